"""FP8 attention as one of Hugging Face transformers' implementations, which models are asked for by name."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from greenfast.operator.arguments import check_length
from greenfast.operator.quantized import PRECISIONS, check_choice
from greenfast.operator.routing import MIN_LENGTH, TORCH, Explanation, Routed, explain
from greenfast.operator.sdpa import Precision, sdpa

NAME = "greenfast"

#: What a layer may ask of attention beyond scaled products, which transformers' "sdpa" would leave out without a word.
_REFUSED = ("softcap", "s_aux", "sinks", "indices", "block_indices")
#: What transformers' own function does, and greenfast does not.
_LEFT = ("position_bias", "cache")
#: Models whose layers with shared K and V are right under the name "sdpa" alone; under others they trim queries.
_TRIMMED = ("gemma4",)


def register_with_transformers(precision: Precision = "fp8", *, min_length: int = MIN_LENGTH) -> Routed:
    """Make ``attn_implementation="greenfast"`` known to Hugging Face transformers; returns the counts of its calls.

        greenfast.register_with_transformers()
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="greenfast")

    A layer's attention is computed in FP8 where ``greenfast.explain`` says so with this ``min_length``, and elsewhere
    by transformers' own "sdpa": with a mask, as of padded batches, windows and chunks of a prompt after the first; with
    dropout; and in decoding, whose queries are few. Heads of K and V that queries share are not repeated.
    Registering again replaces what was chosen before, also for models that are there already.

    Raises ImportError where transformers is missing or too old, and ValueError for a precision that there is not. A
    model whose attention has more than scaled products (soft caps, sinks, selected keys) raises ValueError when it
    runs, as does one that transformers trims queries of by the name of its attention.
    """
    check_choice("precision", precision, PRECISIONS)
    check_length("min_length", min_length)
    try:
        library = importlib.import_module("transformers")
        attentions, masks = library.AttentionInterface, library.AttentionMaskInterface
    except (ImportError, AttributeError) as e:
        raise ImportError(
            "register_with_transformers needs transformers 4.56 or later: pip install 'greenfast[transformers]'"
        ) from e
    attention = _Attention(precision, min_length, attentions()["sdpa"])
    attentions.register(NAME, attention.attend)
    masks.register(NAME, masks()["sdpa"])
    return attention.routed


class _Attention:
    """What is registered, with its settings and counts."""

    def __init__(self, precision: Precision, min_length: int, fallback: Any) -> None:
        self.precision: Precision = precision
        self.min_length = min_length
        self.fallback = fallback
        self.routed = Routed()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attention of query (B, H, S, D), key and value (B, HK, KV, D): (B, S, H, D), and no weights."""
        _check(module, more)
        causal, k, v = False, key, value
        if attention_mask is None and query.shape[2] > 1:
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and key.shape[2] > query.shape[2]:  # a static cache that is being filled: the rest is not there yet
            k, v = (x[:, :, : query.shape[2]] for x in (key, value))
        found = self._explain(query, k, v, attention_mask, dropout, causal, scaling, more)
        self.routed.count(found)
        if found.taken:
            out = sdpa(
                query,
                k,
                v,
                attn_mask=attention_mask,
                is_causal=causal,
                scale=scaling,
                enable_gqa=True,
                precision=self.precision,
            )
            return out.transpose(1, 2).contiguous(), None
        result: tuple[Tensor, None] = self.fallback(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
        )
        return result

    def _explain(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
        scale: float | None, more: dict[str, Any],
    ) -> Explanation:  # fmt: skip
        for name in _LEFT:
            if more.get(name) is not None:
                return Explanation(TORCH, f"{name}: transformers' own function has it")
        return explain(
            query, key, value, mask, dropout, causal, scale, True, precision=self.precision, min_length=self.min_length
        )


def _check(module: nn.Module, more: dict[str, Any]) -> None:
    """Raises ValueError for attention that neither greenfast nor "sdpa" computes as the model means it."""
    for name in _REFUSED:
        if more.get(name) is not None:
            raise ValueError(
                f'{type(module).__name__}: its attention has `{name}`, which attn_implementation="{NAME}" does not '
                'compute; use attn_implementation="eager"'
            )
    model = str(getattr(getattr(module, "config", None), "model_type", ""))
    if model.startswith(_TRIMMED) and getattr(module, "is_kv_shared_layer", False):
        raise ValueError(
            f'{model}: transformers leaves out queries of its last layers unless attention is called "sdpa"; '
            'use attn_implementation="sdpa" under `with greenfast.use():`'
        )
