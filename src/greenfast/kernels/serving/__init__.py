"""Kernels of serving: attention over a paged FP8 cache, and appending to the cache."""
