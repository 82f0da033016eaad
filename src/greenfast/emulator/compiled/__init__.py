"""Stretches of instructions as machine code, for threads that run many of them: optional, with equal results."""
