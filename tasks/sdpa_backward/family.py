"""The backward pass in 8 bits as a kernel family: dK and dV, by two kernels at head dim 256, then dQ.

A shape has H heads of Q and HK of K and V (of all sequences of a batch), S queries, KV keys and head dim D. CAUSAL=1:
query i attends to keys 0 .. i.
"""

from __future__ import annotations

from collections.abc import Mapping

from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention import backward
from greenfast.spec.errors import UsageError, unknown
from greenfast.spec.kernel import Program, Step

FORMATS = ("int8",)
_REQUIRED = ("H", "HK", "S", "KV", "D")


def read_dims(dims: Mapping[str, int], fmt: str) -> dict[str, int]:
    """Return a shape's dimensions with CAUSAL. Raises UsageError for a format or shape without a kernel."""
    if fmt not in FORMATS:
        raise unknown("format", fmt, FORMATS)
    if any(dims.get(name, 0) < 1 for name in _REQUIRED) or dims.keys() - {*_REQUIRED, "CAUSAL"}:
        raise UsageError(
            f"a shape of sdpa_backward needs {', '.join(_REQUIRED)}, each at least 1, and may have CAUSAL=1; "
            f"got {dict(dims)}"
        )
    if dims["D"] not in HEAD_DIMS:
        raise UsageError(f"D={dims['D']}: allowed are {', '.join(map(str, HEAD_DIMS))}")
    if dims["H"] % dims["HK"]:
        raise UsageError(f"H={dims['H']}, HK={dims['HK']}: HK must divide H")
    if dims.get("CAUSAL", 0) not in (0, 1):
        raise UsageError(f"CAUSAL={dims['CAUSAL']}: allowed are 0, 1")
    return {"CAUSAL": 0, **dims}


def _choose_tiles(toggles: Mapping[str, int], head_dim: int) -> backward.BackwardTiling:
    if toggles["USE_WIDE_TILES"]:
        if head_dim == 256:
            raise UsageError("USE_WIDE_TILES=1: at D=256 dQ has tiles of 64 keys; shared memory holds no wider ones")
        return backward.BackwardTiling(head_dim, consumers=2, stages=3, block_n=128)
    if head_dim == 64:  # the registers of wide tiles allow two warpgroups
        return backward.BackwardTiling(head_dim, consumers=3, stages=4, registers=(160, 24))
    return backward.BackwardTiling(head_dim, consumers=2, stages=3 if head_dim == 256 else 4)


def program(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False) -> Program:
    """Return the launches. Raises UsageError as Family documents."""
    if instrumented:
        raise UsageError("the backward kernels have no phases to count: warpgroups are in different ones at a time")
    d = read_dims(dims, fmt)
    sizes, causal = (d["H"], d["HK"], d["S"], d["KV"]), bool(d["CAUSAL"])
    of_queries = _choose_tiles(toggles, d["D"])
    keys = [
        Step(backward.keys_kernel(tiles, causal), backward.keys_launch(tiles, *sizes))
        for tiles in backward.KEYS_TILINGS[d["D"]]
    ]
    queries = Step(backward.queries_kernel(of_queries, causal), backward.queries_launch(of_queries, *sizes))
    return Program((*keys, queries))
