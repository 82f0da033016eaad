"""Benchmarks: the attention kernel and the operator compared with other libraries."""
