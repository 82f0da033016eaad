"""FP8 attention kernels for NVIDIA GPUs, and the pipeline that proves them: green before fast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenfast import flash_attn as flash_attn
    from greenfast.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
    from greenfast.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache
    from greenfast.integrations.calibration import Calibration as Calibration
    from greenfast.integrations.calibration import calibrate as calibrate
    from greenfast.integrations.continuous_batching import register_continuous_batching as register_continuous_batching
    from greenfast.integrations.models import Accelerated as Accelerated
    from greenfast.integrations.models import Policy as Policy
    from greenfast.integrations.switch import use as use
    from greenfast.integrations.transformers import register_with_transformers as register_with_transformers
    from greenfast.ops.block_mask import BlockMask as BlockMask
    from greenfast.ops.quantized import QuantizedQKV as QuantizedQKV
    from greenfast.ops.routing import Explanation as Explanation
    from greenfast.ops.routing import explain as explain
    from greenfast.ops.sdpa import attention as attention
    from greenfast.ops.sdpa import attention_block as attention_block
    from greenfast.ops.sdpa import quantize as quantize
    from greenfast.ops.sdpa import sdpa as sdpa
    from greenfast.ops.varlen import varlen_attn as varlen_attn
    from greenfast.parallel.context import context_parallel as context_parallel
    from greenfast.serving.explain import explain_call as explain_call
    from greenfast.serving.paged_cache import PagedKVCache as PagedKVCache
    from greenfast.serving.plan import ServingPlan as ServingPlan
    from greenfast.serving.plan import append_kv as append_kv

__version__ = "0.2.0"

#: Public names -> their modules, imported on first use: the command line prints its version without PyTorch.
_PUBLIC = {
    "Accelerated": "greenfast.integrations.models",
    "BlockMask": "greenfast.ops.block_mask",
    "Calibration": "greenfast.integrations.calibration",
    "Explanation": "greenfast.ops.routing",
    "PagedKVCache": "greenfast.serving.paged_cache",
    "Policy": "greenfast.integrations.models",
    "QuantizedQKV": "greenfast.ops.quantized",
    "ServingPlan": "greenfast.serving.plan",
    "append_kv": "greenfast.serving.plan",
    "attention": "greenfast.ops.sdpa",
    "attention_block": "greenfast.ops.sdpa",
    "calibrate": "greenfast.integrations.calibration",
    "context_parallel": "greenfast.parallel.context",
    "explain": "greenfast.ops.routing",
    "explain_call": "greenfast.serving.explain",
    "flash_attn_varlen_func": "greenfast.flash_attn",
    "flash_attn_with_kvcache": "greenfast.flash_attn",
    "quantize": "greenfast.ops.sdpa",
    "register_continuous_batching": "greenfast.integrations.continuous_batching",
    "register_with_transformers": "greenfast.integrations.transformers",
    "sdpa": "greenfast.ops.sdpa",
    "use": "greenfast.integrations.switch",
    "varlen_attn": "greenfast.ops.varlen",
}


def __getattr__(name: str) -> Any:
    if name == "flash_attn":
        return importlib.import_module("greenfast.flash_attn")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, "flash_attn"})
