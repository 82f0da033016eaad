"""The ladder's task, and its legal and illegal toggles as documented."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from greenfast.judge.task import load_task

CONFIG = load_task(Path(__file__).parents[2] / "tasks" / "fp8_sdpa_stage_c_wmma").config
RUNGS = [rung.name for rung in CONFIG.rungs]
#: The toggles of Stage 3B's variants.
FORMS = ("USE_THREE_STAGE_PIPE", "USE_WARP_SPECIALIZATION", "USE_PERSISTENT_CTAS")
SMALL = CONFIG.shape("small").dims


def toggles(rung: str, **changes: int) -> dict[str, int]:
    """All toggles of a rung, with changes."""
    return {**CONFIG.rung_variant(CONFIG.rung(rung)).values, **changes}


def all_toggles() -> Iterator[dict[str, int]]:
    """Every combination of values that the config allows."""
    for values in itertools.product(*(toggle.values for toggle in CONFIG.toggles.values())):
        yield dict(zip(CONFIG.toggles, values, strict=True))


def is_legal(t: dict[str, int]) -> bool:
    """Stage 3A reuses the score tile for the P of WMMA P*V; swizzled tiles are read by tensor-core loads only.

    Stage 3B multiplies on tensor cores what cp.async fetched and has no half tiles. Only Stage 3B has variants, one at
    a time.
    """
    forms = sum(t[name] for name in FORMS)
    tensor_cores = bool(t["USE_WMMA_QK"] and t["USE_WMMA_PV"])
    if is_full_fusion(t):
        return tensor_cores and bool(t["USE_CP_ASYNC"]) and forms <= 1 and not (t["USE_XOR_SWIZZLE"] or t["USE_KV_LUT"])
    if forms or (t["USE_FUSED_SOFTMAX_PV"] and not t["USE_WMMA_PV"]):
        return False
    return not t["USE_XOR_SWIZZLE"] or tensor_cores


def is_full_fusion(t: dict[str, int]) -> bool:
    """Whether these toggles select the kernel of Stage 3B."""
    return t["USE_FUSED_SOFTMAX_PV"] == 2
