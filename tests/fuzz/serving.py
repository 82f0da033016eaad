"""Random calls over a paged cache, compared with attention in float64 and with the same rows in other surroundings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

import greenfast
from greenfast.kernels.serving import slots
from greenfast.serving import cuda as serving_cuda
from greenfast.serving import torch_ops as serving_ops
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource
from tests.fuzz.calls import Run, differ, repeated
from tests.fuzz.guards import FILL, GUARD, dense, guarded
from tests.kernels.serving.appends import Append, flat, on_cpu
from tests.serving.oracle import Case, case, faults, visible

flash_attn_varlen_func: Any = greenfast.flash_attn_varlen_func
flash_attn_with_kvcache: Any = greenfast.flash_attn_with_kvcache
append_kv: Any = greenfast.append_kv
BF16, FP16 = torch.bfloat16, torch.float16
#: The kernels of attention that are drawn: head dim, dtype, whether Q is E4M3, scales, softcap.
KINDS = (
    (64, BF16, False, "token", 0.0), (64, FP16, False, "head", 0.0), (64, BF16, False, "head", 20.0),
    (64, BF16, True, "one", 0.0), (128, BF16, False, "token", 0.0), (128, BF16, False, "head", 0.0),
    (128, BF16, True, "sequence", 0.0), (128, FP16, False, "token", 20.0), (256, BF16, False, "token", 0.0),
    (256, BF16, False, "one", 0.0), (256, FP16, False, "token", 0.0),
)  # fmt: skip
#: Rows of a tile, query tokens times the heads of a group, that need kernels of their own.
ROWS = (8, 16, 64, 512)
Q_LENGTHS = ([1], [1], [1, 1, 1, 2], [0, 1, 5], [1, 8, 17, 70], [1, 64, 130, 300], [200, 511, 700])
KV_LENGTHS = (0, 1, 15, 63, 64, 65, 127, 128, 129, 257, 511, 512, 513, 1023, 1025, 1500, 3000)
WINDOWS = ((-1, -1), (-1, -1), (-1, -1), (0, 0), (64, 0), (64, 64), (1, 0), (-1, 5), (700, 3), (128, -1))
CALLS = ("operator", "varlen", "plan", "kvcache", "out")
#: The kernels that append: options of ``Append``.
APPENDS: tuple[dict[str, Any], ...] = (
    {}, {"head_dim": 128, "page_size": 64, "rotary_dim": 128}, {"head_dim": 256, "page_size": 128},
    {"head_dim": 128, "page_size": 64, "norm": torch.float32, "rotary_dim": 128},
    {"head_dim": 128, "page_size": 16, "dtype": FP16, "queries": False},
    {"head_dim": 64, "page_size": 32, "scales": "head", "rotary_dim": 32, "interleaved": True},
    {"head_dim": 128, "page_size": 64, "grouped": False, "queries": False},
)  # fmt: skip
#: The only kernels of rotation, norm and quantization in the draws of ``CacheDraw`` and ``KeysDraw``.
_LIKE_KEYS = tuple(
    {"head_dim": d, "page_size": p, "dtype": t, "queries": q, "rotary_dim": d * q, "interleaved": bool(q)}
    for (d, t), p, q in product(((64, BF16), (128, BF16)), (64, 128), (0, 1))
)
_SCORES = 5e-3  # natural units: the tensor cores keep about 14 bits of a sum of products


def sources(target: Target) -> Iterator[KernelSource]:
    """All kernels that draws need."""

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    e4m3, scale = torch.float8_e4m3fn, {"token": (2, 1, 16), "head": (1,), "one": (), "sequence": (1, 1)}
    for (dim, dtype, fp8, scales, cap), rows in product(KINDS, ROWS):
        q = meta(rows, 1, dim, dtype=e4m3 if fp8 else dtype)
        k, v = meta(2, 16, 1, dim, dtype=e4m3), meta(2, 1, 1, dim, 16, dtype=e4m3)
        of_q = meta(1, 1, dtype=torch.float32) if fp8 else None
        k_scale, v_scale = (meta(*scale[scales], dtype=torch.float32) for _ in "kv")
        steps = serving_cuda.build_attention_steps(
            q, k, v, meta(1, 2), meta(2), meta(1), k_scale, v_scale, of_q, None, None, rows, (True, -1, -1), cap,
            1.0, dtype,
        )  # fmt: skip
        yield from (step.source for step in steps)
    for options in (*APPENDS, *_LIKE_KEYS):
        tensors = {name: x.to("meta") for name, x in Append([0, 1], **options).tensors().items()}
        names = ("q", "k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale", "q_weight", "k_weight",
                 "cos", "sin", "positions")  # fmt: skip
        inputs = tuple(tensors.get(name) for name in names)
        yield serving_cuda.build_append_step(inputs, 1e-6, options.get("interleaved", False)).source
    yield slots.KERNEL


def moved(x: Tensor, device: str) -> Tensor:
    """Return a copy with the same strides, including the memory between the elements."""
    kind = x.dtype
    bits = x.view(torch.uint8) if kind == torch.float8_e4m3fn else x
    whole = torch.as_strided(bits, (bits.untyped_storage().size() // bits.element_size(),), (1,), 0).clone().to(device)
    result = torch.as_strided(whole, x.shape, x.stride(), x.storage_offset())
    return result.view(kind) if kind == torch.float8_e4m3fn else result


@dataclass(frozen=True)
class ServingDraw:
    """Attention over a cache. lengths: queries and keys of each sequence; spare: entries of the block tables."""

    kind: tuple[int, torch.dtype, bool, str, float]
    lengths: tuple[tuple[int, int], ...]
    kv_heads: int
    group: int
    page_size: int
    strides: str
    window: tuple[int, int]
    causal: bool
    sinks: bool
    call: str
    garbage: bool
    seed: int

    def case(self) -> Case:
        dim, dtype, fp8, scales, cap = self.kind
        made = case(
            list(self.lengths), kv_heads=self.kv_heads, group=self.group, head_dim=dim, page_size=self.page_size,
            scales=scales, strides=self.strides, fp8_queries=fp8, sinks=self.sinks, dtype=dtype, seed=self.seed,
            softcap=cap, window=self.window, causal=self.causal,
        )  # fmt: skip
        if self.garbage:  # after the pages of each sequence
            made.block_table[made.block_table < 0] = 2**31 - 7
        return made

    def faults(self, run: Run) -> list[str]:
        c = self.case()
        names = ("q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqused_k", "k_scale", "v_scale", "q_scale",
                 "sinks")  # fmt: skip
        tensors: dict[str, Any] = {name: x for name in names if (x := getattr(c, name)) is not None}
        there = c.but(**{name: moved(x, run.device) for name, x in tensors.items()})
        before = [there.q.clone(), there.k_cache.clone(), there.v_cache.clone()]
        (out, lse), wrong = repeated(run, lambda: self._called(there))
        for fault in faults(c, out.cpu(), lse.cpu()):
            off = float(fault.removeprefix("lse: off by ")) if fault.startswith("lse: off") else None
            if off is None or off > (_SCORES if run.on_gpu else 1e-3):
                wrong.append(fault)
        wrong += self._alone(there, out, lse)
        for name, x, old in zip(("q", "k_cache", "v_cache"), (there.q, there.k_cache, there.v_cache), before,
                                strict=True):  # fmt: skip
            wrong += differ(f"{name} before and after", old.view(torch.uint8), x.contiguous().view(torch.uint8))
        return wrong

    def _called(self, c: Case) -> tuple[Tensor, Tensor]:
        o, limit = c.options, max(n for n, _ in self.lengths)
        left, right = self.window
        if self.call == "operator":
            return serving_ops.paged_attention(
                c.q, c.k_cache, c.v_cache, c.block_table, c.cu_seqlens_q, c.seqused_k, c.k_scale, c.v_scale, c.q_scale,
                c.sinks, None, limit, self.causal, left, right, self.kind[4], o["softmax_scale"], o["out_dtype"],
            )  # fmt: skip
        options: dict[str, Any] = {
            "q_descale": c.q_scale, "k_descale": c.k_scale, "v_descale": c.v_scale, "causal": self.causal,
            "window_size": self.window, "softcap": self.kind[4], "s_aux": c.sinks, "return_softmax_lse": True,
        }  # fmt: skip
        if self.call == "kvcache":
            result = flash_attn_with_kvcache(
                c.q, c.k_cache, c.v_cache, cache_seqlens=c.seqused_k, page_table=c.block_table,
                cu_seqlens_q=c.cu_seqlens_q, max_seqlen_q=limit, **options,
            )  # fmt: skip
        else:
            memory = None
            if self.call == "plan":
                options["scheduler_metadata"] = greenfast.ServingPlan(
                    c.cu_seqlens_q, c.seqused_k, limit, heads=c.q.shape[1], kv_heads=self.kv_heads,
                    head_dim=c.q.shape[2], causal=self.causal, window_size=self.window,
                )  # fmt: skip
            elif self.call == "out":
                shape = tuple(c.q.shape)
                options["out"], memory = guarded(shape, dense(shape), o["out_dtype"], c.q.device)
            result = flash_attn_varlen_func(
                c.q, c.k_cache, c.v_cache, c.cu_seqlens_q, None, limit, 1, seqused_k=c.seqused_k,
                block_table=c.block_table, **options,
            )  # fmt: skip
            if memory is not None:
                assert bool((memory[:GUARD] == FILL).all() & (memory[-GUARD:] == FILL).all()), "guard around out"
        assert isinstance(result, tuple)
        return result

    def _alone(self, c: Case, out: Tensor, lse: Tensor) -> list[str]:
        """One of the sequences without the others, in the operator's own call: the same bits."""
        of = [b for b, (n, _) in enumerate(self.lengths) if n]
        if not of:
            return []
        b = of[self.seed % len(of)]
        first, last = c.cu_seqlens_q[b : b + 2].tolist()
        per_sequence = self.kind[3] == "sequence"
        k_scale, v_scale = (x[b : b + 1].contiguous() if per_sequence else x for x in (c.k_scale, c.v_scale))
        q_scale = None if c.q_scale is None else c.q_scale[b : b + 1].contiguous()
        starts = torch.tensor([0, last - first], dtype=torch.int32, device=c.q.device)
        one, sums = serving_ops.paged_attention(
            c.q[first:last].contiguous(), c.k_cache, c.v_cache, c.block_table[b : b + 1], starts,
            c.seqused_k[b : b + 1].contiguous(), k_scale, v_scale, q_scale, c.sinks, None, last - first, self.causal,
            *self.window, self.kind[4], c.options["softmax_scale"], c.options["out_dtype"],
        )  # fmt: skip
        wrong = differ(f"sequence {b} alone", one, out[first:last])
        return wrong + differ(f"lse of sequence {b} alone", sums, lse[:, first:last])


@dataclass(frozen=True)
class KeysDraw:
    """Keys that are in no cache, or that are appended in the call: the bits of appending first."""

    lengths: tuple[tuple[int, int], ...]
    head_dim: int
    kv_heads: int
    group: int
    window: tuple[int, int]
    causal: bool
    cached: tuple[int, ...]  # keys of each sequence that are in a cache before; empty for a call without one
    rotary: bool
    seed: int

    def faults(self, run: Run) -> list[str]:
        generator = torch.Generator().manual_seed(self.seed)
        heads, dim, device = self.kv_heads * self.group, self.head_dim, run.device
        q_lengths, kv_lengths = ([n[i] for n in self.lengths] for i in (0, 1))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().to(device)

        q = normal(sum(q_lengths), heads, dim)
        k, v = (normal(sum(kv_lengths), self.kv_heads, dim) for _ in "kv")
        starts_q, starts_k = (_starts(x, device) for x in (q_lengths, kv_lengths))
        options: dict[str, Any] = {"causal": self.causal, "window_size": self.window, "return_softmax_lse": True}
        cache, table, before = self._cache(normal, kv_lengths, device)
        used = torch.tensor(before, dtype=torch.int32, device=device)
        angles = torch.rand(4096, dim // 2, generator=generator).to(device) * 6
        cos, sin = angles.cos(), angles.sin()
        places = [torch.arange(a, a + n) for a, n in zip(before, kv_lengths, strict=True)]
        at = torch.cat(places).to(device)
        of = torch.arange(len(before)).repeat_interleave(torch.tensor(kv_lengths)).to(device)
        places_of = table.long()[of, at // 64] * 64 + at % 64
        turns: dict[str, Any] = {"cos": cos, "sin": sin, "positions": at, "interleaved": True} if self.rotary else {}
        mine = greenfast.PagedKVCache(*self._sizes, device=device).layer()
        for x, y in zip(mine, cache, strict=True):
            _copy(x, y)
        turned = append_kv(
            q if self.rotary else None, k, v, *mine[:2], places_of, k_scale=mine.k_scale, v_scale=mine.v_scale, **turns
        )
        lengths = used + torch.tensor(kv_lengths, dtype=torch.int32, device=device)
        wanted = flash_attn_varlen_func(
            q if turned is None else turned, *mine[:2], starts_q, None, max(q_lengths), 1, seqused_k=lengths,
            block_table=table, k_descale=mine.k_scale, v_descale=mine.v_scale, **options,
        )  # fmt: skip
        if self.cached:

            def call() -> Any:
                return flash_attn_with_kvcache(
                    q, *cache[:2], k=k, v=v, rotary_cos=cos if self.rotary else None,
                    rotary_sin=sin if self.rotary else None, cache_seqlens=used, page_table=table,
                    cu_seqlens_q=starts_q, cu_seqlens_k_new=starts_k, max_seqlen_q=max(q_lengths),
                    k_descale=cache.k_scale, v_descale=cache.v_scale, **options,
                )  # fmt: skip

        else:
            plan = greenfast.ServingPlan(
                starts_q, lengths, max(q_lengths), heads=heads, kv_heads=self.kv_heads, head_dim=dim,
                causal=self.causal, window_size=self.window,
            )  # fmt: skip

            def call() -> Any:
                return flash_attn_varlen_func(
                    q, k, v, starts_q, starts_k, max(q_lengths), max(kv_lengths), scheduler_metadata=plan, **options
                )

        result, wrong = repeated(run, call)
        for name, x, y in zip(("out", "lse"), result, wanted, strict=True):
            wrong += differ(f"{name} in one call and in two", x, y)
        if self.cached:
            for name, x, y in zip(("k_cache", "v_cache", "k_scale", "v_scale"), cache, mine, strict=True):
                wrong += differ(f"{name} in one call and in two", x, y)
        else:
            wrong += self._exact_faults(q, k, v, result[0])
        return wrong

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        limit = max(-(-(n + 1600) // 64) for _, n in self.lengths)
        return limit * len(self.lengths), 64, self.kv_heads, self.head_dim

    def _cache(self, normal: Any, new: list[int], device: str) -> tuple[Any, Tensor, list[int]]:
        """Pages with the keys that are there before, in random order, and their block table."""
        cache = greenfast.PagedKVCache(*self._sizes, device=device).layer()
        for x in cache:
            x.fill_(torch.nan) if x.dtype == torch.float32 else x.view(torch.uint8).fill_(0x7F)
        pages = self._sizes[0]
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(self.seed)).int()
        table = order.view(len(new), -1).to(device)
        before = list(self.cached) or [0] * len(new)
        for b, count in enumerate(before):
            at = torch.arange(count, device=device)
            slots = table[b].long()[at // 64] * 64 + at % 64
            k, v = (normal(count, self.kv_heads, self.head_dim) for _ in "kv")
            append_kv(None, k, v, *cache[:2], slots, k_scale=cache.k_scale, v_scale=cache.v_scale)
        return cache, table, before

    def _exact_faults(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[str]:
        """Next to attention in float64 on what came, within the error of the formats."""
        a = b = 0
        wanted = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        for n, m in self.lengths:
            rows, keys, values = (
                x.double().transpose(0, 1)
                for x in (q[a : a + n], *(x[b : b + m].repeat_interleave(self.group, 1) for x in (k, v)))
            )
            mask = visible(n, m, self.causal, self.window).to(q.device)
            if m:
                scores = (rows @ keys.mT * self.head_dim**-0.5).masked_fill(~mask, -torch.inf)
                wanted[a : a + n] = (torch.softmax(scores, -1).nan_to_num(0.0) @ values).transpose(0, 1)
            a, b = a + n, b + m
        off, size = float((out.double() - wanted).norm()), float(wanted.norm())
        return [] if off <= 0.1 * size else [f"out: {off / max(size, 1e-30)} off attention in float64"]


@dataclass(frozen=True)
class AppendDraw:
    """An append: all bytes of cache, scales and Q are those of the CPU's reference."""

    call: Append

    def faults(self, run: Run) -> list[str]:
        wanted = self.call.tensors()
        q_wanted = on_cpu(self.call, wanted)
        there = {name: moved(x, run.device) for name, x in self.call.tensors().items()}
        there |= {name: there[name].contiguous() for name in ("cos", "sin") if name in there}  # requested by the call
        inputs: dict[str, Any] = {"q": None, **there}
        saved = {name: there[name].clone() for name in ("k_cache", "v_cache", "k_scale", "v_scale")}

        def call() -> Any:
            for name, x in saved.items():
                _copy(there[name], x)
            q = append_kv(**inputs, interleaved=self.call.interleaved)
            written = tuple(flat(there[name]).clone() for name in saved)
            return written if q is None else (q, *written)

        result, wrong = repeated(run, call)
        expected = [flat(wanted[name]) for name in saved]
        for name, x, y in zip(("q", *saved)[-len(result) :], result, ([q_wanted] if q_wanted is not None else []) +
                              expected, strict=True):  # fmt: skip
            if not (x.is_floating_point() and bool((x.cpu().isnan() & y.isnan()).any())):
                wrong += differ(f"{name}, and the CPU's", x.cpu(), y)
        return wrong


def _copy(to: Tensor, x: Tensor) -> None:
    """Bytes, as not all of PyTorch copies E4M3."""
    if x.dtype == torch.float32:
        to.copy_(x)
    else:
        to.view(torch.uint8).copy_(x.view(torch.uint8))


def _starts(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(device)


def draw_serving(rng: random.Random, seed: int, on_gpu: bool) -> ServingDraw:
    """Decoding, chunks, prompts, or all of them, with any lengths."""
    kind = rng.choice(KINDS)
    group = rng.choice([1, 2, 3, 4, 8, 16] if on_gpu else [1, 3, 4])
    kv_heads = rng.choice([1, 2, 5, 8] if on_gpu else [1, 2])
    of_q, of_kv = rng.choice(Q_LENGTHS if on_gpu else Q_LENGTHS[:-2]), KV_LENGTHS if on_gpu else KV_LENGTHS[:-5]
    lengths = [(rng.choice(of_q), rng.choice(of_kv)) for _ in range(rng.choice([1, 2, 3, 6, 20 if on_gpu else 4]))]
    if max(of_q) > 130:  # the reference takes float64 scores of all
        lengths, kv_heads, group = lengths[: 2 if on_gpu else 1], 1, min(group, 4)
    return ServingDraw(
        kind=kind, lengths=tuple(lengths), kv_heads=kv_heads, group=group, page_size=rng.choice([16, 32, 64, 128]),
        strides=rng.choice(["NHD", "HND"]), window=rng.choice(WINDOWS), causal=rng.random() < 0.6,
        sinks=rng.random() < 0.3, call=rng.choice(CALLS), garbage=rng.random() < 0.5, seed=seed,
    )  # fmt: skip


def draw_keys(rng: random.Random, seed: int, on_gpu: bool) -> KeysDraw:
    """Queries and keys of sequences, with or without a cache."""
    count = rng.choice([1, 2, 5])
    rotary = rng.random() < 0.5
    lengths = [(rng.choice([0, 1, 2, 40, 130]), rng.choice([0, 1, 3, 65, 129, 700])) for _ in range(count)]
    cached: tuple[int, ...] = ()
    causal, window = rng.random() < 0.6, rng.choice(WINDOWS)
    if rng.random() < 0.6:
        cached = tuple(rng.choice([0, 1, 63, 64, 500, 1000 if on_gpu else 100]) for _ in range(count))
        if rotary:
            lengths, causal = [(n, n) for n, _ in lengths], True
    else:
        rotary = False
    if not sum(n for n, _ in lengths) or not sum(n for _, n in lengths):
        lengths[0] = (3, 3)
    return KeysDraw(
        lengths=tuple(lengths), head_dim=rng.choice([64, 128]), kv_heads=rng.choice([1, 2]),
        group=rng.choice([1, 4, 8]), window=window, causal=causal, cached=cached, rotary=rotary, seed=seed,
    )  # fmt: skip


def draw_append(rng: random.Random, seed: int, on_gpu: bool) -> AppendDraw:
    """Slots in runs, out of order, some not kept."""
    count = rng.choice([1, 3, 16, 17, 70, 300 if on_gpu else 40])
    slots = [rng.randint(0, 40) * 16 + i for i in range(count)] if rng.random() < 0.2 else None
    first = rng.randint(0, 2000)
    slots = sorted(set(slots)) if slots else [first + i for i in range(count)]
    if rng.random() < 0.3:
        rng.shuffle(slots)
    slots = [-1 if rng.random() < 0.05 else slot for slot in slots]
    if max(slots) < 0:
        slots = [5]
    options = rng.choice(APPENDS)
    return AppendDraw(
        Append(
            slots, heads=rng.choice([1, 4]), kv_heads=rng.choice([1, 2, 5]), hnd=rng.random() < 0.5, seed=seed,
            **options,
        )
    )  # fmt: skip
