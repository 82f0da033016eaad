"""A kernel implementation under judgement, a rung of the task or a solution, and its compiled form."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.identity import list_launches, state_variables
from greenfast.device.machine_code import count_instructions, disassemble
from greenfast.device.module_variables import read_only_variables
from greenfast.device.session import Executable, KernelImage
from greenfast.judge.record_schema import SolutionSource
from greenfast.judge.request import Request, read_git_state
from greenfast.judge.solution.client import RemoteFamily
from greenfast.judge.solution.cuda_program import DeclaredFamily
from greenfast.judge.solution.files import collect_files, digest_files, make_private_copy
from greenfast.judge.solution.schema import CONFIG_NAME, ResolvedSolution
from greenfast.judge.task import Budget, LoadedTask, Rung, Shape, Variant
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError, too_large
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.kernel import Family, KernelSource, Program, render_program
from greenfast.spec.limits import most_shared

_LOCAL_BYTES = 512 << 10
_ANY_STATE = 1 << 40


@dataclass(frozen=True)
class Implementation:
    """A kernel implementation with the requirements that it is judged by.

    requirements: the budget, kernel error and required speedup, as a rung; for a solution, the task's rules for
        solutions.
    rung: its own rung, with promises; None for a solution, and for toggles that belong to no rung.
    solution: the solution in its private folder; None for a rung.
    files: contents of the solution's files by name.
    sandbox: the protections against the solution's code.
    is_task_baseline: True for the solution that the task names as its baseline.
    """

    variant: Variant
    family: Family
    requirements: Rung
    rung: Rung | None = None
    solution: ResolvedSolution | None = None
    source: SolutionSource | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    sandbox: tuple[str, ...] = ()
    is_task_baseline: bool = False

    def restore_paths(self, text: str) -> str:
        """Replace the private folder in a compiler's message with the folder that the user named."""
        if self.solution is None:
            return text
        return text.replace(str(self.solution.folder), str(self.solution.path.parent.resolve()))


def build_implementation(
    request: Request, side: Variant | ResolvedSolution, *, is_reference: bool = False
) -> Implementation:
    """Build the implementation of a variant, or of a solution with the commit of its repository.

    is_reference: True for a baseline. Raises as ``build_rung_implementation`` and ``build_solution_implementation``.
    """
    if isinstance(side, Variant):
        return build_rung_implementation(request.task, side)
    git = read_git_state(side.path.parent)
    return build_solution_implementation(
        request.task,
        side,
        request.target,
        gpu=request.ordinal if isinstance(request.ordinal, int) else None,
        is_reference=is_reference,
        results=request.out,
        commit="" if git.sha == "unknown" else str(git),
    )


def build_rung_implementation(task: LoadedTask, variant: Variant) -> Implementation:
    """Build the implementation of a variant of the task. Raises UsageError for a task without rungs.

    Toggles that belong to no rung have the requirements of the task's default candidate.
    """
    rung = task.config.find_rung(variant)
    requirements = rung or task.config.rung(task.config.defaults.candidate)
    return Implementation(variant, task.family, requirements, rung, sandbox=tuple(getattr(task.family, "sandbox", ())))


def build_solution_implementation(
    task: LoadedTask,
    resolved: ResolvedSolution,
    target: Target,
    gpu: int | None = None,
    *,
    is_reference: bool = False,
    results: Path | None = None,
    commit: str = "",
) -> Implementation:
    """Build the implementation of a solution. Start its process if it brings code. Raises UsageError and SolutionError.

    task: Python code gets the names of the buffers of its problem.
    gpu: the ordinal of the GPU that captures a callable.
    is_reference: True for a baseline. It may keep state between launches.
    results: the folder of runs. It is excluded from the solution's files if it is inside the solution's folder.
    commit: the commit of the solution's repository, for the record.
    """
    solution, rules = resolved.config, task.config.solutions
    requirements = Rung(
        name=solution.name,
        title=solution.description,
        budget=hardware_budget(target, _ANY_STATE) if is_reference else rules.budget or hardware_budget(target),
        budget_where=[] if is_reference else rules.budget_where,
        required_speedup=rules.required_speedup,
        kernel_error=rules.kernel_error,
    )
    files = collect_files(resolved, results)
    source = SolutionSource(
        language=solution.language,
        author=solution.author,
        description=solution.description,
        sha256=digest_files(files),
        files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        commit=commit,
    )
    judged = make_private_copy(resolved, files)
    family: DeclaredFamily | RemoteFamily
    if resolved.is_code:
        family = RemoteFamily(str(resolved.path), judged.folder, solution, target=target, problem=task.problem, gpu=gpu)
    else:
        family = DeclaredFamily(judged)
    return Implementation(
        Variant(solution.name, tuple(solution.toggles.items())),
        cast(Family, family),
        requirements,
        solution=judged,
        source=source,
        files=files,
        sandbox=tuple(family.sandbox),
        is_task_baseline=is_reference and _names(task.folder / task.config.defaults.baseline, resolved.path),
    )


def _names(solution: Path, file: Path) -> bool:
    """Return True if the path of a solution, or of its folder, names this file."""
    return (solution / CONFIG_NAME if solution.is_dir() else solution).resolve() == file.resolve()


def hardware_budget(target: Target, state_bytes: int = 0) -> Budget:
    """Return the hardware limits of a block on the target, with ``state_bytes`` of state between launches."""
    return Budget(
        registers=255,
        smem_bytes=most_shared(target),
        spill_bytes=_LOCAL_BYTES,
        stack_bytes=_LOCAL_BYTES,
        device_state_bytes=state_bytes,
    )


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
        return Executable(steps, self.program.workspaces, self.program.allocations, self.program.operations)

    def name_launches(self, shape: str, dims: Mapping[str, int]) -> dict[str, tuple[CompiledKernel, LaunchFacts]]:
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
        return render_program(family, variant.values, fmt, shape.dims, instrumented=instrumented)
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
