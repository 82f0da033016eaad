"""The timing loop of all benchmarks: interleaved rounds, of CUDA graphs or of any calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

#: Target duration of a graph replay, and most calls in a graph.
_REPLAY_US, _MOST_CALLS = 2000.0, 50
#: Time spent on each graph, and limits of its rounds.
_TIMED_US, _LEAST_ROUNDS, _MOST_ROUNDS = 60_000.0, 7, 200

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def order(names: Sequence[K], turn: int) -> list[K]:
    """Return the order of a round: the first name rotates, and every second round is reversed.

    With rotation alone, each name would always follow the same one, with its cache contents and its heat.
    """
    start = turn // 2 % max(1, len(names))
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if turn % 2 else rotated


def rounds_for(replay_us: Sequence[float]) -> int:
    """Return the number of rounds that gives each graph about its time. replay_us: one replay of each graph."""
    return max(_LEAST_ROUNDS, min(_MOST_ROUNDS, math.ceil(_TIMED_US / median(replay_us))))


def calls_for(one_us: float) -> int:
    """Return the number of calls in a graph for calls of this duration."""
    return max(1, min(_MOST_CALLS, round(_REPLAY_US / one_us)))


def event() -> Any:
    """Create a CUDA event with timing."""
    made: Any = torch.cuda.Event
    return made(enable_timing=True)


def time_gpu_ms(work: Callable[[], T]) -> tuple[float, T]:
    """Return the milliseconds between two events around some work on the current stream, and the work's result."""
    start, end = event(), event()
    start.record()
    result = work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)), result


def capture_graph(call: Callable[[], Any], calls: int) -> tuple[Any, Any]:
    """Capture a graph of N calls; return it with the result of the last call."""
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            out = call()
    return graph, out


def replay_us(graph: Any) -> float:
    """Measure the microseconds of the third replay."""
    graph.replay()
    graph.replay()
    return 1e3 * time_gpu_ms(graph.replay)[0]


@dataclass(frozen=True)
class Captured:
    """A graph of ``calls`` calls, the result of its last call, and the microseconds of a replay.

    call: holds the tensors that the graph reads.
    """

    graph: Any
    out: Any
    calls: int
    replay_us: float
    call: Any


def capture(call: Callable[[], Any], turns: int = 1) -> Captured:
    """Capture a graph of suitable length. turns: calls after which the memory repeats; the length is a multiple."""
    graph, out = capture_graph(call, 1)
    calls = -(-calls_for(replay_us(graph)) // turns) * turns
    if calls > 1:
        graph, out = capture_graph(call, calls)
    return Captured(graph, out, calls, replay_us(graph), call)


def interleave(
    calls: Mapping[K, Callable[[], T]], rounds: int, warmup: int = 0,
    arrange: Callable[[Sequence[K], int], Sequence[K]] = order,
) -> dict[K, list[T]]:  # fmt: skip
    """Call each once per round; return their results, without those of warm-up rounds. arrange: orders a round."""
    results: dict[K, list[T]] = {name: [] for name in calls}
    for turn in range(-warmup, rounds):
        for name in arrange(tuple(calls), turn):
            result = calls[name]()
            if turn >= 0:
                results[name].append(result)
    return results


def time_graphs(
    captured: Mapping[str, Captured], rounds: int | None = None, while_busy: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Replay every graph once per round; return the microseconds per call of each replay.

    rounds: None chooses the number from the replays' durations. The host queues all rounds ahead of the GPU, so the
    events around the replays include no host time; then it calls ``while_busy`` and waits for the GPU.
    """
    count = rounds or rounds_for([c.replay_us for c in captured.values()])
    marks = interleave(
        {name: partial(_mark_replay, c.graph) for name, c in captured.items()}, count, max(2, count // 4)
    )
    while_busy()
    torch.cuda.synchronize()
    return {name: [1e3 * a.elapsed_time(b) / captured[name].calls for a, b in pairs] for name, pairs in marks.items()}


def time_calls(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Capture each call after a first one, and return its median microseconds in interleaved rounds."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    samples = time_graphs({name: capture(call) for name, call in calls.items()})
    return {name: round(median(each), 2) for name, each in samples.items()}


def _mark_replay(graph: Any) -> tuple[Any, Any]:
    start, end = event(), event()
    start.record()
    graph.replay()
    end.record()
    return start, end
