"""Benchmarks: `python -m experiments.bench NAME`."""
