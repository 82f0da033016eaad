"""Run ``python -m benchmarks kernel fp8_sdpa``: time one variant, its toggles read from the environment.

USE_CP_ASYNC=1 USE_WMMA_PV=1 python -m tasks.fp8_sdpa_stage_c_wmma.runner --shapes small,mission --iters 100

TORCH_CUDA_ARCH_LIST, where set, names the target as --arch does.
"""

import os
import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    target = os.environ.get("TORCH_CUDA_ARCH_LIST")
    arch = ["--arch", target] if target else []
    sys.exit(main(["kernel", "fp8_sdpa", "--from-env", *arch, *sys.argv[1:]]))
