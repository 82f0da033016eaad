"""Which variant of a task a shape should take, where its family chooses."""

from __future__ import annotations

from collections.abc import Sequence

from greenfast.judge.task import Shape
from greenfast.judge.tasks import LoadedTask
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Choice


def choices(task: LoadedTask, target: Target, fmt: str, shapes: Sequence[Shape]) -> list[tuple[Shape, Choice | str]]:
    """For each shape the rung and why, or why there is none.

    Raises UsageError for a task whose family does not choose, and for an unknown format.
    """
    config, choose = task.config, getattr(task.family, "choose", None)
    if choose is None:
        raise UsageError(
            f"the kernels of task {config.name} are chosen by name: {', '.join(r.name for r in config.rungs)}"
        )
    config.gates(fmt)
    found: list[tuple[Shape, Choice | str]] = []
    for shape in shapes:
        try:
            found.append((shape, choose(target, fmt, shape.dims)))
        except UsageError as e:
            found.append((shape, str(e)))
    return found


def chosen_rung(task: LoadedTask, target: Target, fmt: str, shapes: Sequence[Shape]) -> str:
    """The rung that all the shapes should take. Raises UsageError where they differ or one has none."""
    by_rung: dict[str, list[str]] = {}
    for shape, choice in choices(task, target, fmt, shapes):
        if isinstance(choice, str):
            raise UsageError(f"shape {shape.name}: {choice}")
        by_rung.setdefault(choice.rung, []).append(shape.name)
    if len(by_rung) > 1:
        text = "; ".join(f"{rung} for {', '.join(names)}" for rung, names in by_rung.items())
        raise UsageError(f"--variant auto: the shapes take different variants ({text}); ask for them one by one")
    return next(iter(by_rung))
