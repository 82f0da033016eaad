"""Measure the share of exposed communication in a call, from a trace of its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_CALLS = 3
Interval = tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """Shares of the time between the first kernel's start and the last kernel's end; None without a trace."""

    exposed: float | None
    idle: float | None
    exchanging: float | None


def trace_calls(mesh: DeviceMesh, call: Callable[[], Tensor]) -> Trace:
    """Trace some calls; return the maximum of each share over the ranks."""
    if mesh.device_type == "cpu":
        return Trace(None, None, None)
    call()
    dist.barrier(mesh.get_group())
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    exchanges: list[Interval] = []
    others: list[Interval] = []
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(_CALLS):
            call()
        torch.cuda.synchronize()
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            intervals = exchanges if "nccl" in event.name.lower() else others
            intervals.append((event.time_range.start, event.time_range.end))
    local = shares(exchanges, others) if others else (math.inf,) * 3  # a machine may forbid traces
    x = torch.tensor(local, dtype=torch.float64, device="cuda")
    dist.all_reduce(x, dist.ReduceOp.MAX, group=mesh.get_group())
    exposed, idle, exchanging = x.tolist()
    return Trace(None, None, None) if exposed == math.inf else Trace(exposed, idle, exchanging)


def shares(exchanges: Sequence[Interval], others: Sequence[Interval]) -> tuple[float, float, float]:
    """Return the shares of the total span: communication alone, idle, and communication in total."""
    both = [*exchanges, *others]
    if not both:
        return 0.0, 0.0, 0.0
    span = max(end for _, end in both) - min(start for start, _ in both)
    busy, working, exchanging = covered(both), covered(others), covered(exchanges)
    return (busy - working) / span, 1 - busy / span, exchanging / span


def covered(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
