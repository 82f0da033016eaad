"""Compiled implementations: the baseline and the candidate of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.executable import Executable, KernelImage
from greenfast.device.identity import list_launches, state_variables
from greenfast.device.machine_code import count_instructions, disassemble
from greenfast.device.module_variables import read_only_variables
from greenfast.judge.task import Shape, Variant
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
        """The program in the form that a device runs."""
        plans = (step.launch for step in self.program.steps)
        steps = tuple(zip(map(build_image, self.kernels), plans, strict=True))
        return Executable(steps, self.program.workspaces, self.program.allocations)

    def facts(self, shape: str, dims: Mapping[str, int]) -> dict[str, tuple[CompiledKernel, LaunchFacts]]:
        """Return each launch with its kernel, by the launch's name in records."""
        names = list_launches(self.program, shape, dims).items()
        return {name: (kernel, facts) for kernel, (name, (_, facts)) in zip(self.kernels, names, strict=True)}


@dataclass(frozen=True)
class BuiltSide:
    """One implementation, compiled for every shape that it supports. Shapes with equal source share a kernel."""

    role: str
    variant: Variant
    programs: dict[str, BuiltProgram]  # by shape name

    @property
    def distinct(self) -> list[tuple[str, CompiledKernel]]:
        """Each distinct kernel, with the first shape that uses it."""
        first_uses: dict[str, tuple[str, CompiledKernel]] = {}
        for shape, program in self.programs.items():
            for kernel in program.kernels:
                first_uses.setdefault(kernel.kernel_hash, (shape, kernel))
        return list(first_uses.values())

    def executable(self, shape: str) -> Executable:
        """Return the program for a shape in the form that a device runs."""
        return self.programs[shape].executable


def build_image(kernel: CompiledKernel) -> KernelImage:
    """Return the parts of a kernel that a device loads."""
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
    """Return the variables of a cubin that its launches must not change. For other sources, the PTX shows the state."""
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
    rejections: dict[str, str] | None = None,
) -> BuiltSide:
    """Compile a variant for every shape.

    rejections: receives the shapes that the family rejects with UsageError and the reasons; None to raise the error.
    Raises CompileError, and UsageError for an illegal variant or for dimensions that are too large for the family.
    """
    programs = {}
    compiled: dict[KernelSource, CompiledKernel] = {}
    for shape in shapes:
        try:
            program = _render_program(family, variant, fmt, shape, instrumented)
        except UsageError as e:
            if rejections is None:
                raise
            rejections[shape.name] = str(e)
            continue
        for source in dict.fromkeys(step.kernel for step in program.steps):
            if source not in compiled:
                compiled[source] = compile_kernel(source, target, isolated=True)
        programs[shape.name] = BuiltProgram(program, tuple(compiled[step.kernel] for step in program.steps))
    return BuiltSide(role, variant, programs)


def _render_program(family: Family, variant: Variant, fmt: str, shape: Shape, instrumented: bool) -> Program:
    try:
        return program_of(family, variant.values, fmt, shape.dims, instrumented=instrumented)
    except Exception as e:
        name = getattr(family, "__file__", None) or family
        error = too_large(f"{name}: {variant.name} at shape {shape.name}", e)
        if error is None:
            raise
        raise error from e


def count_side_instructions(side: BuiltSide) -> dict[str, dict[str, int]]:
    """Count the instructions of each distinct kernel, by kernel hash. The counts are empty without machine code."""
    return {
        k.kernel_hash: count_instructions(disassemble(k.cubin, k.source.entry)) if k.cubin else {}
        for _, k in side.distinct
    }
