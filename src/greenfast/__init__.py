"""FP8 attention kernels for NVIDIA GPUs, and the pipeline that proves them: green before fast."""

__version__ = "0.1.0"
