"""The task's own kernel beside its peers: checked first, then timed with them in turns, in one run on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from greenfast.device.gpu import KernelImage
from greenfast.device.worker import Worker, WorkerError
from greenfast.judge.artifacts import PLOT, RECORD, REPORT
from greenfast.judge.gates import build
from greenfast.judge.gates.resources import rung_of
from greenfast.judge.gates.sides import CANDIDATE, BuiltSide
from greenfast.judge.peers import OWN, AccuracyCell, Checked, PeerAccuracyRow, PeerContender, PeerRow, Peers, Timed
from greenfast.judge.record import GateResult, PeersRecord
from greenfast.judge.report.markdown import report
from greenfast.judge.report.peers import headline
from greenfast.judge.report.peers_plot import save_peers_plot
from greenfast.judge.request import Observer, Request
from greenfast.judge.run import GateRun
from greenfast.judge.store import check_writable, new_run_folder, to_json
from greenfast.judge.task import KernelErrorGate, Shape
from greenfast.judge.tasks import load_peers
from greenfast.judge.variant import Variant
from greenfast.spec.errors import CompileError, MachineError, UsageError, WrongResultError, unknown
from greenfast.spec.kernel import Launch

#: Seeds of the inputs that are timed, and of those whose errors alone are measured.
TIMED_SEED, ACCURACY_SEED = 0, 1
#: Query rows of each head that are compared with the references before a shape is timed.
SAMPLED_ROWS = 256
#: Seconds that one call of the session may take: the first one loads every library.
_TIMEOUT_S = 180.0
#: A contender that broke its process on so many shapes is left out of the others.
_MOST_CRASHES = 2


class PeersObserver(Observer, Protocol):
    """Whoever watches the comparison."""

    def cell(self, rows: Sequence[PeerRow], contenders: Sequence[PeerContender]) -> None:
        """A shape has been timed."""


@dataclass(frozen=True)
class PeersOutcome:
    """A record, and the folder that holds it with its report."""

    record: PeersRecord
    folder: Path


class PeersWorker(Worker):
    """A session of the task's peers (such as attention.peers.PeerSession) in a process of its own."""

    def __enter__(self) -> PeersWorker:
        return self

    def contenders(self) -> list[PeerContender]:
        """Everyone, those who are missing too."""
        found: list[PeerContender] = self._call("contenders")
        return found

    def versions(self) -> dict[str, str]:
        """What else the times depend on."""
        found: dict[str, str] = self._call("versions")
        return found

    def open(self, dims: Mapping[str, int], seed: int, kind: str, sampled: int) -> None:
        """Draw inputs and compute references."""
        self._call("open", dict(dims), seed, kind, sampled)

    def add(self, name: str, image: KernelImage, plan: Launch, timed: bool) -> Checked:
        """Check one contender, and make it ready to be timed."""
        found: Checked = self._call("add", name, image, plan, timed)
        return found

    def time_all(self, rounds: int | None) -> Timed:
        """Time those that were added."""
        found: Timed = self._call("time", rounds)
        return found

    def release(self) -> None:
        """Give back the memory of a shape."""
        self._call("close")


class _Comparison:
    """A worker that is replaced when a contender breaks it, and who is left out since."""

    def __init__(self, start: Callable[[], PeersWorker], gate: KernelErrorGate, side: BuiltSide | None = None) -> None:
        self._start, self._gate = start, gate
        self.side = side
        self.worker = start()
        self.contenders = self.worker.contenders()
        self.versions = self.worker.versions()
        self._crashes: dict[str, list[str]] = {}

    def close(self) -> None:
        self.worker.close()

    def checked(
        self, shape: Shape, seed: int, kind: str, sampled: int, names: Sequence[str], *, timed: bool
    ) -> dict[str, Checked]:
        """Open a shape and add everyone to it. A contender that ends the process is left out with the reason."""
        assert self.side is not None
        image, plan = self.side.image(shape.name), self.side.launches[shape.name]
        broken: dict[str, Checked] = {}
        while True:
            found: dict[str, Checked] = {}
            self.worker.open(shape.dims, seed, kind, sampled)
            for c in self.contenders:
                if c.name not in names:
                    continue
                crashes = self._crashes.get(c.name, [])
                if c.name in broken:
                    found[c.name] = broken[c.name]
                elif c.missing or len(crashes) >= _MOST_CRASHES:
                    found[c.name] = Checked(reason=c.missing or f"left out after {len(crashes)} crashes: {crashes[-1]}")
                else:
                    try:
                        found[c.name] = self.worker.add(c.name, image, plan, timed)
                    except WorkerError as e:
                        if c.name == OWN:
                            raise
                        broken[c.name] = Checked(reason=_one_line(e))
                        self._crashes.setdefault(c.name, []).append(_one_line(e))
                        self.worker.close()
                        self.worker = self._start()
                        break
            else:
                return found

    def judge(self, shape: Shape, own: Checked, *, timed: bool) -> None:
        """Raise WrongResultError where greenfast's output is not finite or, before a timing, not right."""
        gate, where = self._gate, f"{OWN} on {shape.name} ({', '.join(f'{k}={v}' for k, v in shape.dims.items())})"
        if own.reason:
            raise MachineError(f"{where}: {own.reason}")
        if not own.finite:
            raise WrongResultError(f"{where}: not every element of the output was written with a finite number")
        if not timed:
            return
        if not (own.kernel_error is not None and own.kernel_error <= gate.relative_error):
            raise WrongResultError(
                f"{where}: kernel error {own.kernel_error}, at most {gate.relative_error} is right; nothing was timed"
            )
        if not (own.bound_ratio is not None and own.bound_ratio <= gate.bound_factor):
            raise WrongResultError(
                f"{where}: an element is off by {own.bound_ratio} of what rounding explains, at most "
                f"{gate.bound_factor} is right; nothing was timed"
            )


def compare_with_peers(
    request: Request, variant: Variant, observer: PeersObserver, *, shapes: Sequence[str] | None, grid: bool,
    rounds: int | None,
) -> PeersOutcome:  # fmt: skip
    """Measure, and write record and report. shapes: by name; grid: those of the grid; else all, and the accuracy.

    Raises UsageError for a task without peers and for unknown shapes, MachineError without a GPU or where the peers'
    libraries cannot use it, and WrongResultError where the task's own kernel computes something wrong.
    """
    peers = load_peers(request.task)
    cells = _cells(peers, shapes, grid)
    accuracy = [] if shapes or grid else list(peers.ACCURACY)
    ordinal = request.gpu
    parent = request.out / request.task.config.defaults.results
    check_writable(parent)
    request = replace(request, shapes=[*cells, *(cell.shape for cell in accuracy)])
    run = GateRun(request, {CANDIDATE: variant}, observer)
    timeout_s = max(request.timeout_s, _TIMEOUT_S)
    rung = rung_of(request.task.config, variant)
    gate = rung.kernel_error or request.task.config.gates(request.format).kernel_error
    comparison = _Comparison(
        lambda: PeersWorker(ordinal, timeout_s=timeout_s, make_session=peers.PeerSession), gate
    )  # fmt: skip
    try:
        comparison.side = _built(run)
        steps = len(cells) + len(accuracy)
        rows: list[PeerRow] = []
        for step, shape in enumerate(cells):
            observer.progress("PERFORMANCE", step / steps, shape.name)
            measured = _measure(comparison, peers, shape, rounds, request)
            observer.cell(measured, comparison.contenders)
            rows += measured
        errors: list[PeerAccuracyRow] = []
        for step, cell in enumerate(accuracy):
            observer.progress("PERFORMANCE", (len(cells) + step) / steps, cell.shape.name)
            errors += _errors(comparison, cell)
    finally:
        comparison.close()
    worst = max((r.kernel_error or 0.0 for r in rows if r.contender == OWN), default=0.0)
    run.add(
        GateResult(
            gate="CORRECTNESS",
            status="PASS",
            summary=f"kernel error at most {worst:.3g} on {len(cells)} shapes, {gate.relative_error:g} allowed",
        )
    )
    run.add(GateResult(gate="PERFORMANCE", status="PASS", summary=headline(rows, comparison.contenders)))
    facts = run.facts()
    facts["environment"] |= comparison.versions | {c.name: c.version for c in comparison.contenders if c.version}
    record = PeersRecord(
        **facts,
        clocks=_extremes([row.clocks for row in rows]),
        side=run.side(CANDIDATE, []),
        contenders=comparison.contenders,
        rows=rows,
        accuracy=errors,
    )
    with new_run_folder(parent, run.stamp) as (work, publish):
        (work / RECORD).write_text(to_json(record), encoding="utf-8")
        plot = PLOT if any(row.median_us is not None for row in rows) else None
        if plot:
            save_peers_plot(record, work / plot)
        (work / REPORT).write_text(report(record, plot=plot), encoding="utf-8")
        return PeersOutcome(record, publish())


def _cells(peers: Peers, names: Sequence[str] | None, grid: bool) -> list[Shape]:
    """The shapes that are asked for. Raises UsageError for unknown ones."""
    known = {shape.name: shape for shape in (*peers.GRID, *peers.SMALL)}
    if names is None:
        return list(peers.GRID) if grid else list(known.values())
    for name in names:
        if name not in known:
            raise unknown("shape of the comparison with peers", name, known)
    if len(set(names)) != len(names):
        raise UsageError(f"shapes {', '.join(names)}: one is named twice")
    return [known[name] for name in names]


def _built(run: GateRun) -> BuiltSide:
    """The own kernel for every shape. Raises CompileError where it does not compile."""
    request = run.request
    result, run.sides = build.check(
        run.variants, request.task.family, request.format, request.shapes, request.target
    )  # fmt: skip
    if run.add(result).status == "FAIL":
        raise CompileError("; ".join(result.reasons))
    return run.sides[0]


def _measure(
    comparison: _Comparison, peers: Peers, shape: Shape, rounds: int | None, request: Request
) -> list[PeerRow]:
    """A row per contender. Raises WrongResultError unless greenfast is right, before the timing and after it."""
    names = [c.name for c in comparison.contenders]
    checked = comparison.checked(shape, TIMED_SEED, "normal", SAMPLED_ROWS, names, timed=True)
    comparison.judge(shape, checked[OWN], timed=True)
    timed = comparison.worker.time_all(rounds)
    comparison.worker.release()
    if OWN in timed.changed:
        raise WrongResultError(
            f"{OWN} on {shape.name}: the timed launches left other bits than those that were checked"
        )
    l2_bytes = request.device.l2_bytes if request.device else 0
    operations = peers.flops(shape.dims)
    rows = []
    for name, found in checked.items():
        row = PeerRow(
            shape=shape.name,
            dims=dict(shape.dims),
            grid=any(shape.name == s.name for s in peers.GRID),
            contender=name,
            cache="warm" if peers.input_bytes(shape.dims) <= l2_bytes else "beyond L2",
            error=found.error,
            kernel_error=found.kernel_error,
            reason=found.reason,
        )
        if name in timed.changed:
            row = msgspec.structs.replace(row, reason="its timed launches left another output than what was checked")
        elif not found.reason:
            samples = timed.samples_us[name]
            p25, p50, p75 = (float(p) for p in np.percentile(samples, (25, 50, 75)))
            row = msgspec.structs.replace(
                row, median_us=p50, p25_us=p25, p75_us=p75, tflops=operations / p50 / 1e6, rounds=len(samples),
                calls=timed.calls[name], clocks=timed.clocks,
            )  # fmt: skip
        rows.append(row)
    return rows


def _errors(comparison: _Comparison, cell: AccuracyCell) -> list[PeerAccuracyRow]:
    """A row per contender. Raises WrongResultError where greenfast leaves an output that is not finite."""
    names = cell.contenders or tuple(c.name for c in comparison.contenders)
    checked = comparison.checked(cell.shape, ACCURACY_SEED, cell.inputs, cell.sampled, names, timed=False)
    comparison.judge(cell.shape, checked[OWN], timed=False)
    comparison.worker.release()
    return [
        PeerAccuracyRow(
            series=cell.series,
            inputs=cell.inputs,
            dims=dict(cell.shape.dims),
            contender=name,
            sampled=min(cell.sampled, cell.shape.dims["S"]),
            error=found.error,
            kernel_error=found.kernel_error,
            reason=found.reason,
        )
        for name, found in checked.items()
    ]


def _extremes(clocks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The least and the largest of each clock over the shapes."""
    found = {name: [c[name] for c in clocks if name in c] for name in sorted({n for c in clocks for n in c})}
    return {f"{name}_{end.__name__}": end(values) for name, values in found.items() for end in (min, max)}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:240]
