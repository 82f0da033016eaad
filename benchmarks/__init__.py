"""Benchmarks of greenfast, to run from a checkout: ``python -m benchmarks --help``."""
