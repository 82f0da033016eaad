"""Hugging Face transformers' continuous batching (``model.generate_batch``) on an FP8 cache.

Transformers plans steps and allocates blocks. This module provides the cache allocators, with one page per layer in
each block, and the attention. The attention appends a step's keys and values to these pages, and attends to them over
block tables.
"""

from __future__ import annotations

import copy
import functools
import importlib
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from greenfast.flash_attn import flash_attn_varlen_func
from greenfast.integrations.transformers import NAME, register_with_transformers
from greenfast.kernels import HEAD_DIMS
from greenfast.ops.quantized import DTYPES
from greenfast.serving.checks import PAGE_SIZES
from greenfast.serving.pages import KVPages, compute_slots, find_sequences, get_page_bytes, view_pages
from greenfast.serving.plan import ServingPlan, append_kv
from greenfast.spec.extras import install_command

#: Under this name transformers makes no masks. ``paged|greenfast`` and, in ``generate_batch``, ``greenfast`` become it.
PAGED = "greenfast_paged"
_PUBLIC_NAME = f"paged|{NAME}"
_REGISTER_LOCK = threading.Lock()
_VERSIONS = "register_continuous_batching needs transformers 5.20 or later; 5.20 to 5.23 are known to fit"
#: Features of a layer's attention that are not supported.
_UNSUPPORTED = ("position_bias", "indices", "block_indices")
_DEFAULT_PAGE_SIZE = 256  # in transformers


def register_continuous_batching() -> None:
    """Register ``attn_implementation="paged|greenfast"`` with transformers' continuous batching.

        greenfast.register_continuous_batching()
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="paged|greenfast")
        outputs = model.generate_batch([[1, 5, 9], [1, 7]], GenerationConfig(max_new_tokens=32))

    The cache then holds E4M3 codes with a scale per token and head, in pages of ``ContinuousBatchingConfig.page_size``
    tokens: 16, 32, 64 or 128; transformers' default of 256 becomes 128. Layers with a sliding window free the pages
    that have left it. Supported models have layers that support FlashAttention in transformers, with windows, softcaps
    and sinks, and head dims 64, 128 and 256; others raise ValueError. A model with ``attn_implementation="greenfast"``
    generates batches in the same way.

    Several internal functions of transformers are wrapped; other implementations are not changed. Further calls change
    nothing. Raises ImportError if transformers is missing or its internals have another version.
    """
    try:
        library = importlib.import_module("transformers")
        base = "transformers.generation.continuous_batching"
        cache, initialization, api = (
            importlib.import_module(f"{base}.{name}") for name in ("cache", "initialization", "continuous_api")
        )
        allocators = cache.ATTN_TYPE_TO_ALLOCATOR
    except (ImportError, AttributeError) as e:
        raise ImportError(f"{_VERSIONS}: {install_command('transformers')}") from e
    with _REGISTER_LOCK:
        if PAGED in library.AttentionInterface():
            return
        try:
            _wrap(library.PreTrainedModel, "_check_and_adjust_attn_implementation", _check_implementation)
            _wrap(api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _switch_implementation)
            _wrap(api, "resolve_continuous_batching_config", _resolve_config)
            _wrap(initialization, "ensure_decode_fast_path_is_available", _allow_block_tables)
            for module in (initialization, cache):
                _wrap(module, "is_flash_attention_requested", _is_flash_like)
        except AttributeError as e:
            raise ImportError(f"{_VERSIONS}: {e}") from e
        for kind, mixin in (("full_attention", _PageAllocator), ("sliding_attention", _WindowPageAllocator)):
            allocators[kind] = _AllocatorFactory(allocators[kind], mixin, cache.FullAttentionCacheAllocator)
        eager = torch.compiler.disable(attend)  # type: ignore[no-untyped-call] # as transformers' updates of caches are
        library.AttentionInterface.register(PAGED, eager)
    if NAME not in library.AttentionInterface():
        register_with_transformers()


def _wrap(owner: Any, name: str, ours: Any) -> None:
    """Replace a function by ``ours``, once. The original is its first argument."""
    original = getattr(owner, name)
    if not getattr(original, "is_greenfast_paged", False):
        wrapper = functools.wraps(original)(lambda *args, **kwargs: ours(original, *args, **kwargs))
        wrapper.is_greenfast_paged = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)


def _is_ours(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) == PAGED


def _check_implementation(original: Any, model: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
    """Return the implementation's name after transformers' checks, without which ``paged|`` would be cut off."""
    if attn_implementation == _PUBLIC_NAME:
        attn_implementation = PAGED
    if attn_implementation == PAGED and not getattr(model, "_supports_flash_attn", False):
        raise ValueError(
            f'{type(model).__name__}: attn_implementation="{_PUBLIC_NAME}" is not for this model: it does not support '
            "FlashAttention, so its attention would run without the masks that it needs"
        )
    implementation: str = original(model, attn_implementation, *args, **kwargs)
    return implementation


def _switch_implementation(original: Any, manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    name = model.config._attn_implementation
    if name not in (NAME, PAGED):
        original(manager, model, *args, **kwargs)
    elif name == NAME:
        model.set_attn_implementation(PAGED)
        manager._original_attn_impl = name  # the manager restores it when it stops


def _resolve_config(original: Any, config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> Any:
    if _is_ours(config) and cb_config.page_size == _DEFAULT_PAGE_SIZE:
        cb_config = copy.copy(cb_config)
        cb_config.page_size = PAGE_SIZES[-1]
    return original(config, cb_config, *args, **kwargs)


def _allow_block_tables(original: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Allow block tables in decode-only steps; transformers allows them for FlashAttention only."""
    if not _is_ours(config):
        original(config, *args, **kwargs)


def _is_flash_like(original: Any, config: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Return True for greenfast, for which transformers then makes no masks.

    CUDA graphs and asynchronous batching become the default.
    """
    return _is_ours(config) or bool(original(config, *args, **kwargs))


class _AllocatorFactory:
    """Builds our allocator for a model with our attention, else transformers' own.

    It has the attributes of transformers' class.
    """

    def __init__(self, original: Any, mixin: type, full: Any) -> None:
        self._original = original
        self._ours: Any = type(mixin.__name__.lstrip("_"), (mixin, full), {"base": full})

    def __call__(self, *args: Any, config: Any, **kwargs: Any) -> Any:
        kind = self._ours if _is_ours(config) else self._original
        return kind(*args, config=config, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _BatchStep(NamedTuple):
    """The inputs that the layers of a group share in one forward pass."""

    slots: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqused_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    plan: ServingPlan


class _PageAllocator:
    """An allocator with blocks that hold one page of our cache for each layer of the group.

    It is mixed into transformers' ``FullAttentionCacheAllocator``. The number of a block is the number of its page in
    every layer. Read indices are pages instead of tokens.
    """

    base: Any
    rows_per_token = 1

    def __init__(self: Any, *args: Any, config: Any, **kwargs: Any) -> None:
        self.base.__init__(self, *args, config=config, **kwargs)
        for name, value, allowed in (
            ("page_size", self.tokens_per_page, PAGE_SIZES),
            ("head_dim", self.head_dim, HEAD_DIMS),
            ("dtype", self.cache_dtype, DTYPES),
        ):
            if value not in allowed:
                raise ValueError(f"{_PUBLIC_NAME}: {name} {value}; allowed are {', '.join(map(str, allowed))}")
        self.block_physical_stride = self.tokens_per_page  # slots count tokens of a layer; its pages are blocks
        self.step: _BatchStep | None = None

    @classmethod
    def get_bytes_per_page(cls, num_key_value_heads: int, head_dim: int, cache_dtype: Any, page_size: int) -> int:
        """Return the bytes of a page: codes and scales, of K and V of a layer."""
        return get_page_bytes(page_size, num_key_value_heads, head_dim)

    def register_cache_tensor(
        self: Any, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Any, pool: Any
    ) -> None:
        """Split the memory of all groups, uint8 (bytes,), into blocks: the pages of the group's layers."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.write_trash_index = -1  # padding is not written
        blocks = self._copy_view.unflatten(1, (self.pages_per_block, self.bytes_per_page))
        sizes = (self.tokens_per_page, self.num_key_value_heads, self.head_dim)
        self.pages: dict[int, KVPages] = {n: view_pages(blocks[:, i], *sizes) for i, n in enumerate(self.layer_indices)}

    def get_read_indices(self: Any, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the pages of a request, in order."""
        count = -(-(past_length + query_length) // self.tokens_per_page)
        pages: list[int] = self.block_table[request_id][:count]
        return pages

    def get_seqlen_k(self: Any, past_length: int, query_length: int) -> int:
        """Return the keys of a request, counted from the first token, including those that have left the window."""
        return past_length + query_length

    def get_step(self: Any, module: Any, q: Tensor, window: tuple[int, int], kwargs: dict[str, Any]) -> _BatchStep:
        """Return the step of this forward pass. Its first layer builds it, also if a CUDA graph captures it again."""
        if self.step is None or module.layer_idx == self.layer_indices[0]:
            self.step = self._make_step(q, window, kwargs)
        step: _BatchStep = self.step
        return step

    def _make_step(self: Any, q: Tensor, window: tuple[int, int], kwargs: dict[str, Any]) -> _BatchStep:
        page, starts = self.tokens_per_page, kwargs["cu_seq_lens_q"].int()
        ends = kwargs["cu_seq_lens_k"][self.layer_type]
        used = (ends[1:] - ends[:-1]).int()
        longest = kwargs["max_length_k"][self.layer_type]
        table = kwargs.get("block_table")
        if table is not None:  # one query per sequence
            table = table[self.index]
            tokens = torch.arange(q.shape[0], device=q.device)
            sequence_ids = find_sequences(starts, tokens)
            slots = compute_slots(table, page, sequence_ids, used.long()[sequence_ids] - 1)
            slots = torch.where(tokens < starts[-1], slots, -1)
        else:
            slots = kwargs["write_index"][self.index]
            table = _build_block_table(slots, kwargs["read_index"][self.index], starts, used, page, -(-longest // page))
        heads, head_dim = q.shape[1:]
        max_seqlen_q = kwargs["max_length_q"]
        plan = ServingPlan(
            starts, used, max_seqlen_q, heads=heads, kv_heads=self.num_key_value_heads, head_dim=head_dim, causal=True,
            window_size=window, total_q=q.shape[0],
        )  # fmt: skip
        return _BatchStep(slots, table, starts, used, max_seqlen_q, longest, plan)


def _build_block_table(slots: Tensor, pages: Tensor, starts: Tensor, used: Tensor, page: int, width: int) -> Tensor:
    """Build block tables, int32 (batch, width), from the pages of all sequences.

    Entries after their last pages are arbitrary.

    Without ``pages`` all keys are new, and the pages follow from their slots.
    """
    columns = torch.arange(max(width, 1), device=slots.device)
    if pages.numel():
        counts = (used + page - 1) // page
        indices = (counts.cumsum(0) - counts).unsqueeze(1) + columns
        entries = pages[indices.clamp(max=pages.numel() - 1)]
    else:
        indices = starts[:-1].long().unsqueeze(1) + columns * page
        entries = slots[indices.clamp(max=slots.numel() - 1)] // page
    return entries.int()


class _WindowPageAllocator(_PageAllocator):
    """The same for layers with a sliding window: pages that no later query can see are freed.

    Their entries become page 0. Transformers keeps that page zero and gives it to no request.
    """

    layer_type = "sliding_attention"
    supports_block_sharing = False

    def __init__(self: Any, *args: Any, config: Any, **kwargs: Any) -> None:
        _PageAllocator.__init__(self, *args, config=config, **kwargs)
        self.sliding_window: int = config.sliding_window

    def allocate_cache_to_request(self: Any, request_id: str, past_length: int, query_length: int) -> None:
        """Free the pages before the window of the first new query, then allocate pages for the new tokens."""
        blocks = self.block_table.get(request_id, [])
        gone = min(max(past_length - self.sliding_window + 1, 0) // self.tokens_per_page, len(blocks))
        freed = [b for b in blocks[:gone] if b and self.ledger.release(b, True)]
        blocks[:gone] = [0] * gone
        self.pool.free_blocks(self.index, freed)
        self.base.allocate_cache_to_request(self, request_id, past_length, query_length)

    def free_blocks(self: Any, request_id: str, no_cache: bool = False) -> None:
        """Free all pages of a request."""
        if request_id in self.block_table:
            self.block_table[request_id] = [b for b in self.block_table[request_id] if b]
        self.base.free_blocks(self, request_id, no_cache)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, cache: Any = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention of a step's tokens: query (1, H, T, D), key and value (1, HK, T, D).

    Returns (1, T, H, D), and None for the weights.
    """
    allocator = None if cache is None else cache.layer_to_allocator[module.layer_idx]
    if not isinstance(allocator, _PageAllocator):
        raise ValueError(f'"{PAGED}" is for generate_batch; use attn_implementation="{NAME}" for other calls')
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__}: its attention has `{name}`, which {_PUBLIC_NAME} does not compute"
            )
    cache_window = getattr(allocator, "sliding_window", None)
    if cache_window is not None and cache_window != sliding_window:
        raise ValueError(
            f"{type(module).__name__}: its window is {sliding_window}, its layer's cache keeps {cache_window}"
        )
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    step = allocator.get_step(module, q, window, kwargs)
    pages = allocator.pages[module.layer_idx]
    append_kv(None, k, v, pages.k_cache, pages.v_cache, step.slots, k_scale=pages.k_scale, v_scale=pages.v_scale)
    out = flash_attn_varlen_func(
        q, pages.k_cache, pages.v_cache, step.cu_seqlens_q, None, step.max_seqlen_q, step.max_seqlen_k,
        seqused_k=step.seqused_k, block_table=step.block_table, k_descale=pages.k_scale, v_descale=pages.v_scale,
        softmax_scale=scaling, causal=True, window_size=window, softcap=softcap or 0.0, s_aux=s_aux,
        scheduler_metadata=step.plan,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None
