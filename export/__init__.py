"""The exporter: checkpoint -> module -> graph -> verified bundle."""
