"""Timing of one implementation after BUILD, RESOURCES and CORRECTNESS. An incorrect kernel is not timed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.options import add_run_options, format_command, make_parser, make_run_request
from greenfast.cli.console import GateConsole, show, table
from greenfast.cli.judge import required_gates
from greenfast.cli.options import numbers, words
from greenfast.device.worker import WorkerError
from greenfast.judge.gates.performance import find_obstacle, time_sides
from greenfast.judge.gates.registry import GATES
from greenfast.judge.implementation import CANDIDATE, Implementation, build_rung_implementation
from greenfast.judge.pages import write_page
from greenfast.judge.pipeline import GateRun, pending
from greenfast.judge.record_io import RECORD, REPORT, sealed_json, side_files
from greenfast.judge.record_schema import BenchRecord, GateResult
from greenfast.judge.report.markdown import report
from greenfast.judge.request import ProgressListener, Request
from greenfast.judge.store import check_output_file, check_writable, new_run_folder, to_json
from greenfast.judge.task import LoadedTask, Shape, TaskConfig, Variant, choices
from greenfast.judge.timing.interleaved import WARM
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError


@dataclass(frozen=True)
class BenchOutcome:
    """A record, and the folder with its file and the three JSON files."""

    record: BenchRecord
    folder: Path


def bench(request: Request, variant: Implementation | Variant, observer: ProgressListener) -> BenchOutcome:
    """Check and time one implementation and write its artifacts. Raises MachineError for an unwritable folder."""
    check_writable(request.results)
    implementation = build_rung_implementation(request.task, variant) if isinstance(variant, Variant) else variant
    run = GateRun(request, {CANDIDATE: implementation}, observer)
    gates = {**GATES, "PERFORMANCE": replace(GATES["PERFORMANCE"], check=_time)}
    run.run(gate for name, gate in gates.items() if name != "EVIDENCE")
    timed = run.timed
    record = BenchRecord(**run.facts(), clocks=timed.clocks, order_seed=timed.order_seed, side=run.side(CANDIDATE))
    with new_run_folder(request.results, run.stamp) as (work, publish):
        (work / RECORD).write_text(sealed_json(record), encoding="utf-8")
        (work / REPORT).write_text(report(record), encoding="utf-8")
        for name, content in side_files(record, record.side).items():
            (work / name).write_text(to_json(content), encoding="utf-8")
        return BenchOutcome(record, publish())


def _time(run: GateRun) -> GateResult:
    """Time the implementation. PERFORMANCE passes if the timed launches computed the checked outputs."""
    request = run.request
    if obstacle := find_obstacle(run) or request.cannot_time():
        return pending("PERFORMANCE", obstacle)
    try:
        run.timed = time_sides(run, request.timing)
    except WorkerError as e:
        return GateResult(gate="PERFORMANCE", status="FAIL", summary=e.fault, reasons=[e.fault])
    warm = "; ".join(f"{r.shape} seed {r.seed} {r.p50_us:.2f} µs" for r in run.timed.rows[CANDIDATE] if r.cache == WARM)
    return GateResult(gate="PERFORMANCE", status="PASS", summary=f"timed, p50 with warm L2: {warm}")


def main(argv: Sequence[str]) -> int:
    """Check and time one variant; print each gate and the timings. Return 1 if a gate failed."""
    parser = make_parser("kernel", "Check one variant of a task and time it over shapes.")
    parser.add_argument("task", help="a task's name (see `greenfast list`), or the folder of a task of your own")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--variant", help="a name, TOGGLE=VALUE,..., or auto for what the shapes should take (default: the candidate)"
    )
    which.add_argument("--from-env", action="store_true", help="read the task's toggles from the environment")
    parser.add_argument("--shapes", type=words, metavar="A,B", help="shapes of the task's config (default: its own)")
    parser.add_argument("--seeds", type=numbers, metavar="0,1", help="public seeds of the inputs (default: the task's)")
    parser.add_argument("--format", help="number format of the task's config (default: its own)")
    parser.add_argument("--arch", metavar="SM", help="target, such as sm_89 (default: the GPU's, else the task's)")
    parser.add_argument("--iters", type=int, metavar="N", help="timed launches per shape, seed and cache state")
    parser.add_argument("--warmup", type=int, metavar="N", help="untimed launches before them")
    parser.add_argument("--processes", type=int, metavar="N", help="fresh processes to spread them over")
    parser.add_argument(
        "--require", type=words, default=[], metavar="GATE,...",
        help="gates that must not be PENDING: build, resources, correctness, performance, or all",
    )  # fmt: skip
    add_run_options(parser)
    args = parser.parse_args(argv)
    check_output_file(args.html, "--html")
    required = required_gates(args.require)
    if "evidence" in args.require:
        raise UsageError("--require evidence: no benchmark reads the machine code; `greenfast judge` does")
    request = make_run_request(args, format_command("kernel", *argv))
    config = request.task.config
    if args.from_env:
        variant = variant_of_environment(config, os.environ)
        # The command without the environment would not repeat the run.
        toggles = [f"{name}={os.environ[name]}" for name in config.toggles if name in os.environ]
        request = replace(request, command=" ".join([*toggles, request.command]))
    elif args.variant == "auto":
        variant = config.variant(chosen_rung(request.task, request.target, request.format, request.shapes))
    else:
        variant = config.variant(args.variant or config.defaults.candidate)
    with GateConsole(to_stderr=args.json) as console:
        outcome = bench(request, variant, console)
    write_page(args.html, outcome.record, outcome.folder, request.task)
    if args.json:
        print(sealed_json(outcome.record, conclusions=True), end="")
    else:
        rows = [
            (r.shape, str(r.seed), r.cache, f"{r.p50_us:.2f}", f"{r.p90_us:.2f}", f"{r.mean_us:.2f}", f"{r.std_us:.2f}")
            for r in outcome.record.side.timing
        ]
        if rows:
            show(table(("shape", "seed", "L2", "p50 µs", "p90 µs", "mean µs", "std µs"), rows, title=variant.name))
        show(f"\n{outcome.folder}")
    return int(any(g.status == "FAIL" or (g.status == "PENDING" and g.gate in required) for g in outcome.record.gates))


def variant_of_environment(config: TaskConfig, environment: Mapping[str, str]) -> Variant:
    """Return the variant that the environment's toggles select. Raises UsageError for other than whole numbers."""
    toggles = {}
    for name in config.toggles:
        if name in environment:
            try:
                toggles[name] = int(environment[name])
            except ValueError:
                raise UsageError(
                    f"{name}={environment[name]!r}: allowed values are {config.toggles[name].values}"
                ) from None
    return config.toggle_variant(toggles)


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
