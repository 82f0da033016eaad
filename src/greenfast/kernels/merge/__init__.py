"""Merge partial results of attention."""
