"""Tiny models of transformers with accelerate, on the CPU, against the same models without."""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.integrations import models
from greenfast.integrations.transformers import accelerate

library: Any = importlib.import_module("transformers")
COMPILE: Any = torch.compile
LAYERS = 2
SIZES = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=128, pad_token_id=0, max_position_embeddings=256,
)  # fmt: skip
#: Name -> classes of config and model, and other sizes. Windows are shorter than the texts.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=24)),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma3": (
        "Gemma3TextConfig", "Gemma3ForCausalLM",
        dict(sliding_window=24, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=16),
    ),
    "gpt_oss": (
        "GptOssConfig", "GptOssForCausalLM",
        dict(
            sliding_window=24, layer_types=["sliding_attention", "full_attention"], num_local_experts=2,
            num_experts_per_tok=2,
        ),
    ),
}  # fmt: skip
#: Relative error of attention in FP8: 0.053 for Gaussian inputs (evidence/h200/peers). Errors of layers can add up.
LAYER_LIMIT = 0.053
LIMIT = LAYERS * LAYER_LIMIT


@functools.cache
def build(name: str) -> Any:
    config, model, more = MODELS[name]
    torch.manual_seed(0)
    made = getattr(library, model)(getattr(library, config)(**SIZES, **more)).to(torch.bfloat16).eval()
    made.set_attn_implementation("eager" if name == "gpt_oss" else "sdpa")  # what transformers chooses itself
    for label, parameter in made.named_parameters():
        if label.endswith(("q_norm.weight", "k_norm.weight")):
            shift = 1.0 if name == "gemma3" else 0.0  # its weights are stored minus 1
            torch.nn.init.uniform_(parameter, 0.5 - shift, 1.5 - shift)
        if label.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return made


def make_tokens(rows: int = 60) -> Tensor:
    return torch.randint(1, 128, (2, rows), generator=torch.Generator().manual_seed(0))


def make_padding() -> Tensor:
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :17] = 0
    return mask


def run(model: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(make_tokens(), use_cache=False, **more).logits
    return logits.float()


def error(result: Tensor, wanted: Tensor) -> float:
    return float(((result.float() - wanted.float()).norm() / wanted.float().norm()).detach())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_agrees_with_itself(name: str) -> None:
    model = build(name)
    plain, padded = run(model), run(model, attention_mask=make_padding())
    former = model.config._attn_implementation
    kept = make_padding().bool()
    with accelerate(model, min_length=0) as accelerated:
        assert len(accelerated.replaced) == LAYERS
        assert 0.0 < error(run(model), plain) < LIMIT
        assert accelerated.routed.taken == LAYERS
        assert error(run(model, attention_mask=make_padding())[kept], padded[kept]) < LIMIT
        assert accelerated.routed.taken == 2 * LAYERS
    assert model.config._attn_implementation == former
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(run(model), plain)


@pytest.mark.parametrize("name", MODELS)
def test_float32_attention_in_place_of_fp8_changes_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, angles, masks, scales and sinks are the model's; what remains are roundings to bfloat16."""

    def attend(query: Any, key: Any, value: Any, **options: Any) -> Tensor:
        return models.attend_exactly(query, key, value, **options).bfloat16()

    monkeypatch.setattr(models, "_ATTENTION_BLOCK", attend)
    model = build(name)
    plain, padded = run(model), run(model, attention_mask=make_padding())
    kept = make_padding().bool()
    with accelerate(model, min_length=0):
        assert error(run(model), plain) < 0.012
        assert error(run(model, attention_mask=make_padding())[kept], padded[kept]) < 0.012


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_fills_the_cache_with_the_models_keys(name: str) -> None:
    model = build(name)

    def prefill() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        with torch.no_grad():
            first = model(make_tokens(20))
            second = model(make_tokens(1), past_key_values=first.past_key_values)
        layers = first.past_key_values.layers
        return [first.logits, second.logits], [layer.keys for layer in layers], [layer.values for layer in layers]

    logits, keys, values = prefill()
    with accelerate(model, min_length=0) as accelerated:
        mine, my_keys, my_values = prefill()
    assert accelerated.routed.taken >= LAYERS
    assert torch.equal(keys[0], my_keys[0])
    assert torch.equal(values[0], my_values[0])
    for one, other in zip([*mine, *my_keys, *my_values], [*logits, *keys, *values], strict=True):
        assert error(one, other) < LIMIT


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_gradients_and_graphs(name: str) -> None:
    model = build(name)
    weights = [x for key, x in model.named_parameters() if "layers.0" in key and ("norm" in key or "q_proj" in key)]

    def differentiate() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(make_tokens(), labels=make_tokens(), use_cache=False).loss, weights)

    plain = differentiate()
    with accelerate(model, min_length=0):
        mine = differentiate()
        if name == "qwen3":
            eager = run(model)
            assert error(run(COMPILE(model, backend="aot_eager")), eager) < 1e-2
    for one, other in zip(mine, plain, strict=True):
        assert error(one, other) < 3 * LIMIT


def test_layers_in_16_bits_and_errors() -> None:
    model = build("qwen3")
    plain = run(model)
    measured = greenfast.calibrate(model, dict(input_ids=make_tokens(), use_cache=False))
    assert set(measured.layers) == {f"model.layers.{i}.self_attn" for i in range(LAYERS)}
    assert all(0.0 < x < LAYER_LIMIT for x in measured.layers.values())
    assert measured.policy == greenfast.Policy()
    all_kept = greenfast.calibrate(model, (make_tokens(),), limit=1e-5).policy
    with accelerate(model, min_length=0, policy=all_kept) as accelerated:
        assert torch.equal(run(model), plain)
    assert accelerated.routed.taken == 0
    assert torch.equal(run(model), plain)


def test_a_copy_of_an_accelerated_model_has_its_own_layers() -> None:
    model = build("llama")
    with accelerate(model, min_length=0):
        expected = run(model)
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data.mul_(2.0)
        try:
            assert torch.equal(run(twin), expected)
        finally:
            for parameter in model.parameters():
                parameter.data.mul_(0.5)


def test_refusals_name_what_is_not_known() -> None:
    bert = library.BertModel(
        library.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    )
    with pytest.raises(ValueError, match=r"BertModel: no attention that is known\. Known: LlamaAttention, MistralAtt"):
        accelerate(bert)
    model = build("gpt_oss")
    with pytest.raises(ValueError, match=r"policy: model\.layers\.0\.self_attn has sinks"):
        accelerate(model, policy=greenfast.Policy(("model.layers.0.self_attn",)))
    with pytest.raises(ValueError, match=r"policy: no layers layer9 in GptOssForCausalLM"):
        accelerate(model, policy=greenfast.Policy(("layer9",)))
    with pytest.raises(ValueError, match="policy: a transformers model has no denoising steps"):
        accelerate(model, policy=greenfast.Policy(last_steps=1))
    with pytest.raises(TypeError, match="model: a str"):
        accelerate("llama")
    with pytest.raises(TypeError, match="layers: 'x'; a collection"):
        greenfast.Policy("x")
    with pytest.raises(ValueError, match="precision: 'fp4'"):
        accelerate(model, precision="fp4")  # type: ignore[arg-type]
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(ValueError, match="batch: it ran none"):
        greenfast.calibrate(build("llama"), (make_tokens(1),))
    with accelerate(model), pytest.raises(ValueError, match="its forward was replaced already"):
        accelerate(model)
