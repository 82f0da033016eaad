"""Whole CUDA programs without a GPU: host code runs natively, kernels run in the emulator."""
