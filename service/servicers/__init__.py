"""One file per API; `status.py` holds the one table that turns an error into a gRPC status."""
