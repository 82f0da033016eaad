"""Serving attention as a kernel family: narrow or wide row tiles, or swapped operands (S^T = K Q^T) for decoding.

A shape has B sequences of at most Q queries and S keys, H query heads, HK KV heads, and head dim D. Optional: PAGE
tokens per page (default 64), VROWS=1 for row-major V, and HEADSCALE=1 for scales per head instead of per token.
"""

from __future__ import annotations

from collections.abc import Mapping

from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.serving import attention
from greenfast.kernels.serving.attention import ServingSizes, ServingStrides
from greenfast.kernels.serving.config import FEW_ROWS, ServingConfig, few_rows
from greenfast.spec.errors import UsageError, unknown
from greenfast.spec.kernel import Program, Step, Workspace

FORMATS = ("e4m3",)
#: Launches fill this number of multiprocessors.
MULTIPROCESSORS = attention.TARGET.multiprocessors
#: Causal, without a window.
_WINDOW = (-1, 0)
_REQUIRED, _DEFAULTS = ("B", "Q", "S", "H", "HK", "D"), {"PAGE": 64, "VROWS": 0, "HEADSCALE": 0}
_ALLOWED = {"D": HEAD_DIMS, "PAGE": (16, 32, 64, 128), "VROWS": (0, 1), "HEADSCALE": (0, 1)}
_MOST_GROUPED = 16


def query_lengths(sequences: int, longest: int) -> list[int]:
    """Return the query lengths of the sequences, each at least 1: ``longest`` first, then varying ones."""
    return [longest - 7 * n % longest for n in range(sequences)]


def read_dims(dims: Mapping[str, int], fmt: str) -> dict[str, int]:
    """Return a shape's dimensions with defaults. Raises UsageError for a format or shape without a kernel."""
    if fmt not in FORMATS:
        raise unknown("format", fmt, FORMATS)
    if any(dims.get(name, 0) < 1 for name in _REQUIRED) or dims.keys() - {*_REQUIRED, *_DEFAULTS}:
        raise UsageError(
            f"a serving shape needs {', '.join(_REQUIRED)}, each at least 1, and may have {', '.join(_DEFAULTS)}; "
            f"got {dict(dims)}"
        )
    complete = _DEFAULTS | dict(dims)
    for name, allowed in _ALLOWED.items():
        if complete[name] not in allowed:
            raise UsageError(f"{name}={complete[name]}: allowed are {', '.join(map(str, allowed))}")
    if complete["H"] % complete["HK"] or complete["H"] // complete["HK"] > _MOST_GROUPED:
        raise UsageError(
            f"H={complete['H']}, HK={complete['HK']}: 1 to {_MOST_GROUPED} query heads share a head of K and V"
        )
    return complete


def sizes_of(dims: Mapping[str, int], fmt: str) -> ServingSizes:
    """Return the sizes of a shape, with pages for S keys per sequence and three more. Raises as ``read_dims`` does."""
    d = read_dims(dims, fmt)
    entries = -(-d["S"] // d["PAGE"])
    return ServingSizes(
        sequences=d["B"], tokens=sum(query_lengths(d["B"], d["Q"])), max_q_len=d["Q"], heads=d["H"], kv_heads=d["HK"],
        pages=d["B"] * entries + 3, page=d["PAGE"], table_entries=entries + 1,
    )  # fmt: skip


def _config(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> ServingConfig:
    d = read_dims(dims, fmt)
    wide, rows = bool(toggles["USE_WIDE_ROWS"]), d["Q"] * d["H"] // d["HK"]
    few = 0
    if toggles["USE_FEW_ROWS"]:
        if wide:
            raise UsageError("USE_WIDE_ROWS=1 and USE_FEW_ROWS=1 are two kernels; one of them is 0")
        few = few_rows(rows)
        if not few:
            raise UsageError(
                f"USE_FEW_ROWS=1 takes up to {FEW_ROWS[-1]} rows, Q={d['Q']} queries of {d['H'] // d['HK']} "
                f"heads each are {rows}"
            )
    return ServingConfig(
        head_dim=d["D"], query="float16", out="float16", wide=wide, few_rows=few,
        token_scales=not d["HEADSCALE"], value_layout="rows" if d["VROWS"] else "grouped",
    )  # fmt: skip


def program(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False) -> Program:
    """Return the launches of the plan and the attention. Raises UsageError as Family documents."""
    if instrumented:
        raise UsageError("the serving kernels have no phases to count: warpgroups are in different ones at a time")
    config, sizes = _config(toggles, fmt, dims), sizes_of(dims, fmt)
    page, heads, d = sizes.page, sizes.kv_heads, config.head_dim
    blocks = attention.grid_blocks(config, sizes, MULTIPROCESSORS)
    rows = (page * heads * d, heads * d, d)
    scales = (heads * page, page) if config.token_scales else (0, 1)
    strides = ServingStrides(
        q=(sizes.heads * d, d),
        k=rows,
        v=rows if config.value_layout == "rows" else (heads * page * d, page * d),
        table=sizes.table_entries,
        k_scale=scales,
        v_scale=scales,
    )
    return Program(
        (
            Step(
                attention.plan_kernel(config),
                attention.plan_launch(config, sizes, _WINDOW, multiprocessors=MULTIPROCESSORS),
            ),
            Step(
                attention.kernel(config),
                attention.launch(config, sizes, strides, _WINDOW, multiprocessors=MULTIPROCESSORS),
            ),
        ),
        {
            "plan": Workspace(4 * attention.plan_words(config, sizes, blocks)),
            "partials": Workspace(4 * attention.partial_words(config, sizes, blocks)),
        },
    )
