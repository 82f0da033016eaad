"""The two sides of a comparison as built kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.executable import Executable, KernelImage
from greenfast.device.identity import launches_of, state_variables
from greenfast.device.module_variables import read_only_variables
from greenfast.judge.task import Shape
from greenfast.judge.variant import Variant
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError, too_large
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.kernel import Family, KernelSource, Program, program_of

BASELINE, CANDIDATE = "baseline", "candidate"


@dataclass(frozen=True)
class BuiltProgram:
    """A program for one shape, with the compiled kernel of each step."""

    program: Program
    kernels: tuple[CompiledKernel, ...]

    @property
    def executable(self) -> Executable:
        """What a device runs."""
        plans = (step.launch for step in self.program.steps)
        steps = tuple(zip(map(image_of, self.kernels), plans, strict=True))
        return Executable(steps, self.program.workspaces, self.program.allocations)

    def facts(self, shape: str, dims: Mapping[str, int]) -> dict[str, tuple[CompiledKernel, LaunchFacts]]:
        """Each launch with its kernel, by its name in records."""
        names = launches_of(self.program, shape, dims).items()
        return {name: (kernel, facts) for kernel, (name, (_, facts)) in zip(self.kernels, names, strict=True)}


@dataclass(frozen=True)
class BuiltSide:
    """One variant, compiled for every shape that it computes; shapes that render the same source share a kernel."""

    role: str
    variant: Variant
    programs: dict[str, BuiltProgram]  # by shape name

    @property
    def distinct(self) -> list[tuple[str, CompiledKernel]]:
        """Each different kernel once, with the first shape that uses it."""
        seen: dict[str, tuple[str, CompiledKernel]] = {}
        for shape, program in self.programs.items():
            for kernel in program.kernels:
                seen.setdefault(kernel.kernel_hash, (shape, kernel))
        return list(seen.values())

    def executable(self, shape: str) -> Executable:
        """What a device runs for a shape."""
        return self.programs[shape].executable


def image_of(kernel: CompiledKernel) -> KernelImage:
    """What a device loads of a kernel."""
    source = kernel.source
    return KernelImage(
        kernel.cubin,
        source.entry,
        source.block,
        source.dynamic_smem_bytes,
        source.phases,
        kernel.ptx,
        watched_variables(kernel),
        read_only_variables(kernel.cubin, kernel.ptx) if kernel.cubin and kernel.ptx else (),
    )


def watched_variables(kernel: CompiledKernel) -> tuple[str, ...]:
    """The variables of a cubin that must be after its launches what they were before; of other sources PTX decides."""
    if kernel.source.language != "cubin" or not kernel.resources.global_bytes:
        return ()
    return tuple(sorted(filter(None, state_variables(kernel))))


def build_side(
    role: str,
    family: Family,
    variant: Variant,
    fmt: str,
    shapes: Sequence[Shape],
    target: Target,
    *,
    instrumented: bool = False,
    refused: dict[str, str] | None = None,
) -> BuiltSide:
    """Compile a variant for every shape.

    refused: filled with the shapes that the family refuses with a UsageError, and why; None to raise it.
    Raises CompileError, or UsageError for an illegal variant and for dimensions that are too large for the family.
    """
    programs = {}
    compiled: dict[KernelSource, CompiledKernel] = {}
    for shape in shapes:
        try:
            program = _program(family, variant, fmt, shape, instrumented)
        except UsageError as e:
            if refused is None:
                raise
            refused[shape.name] = str(e)
            continue
        for source in dict.fromkeys(step.kernel for step in program.steps):
            if source not in compiled:
                compiled[source] = compile_kernel(source, target, isolated=True)
        programs[shape.name] = BuiltProgram(program, tuple(compiled[step.kernel] for step in program.steps))
    return BuiltSide(role, variant, programs)


def _program(family: Family, variant: Variant, fmt: str, shape: Shape, instrumented: bool) -> Program:
    try:
        return program_of(family, variant.values, fmt, shape.dims, instrumented=instrumented)
    except Exception as e:
        name = getattr(family, "__file__", None) or family
        error = too_large(f"{name}: {variant.name} at shape {shape.name}", e)
        if error is None:
            raise
        raise error from e
