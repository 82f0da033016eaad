"""Hugging Face transformers with attn_implementation="greenfast": a small Llama, and calls left to transformers."""

from __future__ import annotations

import copy
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import greenfast
from greenfast.integrations import transformers as integration
from greenfast.ops import context_stack
from greenfast.ops.routing import Routed

library: Any = importlib.import_module("transformers")
LAYERS = 2


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    greenfast.register_with_transformers()
    config = library.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, pad_token_id=0,
    )  # fmt: skip
    return library.LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(1, 256, (2, 100), generator=torch.Generator().manual_seed(0))


def logits(model: Any, tokens: Tensor, attention: str, **more: Any) -> Tensor:
    model.set_attn_implementation(attention)
    with torch.no_grad():
        result: Tensor = model(tokens, **more).logits.float()
    return result


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_llama_agrees_with_its_sdpa(llama: Any, tokens: Tensor, with_mask: bool, precision: Any) -> None:
    """A mask of ones counts as no mask: transformers omits it."""
    more = {"attention_mask": torch.ones_like(tokens)} if with_mask else {}
    routed = greenfast.register_with_transformers(precision, min_length=0)
    result = logits(llama, tokens, "greenfast", **more)
    assert (routed.taken, routed.fallen_back) == (LAYERS, {})
    # Each layer adds attention to its input; attention's error in FP8 is 0.053 (evidence/h200/peers).
    assert error(result, logits(llama, tokens, "sdpa", **more)) < 0.053


def test_heads_that_queries_share_are_not_repeated(llama: Any, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = []

    def sdpa(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        heads.append((query.shape[1], key.shape[1], value.shape[1]))
        out: Tensor = greenfast.sdpa(query, key, value, **more)
        return out

    monkeypatch.setattr(integration, "sdpa", sdpa)
    greenfast.register_with_transformers(min_length=0)
    logits(llama, tokens, "greenfast")
    assert heads == [(4, 2, 2)] * LAYERS


def test_a_padded_batch_is_taken(llama: Any, tokens: Tensor) -> None:
    mask = torch.ones_like(tokens)
    mask[0, :30] = 0
    routed = greenfast.register_with_transformers(min_length=0)
    result = logits(llama, tokens, "greenfast", attention_mask=mask)
    assert (routed.taken, routed.fallen_back) == (LAYERS, {})
    wanted = logits(llama, tokens, "sdpa", attention_mask=mask)
    assert 1e-3 < error(result[mask > 0], wanted[mask > 0]) < 0.053


def test_a_window_is_taken(tokens: Tensor) -> None:
    routed = greenfast.register_with_transformers(min_length=0)
    config = library.MistralConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, sliding_window=101, attn_implementation="greenfast",
    )  # fmt: skip
    model = library.MistralForCausalLM(config).to(torch.bfloat16).eval()
    whole = logits(model, tokens, "greenfast")
    model.config.sliding_window = 50
    result = logits(model, tokens, "greenfast")
    assert routed.taken == 2
    wanted = logits(model, tokens, "sdpa")
    assert error(result, wanted) < 0.053 < error(whole, wanted)


def test_activation_checkpoints_recompute_in_fp8(llama: Any, tokens: Tensor) -> None:
    routed = greenfast.register_with_transformers(min_length=0)
    model = copy.deepcopy(llama).train()
    model.set_attn_implementation("greenfast")
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens).loss.backward()
    assert routed.taken == 2 * LAYERS
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_takes_the_prompt_and_leaves_decoding(llama: Any, tokens: Tensor, cache: str) -> None:
    routed = greenfast.register_with_transformers(min_length=16)
    llama.set_attn_implementation("greenfast")
    result = llama.generate(
        tokens, max_new_tokens=8, min_new_tokens=8, do_sample=False, cache_implementation=cache, disable_compile=True
    )
    assert result.shape == (2, 108)
    assert torch.equal(result[:, :100], tokens)
    assert routed.taken == LAYERS
    assert routed.fallen_back.total() == 7 * LAYERS
    assert [reason.split(":")[0] for reason in routed.fallen_back] == ["query"]


def test_a_cache_in_fp8_continues_as_the_whole(llama: Any, tokens: Tensor) -> None:
    """The second part of a prompt has a mask of booleans."""
    routed = greenfast.register_with_transformers(min_length=0)
    whole = logits(llama, tokens, "sdpa")
    llama.set_attn_implementation("greenfast")
    with torch.no_grad():
        first = llama(tokens[:, :60], use_cache=True)
        second = llama(tokens[:, 60:], past_key_values=first.past_key_values).logits.float()
    assert (routed.taken, routed.fallen_back) == (2 * LAYERS, {})
    assert error(second, whole[:, 60:]) < 0.053


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="transformers makes masks where it cannot tell compiling from exporting"
)
@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled(llama: Any, tokens: Tensor, padded: bool) -> None:
    torch._dynamo.reset()
    greenfast.register_with_transformers(min_length=0)
    mask = torch.ones_like(tokens)
    mask[0, :30] = 0
    more = {"attention_mask": mask} if padded else {}
    rows = mask > 0 if padded else slice(None)
    wanted = logits(llama, tokens, "greenfast", **more)[rows]
    with torch.no_grad():
        compiled: Any = torch.compile(llama, backend="aot_eager", fullgraph=True)
        result = compiled(tokens, **more).logits.float()[rows]
    assert error(result, wanted) < 1e-3 < error(logits(llama, tokens, "sdpa", **more)[rows], wanted)


class Layer(nn.Module):
    """The attributes of a layer that transformers passes on."""

    def __init__(self, model_type: str = "llama", **more: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=model_type)
        self.num_key_value_groups = 2
        for name, value in more.items():
            setattr(self, name, value)


def inputs(q_len: int = 20, keys: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, q_len, 32), (2, 2, keys, 32), (2, 2, keys, 32))
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def attend(layer: Layer, tensors: list[Tensor], attention_mask: Tensor | None = None, **more: Any) -> Tensor:
    """(B, H, S, D), as PyTorch's attention returns it."""
    result, weights = library.AttentionInterface()["greenfast"](layer, *tensors, attention_mask, **more)
    assert weights is None
    assert result.is_contiguous(), "the layer views it as (B, S, H * D)"
    out: Tensor = result.transpose(1, 2)
    return out


@pytest.mark.parametrize(
    ("attributes", "sizes", "more", "causal"),
    [
        ({}, {}, {}, True),
        ({"is_causal": True}, {}, {"is_causal": None}, True),
        ({"is_causal": False}, {}, {}, False),
        ({"is_causal": False}, {}, {"is_causal": True}, True),
        ({"is_causal": True}, {}, {"is_causal": False, "scaling": 0.7}, False),
        ({"is_causal": True}, {"q_len": 1}, {}, False),
        ({"is_causal": True}, {"keys": 33}, {"scaling": 0.1}, True),
    ],
    ids=str,
)
def test_the_mask_and_scale_that_the_layer_means(
    attributes: dict[str, Any], sizes: dict[str, int], more: dict[str, Any], causal: bool
) -> None:
    routed = greenfast.register_with_transformers(min_length=0)
    q, k, v = inputs(**sizes)
    result = attend(Layer(**attributes), [q, k, v], **more)
    assert routed.taken == 1
    keys = q.shape[2] if causal else k.shape[2]  # unfilled keys of a static cache do not count
    choices: dict[str, Any] = {"is_causal": causal, "scale": more.get("scaling"), "enable_gqa": True}
    assert torch.equal(result, greenfast.sdpa(q, k[:, :, :keys], v[:, :, :keys], **choices))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, **choices)
    assert error(result.float(), exact.float()) < 0.08


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"dropout": 0.1}, "dropout_p"),
        ({"attention_mask": torch.ones(20, 20).bfloat16()}, "attn_mask"),
        ({"position_bias": torch.ones(1, 4, 20, 20).bfloat16()}, "position_bias: transformers' own function has it"),
        ({"cache": object()}, "cache: transformers' own function has it"),
    ],
    ids=["dropout", "mask", "position_bias", "cache"],
)
def test_what_is_left_to_transformers(more: dict[str, Any], reason: str) -> None:
    routed = greenfast.register_with_transformers(min_length=0)
    torch.manual_seed(0)
    result = attend(Layer(), inputs(), **more)
    assert routed.taken == 0
    assert [saved.startswith(reason) for saved in routed.fallen_back] == [True]
    torch.manual_seed(0)
    wanted = library.AttentionInterface()["sdpa"](Layer(), *inputs(), **{"attention_mask": None, **more})[0]
    assert torch.equal(result, wanted.transpose(1, 2))


def attend_exactly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softcap: float | None = None, s_aux: Tensor | None = None
) -> Tensor:
    """Attention in float64, with a cap of the scores and one more logit per head without a value."""
    q, k, v = q.double(), k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(mask.logical_not(), -torch.inf)
    sinks = torch.full((q.shape[1],), -torch.inf) if s_aux is None else s_aux
    last = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, last), -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("precision", ["fp8", "int8", "auto"])
@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "features",
    [{"softcap": 1.5}, {"s_aux": torch.tensor([3.0, -2.0, 0.0, 5.0])}, {"softcap": 1.5, "s_aux": torch.ones(4)}],
    ids=["softcap", "s_aux", "both"],
)
def test_soft_caps_and_sinks_are_computed_whatever_the_length(
    features: dict[str, Any], masked: bool, q_len: int, precision: Any
) -> None:
    routed = greenfast.register_with_transformers(precision)  # by its rules PyTorch computes such lengths
    q, k, v = inputs(q_len)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()[20 - q_len :][None, None]
    mask = mask & (torch.arange(20) > 2) | torch.eye(20, dtype=torch.bool)[20 - q_len :] if masked else mask
    result = attend(Layer(), [q, k, v], mask if masked else None, **features)
    assert (routed.taken, routed.fallen_back) == (1, {})
    wanted = attend_exactly(q, k, v, mask, **features)
    assert error(result.double(), wanted) < 0.08
    assert error(attend_exactly(q, k, v, mask), wanted) > 0.1, "they matter"


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"dropout": 0.1}, "dropout_p: the kernels have no dropout"),
        ({"attention_mask": torch.zeros(20, 20).bfloat16() - 1}, "attn_mask: numbers to add"),
        ({"position_bias": torch.ones(1, 4, 20, 20).bfloat16()}, "position_bias"),
        ({"cache": object()}, "cache"),
        ({"scaling": -1.0}, "scale: the kernels take positive"),
    ],
    ids=["dropout", "mask", "position_bias", "cache", "scaling"],
)
def test_soft_caps_and_sinks_are_never_left_to_sdpa(name: str, more: dict[str, Any], reason: str) -> None:
    """It has neither: it ignores ``s_aux``."""
    routed = greenfast.register_with_transformers()
    feature = {"softcap": 30.0, "s_aux": torch.ones(4)}[name]
    with pytest.raises(ValueError, match=rf'its attention has `{name}`, which "sdpa" lacks, .*{reason}.*eager'):
        attend(Layer(), inputs(), **{name: feature, **more})
    assert (routed.taken, routed.fallen_back) == (0, {})


def test_soft_caps_and_sinks_without_a_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(*args: Any, **more: Any) -> greenfast.Explanation:
        return greenfast.explain(*args, **more, target="sm_89")

    monkeypatch.setattr(integration, "explain", explain)
    greenfast.register_with_transformers()
    with pytest.raises(ValueError, match=r"`s_aux`, .*their kernels are for Hopper GPUs; use .*eager"):
        attend(Layer(), inputs(), s_aux=torch.ones(4))


def test_sinks_have_gradients() -> None:
    """Also if nothing else needs them."""
    greenfast.register_with_transformers()
    sinks = torch.ones(4, requires_grad=True)
    torch.autograd.backward(attend(Layer(), inputs(), s_aux=sinks).sum())
    assert sinks.grad is not None
    assert sinks.grad.norm() > 0


def test_keys_that_are_padding_change_nothing() -> None:
    """A mask that is the same for all queries, as transformers makes for encoders."""
    greenfast.register_with_transformers(min_length=0)
    q, k, v = inputs()
    kept = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    kept[0, ..., 12:] = kept[1, ..., :5] = False
    mask = kept.expand(2, 1, 20, 20)
    result = attend(Layer(is_causal=False), [q, k, v], mask)
    assert error(result.double(), attend_exactly(q, k, v, mask)) < 0.08
    k, v = (torch.where(kept.mT, x, torch.inf) for x in (k, v))
    assert torch.equal(result, attend(Layer(is_causal=False), [q, k, v], mask))


def test_masks_of_padding_alone_are_views() -> None:
    greenfast.register_with_transformers(min_length=0)
    masking = importlib.import_module("transformers.masking_utils")
    padding = torch.ones(2, 20, dtype=torch.long)
    more = {"inputs_embeds": torch.zeros(2, 20, 8)}
    configs = [library.BertConfig(attn_implementation=name) for name in ("greenfast", "sdpa")]
    assert masking.create_bidirectional_mask(configs[0], attention_mask=padding, **more) is None
    padding[0, 15:] = 0
    mine, wanted = (masking.create_bidirectional_mask(c, attention_mask=padding, **more) for c in configs)
    assert mine.stride(2) == 0
    assert torch.equal(mine, wanted)
    mine, wanted = (
        masking.create_bidirectional_mask(
            c, attention_mask=padding, encoder_hidden_states=more["inputs_embeds"], inputs_embeds=torch.zeros(2, 7, 8)
        )
        for c in configs
    )
    assert mine.shape == (2, 1, 7, 20)
    assert torch.equal(mine, wanted)


@pytest.mark.parametrize("name", ["sinks", "indices", "block_indices"])
def test_attention_with_more_than_products_is_refused(name: str) -> None:
    routed = greenfast.register_with_transformers(min_length=0)
    more: dict[str, Any] = {name: 30.0}
    with pytest.raises(ValueError, match=f"Layer: its attention has `{name}`.*eager"):
        attend(Layer(), inputs(), **more)
    more = {name: None}
    attend(Layer(), inputs(), **more)
    assert routed.taken == 1


def test_nothing_is_left_to_transformers_in_a_context_parallel(llama: Any, tokens: Tensor) -> None:
    """Its own attention would see the rows of one rank alone."""
    taken = []

    def of_all_ranks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *more: Any) -> Tensor:
        if mask is not None:
            raise NotImplementedError("attn_mask: in a context_parallel")
        taken.append(more[1])
        return torch.zeros_like(query)

    context_stack.ACTIVE.append(SimpleNamespace(size=2, sdpa=of_all_ranks))
    try:
        routed = greenfast.register_with_transformers()  # by its rules PyTorch computes 100 tokens
        logits(llama, tokens, "greenfast")
        assert (routed.taken, taken) == (LAYERS, [True] * LAYERS)
        padded = torch.ones_like(tokens)
        padded[1, :10] = 0
        with pytest.raises(NotImplementedError, match="attn_mask: in a context_parallel"):
            logits(llama, tokens, "greenfast", attention_mask=padded)
    finally:
        context_stack.ACTIVE.pop()


def test_attention_that_is_causal_by_mistake_is_not() -> None:
    """Transformers' own "sdpa" believes the layer's attribute, and differs from "eager"."""
    greenfast.register_with_transformers(min_length=0)
    layer = type("Phi4MultimodalVisionAttention", (Layer,), {})(is_causal=True)
    q, k, v = inputs()
    assert torch.equal(attend(layer, [q, k, v]), greenfast.sdpa(q, k, v, enable_gqa=True))


def test_registering_again_replaces(llama: Any, tokens: Tensor) -> None:
    first = greenfast.register_with_transformers(min_length=0)
    second = greenfast.register_with_transformers()
    assert isinstance(second, Routed)
    logits(llama, tokens, "greenfast")
    assert first.taken == 0
    assert first.fallen_back.total() == 0
    assert second.fallen_back.total() == LAYERS, "100 tokens are fewer than the default takes"
    assert "fallen_back={'such calls have not been measured" in repr(second)


def test_use_routes_an_unchanged_model(llama: Any, tokens: Tensor) -> None:
    with greenfast.use(min_length=0) as routed:
        result = logits(llama, tokens, "sdpa")
    greenfast.register_with_transformers(min_length=0)
    assert torch.equal(result, logits(llama, tokens, "greenfast"))
    assert routed.taken == LAYERS


def test_an_unknown_precision() -> None:
    with pytest.raises(ValueError, match="precision: 'fp4'; allowed are 'fp8', 'int8'"):
        greenfast.register_with_transformers("fp4")  # type: ignore[arg-type]


@pytest.mark.parametrize("found", [None, SimpleNamespace()], ids=["missing", "old"])
def test_without_transformers_the_remedy_is_named(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", found)
    with pytest.raises(ImportError, match=r"4\.56 or later: pip install '\.\[transformers\]' in a clone of greenfast"):
        greenfast.register_with_transformers()
