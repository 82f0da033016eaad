"""The shapes of the comparison, the check of outputs, and the timing, on a clock made up here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from greenfast.bench import graphs
from greenfast.bench import peer_session as peers
from greenfast.bench.contenders import CONTENDERS, Contender, Inputs, Ready, make_inputs
from greenfast.bench.graphs import calls_for, order, rounds_for
from greenfast.bench.peer_session import ACCURACY, GRID, SMALL, PeerSession, flops, sample
from greenfast.bench.peers import PeersWorker
from greenfast.device.worker import WorkerError
from greenfast.judge.peers import OWN
from greenfast.judge.tasks import load_peers
from greenfast.kernels.attention.config import read_dims
from greenfast.kernels.attention.tiling import tiling
from tests.fakes import shipped

DIMS = {"B": 1, "H": 2, "S": 48, "D": 64}


def test_the_task_names_this_module() -> None:
    assert load_peers(shipped("fp8_attention")) is peers  # type: ignore[comparison-overlap]


def test_the_grid_has_equal_tokens_and_hidden_sizes() -> None:
    assert len({s.name for s in (*GRID, *SMALL, *(c.shape for c in ACCURACY))}) == 18 + 4 + 8
    for shape in GRID:
        assert shape.dims["B"] * shape.dims["S"] == 16384
        assert shape.dims["H"] * shape.dims["D"] == 2048
    found = {(s.dims["D"], s.dims["S"], s.dims.get("CAUSAL", 0)) for s in GRID}
    assert found == set(itertools.product((64, 128, 256), (1024, 4096, 16384), (0, 1)))
    for shape in (*GRID, *SMALL, *(cell.shape for cell in ACCURACY)):
        tiling(*read_dims(shape.dims, "e4m3"), 132)  # the kernel computes all of them


def test_the_small_shapes_are_those_of_the_task() -> None:
    config = shipped("fp8_attention").config
    assert [s.dims for s in SMALL] == [config.shape(s.name).dims for s in SMALL]


def test_a_mask_halves_the_operations() -> None:
    assert flops({"B": 2, "H": 3, "S": 100, "D": 64}) == 4 * 2 * 3 * 100**2 * 64
    assert flops({"B": 2, "H": 3, "S": 100, "D": 64, "CAUSAL": 1}) == 2 * 2 * 3 * 100**2 * 64


def test_everyone_is_first_and_behind_everyone_else_in_turn() -> None:
    names = ["a", "b", "c"]
    rounds = [order(names, turn) for turn in range(6)]
    assert all(sorted(r) == names for r in rounds)
    assert {r[0] for r in rounds} == {r[-1] for r in rounds} == set(names)
    behind = {(x, y) for r in rounds for x, y in itertools.pairwise(r)}
    assert behind == set(itertools.permutations(names, 2))


@pytest.mark.parametrize(("one_us", "calls"), [(5.0, 50), (100.0, 20), (2000.0, 1), (9000.0, 1)])
def test_a_replay_takes_two_milliseconds(one_us: float, calls: int) -> None:
    assert calls_for(one_us) == calls


@pytest.mark.parametrize(
    ("replays", "rounds"), [([2000.0, 2000.0, 9000.0], 30), ([300.0], 200), ([50.0], 200), ([30000.0], 7)]
)
def test_rounds_take_sixty_milliseconds_and_are_seven_at_least(replays: list[float], rounds: int) -> None:
    assert rounds_for(replays) == rounds


def drawn(causal: int = 0) -> Inputs:
    return make_inputs({**DIMS, "CAUSAL": causal}, 0, "normal", "cpu")


@pytest.mark.parametrize("causal", [0, 1])
def test_the_sample_is_exact_and_sees_what_is_wrong(causal: int) -> None:
    inputs = drawn(causal)
    whole, some = sample(inputs, 48), sample(inputs, 16)
    assert whole.rows.tolist() == [list(range(48))] * 2
    assert {0, 47} <= set(some.rows[0].tolist())
    assert some.rows[0].tolist() != some.rows[1].tolist()
    heads = torch.arange(2).unsqueeze(1)
    torch.testing.assert_close(whole.full[heads, some.rows], some.full)
    q, k, v = (inputs.by_batch(inputs.values[n].double()) for n in "qkv")
    reference = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))
    torch.testing.assert_close(whole.full, reference.flatten(0, 1))

    right = whole.exact.float()
    checked = some.check(right, True)
    assert checked.finite
    assert checked.kernel_error is not None
    assert checked.kernel_error < 1e-6
    assert checked.bound_ratio is not None
    assert checked.bound_ratio < 0.01
    assert 0.02 < (checked.error or 0) < 0.07  # of the format
    assert some.check(right, False).kernel_error is None
    wrong = right.clone()
    wrong[1, 0] += 0.5  # the first row is always looked at
    assert (some.check(wrong, True).bound_ratio or 0) > 1
    wrong = right.clone()
    unseen = next(row for row in range(48) if row not in some.rows[0].tolist())
    wrong[0, unseen, 3] = math.nan
    assert not some.check(wrong, True).finite


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has a GPU")
def test_a_torch_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as the comparison starts it."""
    with (
        PeersWorker(0, timeout_s=60, make_session=PeerSession) as worker,
        pytest.raises(WorkerError, match=r"start: torch [\w.+]+ is built .* and shows no GPU; the peers need a CUDA"),
    ):
        worker.contenders()


# A session on host memory: contenders, graphs and clock are made up.


class Clock:
    def __init__(self) -> None:
        self.us = 0.0

    def event(self) -> Any:
        clock = self

        class Event:
            def record(self) -> None:
                self.at = clock.us

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at) / 1e3

        return Event()


class Graph:
    """A graph that takes so long and, unless it is idle, writes its output."""

    def __init__(self, clock: Clock, us: float, out: Tensor, value: Tensor, log: list[str], name: str) -> None:
        self.clock, self.us, self.out, self.value, self.log, self.name = clock, us, out, value, log, name

    def replay(self) -> None:
        self.log.append(self.name)
        self.clock.us += self.us
        self.out.copy_(self.value)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(graphs, "event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


@pytest.fixture
def session(clock: Clock) -> PeerSession:
    made = PeerSession.__new__(PeerSession)
    made._inputs = drawn()
    made._sample = sample(made._inputs, 48)
    made._entries = {}
    made._clocks = lambda: {"sm_mhz": 1980.0}  # type: ignore[method-assign]
    return made


def enter(
    session: PeerSession, clock: Clock, log: list[str], name: str, us: float, calls: int, later: float = 1.0
) -> None:
    """A contender whose timed launches leave ``later`` times what was checked."""
    assert session._sample is not None
    right = session._sample.exact.half().view(1, 2, 48, 64)
    out = right.clone()
    graph = Graph(clock, us, out, right * later, log, name)
    session._entries[name] = peers._Entry(Ready(lambda: out), graph, out, right.float().flatten(0, 1), calls, us)


def test_times_are_per_call_and_rounds_interleaved(session: PeerSession, clock: Clock) -> None:
    log: list[str] = []
    enter(session, clock, log, OWN, 2000.0, 20)
    enter(session, clock, log, "fa3", 3000.0, 10)
    timed = session.time(8)
    assert {name: set(map(round, us)) for name, us in timed.samples_us.items()} == {OWN: {100}, "fa3": {300}}
    assert all(len(us) == 8 for us in timed.samples_us.values())
    assert timed.calls == {OWN: 20, "fa3": 10}
    assert timed.changed == []
    assert timed.clocks == {"sm_mhz": 1980.0}
    assert len(log) == 2 * (2 + 8)  # warm-up and rounds
    assert log[4:8] == [OWN, "fa3", "fa3", OWN]
    assert len(session.time(None).samples_us[OWN]) == rounds_for([2000.0, 3000.0])


@pytest.mark.parametrize(("name", "later", "changed"), [
    (OWN, 1.0, False), (OWN, 1.002, True), (OWN, math.nan, True), ("fa3", 1.0001, False), ("fa3", 1.01, True),
    ("fa3", math.nan, True),
])  # fmt: skip
def test_what_the_timed_launches_leave_must_be_what_was_checked(
    session: PeerSession, clock: Clock, name: str, later: float, changed: bool
) -> None:
    enter(session, clock, [], name, 2000.0, 1, later)
    assert session.time(7).changed == ([name] if changed else [])


def test_a_graph_that_writes_nothing_is_found_out(session: PeerSession, clock: Clock) -> None:
    enter(session, clock, [], "fa3", 2000.0, 1)
    session._entries["fa3"].graph.replay = lambda: None
    assert session.time(7).changed == ["fa3"]


def test_a_graph_holds_enough_calls_and_keeps_what_they_read(
    session: PeerSession, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session._sample is not None
    right = session._sample.exact.half().view(1, 2, 48, 64)
    captured: list[int] = []

    def graph(call: Callable[[], Tensor], calls: int) -> tuple[Graph, Tensor]:
        captured.append(calls)
        out = call().clone()
        return Graph(clock, 100.0 * calls, out, right, [], "x"), out

    monkeypatch.setattr(graphs, "graph_of", graph)
    ready = Ready(lambda: right)
    contend(monkeypatch, lambda _: ready)
    assert session.add("x", None, None, True).reason == ""  # type: ignore[arg-type]
    assert captured == [1, 20]
    entry = session._entries["x"]
    assert (entry.calls, entry.replay_us) == (20, 2000.0)
    assert entry.ready is ready
    assert session.time(7).changed == []


def contend(monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Inputs], Ready]) -> None:
    monkeypatch.setitem(CONTENDERS, "x", Contender("x", "X", "fp8", "math", "x", False, prepare))


def test_a_peer_that_fails_or_is_wrong_is_a_reason(session: PeerSession, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Ready] = []
    monkeypatch.setattr(session, "_capture", lambda ready, first: captured.append(ready))
    image: Any = None

    def refuses(_: Inputs) -> Ready:
        raise RuntimeError("head dim 64 is not supported\nsome trace")

    contend(monkeypatch, refuses)
    assert session.add("x", image, image, True).reason == "RuntimeError: head dim 64 is not supported"
    contend(monkeypatch, lambda inputs: Ready(lambda: inputs.by_batch(inputs.values["q"])))
    wrong = session.add("x", image, image, True)
    assert wrong.reason.startswith("its output is wrong: relative error ")
    contend(monkeypatch, lambda inputs: Ready(lambda: inputs.by_batch(inputs.values["q"] * math.nan)))
    assert session.add("x", image, image, True).reason == "its output is wrong: not every element is finite"
    assert captured == []
    assert session._sample is not None
    right = session._sample.exact.half().view(1, 2, 48, 64)
    contend(monkeypatch, lambda inputs: Ready(lambda: right / 4, unit=4.0))
    assert session.add("x", image, image, False).reason == ""
    assert captured == []
    found = session.add("x", image, image, True)
    assert (found.reason, found.finite, found.kernel_error, len(captured)) == ("", True, None, 1)


def test_a_broken_context_ends_the_session(session: PeerSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object = None) -> Ready:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    contend(monkeypatch, broken)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        session.add("x", None, None, True)  # type: ignore[arg-type]
