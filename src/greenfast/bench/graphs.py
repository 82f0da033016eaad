"""Calls on torch's memory, captured in CUDA graphs and timed interleaved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

#: What a replay of a graph should take, and the most calls that it holds.
_REPLAY_US, _MOST_CALLS = 2000.0, 50
#: For how long each graph is timed, and the least and most rounds for it.
_TIMED_US, _LEAST_ROUNDS, _MOST_ROUNDS = 60_000.0, 7, 200

Marks = dict[str, list[tuple[Any, Any]]]


def order(names: Sequence[str], turn: int) -> list[str]:
    """The order of a round: each name comes first in some rounds, and every other round runs the other way around.

    A plain rotation would run each after the same one throughout, with its caches and its heat.
    """
    start = turn // 2 % len(names)
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if turn % 2 else rotated


def rounds_for(replay_us: Sequence[float]) -> int:
    """How many rounds give each graph about its time; replay_us: the microseconds of one replay of each."""
    return max(_LEAST_ROUNDS, min(_MOST_ROUNDS, math.ceil(_TIMED_US / median(replay_us))))


def calls_for(one_us: float) -> int:
    """How many calls of that duration a graph holds."""
    return max(1, min(_MOST_CALLS, round(_REPLAY_US / one_us)))


def event() -> Any:
    """A CUDA event that takes the time."""
    made: Any = torch.cuda.Event
    return made(enable_timing=True)


def graph_of(call: Callable[[], Any], calls: int) -> tuple[Any, Any]:
    """A graph of N calls, and what the last one returned."""
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            out = call()
    return graph, out


def replay_us(graph: Any) -> float:
    """Microseconds of one replay, the third."""
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
    """A graph of ``calls`` calls, what the last one returns, and how long a replay takes."""

    graph: Any
    out: Any
    calls: int
    replay_us: float


def capture(call: Callable[[], Any], turns: int = 1) -> Captured:
    """A graph that holds as many calls as a replay should, a multiple of ``turns``, after which calls repeat."""
    graph, out = graph_of(call, 1)
    calls = -(-calls_for(replay_us(graph)) // turns) * turns
    if calls > 1:
        graph, out = graph_of(call, calls)
    return Captured(graph, out, calls, replay_us(graph))


def queue_interleaved(graphs: Mapping[str, Any], rounds: int) -> Marks:
    """Queue a replay of every graph once per round, after a warm-up; returns the events around each.

    All of it is queued before the GPU gets there, so that no time of the host lies between the events.
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
    """Microseconds per call of each replay, once the GPU has finished them all."""
    return {name: [1e3 * a.elapsed_time(b) / calls[name] for a, b in pairs] for name, pairs in marks.items()}
