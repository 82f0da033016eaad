"""Compile kernels, read their machine code, load and launch them on a GPU."""
