"""Attention of one sequence on several GPUs: context parallelism on torch.distributed."""
