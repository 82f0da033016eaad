"""Attention kernels for Hopper and Ada: which one a shape takes, its source and its launch."""
