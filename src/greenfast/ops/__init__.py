"""FP8 attention on PyTorch tensors."""
