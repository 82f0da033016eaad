"""Routing on a GPU: PyTorch's calls reach the kernel that ``explain`` names, eager, compiled and in transformers."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import greenfast

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
attention = torch.nn.functional.scaled_dot_product_attention


def inputs(length: int = 4096, kv_heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> Any:
    generator = torch.Generator().manual_seed(length)
    shapes = ((1, 4, length, 128), (1, kv_heads, length, 128), (1, kv_heads, length, 128))
    return [torch.randn(shape, generator=generator).to(dtype).cuda() for shape in shapes]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_the_named_kernel_runs() -> None:
    q, k, v = inputs(kv_heads=2)
    launches_nothing = torch.cuda.memory_stats()["allocation.all.allocated"]
    found = greenfast.explain(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == launches_nothing
    assert found.kernel == "hopper"
    with greenfast.use(min_length=4096) as routed:
        out = attention(q, k, v, is_causal=True, enable_gqa=True)
        attention(q[:, :, :1], k, v, enable_gqa=True)
    assert torch.equal(out, greenfast.sdpa(q, k, v, is_causal=True, enable_gqa=True))
    assert routed.taken == 1
    assert routed.fallen_back == {"query: shorter than min_length=4096, where quantization does not pay": 1}


def test_measured_rules_decide_by_default() -> None:
    shape = (8, 16, 8192, 128)
    long = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    short = long[:1, :, :64]
    assert "measured shapes" in greenfast.explain(long, long, long, precision="auto").reason
    with greenfast.use() as routed:
        out = attention(long, long, long)
        kept = attention(short, short, short)
    assert torch.equal(out, greenfast.sdpa(long, long, long))
    assert torch.equal(kept, attention(short, short, short))
    assert (routed.taken, routed.fallen_back.total()) == (1, 1)
    with greenfast.use(precision="auto"):
        assert torch.equal(attention(long, long, long), greenfast.sdpa(long, long, long, precision="auto"))


@pytest.mark.parametrize("inside", [False, True])
def test_measured_rules_decide_in_a_graph(inside: bool) -> None:
    q = torch.randn(4, 16, 8192, 64, device="cuda", dtype=torch.bfloat16)

    def model(q: Tensor) -> Tensor:
        return -attention(q, q, q)

    def routed(q: Tensor) -> Tensor:
        with greenfast.use("auto"):
            out = model(q)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(routed if inside else model, fullgraph=True, dynamic=True)
    for given in (q, q[:, :, :96]):
        with nullcontext() if inside else greenfast.use("auto"):
            found = compiled(given)
        wanted = routed(given)
        assert error(found, wanted) < 5e-3
    assert greenfast.explain(q, q, q, precision="auto").taken


def test_autocast() -> None:
    q, k, v = (x.float() for x in inputs(512))
    with torch.autocast("cuda", torch.float16), greenfast.use(min_length=0) as routed:
        assert attention(q, k, v).dtype == torch.float16
    assert routed.taken == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return -attention(q, k, v, is_causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for length in (256, 512, 2048):
        q, k, v = inputs(length)
        for _ in range(2):
            with greenfast.use(min_length=512):
                found = compiled(q, k, v)
            own = length < 512
            mine = -greenfast.sdpa(q, k, v, is_causal=True)
            wanted, other = (model(q, k, v), mine) if own else (mine, model(q, k, v))
            assert error(found, wanted) < 5e-3 < error(found, other), length


def test_compiled_with_gradients() -> None:
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in inputs(512))
    with greenfast.use(min_length=0):
        out = torch.compile(lambda *x: attention(*x).sum(), fullgraph=True)(q, k, v)
    found = torch.autograd.grad(out, (q, k, v))
    wanted = torch.autograd.grad(greenfast.sdpa(q, k, v).sum(), (q, k, v))
    for mine, theirs in zip(found, wanted, strict=True):
        assert error(mine, theirs) < 2e-2


def test_multi_head_attention() -> None:
    layer = nn.MultiheadAttention(512, 4, batch_first=True, dtype=torch.float16, device="cuda").eval()
    x = torch.randn(1, 600, 512, dtype=torch.float16, device="cuda")
    with torch.no_grad():
        wanted = layer(x, x, x, need_weights=False)[0]
        with greenfast.use(min_length=0) as routed:
            found = layer(x, x, x, need_weights=False)[0]
    assert routed.taken == 1
    assert error(found, wanted) < 0.08


def test_a_llama() -> None:
    transformers: Any = importlib.import_module("transformers")
    routed = greenfast.register_with_transformers(min_length=256)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    tokens = torch.randint(1, 256, (2, 300), device="cuda")
    with torch.no_grad():
        wanted = model(tokens).logits
        model.set_attn_implementation("greenfast")
        assert error(model(tokens).logits, wanted) < 0.053
    assert (routed.taken, routed.fallen_back) == (2, {})
    model.generate(tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert routed.taken == 4
    assert routed.fallen_back.total() == 6


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_a_padded_batch_with_windows_caps_and_sinks(name: str) -> None:
    """The window of a layer is 100 tokens; a prompt of 300, and a step of decoding with its cache."""
    transformers: Any = importlib.import_module("transformers")
    routed = greenfast.register_with_transformers(min_length=0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, vocab_size=256, pad_token_id=0, sliding_window=100, attn_implementation="eager",
        **({"num_local_experts": 4} if name == "GptOss" else {}),
        **({"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 64} if name == "Gemma2" else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to("cuda", torch.bfloat16).eval()
    tokens = torch.randint(1, 256, (2, 301), device="cuda")
    mask = torch.ones_like(tokens)
    mask[0, :70] = 0
    prompt, step = (tokens[:, :-1], mask[:, :-1]), (tokens[:, -1:], mask)

    def run() -> tuple[Tensor, Tensor]:
        first = model(prompt[0], attention_mask=prompt[1], use_cache=True)
        last = model(step[0], attention_mask=step[1], past_key_values=first.past_key_values)
        return first.logits[prompt[1] > 0], last.logits

    with torch.no_grad():
        wanted = run()
        model.set_attn_implementation("greenfast")
        found = run()
    assert (routed.taken, routed.fallen_back) == (4, {})
    for mine, theirs in zip(found, wanted, strict=True):
        assert 0 < error(mine, theirs) < 0.053


def test_a_choice_of_math_only_is_respected() -> None:
    q, k, v = inputs(512)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = attention(q, k, v)
        with greenfast.use(min_length=0) as routed:
            assert torch.equal(attention(q, k, v), wanted)
    assert routed.taken == 0
    with greenfast.use(min_length=0) as routed, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attention(q, k, v)
    assert routed.taken == 1
