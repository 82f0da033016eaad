"""CUDA C++ sources, and the Python that renders and launches them. README.md lists the files."""

from pathlib import Path

#: The folder that kernels' ``#include "..."`` lines resolve in.
KERNEL_DIR = Path(__file__).parent

#: dtype of an attention's input or output -> CUDA C++ type.
CUDA_TYPES = {"float16": "half", "bfloat16": "__nv_bfloat16"}

#: The same for weights and tables, which may be float32.
FLOAT_TYPES = {**CUDA_TYPES, "float32": "float"}
