"""Who takes part in a comparison: a rung of the task, or a solution from a folder of another author."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from greenfast.judge.record_schema import SolutionSource
from greenfast.judge.solution.family import DeclaredFamily, RemoteFamily
from greenfast.judge.solution.files import private_copy, solution_files
from greenfast.judge.solution.schema import ResolvedSolution
from greenfast.judge.task import Budget, Rung, TaskConfig
from greenfast.judge.variant import Variant
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Family
from greenfast.spec.limits import most_shared
from greenfast.spec.problem import Problem

_LOCAL_BYTES = 512 << 10
_ANY_STATE = 1 << 40


@dataclass(frozen=True)
class Implementation:
    """What takes part under a role.

    asked: the rung whose budget, kernel error and required speedup it answers to; for a solution, what the task asks
    of solutions. rung: its own, with promises; None for a solution, and for toggles that are not a rung's.
    found: the solution, in the folder that it is judged from; None for a rung. files: what lies there, by name.
    sandbox: what protects the judge from its code. is_own: whether it is what the task itself compares solutions with.
    """

    variant: Variant
    family: Family
    asked: Rung
    rung: Rung | None = None
    found: ResolvedSolution | None = None
    source: SolutionSource | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    sandbox: tuple[str, ...] = ()
    is_own: bool = False

    def named(self, text: str) -> str:
        """A message of a compiler, with a solution's headers under the names that the user knows."""
        if self.found is None:
            return text
        return text.replace(str(self.found.folder), str(self.found.where.parent.resolve()))


def find_rung(config: TaskConfig, variant: Variant) -> Rung:
    """The rung that a variant answers to: its own, or the task's default candidate for toggles that are not a rung."""
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

    problem: the task's, whose buffers Python code is told of. gpu: the one that a callable is captured on.
    is_reference: whether others are compared with it; what it keeps from launch to launch is then its own gain.
    results: the folder of runs, which is no part of a solution whose folder it lies in.
    """
    solution = found.solution
    files = solution_files(found, results)
    judged = private_copy(found, files)
    family: DeclaredFamily | RemoteFamily
    if found.is_code:
        family = RemoteFamily(str(found.where), judged.folder, solution, target=target, problem=problem, gpu=gpu)
    else:
        family = DeclaredFamily(judged)
    asked = config.solutions
    source = SolutionSource(
        language=solution.language,
        author=solution.author,
        description=solution.description,
        sha256=_digest(files),
        files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    )
    demands = Rung(
        name=solution.name,
        title=solution.description,
        budget=hardware_budget(target, _ANY_STATE) if is_reference else asked.budget or hardware_budget(target),
        budget_where=[] if is_reference else asked.budget_where,
        required_speedup=asked.required_speedup,
        kernel_error=asked.kernel_error,
    )
    variant = Variant(solution.name, tuple(solution.toggles.items()))
    return Implementation(
        variant, family, demands, found=judged, source=source, files=files, sandbox=tuple(family.sandbox)
    )


def hardware_budget(target: Target, state_bytes: int = 0) -> Budget:
    """What a block of the target can have, and ``state_bytes`` of state from one launch to the next."""
    return Budget(
        registers=255,
        smem_bytes=most_shared(target),
        spill_bytes=_LOCAL_BYTES,
        stack_bytes=_LOCAL_BYTES,
        global_bytes=state_bytes,
    )


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(b"%d:%s;%d:" % (len(name.encode()), name.encode(), len(data)) + data)
    return digest.hexdigest()
