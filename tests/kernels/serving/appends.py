"""Calls of the append kernel: their tensors, what is launched, and what the CPU makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from greenfast.kernels.serving import append as kernels
from greenfast.kernels.serving.append import AppendConfig, AppendSizes, AppendStrides
from greenfast.numerics import serving_append
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import Array, Case, OutputSpec

MAX_POSITION = 50
BEYOND = 10**12  # a slot in no cache
BITS = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64, 1: torch.uint8}


@dataclass
class Append:
    """One call; ``slots`` are those of its tokens."""

    slots: list[int]
    head_dim: int = 64
    page_size: int = 16
    heads: int = 2
    kv_heads: int = 1
    dtype: torch.dtype = torch.bfloat16
    grouped: bool = True
    scales: str = "token"
    queries: bool = True
    norm: torch.dtype | None = None
    rotary_dim: int = 0
    interleaved: bool = False
    tables: torch.dtype = torch.float32
    positions: torch.dtype = torch.int64
    hnd: bool = False
    shared_scale: bool = False
    apart: bool = False  # whether something else lies between the scales of two pages
    seed: int = 0
    edit: dict[int, float] = field(default_factory=dict)  # token -> what its row is multiplied by

    @property
    def tokens(self) -> int:
        return len(self.slots)

    @property
    def pages(self) -> int:
        return max(slot for slot in self.slots if slot < BEYOND) // self.page_size + 2

    def config(self) -> AppendConfig:
        return AppendConfig(
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=name(self.dtype),
            value_layout="grouped" if self.grouped else "rows",
            scales=self.scales,
            queries=self.queries,
            norm=name(self.norm) if self.norm else "",
            rotary_dim=self.rotary_dim,
            interleaved=self.interleaved,
            tables=name(self.tables),
            positions=name(self.positions),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Arguments of ``serving_append.append``; Q, K and V are slices of one tensor, pages hold garbage."""
        made = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=made)

        def codes(*shape: int) -> Tensor:
            return torch.randint(0, 256, shape, generator=made, dtype=torch.uint8).view(torch.float8_e4m3fn)

        tokens, pages, size, dim, kv_heads = self.tokens, self.pages, self.page_size, self.head_dim, self.kv_heads
        fused = normal(tokens, self.heads + 2 * kv_heads, dim)
        for token, factor in self.edit.items():
            fused[token, :, 0 if np.isfinite(factor) else dim // 2 :] *= factor
        q, k, v = torch.split(fused.to(self.dtype), [self.heads, kv_heads, kv_heads], 1)
        found = {"q": q} if self.queries else {}
        found |= {"k": k, "v": v, "slot_mapping": torch.tensor(self.slots)}
        rows = [
            codes(pages, kv_heads, size, dim).transpose(1, 2) if self.hnd else codes(pages, size, kv_heads, dim)
            for _ in range(2)
        ]
        found["k_cache"] = rows[0]
        found["v_cache"] = codes(pages, kv_heads, size // 16, dim, 16) if self.grouped else rows[1]
        for scale in ("k_scale", "v_scale"):
            shape = (pages, kv_heads, size) if self.scales == "token" else () if self.shared_scale else (kv_heads,)
            found[scale] = 0.005 + 0.001 * torch.rand(shape, generator=made)
            if self.apart:
                found[scale] = torch.cat((found[scale], torch.rand(pages, 3, size, generator=made)), 1)[:, :kv_heads]
        if self.norm:
            found |= {weight: normal(dim).to(self.norm) for weight in ("q_weight", "k_weight")}
        if self.rotary_dim:
            angles = 6 * torch.rand(MAX_POSITION, self.rotary_dim // 2, generator=made)
            table = torch.cat((angles.cos(), angles.sin()), 1).to(self.tables)  # one tensor, as vLLM has it
            found["cos"], found["sin"] = table.chunk(2, 1)
            found["positions"] = torch.randint(MAX_POSITION, (tokens,), generator=made).to(self.positions)
        return found


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def flat(x: Tensor) -> Tensor:
    """The memory that a tensor spans, as bits."""
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((extent,), (1,)).view(BITS[x.element_size()])


@dataclass(frozen=True)
class Request:
    """A kernel and what it is launched on."""

    kernel: KernelSource
    plan: Launch
    case: Case


def request(call: Append, tensors: dict[str, Tensor]) -> Request:
    """The kernel, on copies of the tensors as bits, which it changes in place."""
    k_cache, v_cache = tensors["k_cache"], tensors["v_cache"]
    written = ["k_cache", "v_cache", *(["k_scale", "v_scale"] if call.scales == "token" else [])]
    outputs = {n: OutputSpec(tuple(flat(tensors[n]).shape), str(flat(tensors[n]).numpy().dtype)) for n in written}
    if call.queries:
        outputs["q_out"] = OutputSpec(tuple(tensors["q"].shape), "uint16")
    page, slot, *rest = v_cache.stride()
    strides = AppendStrides(
        query=pair(tensors["q"]) if call.queries else (0, 0),
        key=pair(tensors["k"]),
        value=pair(tensors["v"]),
        key_cache=(k_cache.stride(0), k_cache.stride(1), k_cache.stride(2)),
        value_cache=(page, 0, slot) if call.grouped else (page, slot, rest[0]),
        key_scale=tensors["k_scale"].stride(0) if tensors["k_scale"].dim() else 0,
        value_scale=tensors["v_scale"].stride(0) if tensors["v_scale"].dim() else 0,
        cos=call.rotary_dim,
        sin=call.rotary_dim,
    )
    sizes = AppendSizes(call.tokens, call.heads, call.kv_heads, call.pages, MAX_POSITION)
    inputs: dict[str, Array] = {n: flat(x).numpy().copy() for n, x in tensors.items()}
    launch = kernels.launch(call.config(), sizes, strides)
    return Request(kernels.kernel(call.config()), launch, Case(inputs, outputs))


def pair(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1)


def on_cpu(call: Append, tensors: dict[str, Tensor]) -> Tensor | None:
    """Q out; the caches and scales among the tensors are changed."""
    arguments: dict[str, Any] = {"q": None, **tensors}
    return serving_append.append(**arguments, interleaved=call.interleaved)


def assert_as_on_the_cpu(call: Append, tensors: dict[str, Tensor], outputs: dict[str, Array]) -> Tensor | None:
    """The kernel's bits are the CPU's, which are left in the tensors; returns the CPU's Q."""
    q_out = on_cpu(call, tensors)
    if q_out is not None:
        assert_same_bits(outputs["q_out"], q_out.reshape(-1).view(torch.uint16), call.dtype, "q_out")
    for written in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if written in outputs:
            kind = torch.float32 if "scale" in written else torch.uint8
            assert_same_bits(outputs[written], flat(tensors[written]), kind, written)
    return q_out


def assert_same_bits(output: Array, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """Equal bits, except that one NaN is as good as another."""
    found = torch.from_numpy(output).reshape(-1)
    a, b = found.view(dtype), expected.view(dtype)
    nan = torch.zeros_like(a, dtype=torch.bool) if dtype == torch.uint8 else a.isnan() & b.isnan()
    same = (found.to(torch.int64) == expected.to(torch.int64)) | nan
    assert bool(same.all()), f"{what}: {int((~same).sum())} of {same.numel()} differ, first at {same.int().argmin()}"


def run_of(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


CALLS = {
    "one token": Append([21], head_dim=128),
    "three, mid group": Append([5, 6, 7], head_dim=128, page_size=32, kv_heads=5),
    "sixteen, one group": Append(run_of(32, 16), page_size=16, kv_heads=5),
    "seventeen, mid group": Append(run_of(41, 17), head_dim=256, page_size=64),
    "seventy in order": Append(run_of(0, 70), page_size=128),
    "seventy, mid group": Append(run_of(11, 70), head_dim=128, page_size=64, queries=False),
    "seventy, another tile's group": Append([*run_of(0, 56), *run_of(64, 14)], head_dim=256, queries=False),
    "a group in two tiles": Append([*run_of(3, 50), *run_of(80, 40)], queries=False, kv_heads=2),
    "groups of two sequences": Append([*run_of(2, 20), *run_of(58, 9), *run_of(96, 16), 40], page_size=32),
    "out of order": Append([*reversed(range(16)), 40, 35, 33, 37, *run_of(65, 15), 64], queries=False),
    "skipped": Append([-1, 3, -1, *run_of(16, 15), -1, *run_of(48, 16), -9, BEYOND], head_dim=128),
    "none kept": Append([-1, -1, 2], rotary_dim=64),
    "rows": Append(run_of(9, 40), head_dim=128, grouped=False, kv_heads=5, page_size=32),
    "rows, HND": Append([*run_of(3, 6), -1, 60], head_dim=256, grouped=False, hnd=True, kv_heads=2),
    "HND keys": Append(run_of(30, 5), head_dim=128, hnd=True, kv_heads=5, page_size=128),
    "given scales": Append(run_of(7, 20), scales="head", kv_heads=5, rotary_dim=32, edit={1: 40.0, 3: np.nan}),
    "one given scale": Append(run_of(7, 3), scales="head", shared_scale=True, grouped=False, edit={0: np.inf}),
    "pages of an engine": Append(run_of(7, 90), apart=True, kv_heads=2),
    "pages of an engine, rows": Append(run_of(7, 40), apart=True, kv_heads=3, grouped=False, head_dim=128),
    "norm": Append(run_of(1, 17), head_dim=128, norm=torch.bfloat16, dtype=torch.float16),
    "norm, 256": Append(run_of(1, 3), head_dim=256, norm=torch.float32, kv_heads=3),
    "neox": Append(run_of(1, 35), head_dim=128, rotary_dim=128, heads=5),
    "interleaved": Append(run_of(1, 17), head_dim=128, rotary_dim=128, interleaved=True, tables=torch.bfloat16),
    "partial": Append(run_of(1, 17), head_dim=128, rotary_dim=96, positions=torch.int32),
    "partial, interleaved": Append(run_of(1, 3), head_dim=256, rotary_dim=16, interleaved=True),
    "quarter": Append(run_of(1, 3), head_dim=256, rotary_dim=64, tables=torch.float16, grouped=False),
    "norm and neox": Append(run_of(1, 17), head_dim=128, rotary_dim=128, norm=torch.bfloat16, kv_heads=2),
    "norm and partial": Append(run_of(1, 3), head_dim=256, rotary_dim=64, norm=torch.float16, dtype=torch.float16),
    "norm and interleaved": Append(run_of(1, 3), rotary_dim=32, norm=torch.float32, interleaved=True, scales="head"),
}


def random_call(seed: int) -> Append:
    """Options drawn independently; slots of one to four runs, some out of order, some skipped."""
    draw = np.random.default_rng(seed)

    def one(*of: Any) -> Any:
        return of[draw.integers(len(of))]

    head_dim, page_size, count = one(64, 128, 256), one(16, 32, 64, 128), int(one(1, 3, 16, 17, 70))
    starts = np.sort(draw.choice(12, one(1, 2, 4), replace=False)) * 96 + draw.integers(16)
    slots = [int(starts[i * len(starts) // count]) + i for i in range(count)]
    slots = [-1 if draw.random() < one(0.0, 0.1) else slot for slot in slots]
    if draw.random() < 0.3:
        slots = [int(s) for s in draw.permutation(slots)]
    return Append(
        slots if max(slots) >= 0 else [5],
        head_dim=head_dim,
        page_size=page_size,
        heads=one(1, 4),
        kv_heads=one(1, 5),
        dtype=one(torch.bfloat16, torch.float16),
        grouped=one(True, True, False),
        scales=one("token", "token", "head"),
        queries=one(True, False),
        norm=one(None, None, torch.bfloat16, torch.float32),
        rotary_dim=one(0, 16, head_dim // 2, head_dim),
        interleaved=one(True, False),
        tables=one(torch.float32, torch.bfloat16),
        positions=one(torch.int64, torch.int32),
        hnd=one(True, False),
        seed=seed,
    )
