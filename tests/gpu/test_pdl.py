"""Attention that begins while the launch before it ends reads none of its output early, and sdpa repeats its bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import greenfast
from greenfast.kernels import KERNEL_DIR
from greenfast.ops import cuda
from greenfast.ops.launch_plans import LaunchStep, get_target
from greenfast.spec.kernel import KernelSource, Launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

# Lets the next launch begin at once, waits 300 µs, and only then writes what it reads.
LATE = """#include "ptx/griddepcontrol.cuh"
extern "C" __global__ void late(const uint4* from, uint4* to, long long count) {
  greenfast::ptx::launch_dependent_grids();
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < 300000);
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];
}
"""


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [300, 4096])
def test_a_producer_that_writes_late(head_dim: int, causal: int, precision: str, length: int) -> None:
    generator = torch.Generator("cuda").manual_seed(length)
    shape = (1, 4, length, head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in "qkv")
    wanted = greenfast.sdpa(q, k, v, is_causal=bool(causal), precision=precision)  # type: ignore[call-overload]
    target = get_target(0)
    config = cuda.build_sdpa_config(target, head_dim, q.dtype, precision, causal)
    quantizing, attending = cuda.build_sdpa_steps(q, k, v, config, head_dim**-0.5, target)
    assert attending.launch.early

    sizes = {n: s for n, s in cuda.get_quantized_shapes(q.shape, k.shape, config).items() if not n.startswith("q_")}
    places, size = {}, 0
    for name, of in sizes.items():
        places[name] = size
        size += -(-torch.Size(of).numel() * cuda.get_buffer_dtype(name).itemsize // 256) * 256
    ready, late = (torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(2))  # all NaN
    out = torch.full_like(q, torch.nan)
    stream = torch.cuda.current_stream().cuda_stream
    given = {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr(), "out": out.data_ptr()}

    def pointers(base: torch.Tensor) -> dict[str, int]:
        return given | {name: base.data_ptr() + at for name, at in places.items()}

    quantizing.bind(0, pointers(ready), stream)()
    source = KernelSource(entry="late", source=LATE, name="late.cu", include_dirs=(KERNEL_DIR,), block=(256, 1, 1))
    copy = LaunchStep(source, Launch((16, 1, 1), ("from", "to", np.int64(size // 16))))
    writing = copy.bind(0, {"from": ready.data_ptr(), "to": late.data_ptr()}, stream)
    reading = attending.bind(0, pointers(late), stream)
    torch.cuda.synchronize()
    for _ in range(20):
        late.fill_(0xFF)
        out.fill_(torch.nan)
        writing()
        reading()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 32, 2048, 64), (1, 16, 2048, 128), (1, 8, 2048, 256), (1, 32, 1024, 64),
                                   (1, 32, 3000, 64), (1, 40, 1500, 128), (2, 16, 1001, 256)])  # fmt: skip
def test_sdpa_repeats_the_bits_of_attention_on_codes(shape: tuple[int, ...], causal: bool, precision: str) -> None:
    """Where all blocks run at once and some have short work tiles while the quantizer ends, a race would show.

    Rows behind the last one count for nothing, wherever Q is quantized.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in "qkv")
    codes = greenfast.quantize(q, k, v, precision=precision)  # type: ignore[arg-type]
    wanted = greenfast.attention(codes, is_causal=causal)
    for _ in range(100):
        found = greenfast.sdpa(q, k, v, is_causal=causal, precision=precision)  # type: ignore[call-overload]
        assert torch.equal(found, wanted)
