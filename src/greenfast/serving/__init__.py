"""Attention over a paged FP8 cache: plans, calls, appending to the cache, and the launches."""
