"""The backward pass in 8 bits as a kernel family: dK, dV and dS, by two kernels at head dim 256, then dQ from dS.

A shape has H heads of Q and HK of K and V (of all sequences of a batch), S queries, KV keys and head dim D. CAUSAL=1:
query i attends to keys 0 .. i, with 2 to keys 0 .. i + KV - S. WINDOW=W: only to the W keys up to its own place, the
last of those with a causal mask, and without one to W - 1 keys after it. LENGTHS=1: each head of K is a sequence with a
number of keys of its own, which a kernel reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention import backward
from greenfast.spec.errors import UsageError, unknown
from greenfast.spec.kernel import Program, Step, Workspace

FORMATS = ("int8",)
_REQUIRED = ("H", "HK", "S", "KV", "D")
_OPTIONS = {"CAUSAL": (0, 1, 2), "WINDOW": range(2**30), "LENGTHS": (0, 1)}


def read_dims(dims: Mapping[str, int], fmt: str) -> dict[str, int]:
    """Return a shape's dimensions with all options. Raises UsageError for a format or shape without a kernel."""
    if fmt not in FORMATS:
        raise unknown("format", fmt, FORMATS)
    if any(dims.get(name, 0) < 1 for name in _REQUIRED) or dims.keys() - {*_REQUIRED, *_OPTIONS}:
        raise UsageError(
            f"a shape of sdpa_backward needs {', '.join(_REQUIRED)}, each at least 1, and may have "
            f"{', '.join(_OPTIONS)}; got {dict(dims)}"
        )
    if dims["D"] not in HEAD_DIMS:
        raise UsageError(f"D={dims['D']}: allowed are {', '.join(map(str, HEAD_DIMS))}")
    if dims["H"] % dims["HK"]:
        raise UsageError(f"H={dims['H']}, HK={dims['HK']}: HK must divide H")
    for name, allowed in _OPTIONS.items():
        if dims.get(name, 0) not in allowed:
            numbers = "0 to 2**30 - 1" if name == "WINDOW" else ", ".join(map(str, allowed))
            raise UsageError(f"{name}={dims[name]}: allowed are {numbers}")
    return {**dict.fromkeys(_OPTIONS, 0), **dims}


def get_limits(d: Mapping[str, int]) -> tuple[int, int, int]:
    """Return the alignment of a shape's mask, and the keys before and after a query's own place; -1 for all."""
    side = d["WINDOW"] - 1
    return max(1, d["CAUSAL"]), side, 0 if d["CAUSAL"] else side


def program(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False) -> Program:
    """Return the launches. Raises UsageError as Family documents."""
    if instrumented:
        raise UsageError("the backward kernels have no phases to count: warpgroups are in different ones at a time")
    d = read_dims(dims, fmt)
    mask = backward.make_mask(*get_limits(d), d["S"], d["KV"], lengths=bool(d["LENGTHS"]))
    sizes = (d["H"], d["HK"], d["S"], d["KV"], mask, d["HK"] if mask.lengths else 1)
    keys = [
        Step(backward.keys_kernel(tiles, mask), backward.keys_launch(tiles, *sizes))
        for tiles in (replace(x, turns=bool(toggles["USE_TURNS"])) for x in backward.KEYS_TILINGS[d["D"]])
    ]
    tiles = backward.QUERIES_TILINGS[d["D"]]
    queries = Step(backward.queries_kernel(tiles, mask), backward.queries_launch(tiles, *sizes))
    ds = Workspace(backward.stored_bytes(d["H"], d["S"], d["KV"], mask))
    return Program((*keys, queries), {"ds": ds})
