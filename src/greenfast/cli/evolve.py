"""``greenfast evolve``."""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from greenfast.cli.console import GateConsole, show, status
from greenfast.evolve.loop import State
from greenfast.evolve.manifest import Manifest, read_budget
from greenfast.evolve.proposal import Evaluation, Insight, read_lines, select_best
from greenfast.evolve.proposers import make_paths_absolute, make_proposer
from greenfast.evolve.report import write_report
from greenfast.evolve.run_folder import (
    INSIGHTS,
    choose_gpus,
    describe_version_change,
    load_resumed_manifest,
    search,
    start,
)
from greenfast.evolve.space import Space, read_space
from greenfast.evolve.workers import read_workers
from greenfast.judge.record_schema import GateResult
from greenfast.judge.store import to_json
from greenfast.judge.task import find_task
from greenfast.spec.errors import GreenfastError, UsageError

_OF_A_NEW_RUN = ("space", "proposer", "baseline", "shapes", "seeds", "format", "arch", "insights")


def run(args: argparse.Namespace) -> int:
    """Run or resume a search; print each batch, then the verdict and the run's folder.

    Return 0 if a winner passed the validation, or if the search ended without a GPU; 1 if no finalist passed.
    """
    folder, manifest = _resumed(args) if args.resume else _started(args)
    watcher = SearchConsole(to_stderr=args.json)
    watcher.line(f"run {folder}")
    if args.resume and (other := describe_version_change(manifest)):
        watcher.line(other)
    gpus, manifest = choose_gpus(folder, manifest)
    if manifest.untimed:
        print(f"greenfast: {manifest.untimed}", file=sys.stderr)
    insights = Path(manifest.insights or Path(manifest.task) / INSIGHTS)
    known = read_lines(insights, Insight, "insight") if manifest.insights or insights.is_file() else ()
    make = functools.partial(make_proposer, log=watcher.line)
    try:
        state = search(folder, manifest, make, args.workers, watcher, gpus, known)
        write_report(folder, manifest, state)
    except (KeyboardInterrupt, GreenfastError):
        watcher.clear()
        command = f"greenfast evolve --resume {folder}"
        print(f"greenfast: the results so far are saved; `{command}` continues", file=sys.stderr)
        raise
    watcher.clear()
    if args.json:
        print(to_json(summary(folder, manifest, state)), end="")
    else:
        _show(folder, manifest, state)
    measured = any(e.fitness_kind == "seconds" for e in state.history)
    return 1 if measured and state.winner is None else 0


def _started(args: argparse.Namespace) -> tuple[Path, Manifest]:
    if args.task is None:
        raise UsageError("name a task, or a run with --resume")
    task = find_task(args.task)
    space, where = find_space(args.space, task.folder)
    options = {"islands": str(args.islands)} if args.islands is not None else {}
    options |= {"model": args.model} if args.model else {}
    for text in args.option:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--option {text!r}: NAME=VALUE is needed")
        options[name] = value
    proposer = args.proposer or "random"
    make_proposer(proposer, options)  # before a folder is made
    read_workers(args.workers, args.batch)
    if args.insights:
        read_lines(args.insights, Insight, "insight")
    return start(
        args.out,
        Manifest(
            created="",
            task=str(task.folder),
            space=space,
            space_folder=str(where.resolve()),
            proposer=proposer,
            options=make_paths_absolute(options),
            budget=read_budget(args.budget or ""),
            baseline=args.baseline or "",
            shapes=args.shapes or [],
            small=args.small or [],
            seeds=tuple(args.seeds or (0,)),
            format=args.format or "",
            arch=args.arch or "",
            device=args.device,
            timeout_s=args.timeout,
            batch=args.batch,
            screen=args.screen,
            finalists=args.finalists,
            required=args.speedup,
            seed=args.seed,
            insights=str(args.insights.resolve()) if args.insights else "",
            command=args.command,
        ),
    )


def _resumed(args: argparse.Namespace) -> tuple[Path, Manifest]:
    given = [name for name in _OF_A_NEW_RUN if getattr(args, name)]
    if args.task is not None or given:
        option = "a task" if args.task is not None else f"--{given[0]}"
        raise UsageError(f"--resume keeps the settings of its run: {option} cannot change them; --budget can")
    return args.resume, load_resumed_manifest(args.resume, read_budget(args.budget) if args.budget else None)


def find_space(given: str | None, folder: Path) -> tuple[Space, Path]:
    """Read a space; return it with its folder. Allowed: a file, NAME of the task's ``space_NAME.json``, or nothing.

    The default is the task's ``space.json``. Raises UsageError with the names of the task's spaces.
    """
    names = {path.stem.removeprefix("space").lstrip("_"): path for path in sorted(folder.glob("space*.json"))}
    path = names.get(given or "")
    if given and path is None and Path(given).is_file():
        path = Path(given)
    if path is None:
        allowed = ", ".join(filter(None, names)) or "none"
        asked = f"--space {given!r}: no such file" if given else f"{folder} has no space.json: give --space FILE"
        raise UsageError(f"{asked}; spaces of the task by name: {allowed}")
    return read_space(path), path.parent


class SearchConsole(GateConsole):
    """Prints a line for each batch, and the gates of a finalist's validation without their reasons."""

    quiet_s = 30.0

    def gate(self, result: GateResult) -> None:
        """Print a gate's outcome."""
        self.line(f"  {result.gate} {result.status}: {result.summary}")

    def batch(self, number: int, evaluations: Sequence[Evaluation], state: State) -> None:
        """Report the end of a batch."""
        ends = Counter(e.stage if e.stage in ("space", "duplicate") or not e.valid else "" for e in evaluations)
        died = ", ".join(f"{count} {stage}" for stage, count in ends.items() if stage) or "none"
        self.line(
            f"batch {number + 1}: {len(evaluations)} proposed, {ends['']} left (died: {died}); "
            f"{state.evaluations} kernels, {state.gpu_seconds:.0f} s GPU; best {best_in_words(state)}"
        )


def best_in_words(state: State) -> str:
    """Describe the best so far as a time, or as an estimate (marked as no speed)."""
    best, baseline = select_best(state.history), state.baseline
    if best is None or best.fitness is None:
        return "none"
    if best.fitness_kind == "seconds":
        return f"{best.fitness * 1e6:.2f} µs, {state.baseline_us / best.fitness / 1e6:.3f}x in a race"
    ratio = f", {baseline.fitness / best.fitness:.2f}x the baseline's" if baseline and baseline.fitness else ""
    return f"estimate {best.fitness * 1e6:.2f} µs by counts{ratio}; no speed"


def summary(folder: Path, manifest: Manifest, state: State) -> dict[str, Any]:
    """Return the result of a run as data for JSON."""
    best, winner = select_best(state.history), state.winner
    return {
        "run": str(folder),
        "ended": state.ended,
        "untimed": manifest.untimed,
        "candidates": len(state.history),
        "evaluations": state.evaluations,
        "gpu_seconds": round(state.gpu_seconds, 1),
        "seconds": round(state.seconds, 1),
        "best": msgspec.to_builtins(best),
        "winner": {"evaluation": winner[0], "verdict": winner[1]} if winner else None,
        "verdicts": [verdict for _, verdict in state.verdicts],
    }


def _show(folder: Path, manifest: Manifest, state: State) -> None:
    for e, verdict in state.verdicts:
        v = verdict
        interval = f" {v.speedup:.3f}x [{v.low:.3f}, {v.high:.3f}] at {v.shape} {v.where}".rstrip()
        settings = manifest.space.shown(e.candidate.parameters)
        show(Text.assemble("\n", status(verdict.decision), interval if verdict.speedup else "", f"  {settings}"))
        for reason in verdict.reasons:
            show(Text(f"  - {reason}"))
    show(f"\nended: {state.ended}")
    show(f"best: {best_in_words(state)}")
    if select_best(state.history) is None and state.history:
        reasons = Counter((e.stage, e.feedback.partition("\n")[0]) for e in state.history if not e.valid)
        for (stage, why), count in reasons.most_common(3):
            show(Text(f"  {count} ended at {stage}: {why}"))
    if not state.verdicts:
        show("no claim is made: nothing was validated")
    show(f"\n{folder}")
