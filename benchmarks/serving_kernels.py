"""The launches of greenfast in the serving comparison, derived from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.serving_cases import PAGE, ServingCase, copies
from benchmarks.serving_inputs import EPS, ROPE_POSITIONS
from greenfast.device.identity import launch_facts
from greenfast.ops.launch_plans import LaunchStep
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
