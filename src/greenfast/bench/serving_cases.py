"""What serving is compared on: decode and prefill over paged caches, appending to them, and the host's time of a call.

Needs no PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from greenfast.judge.task import Shape
from greenfast.spec.errors import unknown

#: Tokens of a page.
PAGE = 64
GROUPS = ("decode", "prefill", "append", "host")
#: Copies of a cache are read in turn, as many as have this many bytes of K and V in FP8: five times an H200's L2, of
#: which less than a hundredth is then still there, even if lines are replaced at random.
_BEYOND_L2 = 300_000_000
#: Query heads, heads of K and V, head dim; and the batches that are decoded with them, sequences and keys of each.
_DECODE: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {
    (32, 8, 128): ((1, 8192), (1, 131072), (8, 32768), (32, 4096), (128, 2048), (256, 1024)),
    (8, 1, 128): ((1, 8192), (1, 131072), (8, 32768), (32, 4096), (256, 1024)),
    (64, 8, 64): ((1, 131072), (8, 32768), (128, 2048), (256, 1024)),
    (16, 8, 256): ((1, 131072), (8, 32768), (256, 1024)),
    (32, 32, 128): ((8, 32768), (256, 1024)),
}
#: Batches in which a scale for each token and head is compared with scales of heads, and those of a quick run.
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
    """A shape with the keys of each of its sequences; ``token_scales``: whether these are compared too."""

    shape: Shape
    lengths: tuple[int, ...] = ()
    token_scales: bool = False

    @property
    def group(self) -> str:
        """Which part of the comparison it belongs to."""
        return self.shape.name.split("_")[0]


def _dims(heads: tuple[int, int, int], lengths: Sequence[int], queries: str) -> dict[str, int]:
    """H, HK, D: heads of Q, of K and V, and their size. B sequences of up to S keys, KEYS in all."""
    h, hk, d = heads
    dims = {"B": len(lengths), "H": h, "HK": hk, "D": d, "S": max(lengths), "KEYS": sum(lengths)}
    return dims | ({"SQUARES": sum(n * n for n in lengths)} if queries == "all" else {})


def _named(group: str, heads: tuple[int, int, int], what: str) -> str:
    h, hk, d = heads
    return f"{group}_{h}x{hk}_d{d}_{what}"


def cases(groups: Sequence[str] = GROUPS, *, quick: bool = False) -> list[ServingCase]:
    """The cases of these groups, without the host's. quick: a third of them.

    Raises UsageError for unknown groups.
    """
    for group in groups:
        if group not in GROUPS:
            raise unknown("case of bench serving", group, GROUPS)
    found = []
    if "decode" in groups:
        for heads, batches in _DECODE.items():
            for b, s in batches:
                if not quick or (b, s) in _QUICK:
                    shape = Shape(name=_named("decode", heads, f"{b}x{s}"), dims=_dims(heads, (s,) * b, "one"))
                    found.append(ServingCase(shape, (s,) * b, (b, s) in _TOKEN_SCALES and heads[1] == 8))
        for heads in ((32, 8, 128), (64, 8, 64)):
            shape = Shape(name=_named("decode", heads, "skewed"), dims=_dims(heads, _SKEWED, "one"))
            found.append(ServingCase(shape, _SKEWED, heads[2] == 128))
    if "prefill" in groups:
        for heads in _PREFILL_HEADS:
            for name, lengths in _PREFILL.items():
                if not quick or name in ("4x4096", "ragged"):
                    shape = Shape(name=_named("prefill", heads, name), dims=_dims(heads, lengths, "all"))
                    found.append(ServingCase(shape, lengths))
    if "append" in groups:
        h, hk, d = _APPEND_HEADS
        for tokens in _APPENDED:
            for norm in (0, 1):
                dims = {"TOKENS": tokens, "H": h, "HK": hk, "D": d} | ({"NORM": 1} if norm else {})
                found.append(ServingCase(Shape(name=f"append_{tokens}{'_norm' * norm}", dims=dims)))
    if {"decode", "append"} & set(groups):
        found.append(ServingCase(Shape(name="read_1GiB", dims={"BYTES": 2**30})))
    return found


def host_case() -> ServingCase:
    """A batch whose eager calls cost the host more than the GPU."""
    lengths = (1024,) * 8
    return ServingCase(Shape(name="host", dims=_dims(_APPEND_HEADS, lengths, "one")), lengths)


def lengths_of(name: str) -> tuple[int, ...]:
    """Keys of each sequence of a shape, by its name."""
    return next(case.lengths for case in (*cases(), host_case()) if case.shape.name == name)


def kv_bytes(dims: Mapping[str, int], item: int = 1) -> int:
    """Bytes of the K and V that are attended to; item: bytes of a number."""
    return 2 * dims["KEYS"] * dims["HK"] * dims["D"] * item


def append_bytes(dims: Mapping[str, int]) -> int:
    """Bytes that an append must move: Q, K, V of 16 bits in, Q of 16 bits, codes and scales out."""
    q, kv = dims["H"] * dims["D"], 2 * dims["HK"] * dims["D"]
    return dims["TOKENS"] * (2 * (q + kv) + 2 * q + kv + 4 * 2 * dims["HK"])


def copies(dims: Mapping[str, int]) -> int:
    """How many copies of a decoded cache are read in turn, so that K and V come from memory; else 1."""
    if "KEYS" not in dims or "SQUARES" in dims:
        return 1
    return math.ceil(_BEYOND_L2 / kv_bytes(dims))


def bytes_moved(dims: Mapping[str, int]) -> int:
    """Bytes that a round of calls touches, which decides whether they can lie in L2."""
    if "BYTES" in dims:
        return dims["BYTES"]
    return append_bytes(dims) if "TOKENS" in dims else copies(dims) * kv_bytes(dims)


def flops(dims: Mapping[str, int]) -> float:
    """Operations of attention, of a causal prefill half of the squares; 0 where there is none."""
    if "SQUARES" in dims:
        return 2.0 * dims["SQUARES"] * dims["H"] * dims["D"]
    return 4.0 * dims.get("KEYS", 0) * dims["H"] * dims["D"] if "KEYS" in dims else 0.0
