"""Attention of one sequence on several GPUs: ``torchrun --nproc-per-node N -m benchmarks parallel``.

PyTorch's ring, FlashAttention-3 in a hand-written ring, and greenfast's ring and Ulysses are interleaved in one run.
Each is compared with float64 before it is timed (docs/parallel.md).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.options import make_parser
from benchmarks.parallel_backends import BACKENDS, LIMITS, Shards, start_ring_step
from benchmarks.records import CaseRow, LinkRow, ParallelRecord, write_record
from benchmarks.registry import Backend, first_line
from benchmarks.timing import interleave, time_gpu_ms
from greenfast.cli.options import rounds as rounds_value
from greenfast.cli.options import words
from greenfast.judge.request import git_state, package_versions
from greenfast.kernels.attention.config import ROW_BLOCK
from greenfast.numerics.attention import attention
from greenfast.parallel import cost
from greenfast.parallel.layout import ShardLayout
from greenfast.spec.errors import MachineError, unknown

_TRACED_CALLS = 3
_SAMPLED = 64  # query rows per rank, of one head, that are compared with float64
_ROUND_SECONDS = 0.05  # duration of a backend's calls between two events
_MODELS = {"ring": cost.estimate_ring, "ulysses": cost.estimate_ulysses}
_LINKS = (1 << 20, 16 << 20, 128 << 20)
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
        for _ in range(_TRACED_CALLS):
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


@dataclass(frozen=True)
class ParallelCase:
    """One attention over the whole group. rows: length of the sequence before sharding."""

    name: str
    rows: int
    causal: bool
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    batch: int = 1

    @property
    def flops(self) -> float:
        """Counted as 4 * B * H * S * S * D, half of it with a mask."""
        whole = 4.0 * self.batch * self.heads * self.rows**2 * self.head_dim
        return whole / 2 if self.causal else whole

    def on(self, size: int) -> ParallelCase:
        """Round the rows down so that ``size`` ranks can share them, in blocks of 128 rows if there are enough."""
        each = 2 * size * (ROW_BLOCK if self.rows >= 2 * size * ROW_BLOCK else 1)
        return replace(self, rows=max(self.rows // each, 1) * each)

    def sizes(self, size: int) -> cost.CallSizes:
        """Return the sizes on one of ``size`` ranks, for the cost model."""
        rows = self.rows // size
        return cost.CallSizes(size, self.batch, self.heads, self.kv_heads, rows, rows, self.head_dim, self.causal)


CASES = (
    ParallelCase("32k_causal", 32768, True),
    ParallelCase("131k_causal", 131072, True),
    ParallelCase("32k_full", 32768, False),
    ParallelCase("131k_full", 131072, False),
    ParallelCase("32k_causal_gqa8", 32768, True, kv_heads=8),
)
#: Cases for machines without a GPU: they test the arithmetic in PyTorch, not the speed.
CPU_CASES = (ParallelCase("1k_causal", 1024, True, 4, 2, 64), ParallelCase("1k_full", 1024, False, 4, 2, 64))


def measure(
    mesh: DeviceMesh, cases: Sequence[ParallelCase], rounds: int, backends: Sequence[str]
) -> Iterator[ParallelRecord]:
    """Yield the record after each case; it is the same on all ranks of the mesh."""
    device = torch.cuda.get_device_name() if mesh.device_type == "cuda" else "CPU"
    missing = {name: _missing(BACKENDS[name], mesh) for name in backends}
    record = ParallelRecord(
        device=device,
        ranks=mesh.size(),
        git=git_state().sha,
        packages=package_versions(),
        torch=str(torch.__version__),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if mesh.device_type == "cuda" else "",  # type: ignore[no-untyped-call]
        measured=time.strftime("%Y-%m-%d", time.gmtime()),
        rounds=rounds,
        links=_links(mesh) if mesh.size() > 1 else [],
        rows=[],
        missing={name: why for name, why in missing.items() if why},
    )
    for case in cases:
        rows, refused = _case(mesh, case.on(mesh.size()), rounds, [name for name in backends if not missing[name]])
        record = msgspec.structs.replace(record, rows=[*record.rows, *rows], missing={**record.missing, **refused})
        yield record


def _missing(backend: Backend, mesh: DeviceMesh) -> str:
    """Return why a backend cannot be measured here, or an empty text."""
    if backend.precision == "bf16" and mesh.device_type == "cpu":
        return "it is measured on GPUs only"
    return backend.describe().missing


def _case(
    mesh: DeviceMesh, case: ParallelCase, rounds: int, names: Sequence[str]
) -> tuple[list[CaseRow], dict[str, str]]:
    """Measure a case; return its rows, and the reasons of libraries that do not support it."""
    shards, refused = _shards(mesh, case), {}
    ready: dict[str, Callable[[], Tensor]] = {}
    errors, peaks, calls = {}, {}, {}
    for name in names:
        backend = BACKENDS[name]
        try:
            call = backend.bind(shards).call
            errors[name] = _checked(mesh, case, shards, backend, call)
        except Exception as error:
            if backend.precision == "fp8":
                raise
            refused[f"{case.name}: {name}"] = first_line(error)
            continue
        peaks[name] = _peak(mesh, call)
        calls[name] = max(1, round(_ROUND_SECONDS / _slowest_seconds(mesh, call, 1)))
        ready[name] = call
    times = interleave({name: partial(_slowest_seconds, mesh, ready[name], calls[name]) for name in ready}, rounds)
    rows = []
    for name, call in ready.items():
        trace, median = trace_calls(mesh, call), statistics.median(times[name])
        model = _MODELS[name](case.sizes(mesh.size())).seconds * 1e3 if name in _MODELS else None
        rows.append(
            CaseRow(
                case=case.name, backend=name, causal=case.causal, calls=calls[name], error=errors[name],
                dims={"B": case.batch, "H": case.heads, "HK": case.kv_heads, "S": case.rows, "D": case.head_dim},
                median_ms=median * 1e3, least_ms=min(times[name]) * 1e3, most_ms=max(times[name]) * 1e3,
                tflops=case.flops / mesh.size() / median / 1e12, peak_bytes=peaks[name], exposed=trace.exposed,
                idle=trace.idle, nccl=trace.exchanging, model_ms=model,
            )
        )  # fmt: skip
        if dist.get_rank() == 0:
            print(rows[-1].line(), flush=True)
    return rows, refused


def _shards(mesh: DeviceMesh, case: ParallelCase) -> Shards:
    """Draw this rank's rows of Q, K and V from N(0, 1) in bfloat16."""
    generator = torch.Generator(mesh.device_type).manual_seed(1000 + mesh.get_local_rank())
    rows = case.rows // mesh.size()

    def normal(heads: int) -> Tensor:
        shape = (case.batch, heads, rows, case.head_dim)
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=mesh.device_type)
        for i in range(heads):  # drawing all heads in float32 would double the memory
            tensor[:, i].normal_(generator=generator)
        return tensor

    return Shards(mesh, normal(case.heads), normal(case.kv_heads), normal(case.kv_heads), case.causal, case.rows)


def _checked(
    mesh: DeviceMesh, case: ParallelCase, shards: Shards, backend: Backend, call: Callable[[], Tensor]
) -> float:
    """Return the largest relative error of any rank's sampled rows of its last head. Raises ValueError if too large."""
    out = call()
    if not backend.attention:
        return 0.0
    layout = ShardLayout(mesh.size(), True)
    rank, group = mesh.get_local_rank(), mesh.get_group()
    key, value = (_gathered(x[:1, -1:], group, layout)[0] for x in (shards.key, shards.value))
    rows = case.rows // mesh.size()
    at = torch.linspace(0, rows - 1, _SAMPLED, device=out.device).long()
    chunk = rows // 2
    first = torch.tensor(layout.get_chunks(rank), device=out.device) * chunk
    places = first[at // chunk] + at % chunk
    mask = torch.arange(case.rows, device=out.device) <= places.unsqueeze(1) if case.causal else None
    wanted = attention(shards.query[:1, -1, at], key, value, 1 / math.sqrt(case.head_dim), mask)
    sampled = out[:1, -1, at].double()
    error = _worst(mesh, float((sampled - wanted).norm() / wanted.norm()))
    if not error < LIMITS[backend.precision]:
        raise ValueError(f"{case.name}, {backend.name}: relative error {error:.3g} against float64")
    return error


def _gathered(x: Tensor, group: Any, layout: ShardLayout) -> Tensor:
    shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(layout.size)]
    dist.all_gather(shards, x.contiguous(), group=group)
    return layout.unshard(shards, 2)


def _seconds(mesh: DeviceMesh, call: Callable[[], Tensor], count: int) -> float:
    """Measure the seconds per call over ``count`` calls, after a barrier of all ranks."""

    def repeat() -> None:
        for _ in range(count):
            call()

    dist.barrier(mesh.get_group())
    if mesh.device_type == "cpu":
        began = time.perf_counter()
        repeat()
        return (time.perf_counter() - began) / count
    torch.cuda.synchronize()
    return time_gpu_ms(repeat)[0] / 1e3 / count


def _slowest_seconds(mesh: DeviceMesh, call: Callable[[], Tensor], count: int) -> float:
    """Return the slowest rank's seconds per call."""
    return _worst(mesh, _seconds(mesh, call, count))


def _worst(mesh: DeviceMesh, number: float) -> float:
    """Return the maximum of a number over the ranks."""
    x = torch.tensor(number, dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=mesh.get_group())
    return float(x)


def _peak(mesh: DeviceMesh, call: Callable[[], Tensor]) -> int:
    """Return the peak bytes that a call allocates on a GPU, including its output."""
    if mesh.device_type == "cpu":
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(_worst(mesh, torch.cuda.max_memory_allocated() - before))


def _links(mesh: DeviceMesh) -> list[LinkRow]:
    """Measure the bytes/s of a ring step and of an all-to-all."""
    group, size = mesh.get_group(), mesh.size()
    rows = []
    for count in _LINKS if mesh.device_type == "cuda" else _LINKS[:1]:
        sent, received = (torch.zeros(count, dtype=torch.uint8, device=mesh.device_type) for _ in range(2))

        def ring(sent: Tensor = sent, received: Tensor = received) -> Tensor:
            for work in start_ring_step(group, sent, received):
                work.wait()
            return received

        def heads(sent: Tensor = sent, received: Tensor = received) -> Tensor:
            whole = len(sent) // size * size
            dist.all_to_all_single(received[:whole], sent[:whole], group=group)
            return received

        for what, call in (("to the next rank", ring), ("all to all", heads)):
            call()
            seconds = _slowest_seconds(mesh, call, 10 if mesh.device_type == "cuda" else 1)
            moved = count if call is ring else count * (size - 1) // size
            rows.append(LinkRow(what=what, bytes=moved, microseconds=seconds * 1e6, gigabytes=moved / seconds / 1e9))
    return rows


def main(argv: Sequence[str]) -> int:
    """Compare in a process started by torchrun, on its GPU, or with gloo on the CPU without a GPU.

    Rank 0 prints each row and writes parallel.json. Raises UsageError for unknown cases and backends, MachineError for
    a process that was not started by torchrun, and ValueError for a wrong result.
    """
    parser = make_parser("parallel", "Compare attention of one sequence on several GPUs, in each process of torchrun.")
    parser.add_argument("--cases", type=words, metavar="A,B", help="sequences, such as 32k_causal (default: all)")
    parser.add_argument("--contenders", type=words, metavar="A,B", help="such as torch,ring,ulysses (default: all)")
    parser.add_argument(
        "--rounds", type=rounds_value, default=7, metavar="N", help="rounds per case (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="results folder (default: %(default)s)")
    args = parser.parse_args(argv)
    known = {case.name: case for case in (*CASES, *CPU_CASES)}
    for option, names, allowed in (("case", args.cases, known), ("contender", args.contenders, BACKENDS)):
        for name in names or ():
            if name not in allowed:
                raise unknown(f"{option} of benchmarks parallel", name, allowed)
    if "LOCAL_RANK" not in os.environ:
        raise MachineError(
            "benchmarks parallel: one process for each GPU is needed: "
            "torchrun --nproc-per-node N -m benchmarks parallel"
        )
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    try:
        mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))
        cases = [known[name] for name in args.cases or ()] or (CASES if on_gpu else CPU_CASES)
        for record in measure(mesh, cases, args.rounds, tuple(args.contenders or BACKENDS)):
            if dist.get_rank() == 0:
                write_record(args.out, record)
    finally:
        dist.destroy_process_group()
    return 0
