"""Which calls of attention are faster in FP8 or int8 than by PyTorch: the shapes to measure, and the rules found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from greenfast.bench.attention import attention_bytes, flops, sdpa_kernels
from greenfast.bench.comparison import Cell, Comparison, Limits
from greenfast.bench.inputs import INPUTS
from greenfast.bench.ratios import by_shape, geometric_mean
from greenfast.bench.record import Benchmark, Versus
from greenfast.bench.session import Session
from greenfast.judge.task import Shape

PRECISIONS = ("fp8", "int8")
_CONTENDERS = ("sdpa_fp8", "sdpa_int8", "torch")
_TOKENS, _HIDDEN = 16384, 2048
#: An output that is further from exact attention is wrong, not rounded.
_LIMIT = 0.2

Thresholds: TypeAlias = "tuple[float, ...]"


def shapes() -> tuple[Shape, ...]:
    """The shapes: by head dim, mask, heads that share K and V, lengths and batches; and of few queries on many keys."""
    found = []
    for d, group, causal in product((64, 128, 256), (1, 4), (0, 1)):
        for s in (512, 1024, 2048, 4096, 8192, 16384, 32768):
            found += [_shape(d, group, b, s, s, causal) for b in sorted({1, max(1, _TOKENS // s)})]
    for d, group, s, kv in product((64, 128, 256), (1, 8), (16, 128, 1024), (8192, 32768)):
        found.append(_shape(d, group, 1, s, kv, 0))
    return tuple(found)


def _shape(d: int, group: int, b: int, s: int, kv: int, causal: int) -> Shape:
    heads = _HIDDEN // d
    dims = {"B": b, "H": heads, "HK": heads // group, "S": s, "KV": kv, "D": d, "CAUSAL": causal}
    of_keys = "" if kv == s else f"_kv{kv}"
    return Shape(name=f"d{d}_g{group}_b{b}_s{s}{of_keys}{'_causal' if causal else ''}", dims=dims)


def routing() -> Comparison:
    """greenfast.sdpa in both precisions and PyTorch's attention as it is called by default, on many shapes."""
    cells = tuple(Cell(shape, _CONTENDERS, sampled=16, grid=True) for shape in shapes())
    return Comparison(
        name="routing",
        what="greenfast.sdpa and PyTorch's attention, by shape",
        own=_CONTENDERS[:2],
        versus=tuple(Versus(own=f"sdpa_{p}", rivals=["torch"], title=f"sdpa {p} / torch") for p in PRECISIONS),
        timed=cells,
        accuracy=(),
        inputs={"normal": INPUTS["normal"]},
        session=Session,
        flops=flops,
        bytes_moved=attention_bytes,
        limits=Limits(error=_LIMIT),
        kernels=lambda: sdpa_kernels(cells),
        arch="sm_90a",
    )


@dataclass(frozen=True)
class Point:
    """A measured shape as the rules see it, and the times of PyTorch's call over greenfast's.

    reuse: queries that read one key, all heads of a group counted. work: billions of operations.
    """

    shape: str
    reuse: int
    keys: int
    work: float
    gains: dict[str, float]


def points(record: Benchmark) -> dict[tuple[int, bool], list[Point]]:
    """The measured shapes by head dim and whether there is a causal mask; those without a time are left out."""
    found: dict[tuple[int, bool], list[Point]] = {}
    for shape, rows in by_shape(record.rows).items():
        times = {name: row.median_us for name, row in rows.items() if row.median_us is not None}
        if len(times) < len(_CONTENDERS):
            continue
        dims = next(iter(rows.values())).dims
        gains = {p: times["torch"] / times[f"sdpa_{p}"] for p in PRECISIONS}
        point = Point(shape, dims["S"] * dims["H"] // dims["HK"], dims["KV"], flops(dims) / 1e9, gains)
        found.setdefault((dims["D"], bool(dims["CAUSAL"])), []).append(point)
    return found


def rules(record: Benchmark) -> list[dict[str, Any]]:
    """A rule for each head dim, mask and precision that has one, as ``greenfast.operator.measured`` reads them.

    ``held_out``: the least gain on one half of the points under the rule of the other half; None where it takes none.
    """
    found = []
    for (head_dim, causal), of in sorted(points(record).items()):
        for precision in PRECISIONS:
            whole, half = (_rule(x, precision) for x in (of, of[::2]))
            if whole is None:
                continue
            others = [p.gains[precision] for p in of[1::2] if half and _takes(half["least"], p)]
            found.append(
                {"head_dim": head_dim, "causal": causal, "precision": precision, **whole,
                 "held_out": round(min(others), 3) if others else None}
            )  # fmt: skip
    return found


def _rule(of: Sequence[Point], precision: str) -> dict[str, Any] | None:
    """The least reuse, keys and work of calls to take, so that greenfast is slower on none of the points.

    Of all such thresholds at measured values those that gain most, which is the largest sum of logarithms; of equal
    ones the lowest. None where greenfast is slower on the largest point of all.
    """
    values = [sorted({getattr(p, name) for p in of}) for name in ("reuse", "keys", "work")]
    best: list[float] = []
    chosen: Thresholds | None = None
    for least in product(*values):
        gains = [p.gains[precision] for p in of if _takes(least, p)]
        if gains and min(gains) >= 1.0 and sum(map(math.log, gains)) > sum(map(math.log, best)):
            best, chosen = gains, least
    if chosen is None:
        return None
    return {
        "least": list(chosen), "shapes": len(best), "of": len(of), "slowest": round(min(best), 3),
        "mean": round(geometric_mean(best), 3), "fastest": round(max(best), 3),
    }  # fmt: skip


def rules_table(found: Sequence[Mapping[str, Any]]) -> str:
    """The rules as a table of Markdown."""
    lines = [
        "| head dim, mask | precision | queries to a key, keys, GFLOP at least | shapes taken | slowest, mean, fastest "
        "against PyTorch | slowest of those held out |",
        "|---|---|---|---|---|---|",
    ]
    for rule in found:
        mask = "causal" if rule["causal"] else "none"
        least = ", ".join(f"{x:.3g}" if isinstance(x, float) else f"{x:,}" for x in rule["least"])
        gains = ", ".join(f"{rule[name]:.2f}" for name in ("slowest", "mean", "fastest"))
        held_out = "" if rule["held_out"] is None else f"{rule['held_out']:.2f}"
        lines.append(
            f"| {rule['head_dim']}, {mask} | {rule['precision']} | {least} | {rule['shapes']} of {rule['of']} "
            f"| {gains} | {held_out} |"
        )
    return "\n".join(lines)


def _takes(least: Sequence[float], point: Point) -> bool:
    return point.reuse >= least[0] and point.keys >= least[1] and point.work >= least[2]
