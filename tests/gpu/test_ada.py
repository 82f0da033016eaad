"""The Ada kernel on any GPU from sm_89 up; it is native on sm_89 only."""

from __future__ import annotations

import pytest

from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import Gpu
from greenfast.device.session import Executable, KernelImage
from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.kernels.attention import ada
from greenfast.kernels.attention.config import FORMATS, read_dims
from greenfast.spec.arch import Target
from tasks.fp8_attention import problem as attention_problem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("head_dim", ada.HEAD_DIMS)
@pytest.mark.parametrize("causal", [0, 1, 2])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (63, 65), (129, 1000), (512, 512), (200, 70)])
def test_it_is_right(fmt: str, head_dim: int, causal: int, q_len: int, kv_len: int) -> None:
    gpu = Gpu(0)
    if gpu.capability < (8, 9):
        pytest.skip(f"E4M3 products need compute capability 8.9, this GPU has {gpu.capability}")
    dims = {"B": 2, "H": 4, "HK": 2, "S": q_len, "KV": kv_len, "D": head_dim, "CAUSAL": causal}
    source = ada.kernel(read_dims(dims, fmt)[0])
    compiled = compile_kernel(source, Target.of_device(gpu.capability))
    image = KernelImage(compiled.cubin, source.entry, source.block, source.dynamic_smem_bytes)
    executable = Executable.single(image, ada.launch(*read_dims(dims, fmt)))
    bound = gpu.bind(executable, attention_problem.make_case(dims, 0, fmt))
    first, second = bound.run(), bound.run()
    assert bound.violations() == []
    bound.free()
    assert first["out"].tobytes() == second["out"].tobytes()
    references = attention_problem.references(dims, 0, fmt)
    out = attention_problem.decode(first, fmt)
    assert worst_bound_ratio(out, references.exact, references.bounds["e4m3"]) <= 1
    assert error_stats(out, references.exact, 1).relative_error <= 0.03
