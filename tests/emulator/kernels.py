"""Small CUDA kernels on the emulator."""

from __future__ import annotations

from collections.abc import Mapping
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


#: Types of a pointer to elements of a dtype.
TYPES = {
    "float32": "float", "float64": "double", "int32": "int", "uint32": "unsigned", "uint16": "unsigned short",
    "uint8": "unsigned char",
}  # fmt: skip


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
    outputs: Mapping[str, tuple[int | tuple[int, ...], str]],
    *,
    parameters: str = "",
    args: tuple[Argument, ...] = (),
    threads: int = 32,
    blocks: int = 1,
    before: str = "",
    target: Target = TARGET,
    cooperative: bool = False,
    dynamic: int = 0,
    cluster: tuple[int, int, int] = (1, 1, 1),
    grid: tuple[int, int, int] | None = None,
) -> Request:
    """Return the kernel ``k(parameters) { body }``; line 1 of k.cu is the body's first.

    Without ``parameters`` these are pointers to the inputs and the outputs, by their names and dtypes.
    """
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    specs = {
        name: OutputSpec((shape,) if isinstance(shape, int) else shape, dtype)
        for name, (shape, dtype) in outputs.items()
    }
    if not parameters:
        pointers = {name: f"const {TYPES[array.dtype.name]}* {name}" for name, array in arrays.items()}
        pointers |= {name: f"{TYPES[dtype]}* {name}" for name, (_, dtype) in outputs.items()}
        parameters, args = ", ".join(pointers.values()), tuple(pointers)
    own = f"__cluster_dims__({', '.join(map(str, cluster))}) " if cluster != (1, 1, 1) else ""
    source = f'{before}\nextern "C" __global__ void {own}k({parameters}) {{\n#line 1 "k.cu"\n{body}\n}}'
    kernel = KernelSource("k", source, "k.cu", (KERNEL_DIR,), (threads, 1, 1), dynamic)
    return Request(kernel, Launch(grid or (blocks, 1, 1), args, cooperative=cooperative), Case(arrays, specs), target)


def run(*args: Any, seed: int = 0, structs: Any = None, **more: Any) -> GridResult:
    """Compile a request and run it on the emulator; structs: see ``run_chain``."""
    asked = request(*args, **more)
    kernel, case = asked.kernel, asked.case
    ptx, smem = to_ptx(kernel, asked.target, assemble=False), kernel.dynamic_smem_bytes
    return run_grid(ptx, "k", kernel.block, smem, asked.plan, case.inputs, case.outputs, seed=seed, structs=structs)


def run_source(source: KernelSource, plan: Launch, case: Case, target: str = "sm_90a", seed: int = 0) -> GridResult:
    """Compile a family's kernel for a target and run it on a case."""
    ptx = to_ptx(source, Target(target), assemble=False)
    smem = source.dynamic_smem_bytes
    return run_grid(ptx, source.entry, source.block, smem, plan, case.inputs, case.outputs, seed=seed)
