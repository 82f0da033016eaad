"""Derive routing rules: which calls of attention are faster in 8 bits than in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.comparison import BenchCell, Comparison, ErrorLimits
from benchmarks.records import Benchmark, SpeedupPair
from benchmarks.report import by_shape, geometric_mean
from benchmarks.sdpa import attention_bytes, flops, sdpa_kernels
from benchmarks.sdpa_inputs import INPUTS
from benchmarks.session import BenchSession
from greenfast.judge.task import Shape
from greenfast.ops.quantized import PRECISIONS
from greenfast.ops.routing_rules import FA3, TORCH

_TORCH = ("torch", "torch_flash", "torch_cudnn")
#: The alternative of a call -> the backends that represent it; the fastest one counts.
BASELINES = {TORCH: _TORCH, FA3: (*_TORCH, "fa3_bf16")}
_OWN = tuple(f"sdpa_{p}" for p in PRECISIONS)
_CONTENDERS = (*_OWN, "torch", "fa3_bf16")
_TOKENS, _HIDDEN = 16384, 2048
#: Largest relative error of a correct output.
_LIMIT = 0.2
#: Rows of Q per tile, and tiles that fill a GPU: two for each of 132 multiprocessors.
_TILE, _FULL = 128, 264

_Floats = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


def shapes() -> tuple[Shape, ...]:
    """Return the shapes to measure: head dim x mask x group size x length, each for one sequence and for a full GPU.

    Lengths are powers of two; with a full GPU also lengths between them. Some shapes have few queries and many keys.
    """
    chosen = []
    for d, group, causal in product((64, 128, 256), (1, 4), (0, 1)):
        for s in (512, 1024, 2048, 4096, 8192, 16384, 32768):
            chosen += [_shape(d, group, b, s, s, causal) for b in sorted({1, max(1, _TOKENS // s)})]
    for d, causal, (group, s) in product(
        (64, 128, 256), (0, 1), ((1, 768), (1, 1536), (4, 1536), (1, 3072), (1, 6144))
    ):
        chosen.append(_shape(d, group, _TOKENS // s, s, s, causal))
    for d, group, s, kv in product((64, 128, 256), (1, 8), (16, 128, 1024), (8192, 32768)):
        batches = (1, 5120 // max(s, _TILE)) if kv == 8192 else (1,)
        chosen += [_shape(d, group, b, s, kv, 0) for b in batches]
    return tuple(chosen)


def _shape(d: int, group: int, b: int, s: int, kv: int, causal: int) -> Shape:
    heads = _HIDDEN // d
    dims = {"B": b, "H": heads, "HK": heads // group, "S": s, "KV": kv, "D": d, "CAUSAL": causal}
    kv_part = "" if kv == s else f"_kv{kv}"
    return Shape(name=f"d{d}_g{group}_b{b}_s{s}{kv_part}{'_causal' if causal else ''}", dims=dims)


def routing() -> Comparison:
    """Compare greenfast.sdpa, PyTorch's default attention and FlashAttention-3 on many shapes."""
    cells = tuple(BenchCell(shape, _CONTENDERS, sampled=16, grid=True) for shape in shapes())
    return Comparison(
        name="routing",
        what="greenfast.sdpa and PyTorch's attention, by shape",
        own=_OWN,
        versus=tuple(
            SpeedupPair(own=f"sdpa_{p}", baselines=list(baselines), title=f"sdpa {p} / {name}")
            for name, baselines in (("torch", ["torch"]), ("best bf16", ["torch", "fa3_bf16"]))
            for p in PRECISIONS
        ),
        timed=cells,
        accuracy=(),
        inputs={"normal": INPUTS["normal"]},
        session=BenchSession,
        flops=flops,
        bytes_moved=attention_bytes,
        limits=ErrorLimits(error=_LIMIT),
        kernels=lambda: sdpa_kernels(cells),
        arch="sm_90a",
    )


@dataclass(frozen=True)
class RoutingPoint:
    """A measured shape with the inputs of a rule.

    reuse: queries per key, over all heads of a group. work: billions of operations. full: whether its tiles fill a GPU;
    with fewer tiles, 16-bit kernels leave multiprocessors idle. gains: 16-bit time / greenfast's time, by precision.
    """

    shape: str
    reuse: int
    keys: int
    work: float
    full: bool
    gains: dict[str, float]


def points(record: Benchmark, against: str) -> dict[tuple[int, bool], list[RoutingPoint]]:
    """Return the measured shapes by (head dim, causal). Shapes without a time are left out.

    against: one of BASELINES; for FA3 only shapes with a time of FlashAttention-3.
    """
    points_by_kind: dict[tuple[int, bool], list[RoutingPoint]] = {}
    for shape, rows in by_shape(record.rows).items():
        times = {name: row.median_us for name, row in rows.items() if row.median_us is not None}
        baselines = [times[name] for name in BASELINES[against] if name in times]
        if not baselines or (against == FA3 and "fa3_bf16" not in times):
            continue
        gains = {p: min(baselines) / times[f"sdpa_{p}"] for p in PRECISIONS if f"sdpa_{p}" in times}
        dims = next(iter(rows.values())).dims
        reuse, keys = dims["S"] * dims["H"] // dims.get("HK", dims["H"]), dims.get("KV", dims["S"])
        full = dims["B"] * dims["H"] * -(-dims["S"] // _TILE) >= _FULL
        point = RoutingPoint(shape, reuse, keys, flops(dims) / 1e9, full, gains)
        points_by_kind.setdefault((dims["D"], bool(dims.get("CAUSAL"))), []).append(point)
    return points_by_kind


def rules(records: Sequence[tuple[str, Benchmark]]) -> list[dict[str, Any]]:
    """Derive the rules by baseline, precision, head dim and mask, in the format of ``greenfast.ops.routing_rules``.

    records: (path, record); a rule comes from the first record with times for it. A rule has least=None if no threshold
    is safe.
    """
    derived = []
    for against, precision in product(BASELINES, PRECISIONS):
        for path, record in records:
            timed = {
                key: [p for p in group if precision in p.gains]
                for key, group in sorted(points(record, against).items())
            }
            if any(timed.values()):
                source = {"against": against, "record": path, "device": record.device.name if record.device else ""}
                derived += [
                    {
                        **source,
                        "head_dim": head_dim,
                        "causal": causal,
                        "precision": precision,
                        **_rule(group, precision),
                    }
                    for (head_dim, causal), group in timed.items()
                ]
                break
    return derived


def _rule(group: Sequence[RoutingPoint], precision: str) -> dict[str, Any]:
    """Derive one rule: the thresholds of reuse, keys and work, and the gains of the shapes above them.

    held_out: smallest gain of a shape that a rule derived without it accepts (leave-one-out); None if there is none.
    """
    sizes = np.array([(p.reuse, p.keys, p.work) for p in group], np.float64)
    gains = np.array([p.gains[precision] for p in group])
    full = np.array([p.full for p in group])
    least = _find_thresholds(sizes, gains, full)
    if least is None:
        return {"least": None, "shapes": 0, "of": len(group)}
    taken = gains[_exceed(sizes, least)]
    held_out = []
    for i in range(len(group)):
        others = np.arange(len(group)) != i
        without = _find_thresholds(sizes[others], gains[others], full[others])
        if without is not None and _exceed(sizes[i], without):
            held_out.append(float(gains[i]))
    return {
        "least": [int(least[0]), int(least[1]), float(least[2])], "shapes": len(taken), "of": len(group),
        "slowest": round(float(taken.min()), 3), "mean": round(geometric_mean(list(taken)), 3),
        "fastest": round(float(taken.max()), 3), "held_out": round(min(held_out), 3) if held_out else None,
    }  # fmt: skip


def _find_thresholds(sizes: _Floats, gains: _Floats, full: _Flags) -> _Floats | None:
    """Return the safe thresholds (reuse, keys, work) with the largest sum of log gains; None if there are none.

    Thresholds are safe if greenfast is slower on no shape with at least half of each threshold. Reuse and keys must be
    values of shapes that fill a GPU. Among thresholds that accept the same shapes, take the highest reuse and keys and
    the lowest work. sizes: (shapes, 3).
    """
    if not full.any():
        return None
    values = (np.unique(sizes[full, 0]), np.unique(sizes[full, 1]), np.unique(sizes[:, 2]))
    taken, near = (_exceed_all(sizes, [v * share for v in values]) for share in (1.0, 0.5))
    safe = ~(near & (gains < 1.0)).any(axis=1)
    total = np.zeros(len(taken))
    total[safe] = np.where(taken[safe], np.log(gains), 0.0).sum(axis=1)
    best = total == total.max()
    if total.max() <= 0:
        return None
    least = sizes[taken[best][0]].min(axis=0)
    least[2] = values[2][np.flatnonzero(best) % len(values[2])].min()
    return np.asarray(least)


def _exceed_all(sizes: _Floats, values: Sequence[_Floats]) -> _Flags:
    """Return which shapes exceed which thresholds: (thresholds in the order of ``product(*values)``, shapes)."""
    reuse, keys, work = (sizes[:, axis] >= value[:, None] for axis, value in enumerate(values))
    return (reuse[:, None, None] & keys[:, None] & work).reshape(-1, len(sizes))


def _exceed(sizes: _Floats, least: _Floats) -> _Flags:
    return np.asarray((sizes >= least).all(axis=-1))


def rules_table(derived: Sequence[Mapping[str, Any]], against: str) -> str:
    """Format the rules against a baseline as a Markdown table for docs/, with their records."""
    lines = [
        "| head dim, mask | precision | queries to a key, keys, GFLOP at least | shapes taken | slowest, mean, fastest "
        "shape | slowest held-out shape |",
        "|---|---|---|---|---|---|",
    ]
    shown = [rule for rule in derived if rule["against"] == against]
    for rule in shown:
        mask = "causal" if rule["causal"] else "none"
        least = gains = held_out = ""
        if rule["least"]:
            least = ", ".join(f"{x:.3g}" if isinstance(x, float) else f"{x:,}" for x in rule["least"])
            gains = ", ".join(f"{rule[name]:.2f}" for name in ("slowest", "mean", "fastest"))
            held_out = "" if rule["held_out"] is None else f"{rule['held_out']:.2f}"
        lines.append(
            f"| {rule['head_dim']}, {mask} | {rule['precision']} | {least} | {rule['shapes']} of {rule['of']} "
            f"| {gains} | {held_out} |"
        )
    sources = []
    for path, device in dict.fromkeys((rule["record"], rule["device"]) for rule in shown):
        of = [rule for rule in shown if rule["record"] == path]
        names = list(dict.fromkeys(rule["precision"] for rule in of))
        count = sum(rule["of"] for rule in of) // len(names)
        sources.append(f"{', '.join(names)} on [{count} shapes](../{path}) on {device}")
    return "\n".join([*lines, *(["", f"Measured: {'; '.join(sources)}."] if sources else [])])
