"""The two sides of a comparison as built kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.gpu import KernelImage
from greenfast.judge.task import Shape
from greenfast.judge.variant import Variant
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Family, Launch

BASELINE, CANDIDATE = "baseline", "candidate"


@dataclass(frozen=True)
class BuiltSide:
    """One variant, compiled for every shape; shapes that render the same source share a kernel."""

    role: str
    variant: Variant
    kernels: dict[str, CompiledKernel]  # by shape name, as launches
    launches: dict[str, Launch]

    @property
    def distinct(self) -> list[tuple[str, CompiledKernel]]:
        """Each different kernel once, with the first shape that uses it."""
        seen: dict[str, tuple[str, CompiledKernel]] = {}
        for shape, kernel in self.kernels.items():
            seen.setdefault(kernel.kernel_hash, (shape, kernel))
        return list(seen.values())

    def image(self, shape: str) -> KernelImage:
        """What a device loads to run the kernel of a shape."""
        kernel = self.kernels[shape]
        source = kernel.source
        return KernelImage(
            kernel.cubin, source.entry, source.block, source.dynamic_smem_bytes, source.phases, kernel.ptx
        )


def build_side(
    role: str,
    family: Family,
    variant: Variant,
    fmt: str,
    shapes: Sequence[Shape],
    target: Target,
    *,
    instrumented: bool = False,
) -> BuiltSide:
    """Compile a variant for every shape. Raises CompileError, or UsageError for an illegal variant."""
    kernels, launches = {}, {}
    for shape in shapes:
        source = family.kernel(variant.values, fmt, shape.dims, instrumented=instrumented)
        kernels[shape.name] = compile_kernel(source, target, isolated=True)
        launches[shape.name] = family.launch(variant.values, fmt, shape.dims)
    return BuiltSide(role, variant, kernels, launches)
