"""Tensors that begin at any address: what the kernels read in vectors is copied, and the bits stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.ops.quantized import QuantizedQKV
from tests.fuzz.serving import moved
from tests.kernels.serving.appends import Append
from tests.ops.test_addresses import odd
from tests.serving.oracle import case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def apart(x: Tensor) -> Tensor:
    """A copy at an odd multiple of its numbers' size."""
    return odd(x.clone())


@pytest.mark.parametrize("norm", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["q", "k", "v", "q_weight", "k_weight", "cos", "sin", "k_scale", "positions"])
def test_appending(name: str, norm: torch.dtype) -> None:
    found: list[list[Any]] = []
    for change in (lambda x: x, apart):
        call = Append([*range(40), 50], norm=norm, rotary_dim=64, head_dim=128, page_size=64, heads=4, kv_heads=2)
        tensors = {n: moved(x, "cuda") for n, x in call.tensors().items()}
        tensors |= {n: tensors[n].contiguous() for n in ("q", "k", "v", "cos", "sin")}
        tensors[name] = change(tensors[name])
        arguments: Any = tensors
        found.append([greenfast.append_kv(**arguments), *(tensors[n] for n in ("k_cache", "v_cache", "k_scale"))])
    torch.cuda.synchronize()
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize("name", ["query", "key", "value", "query_scale", "key_scale", "value_scale"])
def test_codes(name: str, precision: Any) -> None:
    q, k, v = (torch.randn(2, 3, 300, 64, device="cuda").half() for _ in "qkv")
    codes = greenfast.quantize(q, k, v, precision=precision)
    names = ("query", "key", "value", "query_scale", "key_scale", "value_scale", "key_mean")
    fields: dict[str, Any] = dict(zip(names, codes.tensors(), strict=True))
    fields[name] = apart(fields[name])
    moved_codes = QuantizedQKV(**fields, precision=precision, head_dim=64, key_length=300, dtype=torch.float16)
    wanted = greenfast.attention(codes, is_causal=True)
    for _ in range(3):
        assert torch.equal(greenfast.attention(moved_codes, is_causal=True), wanted)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [[(1, 700), (1, 30)], [(5, 600)], [(300, 700)]], ids=str)
@pytest.mark.parametrize(
    "name", ["out", "q", "block_table", "cu_seqlens_q", "seqused_k", "k_scale", "v_scale", "sinks"]
)
def test_serving(name: str, lengths: list[tuple[int, int]], head_dim: int) -> None:
    c = case(lengths, head_dim=head_dim, page_size=64, sinks=True)
    names = ("q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqused_k", "k_scale", "v_scale", "sinks")
    there: dict[str, Any] = {n: moved(getattr(c, n), "cuda") for n in names}
    there["out"] = torch.empty_like(there["q"])
    found = []
    for change in (lambda x: x, apart):
        t = there | {name: change(there[name])}
        greenfast.flash_attn_varlen_func(
            t["q"], t["k_cache"], t["v_cache"], t["cu_seqlens_q"], None, max(n for n, _ in lengths), 1,
            seqused_k=t["seqused_k"], block_table=t["block_table"], k_descale=t["k_scale"], v_descale=t["v_scale"],
            causal=True, s_aux=t["sinks"], out=t["out"],
        )  # fmt: skip
        torch.cuda.synchronize()
        found.append(t["out"].clone())
    assert torch.equal(*found)
