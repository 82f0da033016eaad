"""The append kernel on the hardware: the bits of the CPU, many tokens included."""

from __future__ import annotations

import pytest
import torch

from greenfast.device.compiler import compile_kernel
from greenfast.device.executable import Executable, KernelImage
from greenfast.device.gpu_session import GpuSession
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
