"""Small CUDA kernels on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenfast.build.compiler import compile_kernel, to_ptx
from greenfast.emulator.grid import GridResult, run_grid
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Argument, KernelSource, Launch
from greenfast.spec.problem import Case, OutputSpec

TARGET = Target("sm_89")


def run(
    body: str,
    inputs: dict[str, Any],
    outputs: dict[str, tuple[int, str]],
    *,
    parameters: str,
    args: tuple[Argument, ...],
    threads: int = 32,
    blocks: int = 1,
    before: str = "",
    seed: int = 0,
    target: Target = TARGET,
) -> GridResult:
    """Compile ``extern "C" __global__ void k(parameters) { body }`` and run it; line 1 of k.cu is the body's first."""
    source = f'{before}\nextern "C" __global__ void k({parameters}) {{\n#line 1 "k.cu"\n{body}\n}}'
    kernel = KernelSource("k", source, "k.cu", (KERNEL_DIR,), (threads, 1, 1))
    specs = {name: OutputSpec((count,), dtype) for name, (count, dtype) in outputs.items()}
    plan = Launch((blocks, 1, 1), args)
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    return run_grid(to_ptx(kernel, target), "k", kernel.block, 0, plan, arrays, specs, seed=seed)


def run_source(source: KernelSource, plan: Launch, case: Case, target: str = "sm_90a", seed: int = 0) -> GridResult:
    """Compile a family's kernel for a target and run it on a case."""
    ptx = compile_kernel(source, Target(target)).ptx
    smem = source.dynamic_smem_bytes
    return run_grid(ptx, source.entry, source.block, smem, plan, case.inputs, case.outputs, seed=seed)
