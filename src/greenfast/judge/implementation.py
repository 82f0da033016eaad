"""A kernel implementation under judgement: a rung of the task, or a solution from a separate folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from greenfast.judge.record_schema import SolutionSource
from greenfast.judge.solution.family import DeclaredFamily, RemoteFamily
from greenfast.judge.solution.files import collect_files, make_private_copy
from greenfast.judge.solution.schema import ResolvedSolution
from greenfast.judge.task import Budget, Rung, TaskConfig, Variant
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Family
from greenfast.spec.limits import most_shared
from greenfast.spec.problem import Problem

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
    is_task_baseline: True if the task compares solutions with this implementation by default.
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


def find_rung(config: TaskConfig, variant: Variant) -> Rung:
    """Return the rung of a variant; the task's default candidate for toggles that belong to no rung."""
    names = {rung.name for rung in config.rungs}
    return config.rung(variant.name if variant.name in names else config.defaults.candidate)


def build_rung_implementation(config: TaskConfig, family: Family, variant: Variant) -> Implementation:
    """Build the implementation of a variant of the task. Raises UsageError for a task without rungs."""
    rung = next((r for r in config.rungs if r.name == variant.name), None)
    return Implementation(
        variant, family, find_rung(config, variant), rung, sandbox=tuple(getattr(family, "sandbox", ()))
    )


def build_solution_implementation(
    config: TaskConfig,
    found: ResolvedSolution,
    target: Target,
    problem: Problem | None = None,
    gpu: int | None = None,
    *,
    is_reference: bool = False,
    results: Path | None = None,
) -> Implementation:
    """Build the implementation of a solution. Start its process if it brings code. Raises UsageError and SolutionError.

    problem: the task's problem; Python code gets the names of its buffers.
    gpu: the ordinal of the GPU that captures a callable.
    is_reference: True for a baseline. It may keep state between launches.
    results: the folder of runs. It is excluded from the solution's files if it is inside the solution's folder.
    """
    solution = found.config
    files = collect_files(found, results)
    judged = make_private_copy(found, files)
    family: DeclaredFamily | RemoteFamily
    if found.is_code:
        family = RemoteFamily(str(found.path), judged.folder, solution, target=target, problem=problem, gpu=gpu)
    else:
        family = DeclaredFamily(judged)
    rules = config.solutions
    source = SolutionSource(
        language=solution.language,
        author=solution.author,
        description=solution.description,
        sha256=_digest(files),
        files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    )
    requirements = Rung(
        name=solution.name,
        title=solution.description,
        budget=hardware_budget(target, _ANY_STATE) if is_reference else rules.budget or hardware_budget(target),
        budget_where=[] if is_reference else rules.budget_where,
        required_speedup=rules.required_speedup,
        kernel_error=rules.kernel_error,
    )
    variant = Variant(solution.name, tuple(solution.toggles.items()))
    return Implementation(
        variant, family, requirements, solution=judged, source=source, files=files, sandbox=tuple(family.sandbox)
    )


def hardware_budget(target: Target, state_bytes: int = 0) -> Budget:
    """Return the hardware limits of a block on the target, with ``state_bytes`` of state between launches."""
    return Budget(
        registers=255,
        smem_bytes=most_shared(target),
        spill_bytes=_LOCAL_BYTES,
        stack_bytes=_LOCAL_BYTES,
        device_state_bytes=state_bytes,
    )


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(b"%d:%s;%d:" % (len(name.encode()), name.encode(), len(data)) + data)
    return digest.hexdigest()
