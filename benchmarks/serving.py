"""The serving comparison: attention over a paged FP8 cache and appending to it, with FlashAttention-3."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.comparison import BenchCell, Comparison, ErrorLimits, Facts
from benchmarks.records import HostRow, SpeedupPair
from benchmarks.registry import KERNEL, Backend, first_line
from benchmarks.serving_backends import BACKENDS, VLLM
from benchmarks.serving_cases import (
    GROUPS,
    PAGE,
    ServingCase,
    append_bytes,
    bytes_moved,
    cases,
    copies,
    flops,
    host_case,
)
from benchmarks.serving_inputs import EPS, ROPE_POSITIONS, append_inputs, paged_inputs
from benchmarks.session import BenchSession
from greenfast.device.identity import launch_facts
from greenfast.kernels.serving.attention import TARGET
from greenfast.ops.launch_plans import LaunchStep
from greenfast.ops.warmup import warm
from greenfast.serving.cuda import build_append_step, build_attention_steps
from greenfast.serving.pages import PAGE as TEMPORARY_PAGE
from greenfast.serving.pages import KVPages, allocate_pages, count_pages
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.kernel import KernelSource

_META = torch.device("meta")
#: Backend -> the timed steps.
STEPS = {
    "greenfast": ("attention",),
    "token_scales": ("attention, a scale per token",),
    "varlen": ("quantization", "attention on bf16"),
    "append": ("append",),
    "plan": ("plan",),
}


def timed_launches(cases: Sequence[ServingCase]) -> dict[str, tuple[KernelSource, LaunchFacts]]:
    """Return every timed kernel of the cases with its launch, by step and shape. Needs no GPU."""
    return {
        f"{name}, {case.shape.name}": (step.source, launch_facts(step.source, step.launch, case.shape.dims))
        for case in cases
        for name, step in _steps(case)
    }


def _steps(case: ServingCase) -> Iterator[tuple[str, LaunchStep]]:
    dims = case.shape.dims
    if "TOKENS" in dims:
        yield "append", _append(dims, dims["TOKENS"], dims["H"], PAGE)
    elif "KEYS" in dims:
        pages = copies(dims) * sum(-(-n // PAGE) for n in case.lengths)
        cache = allocate_pages(pages, PAGE, dims["HK"], dims["D"], _META)
        ones = _empty(dims["B"], dims["HK"], dtype=torch.float32)
        plan, attention = _attention(case, cache._replace(k_scale=ones, v_scale=ones), -(-dims["S"] // PAGE))
        yield from (("plan", plan), ("attention", attention))
        if case.token_scales:
            yield "attention, a scale per token", _attention(case, cache, -(-dims["S"] // PAGE))[1]
        if "SQUARES" in dims:
            temporary = count_pages(dims["KEYS"], dims["B"])
            cache = allocate_pages(temporary, TEMPORARY_PAGE, dims["HK"], dims["D"], _META)
            yield "quantization", _append(dims, dims["KEYS"], 0, TEMPORARY_PAGE, temporary)
            yield "attention on bf16", _attention(case, cache, -(-dims["S"] // TEMPORARY_PAGE))[1]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def _attention(case: ServingCase, cache: KVPages, table_entries: int) -> tuple[LaunchStep, ...]:
    dims = case.shape.dims
    prefill = "SQUARES" in dims
    lengths = [_empty(dims["B"] + more, dtype=torch.int32) for more in (1, 0)]
    q = _empty(dims["KEYS"] if prefill else dims["B"], dims["H"], dims["D"])
    k_cache, v_cache, *scales = cache
    return build_attention_steps(
        q, k_cache, v_cache, _empty(dims["B"], table_entries, dtype=torch.int32), *lengths, *scales, None, None, None,
        dims["S"] if prefill else 1, (True, -1, 0), 0.0, dims["D"] ** -0.5, torch.bfloat16,
    )  # fmt: skip


def _append(dims: Mapping[str, int], tokens: int, heads: int, page: int, pages: int = 0) -> LaunchStep:
    """Return the append step.

    heads: of Q; Q and K are rotated if it is not 0. pages: default: enough for the tokens.
    """
    d, key_shape = dims["D"], (tokens, dims["HK"], dims["D"])
    cache = allocate_pages(pages or -(-tokens // page), page, dims["HK"], d, _META)
    rotation: tuple[Tensor | None, ...] = (None,) * 3
    if heads:
        angles = _empty(ROPE_POSITIONS, d // 2, dtype=torch.float32)
        rotation = (angles, angles, _empty(tokens, dtype=torch.int64))
    weight = _empty(d) if dims.get("NORM") else None
    q = _empty(tokens, heads, d) if heads else None
    arguments = (
        q, _empty(*key_shape), _empty(*key_shape), cache.k_cache, cache.v_cache, _empty(tokens, dtype=torch.int64),
        cache.k_scale, cache.v_scale, weight, weight, *rotation,
    )  # fmt: skip
    return build_append_step(arguments, EPS if heads else 0.0, False)


_NO_LIBRARY = (
    "no library was given: --fa3-library takes the _vllm_fa3_C.abi3.so of vLLM's wheel, which loads into the torch "
    "that it was built for"
)


class ServingSession(BenchSession):
    """A BenchSession. fa3_library: file of vLLM's FlashAttention-3; empty for none. cases: to be measured."""

    backends: Mapping[str, Backend] = BACKENDS
    device = "cuda"

    def __init__(self, ordinal: int, fa3_library: str = "", cases: Sequence[ServingCase] = ()) -> None:
        super().__init__(ordinal)
        self._version, self._missing = load_library(fa3_library)
        self._cases = cases

    def facts(self, names: Sequence[str]) -> Facts:
        """Compile greenfast's kernels in parallel, then describe the backends."""
        warm(dict.fromkeys(source for source, _ in timed_launches(self._cases).values()), TARGET)
        facts = super().facts(names)
        return replace(facts, backends=[self._described(c) for c in facts.backends])

    def _described(self, backend: Any) -> Any:
        if self.backends[backend.name].library != VLLM:
            return backend
        return msgspec.structs.replace(backend, version=self._version, missing=self._missing)

    def _draw(self, cell: BenchCell) -> tuple[Any, Any]:
        dims = cell.shape.dims
        if "BYTES" in dims:
            return torch.zeros(dims["BYTES"] // 4, device=self.device), None
        if "TOKENS" in dims:
            inputs: Any = append_inputs(cell.shape, cell.seed, self.device, append_bytes(dims))
        else:
            inputs = paged_inputs(cell.shape, cell.seed, self.device)
        return inputs, inputs.reference

    def host(self, cell: BenchCell) -> list[HostRow]:
        """Measure the host time of the available backends."""
        facts = self.facts(cell.backends).backends
        return super().host(replace(cell, backends=tuple(c.name for c in facts if not c.missing)))


def load_library(path: str) -> tuple[str, str]:
    """Load vLLM's FlashAttention-3; return (version, reason why it is missing); one of them is empty."""
    if not path:
        return "", _NO_LIBRARY
    try:
        with Path(path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except Exception as e:  # no such file, or a library for another torch
        return "", f"{path} cannot be loaded: {first_line(e)}"
    return f"FlashAttention-3 of vLLM ({Path(path).name}, SHA-256 {digest[:16]})", ""


#: Largest relative error of a correct output of greenfast; rounding Q, K, V and P explains 0.06.
_LIMIT = 0.1
_FP8, _BF16 = ("vllm_fa3", "fa3"), ("vllm_fa3_bf16", "fa3_bf16")
_CONTENDERS = {
    "decode": (KERNEL, *_FP8, *_BF16, "plan", "vllm_fa3_plan"),
    "prefill": (KERNEL, "varlen", *_FP8, *_BF16),
    "append": ("append", "copy"),
    "read": ("read_sum", "read_max", "read_norm"),
    "host": (
        "kvcache", "kvcache_unplanned", "kvcache_appending", "varlen_decode", "append_last", "plan_update", *_FP8,
    ),
}  # fmt: skip


def serving(groups: Sequence[str] = GROUPS, *, quick: bool = False, fa3_library: str = "") -> Comparison:
    """Return the comparison of these groups of cases. fa3_library: file of vLLM's FlashAttention-3.

    Raises UsageError for unknown groups.
    """
    chosen = cases(groups, quick=quick)
    host = host_case() if "host" in groups else None
    measured = [*chosen, *([host] if host else [])]
    return Comparison(
        name="serving",
        what="attention over a paged FP8 cache",
        own=tuple(name for name, c in BACKENDS.items() if c.own and c.attention),
        versus=tuple(
            SpeedupPair(own=KERNEL, baselines=list(baselines), title=f"{group}: greenfast / {label}", group=f"{group}_")
            for group in ("decode", "prefill")
            if group in groups
            for baselines, label in ((_FP8, "FA3 FP8"), (_FP8 + _BF16, "best FA3"))
        ),
        timed=tuple(_cell(case) for case in chosen),
        accuracy=(),
        inputs={"normal": "N(0, 1) in bfloat16"},
        session=partial(ServingSession, fa3_library=fa3_library, cases=measured),
        flops=flops,
        bytes_moved=bytes_moved,
        host=_cell(host) if host else None,
        limits=ErrorLimits(error=_LIMIT),
        kernels=partial(timed_launches, measured),
        arch="sm_90a",
    )


def _cell(case: ServingCase) -> BenchCell:
    names = _CONTENDERS[case.group]
    if case.token_scales:
        names = (names[0], "token_scales", *names[1:])
    return BenchCell(case.shape, names, grid=case.group in ("decode", "prefill"))
