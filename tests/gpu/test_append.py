"""The append kernel on the hardware: the bits of the CPU, many tokens included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import greenfast
from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu_session import GpuSession
from greenfast.device.session import Executable, KernelImage
from greenfast.serving.pages import KVPages, get_page_bytes, view_pages
from greenfast.spec.arch import Target
from tests.kernels.serving.appends import CALLS, Append, assert_as_on_the_cpu, random_call, request, run_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def check(call: Append) -> None:
    tensors = call.tensors()
    asked = request(call, tensors)
    image = KernelImage(compile_kernel(asked.kernel, Target("sm_90a")).cubin, asked.kernel.entry, asked.kernel.block, 0)
    result = GpuSession(0).run(Executable.single(image, asked.plan), asked.case, 3)
    assert result.repeatable
    assert_as_on_the_cpu(call, tensors, result.outputs)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_bits_equal_the_cpus(call: Append) -> None:
    check(call)


@pytest.mark.parametrize("seed", range(40))
def test_bits_of_random_calls_equal_the_cpus(seed: int) -> None:
    check(random_call(seed))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("grouped", [True, False])
def test_bits_of_many_tokens_equal_the_cpus(head_dim: int, grouped: bool) -> None:
    """Blocks take several heads; norms and angles make every mantissa of a scale."""
    slots = [*run_of(5, 3000), *run_of(4096, 2100), *run_of(8000, 77)]
    check(
        Append(
            slots,
            head_dim=head_dim,
            page_size=64,
            heads=16,
            kv_heads=6,
            grouped=grouped,
            norm=torch.float32,
            rotary_dim=head_dim,
        )
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_of_an_engine(head_dim: int) -> None:
    """Codes and scales of a page lie side by side in the engine's memory: what is written and read is the CPU's."""
    kv_heads, size, tokens = 2, 32, 300
    made = torch.Generator().manual_seed(head_dim)
    memory = torch.randint(256, (12, get_page_bytes(size, kv_heads, head_dim)), generator=made, dtype=torch.uint8)
    k, v = (torch.randn(tokens, kv_heads, head_dim, generator=made).bfloat16() for _ in "kv")
    slots, on_gpu = torch.arange(17, 17 + tokens), memory.cuda()
    here = view_pages(memory, size, kv_heads, head_dim)
    greenfast.append_kv(None, k, v, *here[:2], slots, k_scale=here.k_scale, v_scale=here.v_scale)
    there = view_pages(on_gpu, size, kv_heads, head_dim)
    greenfast.append_kv(
        None, k.cuda(), v.cuda(), *there[:2], slots.cuda(), k_scale=there.k_scale, v_scale=there.v_scale
    )
    assert torch.equal(on_gpu.cpu(), memory)

    q = torch.randn(1, 3, 2 * kv_heads, head_dim, generator=made).bfloat16().cuda()
    table, lengths = (
        torch.arange(10, dtype=torch.int32).view(1, 10).cuda(),
        torch.tensor([317], dtype=torch.int32).cuda(),
    )
    for x in there[:2]:
        x.view(torch.uint8)[0] = 0  # slots before the first token
    there.k_scale[0], there.v_scale[0] = 1.0, 1.0
    found: list[Any] = [
        greenfast.flash_attn_with_kvcache(
            q, kept.k_cache, kept.v_cache, cache_seqlens=lengths, page_table=table, k_descale=kept.k_scale,
            v_descale=kept.v_scale, causal=True,
        )
        for kept in (there, KVPages(*(x.contiguous() for x in there)))
    ]  # fmt: skip
    assert torch.equal(*found)
    assert not found[0].isnan().any()
