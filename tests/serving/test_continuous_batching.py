"""transformers' continuous batching on an FP8 cache: every layer of every step against attention in float64."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.integrations import continuous_batching
from greenfast.serving.pages import KVPages, allocate_pages, get_page_bytes, view_pages

library: Any = importlib.import_module("transformers")
paged: Any = importlib.import_module("transformers.generation.continuous_batching.cache")
BatchingConfig: Any = importlib.import_module("transformers.generation.configuration_utils").ContinuousBatchingConfig
#: Root of the mean square of what rounding to three bits of mantissa does to weights just above a power of two.
#: Attention rounds the weights besides Q, K and V; the reference here has rounded inputs.
ERROR = 2**-4 / 3**0.5
ALL_ERROR = 0.06  # of attention with Q, K and V of N(0, 1) rounded too: docs/serving.md
NAME = "paged|greenfast"
SMALL = {
    "hidden_size": 128, "intermediate_size": 128, "vocab_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_search_for_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the garbage collection that transformers runs at the end: with many tests it takes most of the time."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    greenfast.register_continuous_batching()
    memory = (torch.device("cpu"), 1 << 33, 0, 0)
    monkeypatch.setattr(paged, "get_device_and_memory_breakdown", lambda: memory)


def llama() -> Any:
    config = library.LlamaConfig(num_hidden_layers=3, head_dim=64, **SMALL)
    return library.LlamaForCausalLM(config)


def gemma() -> Any:
    """Windows of 48 tokens in layers 0, 1 and 3, all keys in layer 2; head dim 256; a softcap."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = library.Gemma2Config(
        num_hidden_layers=4, head_dim=256, sliding_window=48, layer_types=kinds, attn_logit_softcapping=2.0,
        query_pre_attn_scalar=16, **SMALL,
    )  # fmt: skip
    return library.Gemma2ForCausalLM(config)


def oss() -> Any:
    """Sinks, and windows of 48 tokens in layer 0."""
    config = library.GptOssConfig(
        num_hidden_layers=2, head_dim=64, sliding_window=48, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"], **SMALL,
    )  # fmt: skip
    return library.GptOssForCausalLM(config)


def mistral() -> Any:
    """Windows of 48 tokens in all layers."""
    return library.MistralForCausalLM(
        library.MistralConfig(num_hidden_layers=2, head_dim=128, sliding_window=48, **SMALL)
    )


def made(make: Any, spread: float = 10.0) -> Any:
    """With projections of K and V ``spread`` times as large as transformers draws them: weights that differ."""
    torch.manual_seed(0)
    model = make().to(torch.bfloat16).eval()
    for name, x in model.named_parameters():
        if "k_proj.weight" in name or "v_proj.weight" in name:
            x.data *= spread
    model.set_attn_implementation(NAME)
    return model


def prompts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, 128, (n,), generator=draw).tolist() for n in lengths]


def generate(model: Any, inputs: list[list[int]], new: int, **config: Any) -> list[Any]:
    result = model.generate_batch(
        inputs=inputs,
        generation_config=library.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1),
        continuous_batching_config=BatchingConfig(**{"page_size": 16, "return_logprobs": True, **config}),
    )
    outputs = sorted(result.values(), key=lambda x: int(x.request_id.rsplit("_", 1)[-1]))
    assert [x.error for x in outputs] == [None] * len(inputs)
    assert [x.prompt_ids for x in outputs] == inputs
    return outputs


class Watch:
    """Attention as registered, compared in every call with float64 over keys that are kept per request and layer."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.kept: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.wrong = self.squares = 0.0
        self.with_tables: set[bool] = set()
        self.most_requests = self.most_pages = 0
        self.chunked = False

    def see(self, request: str) -> None:
        self.requests.append(request)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        out, weights = continuous_batching.attend(module, query, key, value, mask, **more)
        starts, allocator = more["cu_seq_lens_q"].tolist(), more["cache"].layer_to_allocator[module.layer_idx]
        used = more["cu_seq_lens_k"][allocator.layer_type].diff().tolist()
        now = self.requests[-len(used) :]
        self.with_tables.add(more["block_table"] is not None)
        self.most_requests = max(self.most_requests, len(used))
        wanted, bound = (torch.zeros_like(out, dtype=torch.float64) for _ in range(2))
        for i, (request, keys) in enumerate(zip(now, used, strict=True)):
            part = slice(starts[i], starts[i + 1])
            q, k, v = (rounded(x[0, :, part], appended=x is not query) for x in (query, key, value))
            past = keys - q.shape[1]
            self.chunked |= past > 0 and q.shape[1] > 1
            if past:
                before = self.kept[request, module.layer_idx]
                assert before[0].shape[1] >= past
                k, v = (torch.cat([x[:, :past], y], 1) for x, y in zip(before, (k, v), strict=True))
            self.kept[request, module.layer_idx] = k, v
            result, of_sizes = (reference(q, k, x, more).transpose(0, 1) for x in (v, v.abs()))
            # Weights are rounded by a sixteenth, below the normal numbers by 2^-10 of at most 448; bfloat16 by 2^-9.
            wanted[0, part] = result
            bound[0, part] = 1.001 * of_sizes / 16 + result.abs() / 2**8 + keys / 2**10 / 448 * float(v.abs().max())
            if allocator.layer_type == "sliding_attention":
                live = sum(page > 0 for page in allocator.block_table[request])
                self.most_pages = max(self.most_pages, live)
        assert bool(((out - wanted).abs() <= bound).all())
        self.wrong += float((out - wanted).square().sum())
        self.squares += float(wanted.square().sum())
        return out, weights

    @property
    def error(self) -> float:
        return math.sqrt(self.wrong / self.squares)


def rounded(x: Tensor, *, appended: bool) -> Tensor:
    """To E4M3 with a scale for each token and head, by products in float32 as attention and append have them.

    On the CPU: on a GPU PyTorch multiplies by the inverse of 448 where this divides, and codes at ties would differ.
    """
    inputs = x.float().cpu()
    limit = inputs.abs().amax(-1, keepdim=True)
    limit = torch.where(limit == 0, 448, limit)
    scale = limit / 448
    times = 1 / scale if appended else torch.full_like(limit, 448) / limit
    return ((inputs * times).to(torch.float8_e4m3fn).double() * scale).to(x.device)


def reference(q: Tensor, k: Tensor, v: Tensor, more: dict[str, Any]) -> Tensor:
    """Attention of (heads, queries, head_dim) over (kv_heads, keys, head_dim), aligned at the last query and key."""
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * more["scaling"]
    cap, window, sinks = more.get("softcap"), more.get("sliding_window"), more.get("s_aux")
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    at = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device).unsqueeze(1)
    keys = torch.arange(k.shape[1], device=q.device)
    seen = keys <= at
    if window is not None:
        seen &= keys > at - window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, q.shape[1], 1)], 2)
    result: Tensor = scores.softmax(-1)[..., : k.shape[1]] @ v
    return result


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    result = Watch()
    for name in ("fill_block_table", "extend_read_and_write_indices"):
        original = getattr(paged.PagedAttentionCache, name)

        def told(self: Any, request_id: str, *args: Any, original: Any = original) -> None:
            result.see(request_id)
            original(self, request_id, *args)

        monkeypatch.setattr(paged.PagedAttentionCache, name, told)
    library.AttentionInterface.register(continuous_batching.PAGED, result.attend)
    yield result
    library.AttentionInterface.register(continuous_batching.PAGED, continuous_batching.attend)


@pytest.mark.parametrize("make", [pytest.param(llama, marks=pytest.mark.slow), gemma, oss, mistral])
def test_every_layer_of_every_step_is_attention_within_the_error_of_fp8(make: Any, watch: Watch) -> None:
    """Ragged requests; chunks of 64 tokens, so that prompts of 150 and 97 take several; steps that only decode."""
    generate(made(make), prompts(1, 40, 150, 17, 97), 5, max_batch_tokens=64, num_blocks=64)
    assert watch.with_tables == {False, True}
    assert watch.chunked
    assert watch.most_requests == 5
    assert 0 < watch.error < ERROR
    if make is not llama:  # window and chunk: at most 48 - 1 + 64 tokens are needed, in 8 pages of 16 at any offset
        assert 0 < watch.most_pages <= 8


@pytest.mark.parametrize("make", [llama, pytest.param(gemma, marks=pytest.mark.slow)])
def test_more_requests_than_fit_wait(make: Any, watch: Watch) -> None:
    inputs = prompts(*[60, 33, 70, 20, 64, 48, 15, 66])
    # Shared blocks hold keys of the first request; the watch does not follow these.
    config = {"max_batch_tokens": 64, "num_blocks": 5, "allow_block_sharing": False}
    outputs = generate(made(make), inputs, 12, **config)
    assert 1 < watch.most_requests < len(inputs)
    assert all(len(x.generated_tokens) == 12 for x in outputs)
    assert 0 < watch.error < ERROR


@pytest.mark.parametrize("make", [llama, pytest.param(gemma, marks=pytest.mark.slow)])
def test_logits_are_those_of_the_model(make: Any) -> None:
    """Compare log-probabilities of generated tokens with the model's own attention in bfloat16 on the same tokens."""
    model = made(make, 1.0)
    outputs = generate(model, prompts(90, 13, 50), 8, max_batch_tokens=64, num_blocks=64)
    model.set_attn_implementation("eager")
    result, wanted = [], []
    for x in outputs:
        tokens = torch.tensor([x.prompt_ids + x.generated_tokens])
        with torch.no_grad():
            logits = model(tokens).logits.float()[0, len(x.prompt_ids) - 1 : -1]
        chosen = torch.tensor(x.generated_tokens).unsqueeze(1)
        wanted.append(logits.log_softmax(-1).gather(1, chosen).squeeze(1))
        result.append(torch.tensor(x.logprobs))
    uniform = -math.log(128)
    a, b = torch.cat(result) - uniform, torch.cat(wanted) - uniform
    assert float((a - b).norm() / b.norm()) < ALL_ERROR


def test_a_request_over_a_shared_prefix_is_the_same_request(monkeypatch: pytest.MonkeyPatch) -> None:
    matched = []
    original = paged.PagedAttentionCache.search_prefix_match

    def search(self: Any, *args: Any) -> int:
        matched.append(original(self, *args))
        return int(matched[-1])

    monkeypatch.setattr(paged.PagedAttentionCache, "search_prefix_match", search)
    model, inputs = made(llama), prompts(70, 20)
    inputs[1] = inputs[0][:64] + inputs[1]
    config = {"max_batch_tokens": 128, "num_blocks": 64, "max_requests_per_batch": 1}
    shared = generate(model, inputs, 3, **config)[1]
    alone = generate(model, inputs[1:], 3, **config)[0]
    assert matched == [0, 64, 0]
    # Attention has the same bits either way; the products before it may be summed in another order.
    assert shared.logprobs[0] == pytest.approx(alone.logprobs[0], abs=2**-6)


def test_the_cache_holds_fp8_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = []
    original = paged.PagedAttentionCache.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        caches.append(self)

    monkeypatch.setattr(paged.PagedAttentionCache, "__init__", init)
    model = made(llama)
    generate(model, prompts(5), 1, num_blocks=10, max_batch_tokens=64)
    model.set_attn_implementation("sdpa")
    config = BatchingConfig(page_size=16, num_blocks=10, max_batch_tokens=64, auto_switch_to_flash=False)
    model.generate_batch(prompts(5), library.GenerationConfig(max_new_tokens=1, eos_token_id=-1), config)
    ours, theirs = caches
    sector = 3 * get_page_bytes(16, 2, 64)  # of three layers
    assert ours.bytes_per_sector == sector
    assert ours.cache_tensor.nbytes == (ours.num_sectors + 2) * sector
    assert ours.cache_tensor.nbytes <= theirs.cache_tensor.nbytes
    of_tokens = [c.cache_allocators["full_attention"].num_blocks for c in caches]
    assert of_tokens == [19, 10]  # 64 + 4 bytes a head and token instead of 128


def test_greenfast_generates_batches_in_the_same_way_and_is_itself_again() -> None:
    model = made(llama)
    config = {"max_batch_tokens": 64, "num_blocks": 64}
    wanted = generate(model, prompts(30), 4, **config)[0]
    model.set_attn_implementation("greenfast")
    result = generate(model, prompts(30), 4, **config)[0]
    assert result.logprobs == wanted.logprobs
    assert model.config._attn_implementation == "greenfast"


def test_the_default_page_size_becomes_128() -> None:
    config, inputs = made(llama).config, BatchingConfig()
    api: Any = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
    takes = inspect.signature(api.resolve_continuous_batching_config).parameters
    more = [torch.device("cpu")] if "device" in takes else []
    assert api.resolve_continuous_batching_config(config, inputs, None, False, *more).page_size == 128
    assert inputs.page_size == 256
    config._attn_implementation = "sdpa"
    assert api.resolve_continuous_batching_config(config, inputs, None, False, *more).page_size == 256


@pytest.mark.parametrize(
    ("change", "wanted"),
    [({"head_dim": 96}, "head_dim 96; allowed are 64, 128, 256"), ({"page_size": 48}, "page_size 48; allowed are 16")],
)
def test_sizes_without_a_kernel_are_refused(change: dict[str, int], wanted: str) -> None:
    model = library.LlamaForCausalLM(
        library.LlamaConfig(
            num_hidden_layers=1, **{"head_dim": 64, **SMALL, **{k: v for k, v in change.items() if k == "head_dim"}}
        )
    ).to(torch.bfloat16)
    model.set_attn_implementation(NAME)
    with pytest.raises(Exception, match=wanted):
        generate(model, prompts(5), 1, num_blocks=8, max_batch_tokens=64, page_size=change.get("page_size", 16))


def test_a_model_without_flash_attention_is_refused() -> None:
    model = library.LlamaForCausalLM(library.LlamaConfig(num_hidden_layers=1, **SMALL))
    type(model)._supports_flash_attn, before = False, type(model)._supports_flash_attn
    try:
        with pytest.raises(ValueError, match="not for this model"):
            model.set_attn_implementation(NAME)
    finally:
        type(model)._supports_flash_attn = before


def test_a_call_outside_generate_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r'is for generate_batch; use attn_implementation="greenfast"'):
        made(llama)(torch.ones(1, 4, dtype=torch.long))


@pytest.mark.parametrize("lacking", ["ATTN_TYPE_TO_ALLOCATOR", "is_flash_attention_requested"])
def test_internals_of_another_version_are_refused(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(library.AttentionInterface._global_mapping, continuous_batching.PAGED)
    monkeypatch.delattr(paged, lacking)
    with pytest.raises(ImportError, match=r"needs transformers 5\.20 or later"):
        greenfast.register_continuous_batching()
    assert continuous_batching.PAGED not in library.AttentionInterface()


def test_pages_in_memory_do_not_overlap_and_fill_it() -> None:
    memory = torch.zeros(3, get_page_bytes(32, 2, 64), dtype=torch.uint8)
    pages = view_pages(memory, 32, 2, 64)
    plain = allocate_pages(3, 32, 2, 64, None, heads_first=True)
    assert [x.shape for x in pages] == [x.shape for x in plain]
    for x in pages:
        x.view(torch.uint8).add_(1)
    assert bool((memory == 1).all())
    assert pages.k_cache.stride()[1:] == plain.k_cache.stride()[1:]
    without = view_pages(memory[:, : get_page_bytes(32, 2, 64, scales=False)], 32, 2, 64)
    assert without[2:] == KVPages(*without[:2], torch.ones(()), torch.ones(()))[2:]
