"""Models of Hugging Face transformers, each built small from its default configuration, and their inputs."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

library: Any = importlib.import_module("transformers")
VOCABULARY = 99
LENGTH = 24
WINDOW = 8
SOFTCAP = 0.5  # small enough to change the scores of small models
MAX_PARAMETERS = 30_000_000

_KV_HEADS = r"(.*_)?(num_)?(key_value|kv)_heads|n_head_kv|multi_query_group_num"
#: Smaller values for the numbers of a configuration, by the first pattern that matches their name.
_SIZES: list[tuple[str, int]] = [
    (_KV_HEADS, 2),
    (r"(.*_)?(attention_|mamba_num_)?heads|(.*_)?n_heads?", 4),
    (r"(.*_)?head_dim|d_kv|d_head|attention_key_value_channels|kv_channels", 16),
    (r"(.*_)?rotary_dim", 8),
    (r".*lora_rank|.*_low_rank_dim", 32),
    (r"(.*_)?layers|n_layers?|num_blocks|depth", 2),
    (r"(.*_)?vocab(ulary)?_size(_\w+)?|n_words|.*num_embeddings", VOCABULARY),
    (r"(.*_)?(num|n)_(\w*_)?experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|num_selected_experts|top_k_experts", 2),
    (r"n_group|topk_group|n_shared_experts|num_groups", 1),
    (
        r"(.*_)?((hidden|intermediate|embedding|feed_forward)_size|(hidden|intermediate|ffn|mlp|output|channel|embed|"
        r"emb|projection|embed_proj)_dim|d_model|n_embd|d_ff|d_inner|d_embed|hidden_channels)(_\w+)?|dim|dim_ff|width|"
        r"n_inner|linear_units",
        64,
    ),
    (r"image_size|img_size|input_size", 32),
    (r"patch_size", 8),
    (r"num_frames|frames", 4),
    (r"sliding_window(_size)?|attention_chunk_size|local_attention", WINDOW),
    (r"max_window_layers", 1),
]
#: Values that a configuration's defaults leave open, or that only fit the size of the original.
_MORE: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "DbrxConfig": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "EsmConfig": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "HunYuanDenseV1Config": {"head_dim": 16},
    "HunYuanMoEV1Config": {"head_dim": 16},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashConfig": {"qk_head_dim": 32},
    "MinistralConfig": {"head_dim": 16},
    "NemotronConfig": {"num_key_value_heads": 2},
    "NemotronHConfig": {"layers_block_type": ["mamba", "attention"]},
    "RecurrentGemmaConfig": {"block_types": ["recurrent", "attention"]},
    "ReformerConfig": {"is_decoder": True},
}
_TOKENS = re.compile(r".*token_(id|index)s?$")


def _default(plain: Any, name: str) -> Any:
    try:
        return getattr(plain, name, None)
    except Exception:  # an attribute that differs from layer to layer
        return getattr(type(plain).__dataclass_fields__[name], "default", None)


def _smaller(plain: Any, name: str) -> Any:
    """Return the smaller value for this number; None to keep it."""
    value = _default(plain, name)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if _TOKENS.fullmatch(name):
        return None if value < VOCABULARY else VOCABULARY - 1 - sum(map(ord, name)) % 20
    if re.fullmatch(_KV_HEADS, name) and value == getattr(plain, "num_attention_heads", None):
        return min(value, 4)
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size) if value > 0 else None
    return None


def small(kind: Any) -> Any:
    """A configuration of this class with few narrow layers, one of each type if there are several types."""
    names = {name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "kwargs")}
    names |= set(getattr(kind, "__dataclass_fields__", ()))
    plain = kind()
    chosen: dict[str, Any] = {}
    for name in sorted(names):
        value = _default(plain, name)
        if isinstance(value, library.PretrainedConfig):
            chosen[name] = small(type(value)).to_dict()
        elif (size := _smaller(plain, name)) is not None:
            chosen[name] = size
        elif name == "attn_logit_softcapping" and value:
            chosen[name] = SOFTCAP
    if "use_sliding_window" in names:
        chosen.update(use_sliding_window=True, sliding_window=WINDOW)
    for name in ("layer_types", "layers_block_type"):
        kinds = _default(plain, name)
        if name in names and kinds and isinstance(kinds[0], str) and len(set(kinds)) > 1:
            chosen[name] = list(dict.fromkeys(kinds))
            chosen["num_hidden_layers"] = len(chosen[name])
            if "sliding_window" in names:
                chosen["sliding_window"] = WINDOW
    chosen.update(_MORE.get(kind.__name__, {}))
    try:
        return kind(**chosen)
    except Exception:
        for name, value in chosen.items():
            if not isinstance(value, dict):
                setattr(plain, name, value)
        return plain


def model_class(config: Any) -> Any:
    """Return the class for a configuration, with a head for text if available; None without a class."""
    auto = library.models.auto.modeling_auto
    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MASKED_LM_MAPPING, auto.MODEL_MAPPING,
    ):  # fmt: skip
        try:
            result = mapping[type(config)]
        except (KeyError, ValueError):
            continue
        return result[0] if isinstance(result, tuple) else result
    home = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        classes = vars(importlib.import_module(home)).values()
    except ImportError:
        return None
    result = [c for c in classes if isinstance(c, type) and getattr(c, "config_class", None) is type(config)]
    return next((c for c in result if not c.__name__.endswith("PreTrainedModel")), None)


def _tokens(generator: torch.Generator) -> Tensor:
    """(2, LENGTH), without special tokens."""
    return torch.randint(5, VOCABULARY - 25, (2, LENGTH), generator=generator)


def inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs that a model may take (tokens, pixels, sound or patches), two examples each, the likeliest first."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    parameters = inspect.signature(type(model).forward).parameters
    more: dict[str, Tensor] = {}
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        more["decoder_input_ids"] = _tokens(generator)
    if "token_type_ids" in parameters and "gemma" in type(model).__name__.lower():
        more["token_type_ids"] = torch.ones(2, LENGTH, dtype=torch.long)  # tokens of a text that is causal
    texts = {"input_ids": _tokens(generator), **more}
    vision: Any = getattr(config, "vision_config", config)
    size: Any = getattr(vision, "image_size", 32)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels: Any = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3)
    pixels = {"pixel_values": torch.randn(2, channels, height or 32, width or 32, generator=generator)}
    video = (2, getattr(vision, "num_frames", None) or 4, channels, height or 32, width or 32)
    if model.main_input_name == "pixel_values":
        yield pixels
        yield {"pixel_values": torch.randn(video, generator=generator)}
    if model.main_input_name == "input_features":
        bins: Any = getattr(config, "num_mel_bins", None) or getattr(config, "input_dim", 80)
        sound = torch.randn(2, bins, 2 * getattr(config, "max_source_positions", 50), generator=generator)
        for features in (sound, sound.mT.contiguous()):
            yield {"input_features": features, **more}
    if model.main_input_name == "input_values":
        yield {"input_values": torch.randn(2, 4000, generator=generator), **more}
    yield texts
    yield {"inputs_embeds": torch.randn(2, LENGTH, 64, generator=generator)}
    yield {**texts, **pixels}
    yield pixels
    if model.main_input_name == "pixel_values_videos":
        for tokens in ({}, texts):
            yield {**tokens, "pixel_values_videos": torch.randn(video, generator=generator)}
    if "grid_thw" in parameters:
        patch = channels * getattr(vision, "temporal_patch_size", 1) * getattr(vision, "patch_size", 8) ** 2
        patches = torch.randn(32, patch, generator=generator)
        for name in ("hidden_states", "pixel_values"):
            yield {name: patches, "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    yield {**pixels, "decoder_input_ids": _tokens(generator)}


def variants(config: Any) -> Iterator[Any]:
    """The configuration, and again with rotations of images that fit small heads."""
    yield config
    for section in ([2, 3, 3], [1, 1, 2]):
        changed = copy.deepcopy(config)
        for part in (changed, *(getattr(changed, name, None) for name in type(config).sub_configs)):
            rope = getattr(part, "rope_parameters", None)
            if isinstance(rope, dict) and not any(isinstance(x, dict) for x in rope.values()):  # of one type of layer
                part.rope_parameters = {**rope, "mrope_section": section}
        yield changed


def build(kind: Any, config: Any, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model in evaluation mode, always with the same weights, large enough for attention to be far from uniform."""
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = kind(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and min(parameter.shape) > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
            elif name.endswith(".sinks"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) + 1.0)
    return model


def outputs(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """The floating tensors that a model returns, logits first."""
    torch.manual_seed(0)
    with torch.no_grad():
        result = model(**given)
    named = dict(result) if hasattr(result, "keys") else {"": result[0] if isinstance(result, tuple) else result}
    return [x.float() for x in named.values() if isinstance(x, Tensor) and x.is_floating_point()]
