"""The models of transformers that may use greenfast: only those that keep their masks with it."""

from __future__ import annotations

import copy
import importlib
import inspect
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import greenfast
from greenfast.integrations import transformers as integration
from greenfast.ops.routing import explain
from tests.ops import zoo

library: Any = importlib.import_module("transformers")
TYPES = sorted(library.models.auto.configuration_auto.CONFIG_MAPPING)
PARTS = 8  # of the sweep, for several processes
#: float32 models agree to 1e-6 where the attention is the same; a lost mask changes them by 1e-2 and more.
SAME = 1e-3
#: The ratio of the FP8 kernels' error to that of bfloat16 attention, on N(0, 1) inputs (docs/operator.md, Numbers).
FORMATS = 0.0538 / 0.0037
INDEPENDENT = 1e-6  # of a change elsewhere, apart from the order of sums
#: Models that would lose their masks, or be wrong when padded, and some that ask for "sdpa" by name.
UNFIT = (
    "bloom", "xglm", "codegen", "bigbird_pegasus", "nllb-moe", "pegasus_x", "gpt_neox_japanese", "led", "mvp", "git",
    "longformer", "splinter", "mpt", "canine", "mpnet", "rembert", "imagegpt", "falcon", "deepseek_v32",
)  # fmt: skip
FIT = (
    "llama", "qwen3", "mistral", "bert", "gpt2", "whisper", "gemma2", "gemma3_text", "gpt_oss", "t5gemma",
    "openai_privacy_filter", "vit", "t5", "deepseek_v3",
)  # fmt: skip
#: Models for which transformers' "sdpa" and "eager" differ; greenfast agrees with "sdpa", the default.
AS_SDPA = {
    "colpali": 'no token_type_ids reach PaliGemma: its prefix attends to all of itself with "sdpa", "eager" is causal',
    "doge": "before 5.23, no causal mask reaches its attention where there is no padding",
    "kyutai_speech_to_text": 'before 5.23, "eager" is not causal without a mask',
    "moshi": 'before 5.23, "eager" is not causal without a mask',
    "umt5": 'before 5.23, its decoder is not causal under "sdpa"',
    "blt_global_transformer": 'without the mask that its model gives it, "eager" is not causal',
}
REFUSAL = 'attn_implementation="greenfast" is not for this model: '


@dataclass(frozen=True)
class Verdict:
    """right, refused, refused by transformers, not built, not run, or wrong.

    Errors are relative (Frobenius), of the first output, against "eager" in float32; for ``padded`` the largest of
    valid rows in batches padded on either side. fp8: with greenfast. bf16: of "sdpa", or of "eager" for a model without
    "sdpa". left: calls that transformers computed. windowed: late tokens do not depend on the first one.
    """

    status: str
    detail: str = ""
    taken: int = 0
    left: int = 0
    windowed: bool = False
    fp8: float = 0.0
    bf16: float = 0.0
    padded_fp8: float = 0.0
    padded_bf16: float = 0.0


@contextmanager
def exact_attention() -> Iterator[None]:
    """Exact attention, also in float32, in place of FP8 arithmetic, so that only masks and scales can differ."""

    def explained(query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> greenfast.Explanation:
        return explain(query.bfloat16(), key.bfloat16(), value.bfloat16(), *args, **more)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, *, precision: str, softcap: float = 0.0,
        sinks: Tensor | None = None, **more: Any,
    ) -> Tensor:  # fmt: skip
        if softcap or sinks is not None:
            return attend_with_features(query, key, value, softcap, sinks, **more)
        return nn.functional.scaled_dot_product_attention(query, key, value, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "explain", explained)
        patch.setattr(integration, "sdpa", attend)
        yield


def attend_with_features(
    query: Tensor, key: Tensor, value: Tensor, softcap: float, sinks: Tensor | None, attn_mask: Tensor | None,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Exact attention with a cap of the scores and a logit without a value; 0 for a row that attends to no key."""
    assert enable_gqa
    k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = (query @ k.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(attn_mask.logical_not(), -torch.inf)
    last = scores.new_full((), -torch.inf) if sinks is None else sinks.view(1, -1, 1, 1).to(scores.dtype)
    weights = torch.cat((scores, last.expand(*scores.shape[:-1], 1)), dim=-1).softmax(-1)[..., :-1]
    return weights.nan_to_num(0.0) @ v


def judge(name: str) -> Verdict:
    """The verdict on a type of model with greenfast, compared with "eager"."""
    try:
        configs = list(zoo.variants(zoo.small(library.models.auto.configuration_auto.CONFIG_MAPPING[name])))
        kind = zoo.model_class(configs[0])
        with torch.device("meta"):
            size = sum(p.numel() for p in zoo.build(kind, configs[0], "eager").parameters())
        if size > zoo.MAX_PARAMETERS:
            return Verdict("not built", f"{size / 1e6:.0f} million parameters")
        zoo.build(kind, configs[0], "eager")
    except Exception as e:
        return Verdict("not built", repr(e))
    greenfast.register_with_transformers(min_length=0)
    try:
        zoo.build(kind, configs[0], "greenfast")
    except Exception as e:
        return Verdict("refused" if REFUSAL in str(e) else "refused by transformers", repr(e))
    failed = ""
    for config in configs:
        eager = zoo.build(kind, config, "sdpa" if name in AS_SDPA else "eager")
        for inputs in zoo.inputs(eager):
            try:
                wanted, again = zoo.outputs(eager, inputs), zoo.outputs(eager, inputs)
            except Exception as e:  # wrong inputs for this model
                failed = failed or repr(e)
                continue
            if wanted and all(x.isfinite().all() and torch.equal(x, y) for x, y in zip(wanted, again, strict=True)):
                return compare(kind, config, eager, inputs, wanted)
            failed = failed or "no numbers, or random ones"
    return Verdict("not run", failed)


def compare(kind: Any, config: Any, eager: Any, given: dict[str, Tensor], wanted: list[Tensor]) -> Verdict:
    """Compare in float32 with exact attention, for equality, and in bfloat16 with FP8."""
    routed = greenfast.register_with_transformers(min_length=0)
    try:
        with exact_attention():
            wrong = list(differences(zoo.build(kind, config, "greenfast"), eager, given, wanted))
    except ValueError as e:
        if "which attn_implementation=" not in str(e):
            raise
        return Verdict("refused", repr(e))
    taken, left = routed.taken, routed.fallen_back.total()
    if wrong or not taken:
        return Verdict("wrong" if wrong else "right", "; ".join(wrong), taken, left)
    own = "sdpa" if kind._supports_sdpa else "eager"
    models = [zoo.build(kind, config, name, torch.bfloat16) for name in ("greenfast", own)]
    padded = [
        (x, rows, zoo.outputs(eager, x)[0][rows])
        for _, rows, *both in padded_inputs(eager, given, wanted)
        for x in both
    ]
    rows = torch.ones(wanted[0].shape[:1], dtype=torch.bool)
    return Verdict(
        "right",
        "",
        taken,
        left,
        bool(independent_rows(eager, given, wanted[0], 0).any()),
        *(error(model, given, rows, wanted[0]) for model in models),
        *(max((error(model, *x) for x in padded), default=0.0) for model in models),
    )


def error(model: Any, given: dict[str, Tensor], rows: Tensor, wanted: Tensor) -> float:
    given = {name: x.bfloat16() if x.is_floating_point() else x for name, x in given.items()}
    result = zoo.outputs(model, given)[0][rows]
    return float((result - wanted).norm() / wanted.norm())


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def tokens_name(given: dict[str, Tensor], wanted: list[Tensor]) -> str:
    """Return the name of the tokens that the rows of the first output belong to; empty without them."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    return name if name in given and wanted[0].shape[:2] == given[name].shape else ""


def padded_inputs(
    eager: Any, given: dict[str, Tensor], wanted: list[Tensor]
) -> Iterator[tuple[str, Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    """Yield the side, valid rows, inputs with a mask, and these with other padded tokens, if it takes masks."""
    name = tokens_name(given, wanted)
    if (
        not name
        or "input_ids" not in given
        or "attention_mask" not in inspect.signature(type(eager).forward).parameters
    ):
        return
    for side, padded in (("left", slice(0, 7)), ("right", slice(-7, None))):
        mask = torch.ones_like(given["input_ids"])
        mask[0, padded] = 0
        rows = mask.bool() if name == "input_ids" else torch.ones_like(mask).bool()
        with_mask = {**given, "attention_mask": mask}
        changed = {**with_mask, "input_ids": torch.where(mask.bool(), given["input_ids"], other(given["input_ids"]))}
        try:
            for x in (with_mask, changed):
                zoo.outputs(eager, x)
        except Exception:  # it takes no such mask
            return
        yield side, rows, with_mask, changed


def independent_rows(eager: Any, given: dict[str, Tensor], wanted: Tensor, place: int) -> Tensor:
    """Return the rows (B, S) of the first output that do not depend on the token at a place."""
    if not (name := tokens_name(given, [wanted])):
        return torch.zeros(0, dtype=torch.bool)
    changed = zoo.outputs(eager, change_token(given, name, place))[0]
    return (changed - wanted).abs().reshape(*wanted.shape[:2], -1).amax(2) < INDEPENDENT * wanted.abs().max()


def change_token(given: dict[str, Tensor], name: str, place: int) -> dict[str, Tensor]:
    tokens = given[name].clone()
    tokens[:, place] = other(tokens[:, place])
    return {**given, name: tokens}


def differences(mine: Any, eager: Any, given: dict[str, Tensor], wanted: list[Tensor]) -> Iterator[str]:
    """Differences with greenfast: without padding, padded on either side, and dependence on masked tokens."""
    result = zoo.outputs(mine, given)
    yield from (f"output {i} differs by {e:.1e}" for i, e in enumerate(map(difference, result, wanted)) if not e < SAME)
    if not (name := tokens_name(given, wanted)):
        return
    for side, rows, with_mask, changed in padded_inputs(eager, given, wanted):
        right, right_changed = (zoo.outputs(eager, x)[0][rows] for x in (with_mask, changed))
        left, left_changed = (zoo.outputs(mine, x)[0][rows] for x in (with_mask, changed))
        if not difference(left, right) < SAME:
            yield f"padded on the {side}: differs by {difference(left, right):.1e}"
        if difference(right_changed, right) < INDEPENDENT <= (leak := difference(left_changed, left)):
            yield f"padded on the {side}: depends on a padded token, {leak:.1e}"
    if name == "input_ids" and "past_key_values" in inspect.signature(type(eager).forward).parameters:
        yield from chunks_differ(mine, eager, given)
    for place, which in ((-1, "a later token"), (0, "a token outside its window")):
        rows = independent_rows(eager, given, wanted[0], place)
        after = zoo.outputs(mine, change_token(given, name, place))[0]
        if rows.any() and (leak := difference(after[rows], result[0][rows])) >= INDEPENDENT:
            yield f"depends on {which}, {leak:.1e}"


def chunks_differ(mine: Any, eager: Any, given: dict[str, Tensor]) -> Iterator[str]:
    """A prompt in two parts and a token after it, with the cache that the model makes."""

    def in_chunks(model: Any) -> list[Tensor]:
        cache, result = None, []
        for part in (slice(0, 10), slice(10, 19), slice(19, 20)):
            with torch.no_grad():
                out = model(**{name: x[:, part] for name, x in given.items()}, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            result.append(out[0])
        return result

    try:
        wanted = in_chunks(eager)
    except Exception:  # it has no such cache
        return
    for i, (a, b) in enumerate(zip(in_chunks(mine), wanted, strict=True)):
        if not difference(a, b) < SAME:
            yield f"chunk {i} differs by {difference(a, b):.1e}"


def other(tokens: Tensor) -> Tensor:
    return 5 + (tokens + 2) % 40


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_model_that_can_be_built_small(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = {name: judge(name) for name in TYPES[part::PARTS]}
    with capsys.disabled():
        print()
        for name, v in verdicts.items():
            errors = f"{v.fp8:.3f} {v.bf16:.4f} {v.padded_fp8:.3f} {v.padded_bf16:.4f}"
            print(f"{name:32} {v.status:24} {v.taken:3} {v.left:3} {v.windowed:1} {errors} {v.detail[:160]}")
        print(Counter(v.status for v in verdicts.values()))
    assert {name: v.detail for name, v in verdicts.items() if v.status == "wrong"} == {}
    assert {name: v for name, v in verdicts.items() if not is_accurate(v)} == {}
    assert sum(v.status == "right" and v.taken > 0 for v in verdicts.values()) >= len(verdicts) // 5


def is_accurate(v: Verdict) -> bool:
    """Return whether FP8 errs no more than the kernels do beside bfloat16, also with any tokens as padding."""
    return v.fp8 <= FORMATS * v.bf16 and v.padded_fp8 <= FORMATS * v.padded_bf16


@pytest.mark.parametrize("name", FIT)
def test_models_that_are_right(name: str) -> None:
    result = judge(name)
    assert (result.status, result.detail, result.left > 0) == ("right", "", name == "t5"), "which adds a bias"
    assert (result.taken > 0) == (name != "t5")
    assert (result.padded_fp8 > 0.0) == (name not in ("vit", "t5")), "no padding, or nothing in FP8"
    assert result.windowed == (name in ("mistral", "openai_privacy_filter")), "only layers with windows"
    assert is_accurate(result)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_matter_to_these_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_FEATURES", {})
    result = judge(name)
    assert result.status == "wrong"
    assert result.detail.startswith("output 0 differs")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_padded_prompts_are_continued_with_windows_caps_and_sinks(name: str, cache: str) -> None:
    """Each step of generation is computed here, and agrees with one call of "eager" for the whole."""
    routed = greenfast.register_with_transformers()  # by its rules PyTorch computes such lengths
    config = zoo.small(library.models.auto.configuration_auto.CONFIG_MAPPING[name])
    kind = zoo.model_class(config)
    mine, own = (zoo.build(kind, config, attention, torch.bfloat16) for attention in ("greenfast", "eager"))
    exact = zoo.build(kind, config, "eager")
    tokens = next(iter(zoo.inputs(mine)))["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    steps = zoo.WINDOW + 2
    result = mine.generate(
        tokens, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, output_logits=True,
        return_dict_in_generate=True, cache_implementation=cache, disable_compile=True, pad_token_id=0,
    )  # fmt: skip
    assert (routed.taken, routed.fallen_back) == (config.num_hidden_layers * steps, {})
    mask = torch.nn.functional.pad(mask, (0, steps), value=1)
    inputs = {"input_ids": result.sequences, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    wanted, rounded = (zoo.outputs(model, inputs)[0][:, -steps - 1 : -1] for model in (exact, own))
    logits = torch.stack(result.logits, dim=1)
    bf16, fp8 = ((x - wanted).norm() / wanted.norm() for x in (rounded, logits))
    assert bf16 < fp8 < FORMATS * bf16


def made(name: str, attention: Any) -> Any:
    config = zoo.small(library.models.auto.configuration_auto.CONFIG_MAPPING[name])
    return zoo.build(zoo.model_class(config), config, attention)


@pytest.mark.parametrize("name", UNFIT)
def test_models_that_would_lose_their_masks_are_refused(name: str) -> None:
    """When they are made, when they are given the name, and, if it is set in the config directly, when they run."""
    greenfast.register_with_transformers(min_length=0)
    with pytest.raises(ValueError, match=REFUSAL):
        made(name, "greenfast")
    model = made(name, "eager")
    inputs, wanted = first_that_runs(model)
    if model._can_set_attn_implementation():
        with pytest.raises(ValueError, match=REFUSAL):
            model.set_attn_implementation("greenfast")
    else:
        model.set_attn_implementation("greenfast")  # transformers warns and changes nothing
    assert model.config._attn_implementation == "eager"
    assert torch.equal(zoo.outputs(model, inputs)[0], wanted[0])
    model.config._attn_implementation = "greenfast"
    refused = ""
    try:
        result = zoo.outputs(model, inputs)
    except ValueError as e:
        refused = str(e)
    assert REFUSAL in refused or difference(result[0], wanted[0]) < SAME, "the latter where it makes its masks itself"


def first_that_runs(model: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    failed: Exception | None = None
    for inputs in zoo.inputs(model):
        try:
            return inputs, zoo.outputs(model, inputs)
        except Exception as e:  # wrong inputs for this model
            failed = e
    raise AssertionError(f"nothing runs: {failed!r}")


def test_a_model_is_refused_for_one_of_its_parts() -> None:
    greenfast.register_with_transformers(min_length=0)
    auto = library.models.auto.configuration_auto.CONFIG_MAPPING
    parts = {"encoder": zoo.small(auto["bert"]).to_dict(), "decoder": zoo.small(auto["rembert"]).to_dict()}
    config = library.EncoderDecoderConfig(**copy.deepcopy(parts))
    config._attn_implementation = "greenfast"
    with pytest.raises(ValueError, match=f"RemBertForCausalLM: {REFUSAL}it does not.*Parts of a model may differ"):
        library.EncoderDecoderModel(config)
    config = library.EncoderDecoderConfig(**copy.deepcopy(parts))
    config._attn_implementation = {"encoder": "greenfast", "decoder": "eager"}
    model = library.EncoderDecoderModel(config)
    assert model.encoder.config._attn_implementation == "greenfast"
    model.set_attn_implementation("greenfast")
    assert model.decoder.config._attn_implementation == "eager", "transformers warns, and leaves it"


class CustomModel(library.PreTrainedModel):  # type: ignore[misc]
    """A model from outside transformers, with custom attention."""

    config_class = library.LlamaConfig


def test_models_from_elsewhere_are_refused_unless_they_support_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    greenfast.register_with_transformers()
    config = library.LlamaConfig(attn_implementation="greenfast")
    with pytest.raises(ValueError, match=f"CustomModel: {REFUSAL}"):
        CustomModel(config)
    supporting = type("Supporting", (CustomModel,), {"_supports_sdpa": True, "__module__": __name__})
    supporting(library.LlamaConfig(attn_implementation="greenfast"))
    monkeypatch.setattr(library.PreTrainedModel, "get_correct_attn_implementation", None)
    with pytest.raises(ImportError, match=r"has no PreTrainedModel\.get_correct_attn_implementation"):
        greenfast.register_with_transformers()


def test_registering_in_many_threads_wraps_transformers_once() -> None:
    library_class = library.PreTrainedModel
    threads = [threading.Thread(target=greenfast.register_with_transformers) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrapped = library_class.get_correct_attn_implementation
    assert wrapped.is_greenfast
    assert not hasattr(wrapped.__wrapped__, "is_greenfast")
