"""FP8 attention as an attention implementation of Hugging Face transformers, chosen by name."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import threading
import types
from typing import Any

import torch
from torch import Tensor, nn

from greenfast.integrations.models import Accelerated, Layer, Policy
from greenfast.ops.arguments import parse_length
from greenfast.ops.context_stack import in_context_parallel
from greenfast.ops.quantized import SDPA_PRECISIONS, AutoPrecision, check_choice
from greenfast.ops.routing import CONTEXT_PARALLEL, TORCH, Explanation, Routed, explain
from greenfast.ops.sdpa import sdpa
from greenfast.spec.extras import install_command

NAME = "greenfast"
_REGISTER_LOCK = threading.Lock()

#: Features that "sdpa" lacks, and their names in ``greenfast.sdpa``. softcap: a number. s_aux: (H,), the logit of one
#: more key of each row, without a value.
_FEATURES = {"softcap": "softcap", "s_aux": "sinks"}
#: Features that are computed neither by "sdpa" nor by greenfast. sinks: a logit for each query and head.
_UNSUPPORTED = ("sinks", "indices", "block_indices")
#: Arguments that only transformers' own function supports.
_FALLBACK_ONLY = ("position_bias", "cache")
#: Attention without a causal mask, in spite of its ``is_causal`` attribute; "sdpa" makes it causal.
_NOT_CAUSAL = ("Phi4MultimodalVisionAttention",)
#: Code of a model that compares the name of an implementation.
_NAME_COMPARISON = re.compile(r"""attn_implementation\s*(==|!=|in|not in)\s[^:=]{0,80}["']sdpa["']""")
#: Code of a layer that passes one of ``_FEATURES``.
_FEATURE_ARGUMENT = re.compile(rf"\b({'|'.join(_FEATURES)})=self\.")
#: Classes of attention with a norm and RoPE that ``accelerate`` knows.
_ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen3Attention", "Gemma3Attention", "GptOssAttention")
_FUSED = "norm, RoPE, quantization and attention by attention_block"
_EAGER_HINT = 'use attn_implementation="eager"'
_USE_HINT = 'use attn_implementation="sdpa" under `with greenfast.use():`'


def register_with_transformers(precision: AutoPrecision = "fp8", *, min_length: int | None = None) -> Routed:
    """Register ``attn_implementation="greenfast"`` with Hugging Face transformers. Returns the counts of its calls.

        greenfast.register_with_transformers()
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="greenfast")

    A layer's attention is computed in FP8 by the rules of ``greenfast.explain`` with this ``min_length``, with the
    boolean masks that transformers makes for padded batches, windows and chunks of a prompt. Otherwise transformers'
    own "sdpa" computes it: with dropout, with numbers that are added to the scores, and in decoding with its few
    queries. Shared heads of K and V are not repeated. Registering again replaces the settings, also for existing
    models.

    Soft caps (``softcap``: Gemma 2) and sinks (``s_aux``: gpt-oss) are missing in "sdpa". Such layers are therefore
    computed here whatever their length, and raise ValueError for calls that no kernel can compute, such as with
    dropout. "auto" is "fp8" for them.

    Models, and parts of models, raise ValueError when they are constructed or given the name, if they compare the name
    "sdpa", or do not support "sdpa" for other reasons than soft caps and sinks: their masks would be lost. A layer
    with other features of attention (selected keys, sinks for each query) raises ValueError when it runs.

    Raises ImportError if transformers is missing or too old, ValueError for an unknown precision, and TypeError or
    ValueError for an invalid ``min_length``.
    """
    check_choice("precision", precision, SDPA_PRECISIONS)
    if min_length is not None:
        min_length = parse_length("min_length", min_length)
    try:
        library = importlib.import_module("transformers")
        attentions, masks = library.AttentionInterface, library.AttentionMaskInterface
        model = library.PreTrainedModel
    except (ImportError, AttributeError) as e:
        raise ImportError(
            f"register_with_transformers needs transformers 4.56 or later: {install_command('transformers')}"
        ) from e
    with _REGISTER_LOCK:
        attention = _RegisteredAttention(precision, min_length, attentions()["sdpa"])
        _install_model_check(model)  # before the name can be chosen; masks come before attention
        bidirectional = getattr(sys.modules[masks.__module__], "bidirectional_mask_function", None)
        masks.register(NAME, _MaskFunction(model, masks()["sdpa"], bidirectional))
        attentions.register(NAME, attention.attend)
    return attention.routed


def _install_model_check(model: Any) -> None:
    """Add our check to transformers' check of a model's attention implementation.

    Transformers does not check unknown names. Models with custom attention would then run without their masks, because
    transformers decides by the name whether to make masks.
    """
    chosen = getattr(model, "get_correct_attn_implementation", None)
    if chosen is None:
        raise ImportError(
            "register_with_transformers: this transformers has no PreTrainedModel.get_correct_attn_implementation, "
            "which refuses models without support for greenfast; 4.56 to 5.23 have it"
        )
    if getattr(chosen, "is_greenfast", False):
        return

    @functools.wraps(chosen)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        implementation: str = chosen(self, requested_attention, *args, **kwargs)
        if implementation == NAME:
            _check_model(self)
        return implementation

    get_correct_attn_implementation.is_greenfast = True  # type: ignore[attr-defined]
    model.get_correct_attn_implementation = get_correct_attn_implementation


def _check_model(model: Any) -> None:
    kind: Any = type(model)
    reason = _find_model_fault(kind)
    if reason is not None:
        raise ValueError(_format_refusal(kind.__name__, reason))


@functools.cache
def _find_model_fault(model: Any) -> str | None:
    """Return why a class of models cannot use an implementation with a foreign name; None if it can."""
    if not (getattr(model, "_supports_sdpa", False) or _lacks_features_only(model)):
        return f'it does not support "sdpa", so its attention would run without the masks that it needs; {_EAGER_HINT}'
    for name in {base.__module__ for base in model.__mro__} - {"builtins"}:
        module = sys.modules.get(name)
        for attribute, classes in vars(module).items() if module else ():
            if attribute.endswith("ATTENTION_CLASSES") and isinstance(classes, dict) and NAME not in classes:
                return f"its attention is chosen by name from {attribute}, without an entry for this one; {_USE_HINT}"
        if module and name.rpartition(".")[2].startswith("modeling_") and _NAME_COMPARISON.search(_read_source(module)):
            return f'it treats "sdpa" by name, and would get other masks or queries under another name; {_USE_HINT}'
    return None


def _lacks_features_only(model: Any) -> bool:
    """Return whether "sdpa" lacks no more than soft caps or sinks for a class of models.

    Then its layers pass them, and transformers runs it by FlashAttention, with its own masks for each implementation.
    """
    if not (getattr(model, "_supports_flash_attn", False) and getattr(model, "_supports_attention_backend", False)):
        return False
    modules = [sys.modules.get(name) for name in {base.__module__ for base in model.__mro__} - {"builtins"}]
    return any(module and _FEATURE_ARGUMENT.search(_read_source(module)) for module in modules)


def _read_source(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # no readable source
        return ""


def _format_refusal(name: str, reason: str) -> str:
    return (
        f'{name}: attn_implementation="{NAME}" is not for this model: {reason}. '
        f'Parts of a model may differ, as in attn_implementation={{"": "eager", "text_config": "{NAME}"}}'
    )


class _MaskFunction:
    """Build the masks of "sdpa", after a check for models with a config that was edited by hand.

    A mask of padding alone, the same for all queries, is a view with a stride of 0: attention then skips the padding.
    bidirectional: transformers' function without limits, to which it adds the padding; None if it has none.
    """

    def __init__(self, model: Any, masks: Any, bidirectional: Any) -> None:
        self.model = model
        self.masks = masks
        self.bidirectional = bidirectional

    def __call__(self, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            kind: Any = type(config)
            reason = _find_config_fault(self.model, kind)
            if reason is not None:
                raise ValueError(_format_refusal(kind.__name__, reason))
        q_length, function = kwargs.get("q_length"), kwargs.get("mask_function")
        if q_length is None or function is None or function is not self.bidirectional:
            return self.masks(*args, config=config, **kwargs)
        mask = self.masks(*args, config=config, **{**kwargs, "q_length": 1})
        return None if mask is None else mask.expand(-1, -1, q_length, -1)


@functools.cache
def _find_config_fault(model: Any, config: Any) -> str | None:
    """Return why no class of models with this config can use greenfast; None if one can, or if there is no class."""
    reasons, classes = [], [model]
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        if getattr(kind, "config_class", None) is config:
            reasons.append(_find_model_fault(kind))
    return None if None in reasons or not reasons else reasons[0]


class _RegisteredAttention:
    """The registered attention function, with its settings and counts."""

    def __init__(self, precision: AutoPrecision, min_length: int | None, fallback: Any) -> None:
        self.precision: AutoPrecision = precision
        self.min_length = min_length
        self.fallback = fallback
        self.routed = Routed()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Compute attention of query (B, H, S, D), key and value (B, HK, KV, D).

        Returns (B, S, H, D), and None for the weights.
        """
        features = _parse_features(module, kwargs)
        mask, causal, k, v = _remove_repeats(attention_mask), False, key, value
        if type(module).__name__ in _NOT_CAUSAL:
            is_causal = False
        if attention_mask is None and query.shape[2] > 1:
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and key.shape[2] > query.shape[2]:  # a partly filled static cache
            k, v = (x[:, :, : query.shape[2]] for x in (key, value))
        if in_context_parallel():  # as in ``greenfast.use``
            return self._attend_sharded(query, k, v, mask, dropout, causal, scaling, kwargs, features), None
        explanation = self._explain(query, k, v, mask, dropout, causal, scaling, kwargs, features)
        if features and not explanation.taken:
            raise ValueError(_format_feature_refusal(module, kwargs, explanation.reason))
        self.routed.count(explanation)
        if explanation.taken:
            out = sdpa(
                query, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True,
                precision=explanation.precision, **features,
            )  # type: ignore[call-overload]  # fmt: skip
            return out.transpose(1, 2).contiguous(), None
        result: tuple[Tensor, None] = self.fallback(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return result

    def _attend_sharded(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
        scale: float | None, kwargs: dict[str, Any], features: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Compute (B, S, H, D) in a ``context_parallel``. Raises NotImplementedError for unsupported arguments."""
        for name in _FALLBACK_ONLY:
            if kwargs.get(name) is not None:
                raise NotImplementedError(f"{name}: it is not computed in a context_parallel")
        out: Tensor = sdpa(query, key, value, mask, dropout, causal, scale, True, precision=self.precision, **features)
        self.routed.count(CONTEXT_PARALLEL)
        return out.transpose(1, 2).contiguous()

    def _explain(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
        scale: float | None, kwargs: dict[str, Any], features: dict[str, Any],
    ) -> Explanation:  # fmt: skip
        for name in _FALLBACK_ONLY:
            if kwargs.get(name) is not None:
                return Explanation(TORCH, f"{name}: transformers' own function has it")
        precision, min_length = self.precision, self.min_length
        if features:  # there is no other implementation to be faster
            precision, min_length = "fp8" if precision == "auto" else precision, 0
        return explain(
            query, key, value, mask, dropout, causal, scale, True, precision=precision, min_length=min_length,
            **features,
        )  # fmt: skip


def _remove_repeats(mask: Any) -> Any:
    """Return a mask with one of each set of sequences, heads and queries that an expanded view repeats."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return mask
    for dim in range(3):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _parse_features(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``greenfast.sdpa`` for features that "sdpa" lacks. Raises ValueError for the others."""
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f'{type(module).__name__}: its attention has `{name}`, which attn_implementation="{NAME}" does not '
                f"compute; {_EAGER_HINT}"
            )
    return {ours: kwargs[name] for name, ours in _FEATURES.items() if kwargs.get(name) is not None}


def _format_feature_refusal(module: nn.Module, kwargs: dict[str, Any], reason: str) -> str:
    names = " and ".join(f"`{name}`" for name in _FEATURES if kwargs.get(name) is not None)
    return (
        f'{type(module).__name__}: its attention has {names}, which "sdpa" lacks, and attn_implementation="{NAME}" '
        f"does not compute this call: {reason}; {_EAGER_HINT}"
    )


def accelerate(
    model: Any, *, precision: AutoPrecision = "fp8", min_length: int | None = None, policy: Policy = Policy(),  # noqa: B008
) -> Accelerated:  # fmt: skip
    """Compute the attention of a transformers model by ``greenfast.attention_block``.

        accelerated = greenfast.integrations.transformers.accelerate(model)
        print(accelerated)
        model(**batch)
        accelerated.undo()

    Llama, Mistral, Qwen3, Gemma 3 and gpt-oss: in a forward pass of several tokens without earlier ones (training,
    scoring, a prompt with ``generate``) norm, RoPE, quantization and attention of a layer are one call. With a cache
    the keys that it takes are rotated by the model, in addition. All other calls, such as decoding, run the layer's own
    code with ``attn_implementation="greenfast"`` (``register_with_transformers``), as do other kinds of attention in
    the model. A call follows the rules of ``greenfast.explain`` with this ``precision`` and ``min_length``; with sinks
    it is computed here whatever its length, and has no gradients. policy: layers in 16 bits, by "sdpa"; there are no
    steps. The registration with transformers stays after ``undo``; no model uses it unless it is given the name.

    Returns the report, with ``undo``. Raises ValueError for models without a known attention, for those that
    ``register_with_transformers`` refuses, and for a policy that does not fit; TypeError for arguments of the wrong
    type; ImportError without transformers.
    """
    whole = getattr(model, "_orig_mod", model)
    if not isinstance(whole, nn.Module):
        raise TypeError(f"model: a {type(model).__name__}; a transformers model is needed")
    accelerated = Accelerated(precision, min_length, policy)
    if policy.first_steps or policy.last_steps:
        raise ValueError("policy: a transformers model has no denoising steps")
    for name, module in whole.named_modules():
        kind = type(module).__name__
        if kind not in _ATTENTIONS:
            if kind.endswith("Attention"):
                accelerated.left[name] = f"{kind}: its attention alone runs here"
            continue
        if "forward" in vars(module):
            accelerated.undo()
            raise ValueError(f"{name}: its forward was replaced already; undo that first")
        if name in policy.layers and hasattr(module, "sinks"):
            accelerated.undo()
            raise ValueError(f'policy: {name} has sinks, which "sdpa" lacks, so it cannot stay in 16 bits')
        module.forward = _build_forward(Layer(name, accelerated), module)
        accelerated.replace(name, _FUSED, functools.partial(delattr, module, "forward"))
    accelerated.finish(type(whole).__name__, _ATTENTIONS)
    try:
        _choose_implementation(accelerated, whole)
    except BaseException:
        accelerated.undo()
        raise
    return accelerated


def _choose_implementation(accelerated: Accelerated, model: Any) -> None:
    """Set ``attn_implementation="greenfast"``, for masks of booleans and for layers' own code."""
    configs = {id(x.config): x.config for x in model.modules() if hasattr(getattr(x, "config", None), "to_dict")}
    former = [(config, config._attn_implementation) for config in configs.values()]

    def restore() -> None:
        for config, name in former:
            config._attn_implementation = name

    accelerated.add_undo(restore)
    accelerated.routed = register_with_transformers(accelerated.precision, min_length=accelerated.min_length)
    model.set_attn_implementation(NAME)


def _build_forward(layer: Layer, module: Any) -> Any:
    """Return the forward of an attention module, bound to it, so that copies of the module have their own."""
    own = type(module).forward

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None,
        past_key_values: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        def run_own() -> Any:
            return own(
                self, hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask,
                past_key_values=past_key_values, **kwargs,
            )  # fmt: skip

        precision = ""
        sinks = getattr(self, "sinks", None)
        batch, rows, _ = hidden_states.shape
        mask = attention_mask if attention_mask is None else attention_mask[..., :rows]
        causal = mask is None and bool(kwargs.get("is_causal", self.is_causal))
        if layer.in_16_bits:
            return _run_in_16_bits(self, run_own)  # type: ignore[no-any-return]
        if rows > 1 and _is_prompt(self, position_embeddings, mask, past_key_values, kwargs):
            heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
            precision = layer.choose(
                hidden_states, (batch, heads, rows, self.head_dim), (batch, kv_heads, rows, self.head_dim), mask,
                causal, sinks, always=sinks is not None,
            )  # fmt: skip
        if not precision or (sinks is not None and torch.is_grad_enabled() and hidden_states.requires_grad):
            return run_own()  # type: ignore[no-any-return]
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (
            project(hidden_states).view(batch, rows, -1, self.head_dim).transpose(1, 2) for project in projections
        )
        options: dict[str, Any] = {"precision": precision, "attn_mask": mask, "is_causal": causal, "sinks": sinks}
        norms: list[Any] = [getattr(self, "q_norm", None), getattr(self, "k_norm", None)]
        if norms[0] is not None:
            plus = 1.0 if type(norms[0]).__name__ == "Gemma3RMSNorm" else 0.0
            weights = [norm.weight.float() + plus if plus else norm.weight for norm in norms]
            eps = getattr(norms[0], "eps", None) or norms[0].variance_epsilon
            options |= {"q_norm": weights[0], "k_norm": weights[1], "norm_eps": eps}
        cos, sin = position_embeddings
        if past_key_values is not None:
            rotate = vars(sys.modules[type(self).__module__])["apply_rotary_pos_emb"]
            normalized = key if norms[1] is None else norms[1](key)
            past_key_values.update(rotate(normalized, normalized, cos, sin)[1], value, self.layer_idx)
        width = cos.shape[-1] * (2 if "GptOss" in type(self).__name__ else 1)
        out = layer.attend(query, key, value, scale=self.scaling, rope=(cos, sin), rope_dim=width, **options)
        return self.o_proj(out.transpose(1, 2).reshape(batch, rows, -1)), None

    return types.MethodType(forward, module)


def _run_in_16_bits(module: Any, run: Any) -> Any:
    """Run a layer's own code with transformers' "sdpa". All layers have its masks."""
    config = module.config
    config._attn_implementation = "sdpa"
    try:
        return run()
    finally:
        config._attn_implementation = NAME


def _is_prompt(module: Any, angles: Any, mask: Any, cache: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call attends to its own tokens alone, with arguments that are known."""
    if angles is None or not (mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool)):
        return False
    if (module.training and module.attention_dropout) or getattr(module, "attn_logit_softcapping", None):
        return False
    if any(kwargs.get(name) is not None for name in (*_FALLBACK_ONLY, *_UNSUPPORTED, "cu_seq_lens_q")):
        return False
    if cache is None:
        return True
    length = cache.get_seq_length(module.layer_idx)
    return isinstance(length, int) and length == 0
