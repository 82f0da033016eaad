"""The inputs of the serving comparison on one device, and their references in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.comparison import CheckResult
from benchmarks.serving_cases import PAGE, copies, find_lengths
from greenfast.judge.task import Shape
from greenfast.numerics.serving import grouped_values, quantize_rows, rows_of_pages
from greenfast.serving.pages import KVPages, allocate_pages

FP8 = torch.float8_e4m3fn
#: Rows to compare with the reference: sequences, heads of K and V per sequence, and queries per sequence.
_SEQUENCES, _HEADS, _QUERIES = 4, 2, 64
_ROPE_BASE = 500_000.0
ROPE_POSITIONS = 8192
EPS = 1e-6


@dataclass(frozen=True)
class PagedInputs:
    """A batch over a paged cache: N(0, 1) in bfloat16, and codes of it with scales of 1.

    q: (tokens, heads, head_dim). k, v: pages (copies * pages, PAGE, kv_heads, head_dim); each page exists ``copies``
    times. tables: for each copy, int32 (sequences, max_pages) of pages in random order. used: int32, keys of each
    sequence. starts: int32 (sequences + 1,), offsets of its queries and, in a prefill, of its keys.
    """

    lengths: tuple[int, ...]
    heads: int
    prefill: bool
    q: Tensor
    k: Tensor
    v: Tensor
    tables: list[Tensor]
    used: Tensor
    starts: Tensor

    @property
    def kv_heads(self) -> int:
        """Number of heads of K and V."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self.k.shape[3]

    @property
    def longest(self) -> int:
        """Number of keys of the longest sequence."""
        return max(self.lengths)

    @property
    def max_queries(self) -> int:
        """Number of queries of the longest sequence."""
        return self.longest if self.prefill else 1

    @cached_property
    def scale(self) -> Tensor:
        """Scales in FlashAttention's layout, float32 (sequences, kv_heads)."""
        return torch.ones(len(self.lengths), self.kv_heads, device=self.q.device)

    @cached_property
    def q_codes(self) -> Tensor:
        """Q in E4M3."""
        return self.q.to(FP8)

    @cached_property
    def k_codes(self) -> Tensor:
        """The pages of K in E4M3."""
        return self.k.to(FP8)

    @cached_property
    def v_codes(self) -> Tensor:
        """V in rows, as in the caches of other libraries."""
        return self.v.to(FP8)

    @cached_property
    def v_groups(self) -> Tensor:
        """V in the layout of greenfast's kernel."""
        return grouped_values(self.v_codes)

    @cached_property
    def token_scaled(self) -> KVPages:
        """The cache with a scale for each token and head."""
        (k, k_scale), (v, v_scale) = quantize_rows(self.k), quantize_rows(self.v)
        return KVPages(k, grouped_values(v), k_scale.transpose(1, 2).contiguous(), v_scale.transpose(1, 2).contiguous())

    def keys(self, b: int, pages: Tensor) -> Tensor:
        """Return the rows of a sequence from unquantized pages, (length, kv_heads, head_dim)."""
        return pages[self.tables[0][b].long()].flatten(0, 1)[: self.lengths[b]]

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """K and V of all sequences, concatenated: (tokens, kv_heads, head_dim)."""
        k, v = (torch.cat([self.keys(b, x) for b in range(len(self.lengths))]) for x in (self.k, self.v))
        return k, v

    @cached_property
    def row_codes(self) -> tuple[Tensor, Tensor]:
        """``rows`` in E4M3."""
        k, v = (x.to(FP8) for x in self.rows)
        return k, v

    @cached_property
    def reference(self) -> PagedReference:
        """The reference of an output."""
        return PagedReference.compute(self)


def paged_inputs(shape: Shape, seed: int, device: str) -> PagedInputs:
    """Draw the inputs of a decode or prefill case."""
    dims, lengths = shape.dims, find_lengths(shape.name)
    prefill, count = "SQUARES" in dims, copies(dims)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.bfloat16)

    needed = [-(-n // PAGE) for n in lengths]
    pages = sum(needed)
    k, v = (normal(pages, PAGE, dims["HK"], dims["D"]).repeat(count, 1, 1, 1) for _ in "kv")
    order = torch.randperm(pages, generator=generator, device=device).int()
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32, device=device)
    for b, end in enumerate(itertools.accumulate(needed)):
        table[b, : needed[b]] = order[end - needed[b] : end]
    queries = lengths if prefill else (1,) * len(lengths)
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=device)
    return PagedInputs(
        lengths, dims["H"], prefill, normal(sum(queries), dims["H"], dims["D"]), k, v,
        [table + copy * pages for copy in range(count)],
        torch.tensor(lengths, dtype=torch.int32, device=device), starts,
    )  # fmt: skip


@dataclass(frozen=True)
class PagedReference:
    """The reference of some rows of an output. rows: indices into (tokens * heads). right: attention in float64."""

    rows: Tensor
    right: Tensor

    @classmethod
    def compute(cls, inputs: PagedInputs) -> PagedReference:
        """Compute the reference for the first, the last and some other sequences and queries."""
        generator = torch.Generator().manual_seed(len(inputs.lengths))
        group, device = inputs.heads // inputs.kv_heads, inputs.q.device
        rows, right = [], []
        for b in _some(len(inputs.lengths), _SEQUENCES, generator):
            length, first = inputs.lengths[b], int(inputs.starts[b])
            at = torch.tensor(_some(length, _QUERIES, generator) if inputs.prefill else [0], device=device)
            positions = at if inputs.prefill else at + length - 1
            k, v = inputs.keys(b, inputs.k), inputs.keys(b, inputs.v)
            for head in _some(inputs.kv_heads, _HEADS, generator):
                mine = torch.arange(head * group, (head + 1) * group, device=device)
                q = inputs.q[(first + at).unsqueeze(1), mine].double()
                scores = q @ k[:, head].double().T / math.sqrt(inputs.head_dim)
                hidden = torch.arange(length, device=device) > positions.view(-1, 1, 1)
                weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
                right.append((weights @ v[:, head].double()).flatten(0, 1))
                rows.append(((first + at).unsqueeze(1) * inputs.heads + mine).flatten())
        return cls(torch.cat(rows), torch.cat(right))

    def check(self, out: Tensor, same_codes: bool) -> CheckResult:
        """Measure the errors of an output, float32 (tokens * heads, head_dim)."""
        return _checked(out[self.rows].double(), self.right, bool(torch.isfinite(out).all()))


def _some(count: int, most: int, generator: torch.Generator) -> list[int]:
    """Draw at most ``most`` indices from range(count), including the first and the last."""
    drawn = torch.randperm(count, generator=generator)[:most].tolist()
    return sorted({0, count - 1, *drawn[: max(0, most - 2)]})


def _checked(values: Tensor, right: Tensor, finite: bool) -> CheckResult:
    return CheckResult(float((values - right).norm() / right.norm()), finite=finite)


@dataclass(frozen=True)
class AppendInputs:
    """Projections of new tokens, N(0, 1) in bfloat16, and pages for them in random order.

    q: (tokens, heads, head_dim). k, v: (tokens, kv_heads, head_dim). slots: int64 (tokens,). cos, sin: float32
    (positions, head_dim / 2). weights: of the RMS norm of Q and K, (head_dim,), where there is one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    pages: KVPages
    weights: tuple[Tensor, Tensor] | None
    bytes_moved: int
    rows: Tensor = field(default_factory=lambda: torch.empty(0))

    def right(self) -> Tensor:
        """Return the correct Q, K and V of the sampled tokens, concatenated, in float64."""
        parts = []
        for x, n in ((self.q, 0), (self.k, 1)):
            value = x[self.rows].double()
            if self.weights:
                value = value / (value.square().mean(-1, keepdim=True) + EPS).sqrt() * self.weights[n].double()
            half = x.shape[-1] // 2
            turn = torch.complex(self.cos, self.sin)[self.positions[self.rows]].unsqueeze(1)
            turned = torch.complex(value[..., :half], value[..., half:]) * turn
            parts.append(torch.cat([turned.real, turned.imag], -1))
        return torch.cat([part.flatten() for part in (*parts, self.v[self.rows].double())])

    def kept(self, out: Tensor) -> Tensor:
        """Return Q, K and V of the sampled tokens after an append. out: its Q, float32 (tokens * heads, head_dim)."""
        parts = [out.view(self.q.shape)[self.rows].double()]
        k_cache, v_cache, k_scale, v_scale = self.pages
        pages, places = self.slots[self.rows] // PAGE, self.slots[self.rows] % PAGE
        for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)):
            for page, place in zip(pages, places, strict=True):
                row = rows_of_pages(cache, page.view(1))[place].double()
                parts.append((row * scale[page, :, place].unsqueeze(-1)).flatten())
        return torch.cat([part.flatten() for part in parts])

    @cached_property
    def reference(self) -> AppendReference:
        """The reference of an append."""
        return AppendReference(self)


@dataclass(frozen=True)
class AppendReference:
    """Checks an append on some tokens: its Q, and the content of the pages."""

    inputs: AppendInputs

    def check(self, out: Tensor, same_codes: bool) -> CheckResult:
        """Measure the errors after an append. out: float32 (tokens * heads, head_dim)."""
        values = self.inputs.kept(out)
        return _checked(values, self.inputs.right(), bool(torch.isfinite(values).all() & torch.isfinite(out).all()))


def append_inputs(shape: Shape, seed: int, device: str, bytes_moved: int) -> AppendInputs:
    """Draw the inputs of an append case: tokens at random positions, and their pages in random order."""
    dims: Mapping[str, int] = shape.dims
    tokens, d = dims["TOKENS"], dims["D"]
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.bfloat16)

    q, k, v = (normal(tokens, dims[heads], d) for heads in ("H", "HK", "HK"))
    pages = -(-tokens // PAGE)
    order = torch.randperm(pages, generator=generator, device=device)
    at = torch.arange(tokens, device=device)
    slots = order[at // PAGE] * PAGE + at % PAGE
    angles = torch.arange(ROPE_POSITIONS, device=device).unsqueeze(1) * _ROPE_BASE ** (
        -torch.arange(0, 1, 2 / d, device=device)
    )
    positions = torch.randint(ROPE_POSITIONS, (tokens,), generator=generator, device=device)
    weights = (1 + 0.1 * normal(d), 1 + 0.1 * normal(d)) if dims.get("NORM") else None
    kept = allocate_pages(pages, PAGE, dims["HK"], d, torch.device(device))
    rows = torch.tensor(_some(tokens, 32, torch.Generator().manual_seed(seed)), device=device)
    return AppendInputs(
        q, k, v, slots, positions, angles.cos(), angles.sin(), kept, weights, bytes_moved, rows
    )  # fmt: skip
