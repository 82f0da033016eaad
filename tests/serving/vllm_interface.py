"""The part of vLLM 0.33's interface that greenfast.vllm uses, as modules to import without vLLM.

Written from the wheel's Python files; ``test_vllm.py`` compares the signatures with those files if it finds them.
"""
# ruff: noqa: B027

from __future__ import annotations

import importlib.util
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

import torch

T = TypeVar("T")


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionCGSupport(Enum):
    UNIFORM_SINGLE_TOKEN_DECODE = 1


class KVCacheLayout(Enum):
    """Logical (layer, block, head, token, content) in order of memory."""

    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
    BLHNC = (1, 0, 2, 3, 4)


class AttentionBackend(ABC):
    supported_dtypes: ClassVar[list[torch.dtype]] = []
    supported_kv_cache_dtypes: ClassVar[list[Any]] = []
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]: ...  # type: ignore[empty-body]
    @staticmethod
    @abstractmethod
    def get_name() -> str: ...
    @staticmethod
    @abstractmethod
    def get_impl_cls() -> Any: ...
    @staticmethod
    @abstractmethod
    def get_builder_cls() -> Any: ...
    @classmethod
    def get_supported_head_sizes(cls) -> list[int]: ...  # type: ignore[empty-body]
    @classmethod
    def customize_spec(cls, spec: Any) -> Any: ...
    @classmethod
    def supports_sink(cls) -> bool: ...  # type: ignore[empty-body]
    @classmethod
    def supports_sliding_window(cls) -> bool: ...  # type: ignore[empty-body]
    @classmethod
    def supports_batch_invariance(cls) -> bool: ...  # type: ignore[empty-body]
    @classmethod
    def supports_kv_connector(cls) -> bool: ...  # type: ignore[empty-body]
    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool: ...  # type: ignore[empty-body]
    @classmethod
    def supported_kv_cache_layouts(cls) -> Any: ...


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True


class AttentionMetadataBuilder(ABC, Generic[T]):
    _cudagraph_support: ClassVar[Any] = None

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec, layer_names, vllm_config, device
        )  # fmt: skip

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> T: ...
    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> T: ...  # type: ignore[empty-body]


class AttentionImpl(ABC, Generic[T]):
    @abstractmethod
    def __init__(
        self, num_heads: Any, head_size: Any, scale: Any, num_kv_heads: Any = None, alibi_slopes: Any = None,
        sliding_window: Any = None, kv_cache_dtype: Any = "auto", logits_soft_cap: Any = None,
        attn_type: Any = AttentionType.DECODER, kv_sharing_target_layer_name: Any = None,
    ) -> None: ...  # fmt: skip
    @abstractmethod
    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> torch.Tensor: ...  # fmt: skip


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"


REGISTERED: dict[str, str | None] = {}


def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> Callable[[type], type]:
    REGISTERED[backend] = class_path
    return lambda x: x


#: Modules of vLLM -> the imported names.
MODULES: dict[str, tuple[Any, ...]] = {
    "vllm.v1.attention.backend": (
        AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder, AttentionType,
        CommonAttentionMetadata,
    ),
    "vllm.v1.attention.backends.registry": (AttentionBackendEnum, register_backend),
    "vllm.v1.kv_cache_interface": (KVCacheLayout,),
}  # fmt: skip


def install(monkeypatch: Any) -> None:
    """Put the modules where ``import`` finds them."""
    for name, members in MODULES.items():
        _put(monkeypatch, name, **{x.__name__: x for x in members})


def install_files(monkeypatch: Any, folder: Path) -> None:
    """Install vLLM's own interface classes and registry, with stubs for their imports."""
    _put(
        monkeypatch, "vllm.model_executor.layers.quantization.utils.quant_utils",
        **dict.fromkeys(("kFp8Dynamic64Sym", "kFp8Dynamic128Sym", "kFp8StaticTensorSym", "kNvfp4Dynamic")),
    )  # fmt: skip
    _put(monkeypatch, "vllm.logger", init_logger=logging.getLogger)
    _put(monkeypatch, "vllm.utils.import_utils", resolve_obj_by_qualname=None)
    _put(monkeypatch, "vllm.config", get_current_vllm_config_or_none=lambda: None)
    groups = {"get_dcp_world_size_and_rank": lambda given: (1, 0), "get_pcp_group": _no_group}
    _put(monkeypatch, "vllm.distributed.parallel_state", **groups)
    layouts = _load(monkeypatch, "vllm.v1.kv_cache_layout", folder)
    _put(monkeypatch, "vllm.v1.kv_cache_interface", KVCacheLayout=layouts.KVCacheLayout, get_kv_quant_mode=None)
    for name in ("vllm.v1.attention.backend", "vllm.v1.attention.backends.registry"):
        _load(monkeypatch, name, folder)


def _no_group() -> None:
    raise AssertionError


def _put(monkeypatch: Any, name: str, **members: Any) -> None:
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        parent = ".".join(parts[:i])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    vars(sys.modules[name]).update(members)


def _load(monkeypatch: Any, name: str, folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / (name.replace(".", "/") + ".py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _put(monkeypatch, name.rpartition(".")[0])
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
