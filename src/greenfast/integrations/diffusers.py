"""Attention processors for diffusers: norm, RoPE, quantization and attention of a layer in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from greenfast.integrations.models import Accelerated, Layer, Policy
from greenfast.ops.quantized import AutoPrecision

#: Classes of transformers with known processors.
MODELS = (
    "FluxTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel", "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel", "CogVideoXTransformer3DModel", "QwenImageTransformer2DModel",
)  # fmt: skip
_NORMS = {"RMSNorm": "rms", "LayerNorm": "layer", "FP32LayerNorm": "layer"}
_FUSED = "norm, RoPE, quantization and attention by attention_block"


def accelerate(
    model: Any, *, precision: AutoPrecision = "fp8", min_length: int | None = None, policy: Policy = Policy(),  # noqa: B008
) -> Accelerated:  # fmt: skip
    """Replace the attention of a diffusers pipeline or transformer by ``greenfast.attention_block``.

        accelerated = greenfast.integrations.diffusers.accelerate(pipe)
        print(accelerated)
        pipe("a fox in the snow")
        accelerated.undo()

    Flux, Stable Diffusion 3, Wan 2.x, HunyuanVideo, LTX-Video, CogVideoX and Qwen-Image: projections stay modules of
    the model, with their LoRA weights and offloading; norm, RoPE and attention run here. A call follows the rules of
    ``greenfast.explain`` with this ``precision`` and ``min_length``: attention to a short text, for example, stays with
    PyTorch. Calls that attention_block does not compute (masks that are added to scores, attention to a reference
    image in Wan) run the layer's own processor, with its attention routed as by ``greenfast.use``.
    policy: layers and denoising steps in 16 bits. Steps need a pipeline with ``step_index`` in its scheduler.

    Returns the report, with ``undo``. Raises ValueError for other models and for a policy that does not fit, and
    TypeError for arguments of the wrong type.
    """
    parts = _find_transformers(model)
    accelerated = Accelerated(precision, min_length, policy)
    accelerated.get_step = _find_step(model, policy)
    for prefix, transformer in parts.items():
        for name, module in transformer.named_modules():
            if hasattr(module, "get_processor"):
                _replace(accelerated, f"{prefix}{name}", module)
    accelerated.finish(type(next(iter(parts.values()))).__name__, MODELS)
    return accelerated


def _find_transformers(model: Any) -> dict[str, nn.Module]:
    """Return the transformers of a pipeline or a transformer, by the prefix of their layers' names."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.Module):
        parts = {"": model}
    else:
        named = ((name, getattr(model, name, None)) for name in ("transformer", "transformer_2"))
        parts = {f"{name}.": getattr(x, "_orig_mod", x) for name, x in named if x is not None}
        if len(parts) == 1:
            parts = {"": next(iter(parts.values()))}
    for part in parts.values():
        if type(part).__name__ not in MODELS:
            raise ValueError(
                f"{type(part).__name__}: not known. Known: {', '.join(MODELS)}. `with greenfast.use():` routes any "
                "model"
            )
    if not parts:
        raise TypeError(f"model: a {type(model).__name__}; a diffusers pipeline with a transformer, or one, is needed")
    return parts


def _find_step(model: Any, policy: Policy) -> Callable[[], tuple[int, int]] | None:
    """Return a function that returns the current denoising step and the number of steps; None without a scheduler.

    Raises ValueError if the policy names steps, and the scheduler has no step_index.
    """
    scheduler = getattr(model, "scheduler", None)
    if not hasattr(scheduler, "step_index"):
        if policy.first_steps or policy.last_steps:
            raise ValueError(
                f"policy: steps need a pipeline with a scheduler that has step_index; {type(model).__name__} has "
                f"{'none' if scheduler is None else type(scheduler).__name__}"
            )
        return None

    def get_step() -> tuple[int, int]:
        return scheduler.step_index or 0, len(scheduler.timesteps)  # type: ignore[union-attr]

    return get_step


def _replace(accelerated: Accelerated, name: str, module: Any) -> None:
    original = module.processor
    kind = type(original).__name__
    if isinstance(original, Processor):
        raise ValueError(f"{name}: it is accelerated already; undo that first")
    processor = PROCESSORS.get(kind)
    if processor is None:
        accelerated.left[name] = f"{kind} is not known"
        return
    fault = _find_fault(module, original)
    if fault:
        accelerated.left[name] = fault
        return
    module.processor = processor(Layer(name, accelerated), original)
    accelerated.replace(name, _FUSED, lambda: setattr(module, "processor", original))


def _find_fault(module: Any, original: Any) -> str:
    """Return why a layer with a known processor cannot be replaced; empty if it can."""
    if getattr(original, "_parallel_config", None) is not None:
        return "diffusers' context parallelism is enabled"
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        norm = getattr(module, name, None)
        if norm is None:
            continue
        if type(norm).__name__ not in _NORMS:
            return f"{name}: a {type(norm).__name__}; known are {', '.join(_NORMS)}"
        if norm.eps != (getattr(module, "norm_q", None) or norm).eps:
            return f"{name}: eps is {norm.eps}, but norm_q.eps is {module.norm_q.eps}"
        if norm.eps is None or (type(norm).__name__ == "RMSNorm" and getattr(norm, "bias", None) is not None):
            return f"{name}: without eps, or with a bias"
    return ""


class Part(NamedTuple):
    """Q, K and V (B, H, S, D) of a part of a sequence, its norms and its tables."""

    query: Tensor
    key: Tensor
    value: Tensor
    q_norm: Any
    k_norm: Any
    rope: Any = None


class Processor:
    """A processor of diffusers that computes a layer here, or passes it to the layer's own processor.

    Subclasses have ``compute``, and if the arguments have other names, ``__call__``: diffusers reads its signature.
    """

    _attention_backend = None
    _parallel_config = None
    #: Whether text and image tokens attend to each other; else queries attend to the text, if there is one.
    joint = True

    def __init__(self, layer: Layer, original: Any) -> None:
        self.layer = layer
        self.original = original

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        """Compute the layer."""
        text, mask, rope = encoder_hidden_states, attention_mask, image_rotary_emb
        keywords = dict(encoder_hidden_states=text, attention_mask=mask, image_rotary_emb=rope)
        return self.run(attn, hidden_states, text, mask, rope, keywords)

    def run(
        self, attn: Any, hidden: Tensor, text: Tensor | None, mask: Any, rope: Any, keywords: dict[str, Any]
    ) -> Any:
        """Compute a layer. keywords: for its own processor, the names of its arguments and their values."""
        layer = self.layer
        precision = ""
        usable = mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 4)
        if usable and not layer.is_kept() and self.supports(attn, text, rope):
            width = _get_head_dim(attn)
            rows = hidden.shape[1] + (text.shape[1] if self.joint and text is not None else 0)
            keys = rows if self.joint or text is None else text.shape[1]
            batch, heads = hidden.shape[0], attn.heads
            precision = layer.choose(hidden, (batch, heads, rows, width), (batch, heads, keys, width), mask)
        if not precision:
            return layer.run_original(lambda: self.original(attn, hidden, **keywords))
        return self.compute(attn, hidden, text, rope, {"precision": precision, "attn_mask": mask})

    def supports(self, attn: Any, text: Tensor | None, rope: Any) -> bool:
        """Return whether ``compute`` supports a call."""
        return True

    def compute(self, attn: Any, hidden: Tensor, text: Tensor | None, rope: Any, options: dict[str, Any]) -> Any:
        """Compute the layer's result. options: for ``attention_block``."""
        raise NotImplementedError

    def attend(self, attn: Any, parts: list[Part], options: dict[str, Any]) -> list[Tensor]:
        """Return attention of parts as one sequence, (B, S, H x D) of each part."""
        norm = next((getattr(attn, name) for name in ("norm_q", "norm_added_q") if getattr(attn, name, None)), None)
        if norm is not None:
            kind = _NORMS[type(norm).__name__]
            options = {**options, "norm": kind, "norm_eps": norm.eps}
            for name, index in (("q_norm", 3), ("k_norm", 4)):
                weights = [_read_norm(part[index], part.query.shape[1], part.query.shape[3]) for part in parts]
                options[name] = [weight for weight, _ in weights]
                if kind == "layer":
                    options[f"{name}_bias"] = [bias for _, bias in weights]
        if len(parts) == 1:
            options = {name: x[0] if isinstance(x, list) and name != "attn_mask" else x for name, x in options.items()}
            one = parts[0]
            if one.rope is not None:
                options |= {"rope": one.rope, "rope_interleaved": True}
            out = self.layer.attend(one.query, one.key, one.value, **options)
            return [out.transpose(1, 2).flatten(2)]
        ropes = [part.rope for part in parts]
        columns = list(zip(*parts, strict=True))
        if "rope" not in options:
            options = {**options, "rope": ropes, "rope_interleaved": True}
        out = self.layer.attend(list(columns[0]), list(columns[1]), list(columns[2]), **options)
        return list(torch.split(out.transpose(1, 2).flatten(2), [part.query.shape[2] for part in parts], 1))


def _get_head_dim(attn: Any) -> int:
    return int(getattr(attn, "head_dim", None) or attn.inner_dim // attn.heads)


def _read_norm(norm: Any, heads: int, head_dim: int) -> tuple[Any, Any]:
    """Return the weight (True without) and the bias of a norm; (H, D) if it is over all heads."""
    if norm is None:
        return None, None
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)

    def shape(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.numel() == head_dim else x.view(heads, head_dim)

    return (True if weight is None else shape(weight)), shape(bias)


def _split_heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # type: ignore[no-untyped-call, no-any-return]


def _project(attn: Any, hidden: Tensor, context: Tensor | None = None, rope: Any = None) -> Part:
    """Project tokens to Q, and the context or the same tokens to K and V: views of one tensor if they are packed."""
    fused = getattr(attn, "fused_projections", False)
    if fused and context is None and hasattr(attn, "to_qkv"):
        q, k, v = attn.to_qkv(hidden).chunk(3, -1)
    elif fused and context is not None and hasattr(attn, "to_kv"):
        q, (k, v) = attn.to_q(hidden), attn.to_kv(context).chunk(2, -1)
    else:
        keys = hidden if context is None else context
        q, k, v = attn.to_q(hidden), attn.to_k(keys), attn.to_v(keys)
    q, k, v = (_split_heads(x, _get_head_dim(attn)) for x in (q, k, v))
    return Part(q, k, v, getattr(attn, "norm_q", None), getattr(attn, "norm_k", None), rope)


def _project_text(attn: Any, text: Tensor, rope: Any = None) -> Part:
    """Project text tokens by projections of their own."""
    if getattr(attn, "fused_projections", False) and hasattr(attn, "to_added_qkv"):
        q, k, v = attn.to_added_qkv(text).chunk(3, -1)
    else:
        q, k, v = attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text)
    q, k, v = (_split_heads(x, _get_head_dim(attn)) for x in (q, k, v))
    return Part(q, k, v, getattr(attn, "norm_added_q", None), getattr(attn, "norm_added_k", None), rope)


def _pad_tables(rope: Any, before: int, after: int) -> Any:
    """Return tables with rows for tokens that are not rotated, before and after the rotated ones."""
    if rope is None:
        return None
    cos, sin = rope

    def pad(x: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, before, after), value=value)

    return pad(cos, 1.0), pad(sin, 0.0)


def _project_out(attn: Any, x: Tensor) -> Tensor:
    for module in attn.to_out:
        x = module(x)
    return x


class FluxProcessor(Processor):
    """Flux: text, then image; one pair of tables for the sequence."""

    def compute(self, attn: Any, hidden: Tensor, text: Tensor | None, rope: Any, options: dict[str, Any]) -> Any:
        """Compute text and image tokens, or in single blocks their one sequence."""
        if text is None:
            return self.attend(attn, [_project(attn, hidden, rope=rope)], options)[0]
        options = {**options, "rope": rope, "rope_interleaved": True}
        of_text, of_image = self.attend(attn, [_project_text(attn, text), _project(attn, hidden)], options)
        return _project_out(attn, of_image.contiguous()), attn.to_add_out(of_text.contiguous())


class SD3Processor(Processor):
    """Stable Diffusion 3: image, then text; no RoPE."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Compute the layer. Stable Diffusion 3 has no masks, and its own processor reads none."""
        keywords = dict(encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask)
        return self.run(attn, hidden_states, encoder_hidden_states, None, None, keywords)

    def compute(self, attn: Any, hidden: Tensor, text: Tensor | None, rope: Any, options: dict[str, Any]) -> Any:
        """Compute image and text tokens, or image tokens alone."""
        parts = [_project(attn, hidden), *([] if text is None else [_project_text(attn, text)])]
        outs = self.attend(attn, parts, options)
        if text is None:
            return _project_out(attn, outs[0])
        of_text = outs[1] if attn.context_pre_only else attn.to_add_out(outs[1])
        return _project_out(attn, outs[0]), of_text


class WanProcessor(Processor):
    """Wan: norms over all heads; self-attention with RoPE, and attention to a text."""

    joint = False

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        """Compute the layer."""
        keywords = dict(
            encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask, rotary_emb=rotary_emb
        )
        return self.run(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, keywords)

    def supports(self, attn: Any, text: Tensor | None, rope: Any) -> bool:
        """Return whether there is no second attention, to a reference image."""
        return attn.add_k_proj is None and (rope is None or rope[0].dim() == 4)

    def compute(self, attn: Any, hidden: Tensor, text: Tensor | None, rope: Any, options: dict[str, Any]) -> Any:
        """Compute self-attention, or attention to the text."""
        tables = None if rope is None else tuple(x[:, :, 0].float() for x in rope)
        (out,) = self.attend(attn, [_project(attn, hidden, text, tables)], options)
        return _project_out(attn, out)


class HunyuanVideoProcessor(Processor):
    """HunyuanVideo: image, then text; only image tokens are rotated. Single blocks project both together."""

    def compute(self, attn: Any, hidden: Tensor, text: Tensor | None, rope: Any, options: dict[str, Any]) -> Any:
        """Compute image and text tokens."""
        if text is not None and attn.add_q_proj is not None:
            of_image, of_text = self.attend(
                attn, [_project(attn, hidden, rope=rope), _project_text(attn, text)], options
            )
        else:
            rows = 0 if text is None else text.shape[1]
            both = hidden if text is None else torch.cat((hidden, text), 1)
            (out,) = self.attend(attn, [_project(attn, both, rope=_pad_tables(rope, 0, rows))], options)
            of_image, of_text = out[:, : hidden.shape[1]], out[:, hidden.shape[1] :]
            if text is None:
                return out, None
        if getattr(attn, "to_out", None) is not None:
            of_image = _project_out(attn, of_image)
        if getattr(attn, "to_add_out", None) is not None:
            of_text = attn.to_add_out(of_text)
        return of_image, of_text


class LTXVideoProcessor(Processor):
    """LTX-Video: norms over all heads, and tables with other angles in each head."""

    joint = False

    def compute(self, attn: Any, hidden: Tensor, text: Tensor | None, rope: Any, options: dict[str, Any]) -> Any:
        """Compute self-attention, or attention to the text."""
        tables = None if rope is None else tuple(_split_heads(x, _get_head_dim(attn)) for x in rope)
        (out,) = self.attend(attn, [_project(attn, hidden, text, tables)], options)
        return _project_out(attn, out)


class CogVideoXProcessor(Processor):
    """CogVideoX: text, then video, projected together; LayerNorm; only video tokens are rotated."""

    def compute(self, attn: Any, hidden: Tensor, text: Tensor | None, rope: Any, options: dict[str, Any]) -> Any:
        """Compute text and video tokens."""
        if text is None:
            raise ValueError("encoder_hidden_states: CogVideoX needs its text")
        rows = text.shape[1]
        both = torch.cat((text, hidden), 1)
        (out,) = self.attend(attn, [_project(attn, both, rope=_pad_tables(rope, rows, 0))], options)
        out = _project_out(attn, out)
        return out[:, rows:], out[:, :rows]


class QwenImageProcessor(Processor):
    """Qwen-Image: text, then image; complex tables of each, and a mask of the text's padding."""

    def __call__(  # type: ignore[override]
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None, attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        """Compute the layer. Its own processor refuses calls without a text and with ``attention_mask``."""
        keywords = dict(
            encoder_hidden_states=encoder_hidden_states, encoder_hidden_states_mask=encoder_hidden_states_mask,
            attention_mask=attention_mask, image_rotary_emb=image_rotary_emb,
        )  # fmt: skip
        mask = attention_mask
        if encoder_hidden_states is None or attention_mask is not None:
            return self.original(attn, hidden_states, **keywords)
        if encoder_hidden_states_mask is not None:
            kept = torch.nn.functional.pad(encoder_hidden_states_mask.bool(), (0, hidden_states.shape[1]), value=True)
            mask = kept[:, None, None]
        return self.run(attn, hidden_states, encoder_hidden_states, mask, image_rotary_emb, keywords)

    def compute(self, attn: Any, hidden: Tensor, text: Tensor | None, rope: Any, options: dict[str, Any]) -> Any:
        """Compute text and image tokens."""
        if text is None:
            raise AssertionError
        of_image, of_text = [None, None] if rope is None else [(x.real.float(), x.imag.float()) for x in rope]
        parts = [_project_text(attn, text, of_text), _project(attn, hidden, rope=of_image)]
        out_text, out_image = self.attend(attn, parts, options)
        return _project_out(attn, out_image.contiguous()), attn.to_add_out(out_text.contiguous())


#: diffusers' processors -> ours.
PROCESSORS: dict[str, type[Processor]] = {
    "FluxAttnProcessor": FluxProcessor,
    "JointAttnProcessor2_0": SD3Processor,
    "FusedJointAttnProcessor2_0": SD3Processor,
    "WanAttnProcessor": WanProcessor,
    "HunyuanVideoAttnProcessor2_0": HunyuanVideoProcessor,
    "LTXVideoAttnProcessor": LTXVideoProcessor,
    "CogVideoXAttnProcessor2_0": CogVideoXProcessor,
    "FusedCogVideoXAttnProcessor2_0": CogVideoXProcessor,
    "QwenDoubleStreamAttnProcessor2_0": QwenImageProcessor,
}
