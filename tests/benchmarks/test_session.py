"""The shapes of the comparisons, the check of outputs, and the timing, on a clock made up here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import session as sessions
from benchmarks import timing
from benchmarks.comparison import BenchCell
from benchmarks.registry import KERNEL, Backend, BoundCall
from benchmarks.sdpa import flops, operator, peers
from benchmarks.sdpa_backends import BACKENDS
from benchmarks.sdpa_inputs import INPUTS, Inputs, make_inputs, reference
from benchmarks.session import BenchSession
from benchmarks.timing import Captured, calls_for, interleave, order, rounds_for
from greenfast.device.worker import Worker, WorkerError
from greenfast.judge.task import Shape
from greenfast.kernels.attention.config import read_dims
from greenfast.kernels.attention.heuristics import tiling

DIMS = {"B": 1, "H": 2, "S": 48, "D": 64}


def test_the_peers_are_timed_on_equal_tokens_and_hidden_sizes() -> None:
    found = peers()
    cells = (*found.timed, *found.accuracy)
    assert len({cell.shape.name for cell in cells}) == 18 + 4 + 8
    for cell in cells:
        tiling(*read_dims(cell.shape.dims, "e4m3"), 132)  # the kernel computes all of them
    grid = [cell.shape.dims for cell in found.timed if cell.grid]
    for dims in grid:
        assert dims["B"] * dims["S"] == 16384
        assert dims["H"] * dims["D"] == 2048
    assert {(d["D"], d["S"], d.get("CAUSAL", 0)) for d in grid} == set(
        itertools.product((64, 128, 256), (1024, 4096, 16384), (0, 1))
    )
    assert found.contenders == [KERNEL, "fa3", "cudnn", "torch_flash", "torch_cudnn", "fa3_bf16"]
    assert [cell.backends for cell in found.accuracy if cell.series == "length"] == [(KERNEL, "fa3")] * 4
    assert {cell.seed for cell in found.timed} == {0}
    assert {cell.seed for cell in found.accuracy} == {1}


def test_the_operator_is_checked_on_all_rows_and_on_every_kind_of_inputs() -> None:
    found = operator()
    assert {(c.shape.dims["D"], c.shape.dims["S"], c.shape.dims.get("CAUSAL", 0)) for c in found.timed} == set(
        itertools.product((64, 128, 256), (512, 1024, 2048, 4096, 16384), (0, 1))
    )
    assert all(cell.sampled == cell.shape.dims["S"] and not cell.series for cell in found.timed)
    assert {cell.inputs for cell in found.accuracy} == set(INPUTS)
    own = {"sdpa_fp8", "sdpa_int8", "sdpa_int8_fine", "attention_fp8", "fp8_channel", "fp8_plain", "int8_plain"}
    assert set(found.own) == own
    assert {rival for versus in found.versus for rival in versus.baselines} == {
        "torch_flash",
        "torch_cudnn",
        "fa3_bf16",
    }
    assert found.contenders[:7] == list(found.own)
    assert found.host is not None
    assert found.host.backends == ("sdpa_fp8", "attention_fp8", "torch")
    assert found.kernels is not None
    assert len(found.kernels()) == len(found.timed) * 3 * 3


def test_a_mask_halves_the_operations() -> None:
    assert flops({"B": 2, "H": 3, "S": 100, "D": 64}) == 4 * 2 * 3 * 100**2 * 64
    assert flops({"B": 2, "H": 3, "S": 100, "D": 64, "CAUSAL": 1}) == 2 * 2 * 3 * 100**2 * 64


def test_each_is_first_and_behind_each_other_in_some_round() -> None:
    names = ["a", "b", "c"]
    rounds = [order(names, turn) for turn in range(6)]
    assert all(sorted(r) == names for r in rounds)
    assert {r[0] for r in rounds} == {r[-1] for r in rounds} == set(names)
    behind = {(x, y) for r in rounds for x, y in itertools.pairwise(r)}
    assert behind == set(itertools.permutations(names, 2))


def test_the_loop_keeps_results_by_round_without_those_of_the_warm_up() -> None:
    log: list[str] = []

    def call(name: str) -> int:
        log.append(name)
        return log.count(name)

    assert interleave({name: partial(call, name) for name in "ab"}, 3, warmup=2) == {"a": [3, 4, 5], "b": [3, 4, 5]}
    assert "".join(log) == "baababbaba"
    assert interleave({1: list}, 2, arrange=lambda keys, turn: [*keys] * turn) == {1: [[]]}
    assert interleave({}, 3) == {}


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
def test_the_reference_is_exact_and_sees_what_is_wrong(causal: int) -> None:
    inputs = drawn(causal)
    whole, some = reference(inputs, 48, codes=True), reference(inputs, 16, codes=True)
    assert whole.rows.tolist() == [list(range(48))] * 2
    assert {0, 47} <= set(some.rows[0].tolist())
    assert some.rows[0].tolist() != some.rows[1].tolist()
    heads = torch.arange(2).unsqueeze(1)
    torch.testing.assert_close(whole.full[heads, some.rows], some.full)
    q, k, v = (inputs.by_batch(inputs.values[n].double()) for n in "qkv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))
    torch.testing.assert_close(whole.full, expected.flatten(0, 1))
    torch.testing.assert_close(reference(inputs, 16, codes=False).full, some.full)

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
    """In a separate process, as the comparison starts it."""
    with (
        Worker(0, timeout_s=60, make_session=BenchSession) as worker,
        pytest.raises(WorkerError, match=r"start: torch [\w.+]+ is built .* and shows no GPU; a comparison needs"),
    ):
        worker.call("facts", [])


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
    monkeypatch.setattr(timing, "event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


@pytest.fixture
def session(clock: Clock) -> BenchSession:
    made = BenchSession.__new__(BenchSession)
    made._inputs = drawn()
    made._reference = reference(made._inputs, 48, codes=True)
    made._kernel = None
    made._entries = {}
    made._clocks = lambda: {"sm_mhz": 1980.0}  # type: ignore[method-assign]
    return made


def enter(
    session: BenchSession, clock: Clock, log: list[str], name: str, us: float, calls: int, later: float = 1.0
) -> None:
    """A contender whose timed launches leave ``later`` times what was checked."""
    assert session._reference is not None
    right = session._reference.exact.half().view(1, 2, 48, 64)
    out = right.clone()
    graph = Graph(clock, us, out, right * later, log, name)
    captured = Captured(graph, out, calls, us, None)
    session._entries[name] = sessions._Entry(BoundCall(lambda: out), captured, right.float().flatten(0, 1))


def test_times_are_per_call_and_rounds_interleaved(session: BenchSession, clock: Clock) -> None:
    log: list[str] = []
    enter(session, clock, log, KERNEL, 2000.0, 20)
    enter(session, clock, log, "fa3", 3000.0, 10)
    timed = session.time(8)
    assert {name: set(map(round, us)) for name, us in timed.samples_us.items()} == {KERNEL: {100}, "fa3": {300}}
    assert all(len(us) == 8 for us in timed.samples_us.values())
    assert timed.calls == {KERNEL: 20, "fa3": 10}
    assert timed.changed == []
    assert timed.clocks == {"sm_mhz": 1980.0}
    assert len(log) == 2 * (2 + 8)  # warm-up and rounds
    assert log[4:8] == [KERNEL, "fa3", "fa3", KERNEL]
    assert len(session.time(None).samples_us[KERNEL]) == rounds_for([2000.0, 3000.0])


@pytest.mark.parametrize(("name", "later", "changed"), [
    (KERNEL, 1.0, False), (KERNEL, 1.002, True), (KERNEL, math.nan, True), ("fa3", 1.0001, False), ("fa3", 1.01, True),
    ("fa3", math.nan, True),
])  # fmt: skip
def test_what_the_timed_launches_leave_must_be_what_was_checked(
    session: BenchSession, clock: Clock, name: str, later: float, changed: bool
) -> None:
    enter(session, clock, [], name, 2000.0, 1, later)
    assert session.time(7).changed == ([name] if changed else [])


def test_a_graph_that_writes_nothing_is_found_out(session: BenchSession, clock: Clock) -> None:
    enter(session, clock, [], "fa3", 2000.0, 1)
    session._entries["fa3"].captured.graph.replay = lambda: None
    assert session.time(7).changed == ["fa3"]


def test_a_graph_holds_enough_calls_and_keeps_what_they_read(
    session: BenchSession, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session._reference is not None
    right = session._reference.exact.half().view(1, 2, 48, 64)
    captured: list[int] = []

    def graph(call: Callable[[], Tensor], calls: int) -> tuple[Graph, Tensor]:
        captured.append(calls)
        out = call().clone()
        return Graph(clock, 100.0 * calls, out, right, [], "x"), out

    monkeypatch.setattr(timing, "capture_graph", graph)
    ready = BoundCall(lambda: right)
    contend(monkeypatch, lambda _: BoundCall(lambda: right, copies=7))
    assert session.add("x", True).reason == ""
    assert captured == [1, 21], "each of the copies is read as often"
    captured.clear()
    contend(monkeypatch, lambda _: ready)
    assert session.add("x", True).reason == ""
    assert captured == [1, 20]
    entry = session._entries["x"]
    assert (entry.captured.calls, entry.captured.replay_us) == (20, 2000.0)
    assert entry.ready is ready
    assert session.time(7).changed == []


def contend(
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Inputs], BoundCall],
    package: str = "x",
    *,
    attention: bool = True,
) -> None:
    monkeypatch.setitem(BACKENDS, "x", Backend("x", "X", "fp8", ("math", package), prepare, attention=attention))


def test_a_library_that_fails_or_is_wrong_is_a_reason(session: BenchSession, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[object] = []
    monkeypatch.setattr(sessions, "capture", lambda call, turns: captured.append(call))

    def refuses(_: Inputs) -> BoundCall:
        raise RuntimeError("head dim 64 is not supported\nsome trace")

    contend(monkeypatch, refuses)
    assert session.add("x", True).reason == "RuntimeError: head dim 64 is not supported"
    contend(monkeypatch, lambda inputs: BoundCall(lambda: inputs.by_batch(inputs.values["q"])))
    wrong = session.add("x", True)
    assert wrong.reason.startswith("its output is wrong: relative error ")
    assert session.add("x", False) == replace(wrong, reason=""), "an error is what is asked for"
    contend(monkeypatch, lambda inputs: BoundCall(lambda: inputs.by_batch(inputs.values["q"] * math.nan)))
    assert session.add("x", True).reason == "its output is wrong: not every element is finite"
    assert captured == []
    assert session._reference is not None
    right = session._reference.exact.half().view(1, 2, 48, 64)
    contend(monkeypatch, lambda inputs: BoundCall(lambda: right / 4, unit=4.0))
    assert session.add("x", False).reason == ""
    assert captured == []
    found = session.add("x", True)
    assert (found.reason, found.finite, found.kernel_error, len(captured)) == ("", True, None, 1)


def test_a_broken_context_ends_the_session(session: BenchSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object = None) -> BoundCall:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    contend(monkeypatch, broken)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        session.add("x", True)


def test_an_output_of_greenfast_that_is_wrong_is_left_to_the_judge(
    session: BenchSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "capture", lambda call, turns: Captured(None, None, 1, 1.0, call))
    contend(monkeypatch, lambda inputs: BoundCall(lambda: inputs.by_batch(inputs.values["q"] * math.nan)), "greenfast")
    found = session.add("x", True)
    assert (found.reason, found.finite) == ("", False)


def test_what_is_no_attention_is_timed_unchecked(
    session: BenchSession, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = torch.zeros(3)
    monkeypatch.setattr(timing, "capture_graph", lambda call, calls: (Graph(clock, 2000.0, out, out, [], "x"), call()))
    contend(monkeypatch, lambda _: BoundCall(lambda: ("codes", "scales")), attention=False)
    found = session.add("x", True)
    assert (found.reason, found.finite, found.error) == ("", True, None)
    timed = session.time(7)
    assert (timed.changed, set(timed.samples_us["x"])) == ([], {2000.0})


def test_host_time_is_of_batches_of_eager_calls(session: BenchSession, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def backend(name: str) -> Backend:
        return Backend(name, name, "bf16", ("math", "x"), lambda _: BoundCall(lambda: called.append(name)))

    monkeypatch.setattr(sessions, "make_inputs", lambda dims, seed, kind, device: make_inputs(dims, seed, kind, "cpu"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for name in ("a", "b"):
        monkeypatch.setitem(BACKENDS, name, backend(name))
    rows = session.host(BenchCell(Shape(name="tiny", dims=DIMS), ("a", "b"), sampled=1))
    assert [(row.backend, row.dims, row.batches, row.calls) for row in rows] == [
        ("a", DIMS, 60, 50), ("b", DIMS, 60, 50)
    ]  # fmt: skip
    assert all(0 < row.least_us <= row.median_us for row in rows)
    assert len(called) == 2 * (1 + (60 + 5) * 50)
    batches = called[2::50]
    assert set(zip(batches[::2], batches[1::2], strict=True)) == {("a", "b"), ("b", "a")}


def test_host_times_leave_out_a_library_that_refuses(session: BenchSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("no paged KV")

    monkeypatch.setattr(sessions, "make_inputs", lambda dims, seed, kind, device: make_inputs(dims, seed, kind, "cpu"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def backend(name: str, package: str, call: Callable[[], Any]) -> Backend:
        return Backend(name, name, "bf16", ("math", package), lambda _: BoundCall(call))

    for name, package, call in (("own", "greenfast", tuple), ("a", "x", tuple), ("b", "x", refuse)):
        monkeypatch.setitem(BACKENDS, name, backend(name, package, call))
    cell = BenchCell(Shape(name="tiny", dims=DIMS), ("own", "b", "a"), sampled=1)
    assert [row.backend for row in session.host(cell)] == ["own", "a"]
    monkeypatch.setitem(BACKENDS, "own", backend("own", "greenfast", refuse))
    with pytest.raises(RuntimeError, match="no paged KV"):
        session.host(cell)


def test_facts_name_versions_and_what_is_missing(session: BenchSession) -> None:
    found = session.facts(["sdpa_fp8", "torch"])
    assert [c.name for c in found.backends] == ["sdpa_fp8", "torch"]
    assert found.backends[1].version == f"torch {torch.__version__}"
    assert set(found.versions) == {"torch CUDA", "cuDNN"}
