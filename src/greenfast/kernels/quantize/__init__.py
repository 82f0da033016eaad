"""Kernels that quantize Q, K and V."""
