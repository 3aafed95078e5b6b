"""Measurements for those who work on gfgen: python -m benchmarks.NAME."""
