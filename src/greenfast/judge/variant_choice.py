"""Automatic choice of a rung for each shape, for families that define ``choose``."""

from __future__ import annotations

from collections.abc import Sequence

from greenfast.judge.task import Shape
from greenfast.judge.tasks import LoadedTask
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Choice


def choices(task: LoadedTask, target: Target, fmt: str, shapes: Sequence[Shape]) -> list[tuple[Shape, Choice | str]]:
    """Return, for each shape, the chosen rung or the reason why no rung supports it.

    Raises UsageError if the task's family has no ``choose``, and for an unknown format.
    """
    config, choose = task.config, getattr(task.family, "choose", None)
    if choose is None:
        raise UsageError(
            f"the kernels of task {config.name} are chosen by name: {', '.join(r.name for r in config.rungs)}"
        )
    config.gates(fmt)
    chosen: list[tuple[Shape, Choice | str]] = []
    for shape in shapes:
        try:
            chosen.append((shape, choose(target, fmt, shape.dims)))
        except UsageError as e:
            chosen.append((shape, str(e)))
    return chosen


def chosen_rung(task: LoadedTask, target: Target, fmt: str, shapes: Sequence[Shape]) -> str:
    """Return the one rung for all shapes. Raises UsageError if the shapes need different rungs or one has none."""
    by_rung: dict[str, list[str]] = {}
    for shape, choice in choices(task, target, fmt, shapes):
        if isinstance(choice, str):
            raise UsageError(f"shape {shape.name}: {choice}")
        by_rung.setdefault(choice.rung, []).append(shape.name)
    if len(by_rung) > 1:
        text = "; ".join(f"{rung} for {', '.join(names)}" for rung, names in by_rung.items())
        raise UsageError(f"--variant auto: the shapes take different variants ({text}); ask for them one by one")
    return next(iter(by_rung))
