"""Partial results of attention to one."""
