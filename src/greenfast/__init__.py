"""FP8 attention kernels for NVIDIA GPUs, and the pipeline that proves them: green before fast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenfast import flash_attn as flash_attn
    from greenfast.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
    from greenfast.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache
    from greenfast.operator.continuous_batching import register_continuous_batching as register_continuous_batching
    from greenfast.operator.paged_cache import PagedKVCache as PagedKVCache
    from greenfast.operator.quantized import QuantizedQKV as QuantizedQKV
    from greenfast.operator.routing import Explanation as Explanation
    from greenfast.operator.routing import explain as explain
    from greenfast.operator.sdpa import attention as attention
    from greenfast.operator.sdpa import quantize as quantize
    from greenfast.operator.sdpa import sdpa as sdpa
    from greenfast.operator.serving import ServingPlan as ServingPlan
    from greenfast.operator.serving import append_kv as append_kv
    from greenfast.operator.serving_explain import explain_call as explain_call
    from greenfast.operator.switch import use as use
    from greenfast.operator.transformers import register_with_transformers as register_with_transformers
    from greenfast.parallel.context import context_parallel as context_parallel

__version__ = "0.1.0"

#: Public names -> their modules, loaded when they are asked for: the command line needs no PyTorch to say its version.
_PUBLIC = {
    "Explanation": "greenfast.operator.routing",
    "PagedKVCache": "greenfast.operator.paged_cache",
    "QuantizedQKV": "greenfast.operator.quantized",
    "ServingPlan": "greenfast.operator.serving",
    "append_kv": "greenfast.operator.serving",
    "attention": "greenfast.operator.sdpa",
    "context_parallel": "greenfast.parallel.context",
    "explain": "greenfast.operator.routing",
    "explain_call": "greenfast.operator.serving_explain",
    "flash_attn_varlen_func": "greenfast.flash_attn",
    "flash_attn_with_kvcache": "greenfast.flash_attn",
    "quantize": "greenfast.operator.sdpa",
    "register_continuous_batching": "greenfast.operator.continuous_batching",
    "register_with_transformers": "greenfast.operator.transformers",
    "sdpa": "greenfast.operator.sdpa",
    "use": "greenfast.operator.switch",
}


def __getattr__(name: str) -> Any:
    if name == "flash_attn":
        return importlib.import_module("greenfast.flash_attn")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, "flash_attn"})
