"""Small CUDA kernels on the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import run_grid
from greenfast.emulator.result import GridResult
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Argument, KernelSource, Launch
from greenfast.spec.problem import Case, OutputSpec

TARGET = Target("sm_89")
#: Orders of the warps: what holds in every order is tried quickly in two.
SEEDS = pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])


@dataclass(frozen=True)
class Request:
    """A kernel and its launch."""

    kernel: KernelSource
    plan: Launch
    case: Case
    target: Target


def request(
    body: str,
    inputs: dict[str, Any],
    outputs: dict[str, tuple[int, str]],
    *,
    parameters: str,
    args: tuple[Argument, ...],
    threads: int = 32,
    blocks: int = 1,
    before: str = "",
    target: Target = TARGET,
    cooperative: bool = False,
) -> Request:
    """Return the kernel ``k(parameters) { body }``; line 1 of k.cu is the body's first."""
    source = f'{before}\nextern "C" __global__ void k({parameters}) {{\n#line 1 "k.cu"\n{body}\n}}'
    kernel = KernelSource("k", source, "k.cu", (KERNEL_DIR,), (threads, 1, 1))
    specs = {name: OutputSpec((count,), dtype) for name, (count, dtype) in outputs.items()}
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    return Request(kernel, Launch((blocks, 1, 1), args, cooperative=cooperative), Case(arrays, specs), target)


def run(*args: Any, seed: int = 0, **more: Any) -> GridResult:
    """Compile a request and run it on the emulator."""
    asked = request(*args, **more)
    ptx, case = to_ptx(asked.kernel, asked.target, assemble=False), asked.case
    return run_grid(ptx, "k", asked.kernel.block, 0, asked.plan, case.inputs, case.outputs, seed=seed)


def run_source(source: KernelSource, plan: Launch, case: Case, target: str = "sm_90a", seed: int = 0) -> GridResult:
    """Compile a family's kernel for a target and run it on a case."""
    ptx = to_ptx(source, Target(target), assemble=False)
    smem = source.dynamic_smem_bytes
    return run_grid(ptx, source.entry, source.block, smem, plan, case.inputs, case.outputs, seed=seed)
