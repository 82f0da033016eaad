"""What a kernel is before it is compiled, how it is launched, and what a kernel family offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np


@dataclass(frozen=True)
class TensorMap:
    """A tensor map (CUtensorMap) over a buffer of the case: what a TMA copy reads or writes, and in tiles of what box.

    The kernel takes it by value, as a ``const __grid_constant__ CUtensorMap`` parameter. Reads outside give zeros.

    buffer: name of the buffer. dtype: NumPy name of its elements. shape: elements per dimension, outermost first.
    strides: bytes per dimension, outermost first, multiples of 16 but for the last, which is the element's size.
    box: elements of a tile per dimension, at most 256. swizzle: 0 (none), 32, 64 or 128 bytes, at least the box's
    innermost extent in bytes.
    """

    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


#: A kernel argument: the name of a buffer of the case, a typed scalar, or a tensor map over a buffer.
Argument: TypeAlias = "str | np.number[Any] | TensorMap"

#: The argument that an instrumented build writes its cycle counts to, int64 (blocks, phases); null in other builds.
PHASE_BUFFER = "@phase_cycles"


@dataclass(frozen=True)
class KernelSource:
    """One rendered translation unit.

    entry: the ``extern "C"`` name of the kernel.
    source: CUDA C++ text; ``#include "..."`` lines resolve in ``include_dirs``, in order.
    name: file name that the compiler's messages carry.
    block: threads per block (x, y, z).
    dynamic_smem_bytes: dynamic shared memory that each launch asks for.
    phases: names of the phase counters of an instrumented build, in the kernel's order; else empty.
    requires: the one target that its instructions exist for, such as "sm_90a"; empty where there are several.
    """

    entry: str
    source: str
    name: str
    include_dirs: tuple[Path, ...]
    block: tuple[int, int, int]
    dynamic_smem_bytes: int = 0
    phases: tuple[str, ...] = ()
    requires: str = ""


@dataclass(frozen=True)
class Launch:
    """One launch: ``grid`` blocks of the kernel with ``args`` in the order of its parameters.

    early: whether it may begin while the launch before it in the stream ends; the kernel waits where it has to.
    """

    grid: tuple[int, int, int]
    args: tuple[Argument, ...]
    early: bool = False


@dataclass(frozen=True)
class Choice:
    """The rung that a call should take, and why."""

    rung: str
    reason: str


class Family(Protocol):
    """A kernel family: a module with these two functions, and perhaps ``choose(target, fmt, dims)``, a Choice.

    Toggles are the task's (0 or 1 as a rule), ``fmt`` is a number format of its config, ``dims`` a shape's dimensions.
    """

    def kernel(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> KernelSource:
        """Render the kernel for a variant. Equal results for two shapes are compiled once.

        instrumented: the build that counts cycles per phase; a family without one raises UsageError.
        Raises UsageError, naming the rule, where the toggles or dimensions make no legal kernel.
        """

    def launch(self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
        """The grid and arguments of that kernel for a shape; the buffers named are those of the problem's case."""
