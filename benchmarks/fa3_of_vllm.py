"""FlashAttention-3 of vLLM's wheel under the name and with the functions of the package flash_attn_3.

The library is ``vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so``; it loads into the torch that it was built for. transformers
calls the functions below with the keywords of their signatures.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

Window = tuple[int, int]


def install_package(library: str) -> None:
    """Make this module importable as ``flash_attn_interface``, with a package's metadata.

    Call it before transformers is imported.
    """
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    folder = Path(tempfile.mkdtemp(prefix="flash_attn_3-"))
    (folder / "flash_attn_interface.py").write_text(f"from {__name__} import *\n", encoding="utf-8")
    metadata = folder / "flash_attn_3-3.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-3\nVersion: 3.0.0\n", encoding="utf-8")
    (metadata / "top_level.txt").write_text("flash_attn_interface\n", encoding="utf-8")
    sys.path.insert(0, str(folder))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, new: tuple[Tensor | None, Tensor | None] = (None, None),
    starts: tuple[Tensor | None, Tensor | None] = (None, None), used: Tensor | None = None,
    longest: tuple[int | None, int | None] = (None, None), table: Tensor | None = None, scale: float | None,
    causal: bool, window: Window, softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Call the operator. Its arguments are positional, as its schema has no defaults."""
    outputs: list[Tensor] = torch.ops._vllm_fa3_C.fwd(
        q, k, v, *new, None, None, *starts, None, None, used, *longest, table, None, None, None, None, None,
        None, None, None, q.shape[-1] ** -0.5 if scale is None else scale, causal, *window, softcap, True, None, 0,
        None, 0, sinks, 1, 0, None,
    )  # fmt: skip
    return outputs[0]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, s_aux: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend with q, k, v (batch, tokens, heads, head_dim)."""
    batch, (n, m) = q.shape[0], (q.shape[1], k.shape[1])
    each = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out = flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), each * n, each * m, n, m, softmax_scale, causal,
        window_size, softcap, s_aux,
    )  # fmt: skip
    return out.view(q.shape)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend with concatenated sequences, (tokens, heads, head_dim)."""
    return _forward(
        q, k, v, starts=(cu_seqlens_q, cu_seqlens_k), longest=(max_seqlen_q, max_seqlen_k), scale=softmax_scale,
        causal=causal, window=window_size, softcap=softcap, sinks=s_aux,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, page_table: Tensor,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend with q (batch, tokens, heads, head_dim) over pages, after writing k and v to them."""
    return _forward(
        q, k_cache, v_cache, new=(k, v), used=cache_seqlens, table=page_table, scale=softmax_scale, causal=causal,
        window=window_size, softcap=softcap, sinks=s_aux,
    )  # fmt: skip


__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
