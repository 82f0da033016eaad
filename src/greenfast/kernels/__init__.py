"""CUDA C++ sources: one wrapper per instruction in ``ptx/``, shared pieces, and one file per kernel family."""

from pathlib import Path

#: The folder that kernels' ``#include "..."`` lines resolve in.
KERNEL_DIR = Path(__file__).parent
