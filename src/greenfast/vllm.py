"""An attention backend for vLLM (v1, as of 0.33): FP8 pages of greenfast in the tensors that vLLM allocates.

    vllm serve MODEL --attention-backend GREENFAST --kv-cache-dtype fp8_per_token_head

Importing this module needs vLLM. vLLM finds it by the entry point ``greenfast`` of ``vllm.general_plugins``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheLayout

from greenfast.flash_attn import flash_attn_varlen_func
from greenfast.kernels import HEAD_DIMS
from greenfast.ops.quantized import DTYPES
from greenfast.serving.checks import PAGE_SIZES
from greenfast.serving.pages import KVPages, view_pages
from greenfast.serving.plan import ServingPlan, append_kv

NAME = "GREENFAST"
_PER_TOKEN = "fp8_per_token_head"
_SCALE_BYTES = 2 * torch.float32.itemsize  # per token and head


def register() -> None:
    """Register the backend with vLLM. vLLM calls this in each of its processes; further calls do nothing."""
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, f"{__name__}.{GreenfastBackend.__qualname__}")


class GreenfastBackend(AttentionBackend):
    """The capabilities of the kernels. Caches have the dtype fp8 (E4M3, scales per tensor) or fp8_per_token_head."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["fp8", "fp8_e4m3", _PER_TOKEN]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's registry."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[GreenfastImpl]:
        """Return the class of a layer."""
        return GreenfastImpl

    @staticmethod
    def get_builder_cls() -> type[GreenfastMetadataBuilder]:
        """Return the class of the metadata builder of a group of layers."""
        return GreenfastMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes in tokens. vLLM splits its blocks into these."""
        return list(PAGE_SIZES)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the head dims."""
        return list(HEAD_DIMS)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the layouts with contiguous bytes for one block of one layer. These bytes hold greenfast's pages."""
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Add two float32 scales per token and head to the bytes of K and V, if scales are per token and head."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + _SCALE_BYTES)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether a GPU is a Hopper GPU."""
        return bool(capability.major == 9)

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: sinks are one logit per head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True: windows extend to the left."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True: the bits of a token depend on its own sequence only."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Return False: connectors that move parts of a block assume vLLM's order of its bytes."""
        return False


@dataclass
class GreenfastMetadata(AttentionMetadata):
    """A batch, for the layers of a group.

    int32 tensors: query_start_loc (batch + 1,), seq_lens (batch,), block_table (batch, blocks). plan: None while a CUDA
    graph is captured, because its replays have other lengths.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    plan: ServingPlan | None


class GreenfastMetadataBuilder(AttentionMetadataBuilder[GreenfastMetadata]):
    """Builds one plan per step for the layers of a group."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.heads: int = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self.window = _parse_window(getattr(kv_cache_spec, "sliding_window", None))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> GreenfastMetadata:
        """Build the metadata of a step."""
        metadata = self.build_for_cudagraph_capture(common_attn_metadata)
        spec = self.kv_cache_spec
        metadata.plan = ServingPlan(
            metadata.query_start_loc, metadata.seq_lens, metadata.max_query_len, heads=self.heads,
            kv_heads=spec.num_kv_heads, head_dim=spec.head_size, causal=True, window_size=self.window,
            total_q=metadata.num_actual_tokens,
        )  # fmt: skip
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> GreenfastMetadata:
        """Build the metadata without a plan. Each call then makes its own plan, from the lengths at the replay."""
        m = common_attn_metadata
        if m.causal is not True:
            raise NotImplementedError(f"{NAME}: causal={m.causal}; only causal attention is computed")
        return GreenfastMetadata(
            m.num_actual_tokens, m.max_query_len, m.max_seq_len, m.query_start_loc, m.seq_lens, m.block_table_tensor,
            None,
        )  # fmt: skip


class GreenfastImpl(AttentionImpl[GreenfastMetadata]):
    """The attention of a layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Raise NotImplementedError for options without a kernel."""
        if alibi_slopes is not None or attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"{NAME}: alibi_slopes {alibi_slopes}, attn_type {attn_type}; neither is computed"
            )
        if kv_cache_dtype not in GreenfastBackend.supported_kv_cache_dtypes:
            allowed = ", ".join(GreenfastBackend.supported_kv_cache_dtypes)
            raise NotImplementedError(f"{NAME}: kv_cache_dtype {kv_cache_dtype}; allowed: {allowed}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, None if sinks is None else sinks.float()
        self.window, self.softcap = _parse_window(sliding_window), float(logits_soft_cap or 0.0)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._cached_pages: tuple[tuple[Any, ...], KVPages] | None = None

    def pages(self, layer: Any, kv_cache: Tensor) -> KVPages:
        """Return greenfast's pages in vLLM's tensor, (blocks, kv_heads, page_size, bytes per token).

        A token has the bytes of K, V and optional scales. Raises ValueError for a tensor with a layout that is
        not in ``supported_kv_cache_layouts``.
        """
        key = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())
        if self._cached_pages is None or self._cached_pages[0] != key:
            memory = kv_cache.view(torch.uint8)
            blocks, heads, size, content = memory.shape
            scaled = _SCALE_BYTES if self.kv_cache_dtype == _PER_TOKEN else 0
            dense = all(
                n == 1 or stride == expected
                for n, stride, expected in zip(
                    memory.shape[1:], memory.stride()[1:], (size * content, content, 1), strict=True
                )
            )
            if not dense or heads != self.num_kv_heads or content != 2 * self.head_size + scaled:
                raise ValueError(
                    f"kv_cache: {tuple(memory.shape)} bytes with strides {memory.stride()}; blocks of "
                    f"({self.num_kv_heads}, tokens, {2 * self.head_size + scaled}) that are dense are needed"
                )
            memory = memory.as_strided((blocks, heads * size * content), (memory.stride(0), 1))
            self._cached_pages = key, view_pages(memory, size, heads, self.head_size)
        pages = self._cached_pages[1]
        if self.kv_cache_dtype != _PER_TOKEN:
            pages = pages._replace(k_scale=_squeeze_scale(layer._k_scale), v_scale=_squeeze_scale(layer._v_scale))
        return pages

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Quantize keys and values, (tokens, kv_heads, head_dim), and write them to the slots in slot_mapping."""
        if kv_cache.numel() == 0:  # memory profiling
            return
        pages, count = self.pages(layer, kv_cache), slot_mapping.shape[0]
        append_kv(
            None, key[:count], value[:count], pages.k_cache, pages.v_cache, slot_mapping, k_scale=pages.k_scale,
            v_scale=pages.v_scale,
        )  # fmt: skip

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: GreenfastMetadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute attention of query (tokens, heads, head_dim) over the cache into output, of the same shape."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"{NAME}: output_scale: quantized outputs are not written")
        if attn_metadata is None:  # memory profiling
            return output.fill_(0)
        m, pages, count = attn_metadata, self.pages(layer, kv_cache), attn_metadata.num_actual_tokens
        plan = m.plan if m.plan is not None and m.plan.mask == (True, *self.window) else None
        flash_attn_varlen_func(
            query[:count], pages.k_cache, pages.v_cache, m.query_start_loc, None, m.max_query_len, m.max_seq_len,
            seqused_k=m.seq_lens, block_table=m.block_table, k_descale=pages.k_scale, v_descale=pages.v_scale,
            softmax_scale=self.scale, causal=True, window_size=self.window, softcap=self.softcap, s_aux=self.sinks,
            out=output[:count], scheduler_metadata=plan,
        )  # fmt: skip
        return output


def _parse_window(sliding_window: int | None) -> tuple[int, int]:
    """Return (left, right) of a window of vLLM, which counts the query's own token."""
    return (-1 if sliding_window is None else sliding_window - 1), 0


def _squeeze_scale(scale: Tensor) -> Tensor:
    """Return one scale for all heads without dimensions, or one scale per head."""
    return scale.view(()) if scale.numel() == 1 else scale.view(-1)
