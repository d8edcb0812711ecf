"""The dashboards: written down in Python, committed as the JSON that Grafana reads, drawn for the README."""
