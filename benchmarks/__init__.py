"""Compares offline, padded, unbatched and served rates in one run: `python -m benchmarks`. Not collected by pytest."""
