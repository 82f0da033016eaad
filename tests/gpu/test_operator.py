"""The operator on a GPU: it agrees with the CPU within the kernel's error and behaves as PyTorch users expect."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.kernels.attention.config import Mask
from greenfast.ops import cuda, reference, sdpa, torch_ops
from greenfast.ops.call_cache import CallCache
from greenfast.ops.quantized import build_config
from greenfast.spec.kernel import Choice

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
torch_sdpa = torch.nn.functional.scaled_dot_product_attention


def inputs(
    q_len: int = 300, kv_len: int | None = None, heads: int = 4, kv_heads: int | None = None, head_dim: int = 64,
    batch: int = 2, dtype: torch.dtype = torch.bfloat16,
) -> Any:  # fmt: skip
    generator = torch.Generator().manual_seed(q_len)
    kv = (batch, kv_heads or heads, q_len if kv_len is None else kv_len, head_dim)
    shapes = [(batch, heads, q_len, head_dim), kv, kv]
    return [torch.randn(shape, generator=generator).to(dtype).cuda() for shape in shapes]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double().cpu() - wanted.double().cpu()).norm() / wanted.double().norm().cpu())


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine", "fp8_token"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"q_len": 1000, "head_dim": 128}, {"is_causal": True}),
        ({"q_len": 130, "kv_len": 2100, "head_dim": 256}, {"is_causal": True, "causal_alignment": "lower_right"}),
        ({"q_len": 70, "head_dim": 72}, {"scale": 0.2}),
        ({"q_len": 1, "kv_len": 515, "heads": 8, "kv_heads": 2, "head_dim": 128}, {"enable_gqa": True}),
    ],
    ids=str,
)
def test_agrees_with_the_cpu(
    sizes: dict[str, int], options: dict[str, Any], dtype: torch.dtype, precision: Any
) -> None:
    q, k, v = inputs(dtype=dtype, **sizes)
    found, lse = greenfast.sdpa(q, k, v, precision=precision, return_lse=True, **options)
    plain = greenfast.sdpa(q, k, v, precision=precision, **options)
    wanted, wanted_lse = greenfast.sdpa(q.cpu(), k.cpu(), v.cpu(), precision=precision, return_lse=True, **options)
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    assert error(found, wanted) <= 0.03
    assert error(plain, wanted) <= 0.03
    assert (lse.cpu() - wanted_lse).abs().max() < 0.03
    assert torch.equal(plain, greenfast.sdpa(q, k, v, precision=precision, **options)), "the same bits on each run"


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 4), (80, 4), (128, 1), (256, 2)])
@pytest.mark.parametrize("length", [40, 1000, 2500])
def test_with_token_scales_rows_do_not_depend_on_later_tokens(
    length: int, head_dim: int, kv_heads: int, rows_first: bool
) -> None:
    given = inputs(length, kv_heads=kv_heads, head_dim=head_dim)
    if rows_first:
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    first = length - length // 3
    options = {"is_causal": True, "enable_gqa": True, "precision": "fp8_token", "return_lse": True}
    attend: Any = greenfast.sdpa
    expected = attend(*given, **options)
    for factor in (-1.0, 300.0, float("nan")):
        changed = [torch.cat([x[:, :, :first], x[:, :, first:] * factor], 2) for x in given]
        found = attend(*changed, **options)
        assert all(torch.equal(a[:, :, :first], b[:, :, :first]) for a, b in zip(found, expected, strict=True))
    prefix = attend(*[x[:, :, :first] for x in given], **options)
    assert all(torch.equal(a, b[:, :, :first]) for a, b in zip(prefix, expected, strict=True))


@pytest.mark.parametrize("length", [1, 130, 257, 1500, 5000])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize(
    "choices",
    [("fp8", True, "block", False, False), ("int8", True, "block", True, True), ("int8", True, "channel", True, True),
     ("int8_fine", True, "block", True, True), ("fp8", True, "head", False, False), ("fp8", False, "head", True, True)],
    ids=str,
)  # fmt: skip
def test_codes_equal_the_references(choices: tuple[str, bool, str, bool, bool], head_dim: int, length: int) -> None:
    q, k, v = inputs(length, head_dim=head_dim, heads=3, kv_heads=1)
    config = build_config(head_dim, q.dtype, *choices)
    found = torch_ops.QUANTIZE(q, k, v, *choices)
    wanted = reference.quantize(q.cpu(), k.cpu(), v.cpu(), config)
    codes = (wanted.query, wanted.key, wanted.value)
    scales = (wanted.query_scale, wanted.key_scale, wanted.value_scale)
    # Otherwise the order of sums differs, or PyTorch divides by 448 through a multiplication, as it does on a GPU.
    exact = config.value_scales == "block" and not (config.key_mean or config.rotate)
    few = 0 if exact else 2e-3 if config.value_scales == "block" else 1e-2
    for mine, theirs in zip(found[:3], codes, strict=True):
        assert float((mine.cpu() != theirs).float().mean()) <= few
    for mine, theirs in zip(found[3:6], scales, strict=True):
        assert torch.allclose(mine.cpu(), theirs, rtol=0 if exact else 1e-5, atol=0)
    if wanted.key_mean is not None:
        assert torch.allclose(found[6].cpu(), wanted.key_mean, atol=1e-5)


def test_quantized_inputs_are_kept() -> None:
    q, k, v = inputs(700, head_dim=128)
    for precision in ("fp8", "int8"):
        for choices in ({}, {"scales": "head", "value_scales": "channel"}):
            quantized = greenfast.quantize(q, k, v, precision=precision, log_sum_exp=True, **choices)  # type: ignore[arg-type]
            out, lse = greenfast.attention(quantized, is_causal=True, return_lse=True)
            exact = torch_sdpa(q.double().cpu(), k.double().cpu(), v.double().cpu(), is_causal=True)
            assert error(out, exact) < (0.06 if precision == "fp8" else 0.05)
            assert torch.isfinite(lse).all()
            assert error(greenfast.attention(quantized, is_causal=True), exact) < 0.06


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_the_ada_kernel(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes by PyTorch with one scale per head, and the Ada kernel, which a Hopper GPU can run."""

    def of_heads(target: object, head_dim: int, dtype: torch.dtype, precision: str, mask: int, *, stats: int) -> object:
        return replace(build_config(head_dim, dtype, precision, False, "head"), mask=Mask(mask), log_sum_exp=stats > 0)

    monkeypatch.setattr(cuda, "choose_kernel", lambda target, config, sizes: Choice("ada", "wanted"))
    monkeypatch.setattr(cuda, "build_sdpa_config", of_heads)
    monkeypatch.setattr(cuda, "_PLANS", {})
    monkeypatch.setattr(sdpa, "SDPA_CACHE", CallCache(5))
    q, k, v = inputs(300, heads=4, kv_heads=2, head_dim=128, dtype=torch.float16)
    found = greenfast.sdpa(q, k, v, is_causal=True, enable_gqa=True, precision=precision)
    wanted = torch_sdpa(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
    assert error(found, wanted) < 0.07


def test_strides_make_no_copies() -> None:
    q, k, v = inputs(head_dim=128)
    wanted = greenfast.sdpa(q, k, v)
    strided: Any = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    found = greenfast.sdpa(*strided)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2, "the workspace and the output"
    assert torch.equal(found, wanted)
    odd: Any = [torch.cat([x, x[..., :1]], -1)[..., 1:] for x in (q, k, v)]
    found = greenfast.sdpa(*odd)  # unaligned rows, which are copied
    assert error(found, torch_sdpa(*[x.float().cpu() for x in odd])) < 0.07


def test_memory_is_the_codes_and_the_output() -> None:
    q, k, v = inputs(4096, heads=16, head_dim=128)
    greenfast.sdpa(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = greenfast.sdpa(q, k, v)
    codes = q.numel() + k.numel() + v.numel()
    assert torch.cuda.max_memory_allocated() - before <= codes + out.numel() * 2 + (1 << 20)


def test_in_a_graph() -> None:
    q, k, v = inputs(512)
    wanted = greenfast.sdpa(q, k, v)
    graph = torch.cuda.CUDAGraph()
    static: Any = [x.clone() for x in (q, k, v)]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        greenfast.sdpa(*static)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = greenfast.sdpa(*static)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


def test_compiled() -> None:
    q, k, v = inputs(256)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return greenfast.sdpa(q, k, v, is_causal=True) + q

    compiled = torch.compile(model, fullgraph=True)
    assert error(compiled(q, k, v), model(q, k, v)) < 1e-2


@pytest.mark.parametrize("op", ["sdpa", "sdpa_lse"])
def test_opcheck(op: str) -> None:
    q, k, v = inputs(100, heads=2)
    torch.library.opcheck(getattr(torch.ops.greenfast, op).default, (q, k, v, "fp8", 1, 0.125))


def test_opcheck_of_quantized() -> None:
    q, k, v = inputs(100, heads=2)
    codes = torch_ops.QUANTIZE(q, k, v, "fp8", True, "block", True, True)
    torch.library.opcheck(torch_ops.QUANTIZE, (q, k, v, "fp8", True, "block", True, True))
    torch.library.opcheck(torch_ops.ATTENTION, (*codes[:6], "fp8", 64, 100, torch.bfloat16, 0, 0.125))


def test_from_several_threads() -> None:
    tensors: Any = [inputs(length) for length in (100, 200, 300, 400)]
    wanted = [greenfast.sdpa(*t) for t in tensors]
    torch.cuda.synchronize()
    cuda._PLANS.clear()
    wrong = []

    def work(i: int) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(50):
                if not torch.equal(greenfast.sdpa(*tensors[i]), wanted[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_from_a_new_thread() -> None:
    q, k, v = inputs(100)
    wanted = greenfast.sdpa(q, k, v)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(greenfast.sdpa(q, k, v)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], wanted)


def test_on_the_current_stream() -> None:
    q, k, v = inputs(2048, heads=16)
    wanted = greenfast.sdpa(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        late = q * 1
        out = greenfast.sdpa(late, k, v)
    assert not stream.query(), "a call does not wait for the GPU"
    stream.synchronize()
    assert torch.equal(out, wanted)


def test_nothing_to_compute() -> None:
    empty = torch.zeros(0, 2, 5, 64, device="cuda", dtype=torch.float16)
    assert greenfast.sdpa(empty, empty, empty).shape == empty.shape
    q, k, _ = inputs(5, 0)
    out, lse = greenfast.sdpa(q, k, k, return_lse=True)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_nan_propagates() -> None:
    for precision in ("fp8", "int8"):
        q, k, v = inputs(64)
        k[0, 1, 3, 5] = float("nan")
        out = greenfast.sdpa(q, k, v, precision=precision)
        assert out[0, 1].isnan().all()
        assert not out[0, 0].isnan().any()


def test_autocast() -> None:
    q, k, v = (x.float() for x in inputs(64))
    with torch.autocast("cuda", torch.float16):
        assert greenfast.sdpa(q, k, v).dtype == torch.float16


def test_different_devices() -> None:
    q, k, v = inputs(64)
    with pytest.raises(ValueError, match="key: it is on cpu, query on cuda:0"):
        greenfast.sdpa(q, k.cpu(), v)


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [1, 63, 191, 645])
def test_results_on_codes_are_those_of_sdpa(length: int, head_dim: int, precision: Any) -> None:
    """Rows behind the last one, which fill up a block of 16, have no say in how the others are rounded."""
    q, k, v = inputs(length, 300, heads=16, head_dim=head_dim)
    codes = greenfast.quantize(q, k, v, precision=precision)
    assert torch.equal(greenfast.attention(codes), greenfast.sdpa(q, k, v, precision=precision))
