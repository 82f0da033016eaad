"""Interleaved timing and its statistics."""
