"""The comparison with peers: what is timed, what stops it, and what a peer that fails leaves; on a scripted session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from greenfast.bench.peers import PeersOutcome, PeersWorker, compare_with_peers
from greenfast.device.worker import WorkerError
from greenfast.judge.peers import OWN, Checked, PeerContender, PeerRow, Timed
from greenfast.judge.records import freshness, read_record, with_shape_names
from greenfast.judge.report.markdown import report
from greenfast.spec.errors import MachineError, UsageError, WrongResultError
from greenfast.spec.facts import DeviceInfo
from greenfast.spec.freshness import Freshness
from tests.fakes import Watcher, request, shipped

H100 = DeviceInfo(
    kind="gpu", name="NVIDIA H100", compute_capability="9.0", cuda_version="13.0", driver="580.95", l2_bytes=50 * 2**20
)
CONTENDERS = [
    PeerContender(name=OWN, label="greenfast", precision="fp8", version="greenfast 0.1.0"),
    PeerContender(name="fa3", label="FA3", precision="fp8", version="fa3-fwd 0.0.3"),
    PeerContender(name="absent", label="Absent", precision="fp8", missing="absent is not installed"),
    PeerContender(name="torch", label="torch", precision="bf16", version="torch 2.11"),
]
US = {OWN: 10.0, "fa3": 12.0, "torch": 20.0}
RIGHT = Checked(error=0.05, kernel_error=0.02, bound_ratio=0.4, finite=True)


@dataclass
class Session:
    """What the workers of one comparison do, and what they were asked."""

    checked: dict[str, Checked] = field(default_factory=dict)  # by contender; RIGHT for the others
    crashes: set[tuple[int, str]] = field(default_factory=set)  # (length, contender)
    changed: list[str] = field(default_factory=list)
    starts: int = 0
    closed: int = 0
    rounds: list[int | None] = field(default_factory=list)
    opened: list[tuple[int, str, int]] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    def contenders(self) -> list[PeerContender]:
        return CONTENDERS

    def versions(self) -> dict[str, str]:
        return {"cuDNN": "91900"}

    def open(self, dims: dict[str, int], seed: int, kind: str, sampled: int) -> None:
        self.opened.append((dims["S"], kind, seed))
        self.added = []

    def add(self, name: str, image: Any, plan: Any, timed: bool) -> Checked:
        assert image.entry == "fp8_attention"
        assert plan.grid[0] >= 1
        if (self.opened[-1][0], name) in self.crashes:
            raise WorkerError(f"crash: the process ended during add of {name}")
        found = self.checked.get(name, RIGHT)
        if timed and not found.reason:
            self.added.append(name)
        return found

    def time(self, rounds: int | None) -> Timed:
        self.rounds.append(rounds)
        samples = {name: [US[name] * (1 + 0.01 * n) for n in (4, 0, 2, 1, 3)] for name in self.added}
        return Timed(samples, dict.fromkeys(self.added, 7), self.changed, {"sm_mhz": 1980.0 - len(self.rounds)})

    def close(self) -> None:
        self.added = []


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    made = Session()

    class HereWorker(PeersWorker):
        def __init__(self, ordinal: int, *, timeout_s: float, make_session: object) -> None:
            assert ordinal == 0
            made.starts += 1

        def close(self) -> None:
            made.closed += 1

        def _call(self, method: str, *args: Any) -> Any:
            return getattr(made, method)(*args)

    monkeypatch.setattr("greenfast.bench.peers.PeersWorker", HereWorker)
    return made


@dataclass
class PeersWatcher(Watcher):
    cells: list[list[PeerRow]] = field(default_factory=list)

    def cell(self, rows: Sequence[PeerRow], contenders: Sequence[PeerContender]) -> None:
        assert contenders == CONTENDERS
        self.cells.append(list(rows))


Compare = Callable[..., PeersOutcome]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    def compare(
        shapes: Sequence[str] | None = ("mission",), *, grid: bool = False, rounds: int | None = None, **options: Any
    ) -> PeersOutcome:
        task = shipped(options.pop("task", "fp8_attention"))
        settings: dict[str, Any] = {"task": task, "arch": "sm_90a", "device": H100}
        asked = request(tmp_path, **(settings | options))
        asked = replace(asked, command="greenfast bench fp8_attention --peers")
        variant = task.config.variant(task.config.defaults.candidate)
        watcher = PeersWatcher()
        outcome = compare_with_peers(asked, variant, watcher, shapes=shapes, grid=grid, rounds=rounds)
        assert [rows for cell in watcher.cells for rows in cell] == outcome.record.rows
        assert [g.gate for g in watcher.gates] == ["BUILD", "CORRECTNESS", "PERFORMANCE"]
        return outcome

    return compare


def kept(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def test_a_row_holds_median_quartiles_and_tflops(session: Session, compare: Compare) -> None:
    record = compare(rounds=5).record
    by_name = {row.contender: row for row in record.rows}
    assert list(by_name) == [c.name for c in CONTENDERS]
    fa3 = by_name["fa3"]
    assert (fa3.p25_us, fa3.median_us, fa3.p75_us) == pytest.approx((12.12, 12.24, 12.36))
    assert fa3.tflops == pytest.approx(4 * 8 * 512**2 * 64 / 12.24 / 1e6)
    assert (fa3.rounds, fa3.calls, fa3.method, fa3.cache, fa3.grid) == (5, 7, "graph", "warm", False)
    assert (fa3.error, fa3.kernel_error, fa3.clocks) == (0.05, 0.02, {"sm_mhz": 1979.0})
    assert session.rounds == [5]
    absent = by_name["absent"]
    assert (absent.median_us, absent.tflops, absent.reason) == (None, None, "absent is not installed")
    assert session.closed == session.starts == 1


def test_the_record_and_its_report_are_kept(session: Session, compare: Compare) -> None:
    outcome = compare(["small", "d64_s1024_causal"])
    record = outcome.record
    assert kept(outcome.folder) == ["VALIDATION_REPORT.md", "performance.png", "record.json"]
    assert read_record(outcome.folder) == with_shape_names(record, record.task)
    assert (outcome.folder / "VALIDATION_REPORT.md").read_text() == report(record, plot="performance.png")
    assert {row.shape: (row.grid, row.cache) for row in record.rows} == {
        "small": (False, "warm"), "d64_s1024_causal": (True, "beyond L2")
    }  # fmt: skip
    assert record.environment["fa3"] == "fa3-fwd 0.0.3"
    assert record.environment["cuDNN"] == "91900"
    assert record.clocks == {"sm_mhz_min": 1978.0, "sm_mhz_max": 1979.0}
    assert record.device == H100
    assert record.accuracy == []
    assert len(record.side.builds) == 2
    assert freshness(record) == Freshness()


@pytest.mark.slow
def test_without_shapes_all_are_timed_and_errors_compared(session: Session, compare: Compare) -> None:
    record = compare(None).record
    assert len({row.shape for row in record.rows}) == 22
    assert len(record.rows) == 22 * 4
    assert sum(row.grid for row in record.rows) == 18 * 4
    inputs = [row for row in record.accuracy if row.series == "inputs"]
    assert {(row.dims["D"], row.inputs) for row in inputs} == {
        (d, kind) for d in (64, 128) for kind in ("normal", "outliers")
    }
    assert {row.contender for row in inputs} == {c.name for c in CONTENDERS}
    length = [row for row in record.accuracy if row.series == "length"]
    assert [(row.dims["S"], row.contender) for row in length] == [
        (s, name) for s in (2048, 8192, 32768, 131072) for name in (OWN, "fa3")
    ]
    assert len(session.rounds) == 22  # errors alone are not timed
    assert {seed for _, _, seed in session.opened[:22]} == {0}
    assert {seed for _, _, seed in session.opened[22:]} == {1}
    assert "geometric mean over 18 shapes" in record.gates[-1].summary


def test_the_grid_alone(session: Session, compare: Compare) -> None:
    record = compare(None, grid=True).record
    assert {row.shape.split("_")[0] for row in record.rows} == {"d64", "d128", "d256"}
    assert record.accuracy == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (replace(RIGHT, finite=False), "not every element of the output was written"),
        (replace(RIGHT, kernel_error=0.04), "kernel error 0.04, at most 0.03 is right; nothing was timed"),
        (replace(RIGHT, kernel_error=float("nan")), "kernel error nan"),
        (replace(RIGHT, kernel_error=None), "kernel error None"),
        (replace(RIGHT, bound_ratio=1.2), "off by 1.2 of what rounding explains"),
    ],
)
def test_a_wrong_kernel_stops_the_run_untimed(
    session: Session, compare: Compare, tmp_path: Path, found: Checked, said: str
) -> None:
    session.checked[OWN] = found
    with pytest.raises(WrongResultError, match=rf"greenfast on mission \(B=1, H=8, S=512, D=64\): .*{said}"):
        compare()
    assert session.rounds == []
    assert session.closed == session.starts == 1
    assert kept(tmp_path) == []


def test_a_kernel_that_is_wrong_while_timed_stops_the_run(session: Session, compare: Compare, tmp_path: Path) -> None:
    session.changed = [OWN]
    with pytest.raises(WrongResultError, match="the timed launches left other bits"):
        compare()
    assert kept(tmp_path) == []


def test_a_kernel_that_cannot_be_launched_stops_the_run(session: Session, compare: Compare) -> None:
    session.checked[OWN] = Checked(reason="RuntimeError: out of memory")
    with pytest.raises(MachineError, match=r"greenfast on mission .*: RuntimeError: out of memory"):
        compare()


def test_a_peer_that_fails_on_a_shape_is_a_row_with_the_reason(session: Session, compare: Compare) -> None:
    session.checked["fa3"] = Checked(error=0.4, reason="its output is wrong: relative error 0.4")
    rows = {row.contender: row for row in compare().record.rows}
    assert (rows["fa3"].median_us, rows["fa3"].error) == (None, 0.4)
    assert rows["fa3"].reason == "its output is wrong: relative error 0.4"
    assert rows[OWN].median_us
    assert rows["torch"].median_us


def test_a_peer_whose_timed_launches_differ_has_no_time(session: Session, compare: Compare) -> None:
    session.changed = ["fa3"]
    rows = {row.contender: row for row in compare().record.rows}
    assert rows["fa3"].median_us is None
    assert "timed launches left another output" in rows["fa3"].reason
    assert rows["torch"].median_us


def test_a_peer_that_breaks_its_process_costs_that_shape_alone(session: Session, compare: Compare) -> None:
    session.crashes = {(512, "fa3")}
    rows = {(row.shape, row.contender): row for row in compare(["small", "mission", "long"]).record.rows}
    assert rows["mission", "fa3"].reason == "crash: the process ended during add of fa3"
    assert all(rows[shape, "fa3"].median_us for shape in ("small", "long"))
    assert all(rows[shape, name].median_us for shape in ("small", "mission", "long") for name in (OWN, "torch"))
    assert session.closed == session.starts == 2


def test_a_peer_that_keeps_breaking_is_left_out(session: Session, compare: Compare) -> None:
    session.crashes = {(32, "fa3"), (512, "fa3"), (2048, "fa3")}
    rows = {(row.shape, row.contender): row for row in compare(["small", "mission", "long"]).record.rows}
    assert rows["long", "fa3"].reason.startswith("left out after 2 crashes: crash: ")
    assert session.starts == 3
    assert rows["long", OWN].median_us


def test_a_crash_of_the_kernel_itself_stops_the_run(session: Session, compare: Compare) -> None:
    session.crashes = {(512, OWN)}
    with pytest.raises(WorkerError, match="crash"):
        compare()
    assert session.closed == session.starts == 1


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (["mission", "big"], "unknown shape of the comparison with peers 'big'; allowed: d128_s1024, "),
        (["mission", "mission"], "one is named twice"),
    ],
)
def test_unknown_shapes_are_refused(session: Session, compare: Compare, shapes: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        compare(shapes)
    assert session.starts == 0


def test_a_task_without_peers_is_refused(session: Session, compare: Compare) -> None:
    with pytest.raises(UsageError, match="task fp8_sdpa names no peers"):
        compare(task="fp8_sdpa")


def test_without_a_gpu_nothing_starts(session: Session, compare: Compare, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="this needs a GPU; no GPU"):
        compare(device=None)
    assert session.starts == 0
    assert kept(tmp_path) == []
