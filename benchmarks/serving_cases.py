"""The cases of the serving comparison: decode and prefill over paged caches, append, and the host time of a call.

Needs no PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from greenfast.judge.task import Shape
from greenfast.spec.errors import unknown

#: Tokens per page.
PAGE = 64
GROUPS = ("decode", "prefill", "append", "host")
#: Total bytes of the cache copies that are read in rotation: five times an H200's L2, so that less than 1 % of a copy
#: is still in L2 when it is read again, even with random replacement.
_BEYOND_L2 = 300_000_000
#: (Query heads, heads of K and V, head dim) -> decode batches as (sequences, keys of each).
_DECODE: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {
    (32, 8, 128): ((1, 8192), (1, 131072), (8, 32768), (32, 4096), (128, 2048), (256, 1024)),
    (8, 1, 128): ((1, 8192), (1, 131072), (8, 32768), (32, 4096), (256, 1024)),
    (64, 8, 64): ((1, 131072), (8, 32768), (128, 2048), (256, 1024)),
    (16, 8, 256): ((1, 131072), (8, 32768), (256, 1024)),
    (32, 32, 128): ((8, 32768), (256, 1024)),
}
#: Batches with scales per token and head in the comparison, and in a quick run.
_TOKEN_SCALES = ((8, 32768), (256, 1024))
_QUICK = ((1, 8192), (8, 32768), (256, 1024))
_SKEWED = (131072, *[1024] * 63)
_PREFILL = {
    "16x1024": (1024,) * 16,
    "4x4096": (4096,) * 4,
    "1x16384": (16384,),
    "ragged": (137, 9000, 512, 33, 4000, 1500, 1202),
    "1x32768": (32768,),
}
_PREFILL_HEADS = ((32, 8, 128), (64, 8, 64), (16, 8, 256))
_APPENDED = (16384, 64)
_APPEND_HEADS = (32, 8, 128)


@dataclass(frozen=True)
class ServingCase:
    """A shape with the number of keys of each sequence. token_scales: whether scales per token are compared too."""

    shape: Shape
    lengths: tuple[int, ...] = ()
    token_scales: bool = False

    @property
    def group(self) -> str:
        """The part of the comparison that it belongs to."""
        return self.shape.name.split("_")[0]


def _dims(heads: tuple[int, int, int], lengths: Sequence[int], queries: str) -> dict[str, int]:
    """Return the dims. H, HK, D: heads of Q, heads of K and V, head dim. B sequences of up to S keys; KEYS in total."""
    h, hk, d = heads
    dims = {"B": len(lengths), "H": h, "HK": hk, "D": d, "S": max(lengths), "KEYS": sum(lengths)}
    return dims | ({"SQUARES": sum(n * n for n in lengths)} if queries == "all" else {})


def _named(group: str, heads: tuple[int, int, int], what: str) -> str:
    h, hk, d = heads
    return f"{group}_{h}x{hk}_d{d}_{what}"


def cases(groups: Sequence[str] = GROUPS, *, quick: bool = False) -> list[ServingCase]:
    """Return the cases of these groups, without the host case. quick: a third of them.

    Raises UsageError for unknown groups.
    """
    for group in groups:
        if group not in GROUPS:
            raise unknown("case of benchmarks serving", group, GROUPS)
    chosen = []
    if "decode" in groups:
        for heads, batches in _DECODE.items():
            for b, s in batches:
                if not quick or (b, s) in _QUICK:
                    shape = Shape(name=_named("decode", heads, f"{b}x{s}"), dims=_dims(heads, (s,) * b, "one"))
                    chosen.append(ServingCase(shape, (s,) * b, (b, s) in _TOKEN_SCALES and heads[1] == 8))
        for heads in ((32, 8, 128), (64, 8, 64)):
            shape = Shape(name=_named("decode", heads, "skewed"), dims=_dims(heads, _SKEWED, "one"))
            chosen.append(ServingCase(shape, _SKEWED, heads[2] == 128))
    if "prefill" in groups:
        for heads in _PREFILL_HEADS:
            for name, lengths in _PREFILL.items():
                if not quick or name in ("4x4096", "ragged"):
                    shape = Shape(name=_named("prefill", heads, name), dims=_dims(heads, lengths, "all"))
                    chosen.append(ServingCase(shape, lengths))
    if "append" in groups:
        h, hk, d = _APPEND_HEADS
        for tokens in _APPENDED:
            for norm in (0, 1):
                dims = {"TOKENS": tokens, "H": h, "HK": hk, "D": d} | ({"NORM": 1} if norm else {})
                chosen.append(ServingCase(Shape(name=f"append_{tokens}{'_norm' * norm}", dims=dims)))
    if {"decode", "append"} & set(groups):
        chosen.append(ServingCase(Shape(name="read_1GiB", dims={"BYTES": 2**30})))
    return chosen


def host_case() -> ServingCase:
    """Return a batch with eager calls that take more host time than GPU time."""
    lengths = (1024,) * 8
    return ServingCase(Shape(name="host", dims=_dims(_APPEND_HEADS, lengths, "one")), lengths)


def find_lengths(name: str) -> tuple[int, ...]:
    """Return the number of keys of each sequence of a named shape."""
    return next(case.lengths for case in (*cases(), host_case()) if case.shape.name == name)


def kv_bytes(dims: Mapping[str, int], item: int = 1) -> int:
    """Return the bytes of K and V that attention reads. item: bytes per element."""
    return 2 * dims["KEYS"] * dims["HK"] * dims["D"] * item


def append_bytes(dims: Mapping[str, int]) -> int:
    """Return the bytes that an append moves: Q, K, V in 16 bits in; Q in 16 bits, codes and scales out."""
    q, kv = dims["H"] * dims["D"], 2 * dims["HK"] * dims["D"]
    return dims["TOKENS"] * (2 * (q + kv) + 2 * q + kv + 4 * 2 * dims["HK"])


def copies(dims: Mapping[str, int]) -> int:
    """Return the number of cache copies that decode reads in rotation, so that K and V come from memory; else 1."""
    if "KEYS" not in dims or "SQUARES" in dims:
        return 1
    return math.ceil(_BEYOND_L2 / kv_bytes(dims))


def bytes_moved(dims: Mapping[str, int]) -> int:
    """Return the bytes that a round of calls accesses: they decide whether the data fit into L2."""
    if "BYTES" in dims:
        return dims["BYTES"]
    return append_bytes(dims) if "TOKENS" in dims else copies(dims) * kv_bytes(dims)


def flops(dims: Mapping[str, int]) -> float:
    """Return the operations of attention, half of the square for a causal prefill; 0 for other cases."""
    if "SQUARES" in dims:
        return 2.0 * dims["SQUARES"] * dims["H"] * dims["D"]
    return 4.0 * dims.get("KEYS", 0) * dims["H"] * dims["D"] if "KEYS" in dims else 0.0
