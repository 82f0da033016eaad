"""Who takes part in a comparison: a rung of the task, or a solution from a folder of another author."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from greenfast.judge.record import SolutionSource
from greenfast.judge.solution.family import DeclaredFamily, RemoteFamily
from greenfast.judge.solution.schema import CONFIG_NAME, FoundSolution, read_bytes
from greenfast.judge.task import Budget, Rung, TaskConfig
from greenfast.judge.variant import Variant
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Family
from greenfast.spec.limits import most_shared
from greenfast.spec.problem import Problem

_LOCAL_BYTES = 512 << 10
_ANY_STATE = 1 << 40
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
_MOST_FILES, _MOST_BYTES = 256, 32 << 20


@dataclass(frozen=True)
class Entrant:
    """What takes part under a role.

    asked: the rung whose budget, kernel error and required speedup it answers to; for a solution, what the task asks
    of solutions. rung: its own, with promises; None for a solution, and for toggles that are not a rung's.
    path: where the solution was found; empty for a rung. files: the sources of a solution, by name. sandbox: what
    protects the judge from its code.
    """

    variant: Variant
    family: Family
    asked: Rung
    rung: Rung | None = None
    path: str = ""
    source: SolutionSource | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    sandbox: tuple[str, ...] = ()


def rung_of(config: TaskConfig, variant: Variant) -> Rung:
    """The rung that a variant answers to: its own, or the task's default candidate for toggles that are not a rung."""
    names = {rung.name for rung in config.rungs}
    return config.rung(variant.name if variant.name in names else config.defaults.candidate)


def rung_entrant(config: TaskConfig, family: Family, variant: Variant) -> Entrant:
    """The entrant of a task's variant. Raises UsageError for a task without rungs."""
    rung = next((r for r in config.rungs if r.name == variant.name), None)
    return Entrant(variant, family, rung_of(config, variant), rung, sandbox=tuple(getattr(family, "sandbox", ())))


def solution_entrant(
    config: TaskConfig,
    found: FoundSolution,
    target: Target,
    problem: Problem | None = None,
    gpu: int | None = None,
    *,
    is_reference: bool = False,
) -> Entrant:
    """The entrant of a solution; starts its process where it brings code. Raises UsageError and SolutionError.

    problem: the task's, whose buffers Python code is told of. gpu: the one that a callable is captured on.
    is_reference: whether others are compared with it; what it keeps from launch to launch is then its own gain.
    """
    solution = found.solution
    family: DeclaredFamily | RemoteFamily
    if found.is_code:
        family = RemoteFamily(str(found.where), found.folder, solution, target=target, problem=problem, gpu=gpu)
    else:
        family = DeclaredFamily(found)
    asked = config.solutions
    files = source_files(found)
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
    return Entrant(
        variant, family, demands, path=str(found.where), source=source, files=files, sandbox=tuple(family.sandbox)
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


def source_files(found: FoundSolution) -> dict[str, bytes]:
    """What a solution consists of, by name in its folder.

    That is the file that describes it, its source with the headers of the folder that it includes, and for Python all
    .py, .cu, .cuh and .h files of a folder with solution.json. Raises UsageError for more than can be kept.
    """
    folder = found.folder.resolve()
    wanted = [found.where, found.file]
    if found.is_code and found.where.name == CONFIG_NAME:
        wanted += sorted(p for kind in ("py", "cu", "cuh", "h") for p in found.folder.rglob(f"*.{kind}"))
    kept: dict[str, bytes] = {}
    while wanted:
        path = wanted.pop(0).resolve()
        if not path.is_relative_to(folder) or not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        if name in kept or any(part.startswith((".", "__pycache__")) for part in Path(name).parts):
            continue
        kept[name] = data = read_bytes(path)
        if len(kept) > _MOST_FILES or sum(map(len, kept.values())) > _MOST_BYTES:
            raise UsageError(
                f"{found.where}: more than {_MOST_FILES} files or {_MOST_BYTES >> 20} MiB; keep a solution's folder to "
                "its sources"
            )
        if not found.is_code:
            for include in _INCLUDE.findall(data):
                header = include.decode(errors="replace")
                wanted += [path.parent / header, folder / header]
    return dict(sorted(kept.items()))


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(b"%d:%s;%d:" % (len(name.encode()), name.encode(), len(data)) + data)
    return digest.hexdigest()
