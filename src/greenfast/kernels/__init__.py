"""CUDA C++ sources; README.md says which file is for what."""

from pathlib import Path

#: The folder that kernels' ``#include "..."`` lines resolve in.
KERNEL_DIR = Path(__file__).parent

#: The types of CUDA C++ for dtypes of an attention's inputs and outputs.
CUDA_TYPES = {"float16": "half", "bfloat16": "__nv_bfloat16"}
