"""Kernels of serving: attention over a paged FP8 cache, and what appends to the cache."""
