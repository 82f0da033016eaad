"""Capture calls in CUDA graphs and time them interleaved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

#: Target duration of a graph replay, and most calls in a graph.
_REPLAY_US, _MOST_CALLS = 2000.0, 50
#: Time spent on each graph, and limits of its rounds.
_TIMED_US, _LEAST_ROUNDS, _MOST_ROUNDS = 60_000.0, 7, 200

Marks = dict[str, list[tuple[Any, Any]]]


def order(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of a round: the first name rotates, and every second round is reversed.

    With rotation alone, each name would always follow the same one, with its cache contents and its heat.
    """
    start = turn // 2 % len(names)
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


def capture_graph(call: Callable[[], Any], calls: int) -> tuple[Any, Any]:
    """Capture a graph of N calls; return it with the result of the last call."""
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            out = call()
    return graph, out


def replay_us(graph: Any) -> float:
    """Measure the microseconds of the third replay."""
    start, end = event(), event()
    graph.replay()
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(1e3 * start.elapsed_time(end))


@dataclass(frozen=True)
class Captured:
    """A graph of ``calls`` calls, the result of its last call, and the microseconds of a replay."""

    graph: Any
    out: Any
    calls: int
    replay_us: float


def capture(call: Callable[[], Any], turns: int = 1) -> Captured:
    """Capture a graph of suitable length. turns: calls after which the memory repeats; the length is a multiple."""
    graph, out = capture_graph(call, 1)
    calls = -(-calls_for(replay_us(graph)) // turns) * turns
    if calls > 1:
        graph, out = capture_graph(call, calls)
    return Captured(graph, out, calls, replay_us(graph))


def queue_interleaved(graphs: Mapping[str, Any], rounds: int) -> Marks:
    """Queue a replay of every graph once per round, after a warm-up; return the events around each replay.

    The host runs ahead of the GPU, so the events include no host time.
    """
    names = list(graphs)
    for turn in range(max(2, rounds // 4)):
        for name in order(names, turn):
            graphs[name].replay()
    marks: Marks = {name: [] for name in names}
    for turn in range(rounds):
        for name in order(names, turn):
            start, end = event(), event()
            start.record()
            graphs[name].replay()
            end.record()
            marks[name].append((start, end))
    return marks


def call_us(marks: Marks, calls: Mapping[str, int]) -> dict[str, list[float]]:
    """Return the microseconds per call of each replay, after the GPU has finished."""
    return {name: [1e3 * a.elapsed_time(b) / calls[name] for a, b in pairs] for name, pairs in marks.items()}
