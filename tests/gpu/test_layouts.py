"""The memory layout of outputs on a GPU: dense, in the query's order. Also other forms of calls, and kept codes."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import greenfast
from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import Gpu
from greenfast.device.session import Executable, KernelImage
from greenfast.kernels.attention import hopper
from greenfast.kernels.attention.config import Strides, read_dims
from greenfast.ops import torch_ops
from greenfast.ops.layout import row_strides
from greenfast.ops.quantized import Precision
from greenfast.spec.arch import Target
from greenfast.spec.problem import Case, OutputSpec
from tasks.fp8_attention import problem as attention_problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

BATCH, HEADS, KV_HEADS, LENGTH = 2, 4, 2, 200
ORDERS = [(*first, 3) for first in permutations(range(3))]


def inputs(head_dim: int, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(BATCH, n, length, head_dim) for n in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return q, k, v


def in_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    return x.permute(order).contiguous().permute([order.index(d) for d in range(4)])


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 96, 128, 136, 200, 256])
def test_an_output_has_the_layout_of_its_query(head_dim: int, precision: Precision) -> None:
    q, k, v = inputs(head_dim)
    wanted = greenfast.sdpa(q, k, v, is_causal=True, enable_gqa=True, precision=precision)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True
    )
    assert float((wanted.float() - exact).norm() / exact.norm()) < 0.08
    assert wanted.is_contiguous()
    for order in ORDERS:
        query = in_order(q, order)
        out = greenfast.sdpa(query, k, v, is_causal=True, enable_gqa=True, precision=precision)
        assert out.stride() == query.stride()
        assert out.untyped_storage().nbytes() == out.numel() * out.itemsize
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("head_dim", [72, 256])
def test_the_log_sum_exp_does_not_depend_on_the_order(head_dim: int) -> None:
    q, k, v = inputs(head_dim)
    wanted = greenfast.sdpa(q, k, v, enable_gqa=True, return_lse=True)
    query = in_order(q, (0, 2, 1, 3))
    out, lse = greenfast.sdpa(query, k, v, enable_gqa=True, return_lse=True)
    assert out.stride() == query.stride()
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])


@pytest.mark.parametrize(("padded", "head_dim"), [(64, 8), (64, 40), (128, 72), (256, 136)])
@pytest.mark.parametrize("unquantized_queries", [False, True])
def test_nothing_is_written_outside(padded: int, head_dim: int, unquantized_queries: bool) -> None:
    """Output into a dense (B, S, H, head_dim) between guards; 150 query rows end within a block."""
    gpu = Gpu(0)
    dims = {"B": 2, "H": 2, "S": 150, "D": padded, "KBLOCK": 128, "VBLOCK": 128, "QBLOCK": 16}
    case = attention_problem.make_case(dims, 0, "e4m3")
    config, sizes = read_dims(dims, "e4m3")
    config = replace(config, columns=head_dim, fuse_q_quant=unquantized_queries)
    rows = (300 * head_dim, head_dim, 2 * head_dim)
    inputs = dict(case.inputs)
    if unquantized_queries:
        inputs["q"] = np.random.default_rng(0).standard_normal((2, 150, 2, head_dim)).astype(np.float16).view(np.uint16)
    tight = Case(inputs, {"out": OutputSpec((2, 150, 2, head_dim), "float16")})
    source = hopper.kernel(config, sizes)
    compiled = compile_kernel(source, Target.of_device(gpu.capability))
    image = KernelImage(compiled.cubin, source.entry, source.block, source.dynamic_smem_bytes)

    def launched(strides: Strides) -> Executable:
        return Executable.single(image, hopper.launch(config, sizes, strides=strides))

    bound = gpu.bind(launched(Strides(query=rows, out=rows)), tight)
    found = bound.run()["out"]
    assert bound.violations() == []
    bound.free()
    by_head = {"out": OutputSpec((2, 2, 150, head_dim), "float16")}
    plain = gpu.bind(launched(Strides(query=rows)), Case(inputs, by_head))
    wanted = plain.run()["out"]
    plain.free()
    assert np.array_equal(found.transpose(0, 2, 1, 3), wanted)


def test_kept_codes_give_a_tight_output() -> None:
    for head_dim in (40, 72, 128):
        q, k, v = inputs(head_dim)
        out = greenfast.attention(greenfast.quantize(in_order(q, (0, 2, 1, 3)), k, v))
        assert out.is_contiguous()
        assert out.untyped_storage().nbytes() == q.nbytes


@pytest.mark.parametrize(
    "query", ["heads on each other", "columns not neighbours", "rows not aligned", "every other head"]
)
def test_queries_that_are_copied_first(query: str) -> None:
    q, k, v = inputs(72)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    made = {
        "heads on each other": q[:, :1].expand(q.shape),
        "columns not neighbours": q.transpose(2, 3).contiguous().transpose(2, 3),
        "rows not aligned": torch.nn.functional.pad(q, (1, 0))[..., 1:],
        "every other head": q.repeat_interleave(2, 1)[:, ::2],
    }[query]
    out = greenfast.sdpa(made, k, v)
    assert torch.equal(out, greenfast.sdpa(made.contiguous(), k, v))
    fake = torch_ops.SDPA(*(x.to("meta") for x in (made, k, v)), "fp8", 0, 1.0)
    assert fake.shape == out.shape
    assert row_strides(made, 72) == out.stride()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_compiled_calls_have_the_layout_of_eager_ones(order: tuple[int, ...], head_dim: int) -> None:
    q, k, v = inputs(head_dim)
    q = in_order(q, order)

    def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return greenfast.sdpa(q * 2, k, v, enable_gqa=True).transpose(1, 2).reshape(BATCH, LENGTH, -1) + 1

    assert torch.equal(torch.compile(merged, fullgraph=True)(q, k, v), merged(q, k, v))
    assert greenfast.sdpa(q, k, v, enable_gqa=True).stride() == q.stride()


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((70, 64), (90, 64), (90, 64)), {"is_causal": True}),
        (((3, 70, 64), (3, 90, 64), (3, 90, 64)), {}),
        (((2, 1, 4, 70, 64), (2, 3, 1, 90, 64), (3, 4, 90, 64)), {}),
        (((2, 4, 70, 64), (1, 1, 90, 64), (2, 1, 90, 64)), {"is_causal": True}),
        (((1, 4, 70, 64), (2, 4, 90, 64), (2, 4, 90, 64)), {}),
        (((2, 4, 70, 64), (2, 2, 90, 64), (2, 1, 90, 64)), {"enable_gqa": True}),
        (((2, 4, 70, 64), (2, 4, 90, 64), (2, 4, 90, 40)), {}),
        (((2, 4, 70, 64), (2, 4, 90, 64), (2, 4, 90, 100)), {}),
        (((2, 4, 70, 192), (2, 4, 90, 192), (2, 4, 90, 128)), {}),
        (((2, 0, 70, 64), (2, 0, 90, 64), (2, 0, 90, 64)), {}),
        (((2, 4, 70, 64), (2, 4, 0, 64), (2, 4, 0, 32)), {}),
    ],
    ids=str,
)
def test_other_forms(shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    assert greenfast.explain(q, k, v, **options).taken
    out = greenfast.sdpa(q, k, v, **options)
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    assert out.shape == wanted.shape
    if wanted.numel():
        assert float((out - wanted).norm()) <= 0.1 * max(1e-3, float(wanted.norm()))
        on_meta = greenfast.sdpa(q.to("meta"), k.to("meta"), v.to("meta"), **options)
        assert on_meta.stride() == out.stride()


def test_a_causal_bias_is_the_flag() -> None:
    q, k, v = inputs(64)
    bias = causal_lower_right(LENGTH, 150)
    k, v = k[:, :, :150], v[:, :, :150]
    wanted = greenfast.sdpa(q, k, v, is_causal=True, causal_alignment="lower_right", enable_gqa=True)
    assert torch.equal(greenfast.sdpa(q, k, v, bias, enable_gqa=True), wanted)


def test_float32_and_sparse_tensors() -> None:
    q, k, v = (x.float() for x in inputs(64))
    out = greenfast.sdpa(q, k, v, enable_gqa=True, float32_as=torch.bfloat16)
    assert out.dtype == torch.float32
    assert torch.equal(out, greenfast.sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16(), enable_gqa=True).float())
    with pytest.raises(NotImplementedError, match="key: nested or sparse"):
        greenfast.sdpa(q.bfloat16(), k.bfloat16().to_sparse(), v.bfloat16(), enable_gqa=True)


def test_codes_move_and_are_checked() -> None:
    q, k, v = inputs(72)
    codes = greenfast.quantize(q, k, v)
    wanted = greenfast.attention(codes)
    again = codes.to("cpu").to("cuda")
    assert again.device == q.device
    assert torch.equal(greenfast.attention(again), wanted)
    tensors = list(codes.tensors()[:6])
    rest = ("fp8", 72, LENGTH, torch.bfloat16, 0, 72**-0.5)
    assert torch.equal(torch_ops.ATTENTION(*tensors, *rest), wanted)
    for i, wrong in (
        (0, tensors[0][:, :, :100].contiguous()),
        (1, tensors[1].transpose(1, 2)),
        (2, tensors[2][..., :96].contiguous()),
        (3, tensors[3][..., :5].contiguous()),
        (4, tensors[4][..., :1].contiguous()),
        (5, tensors[5].cpu()),
    ):
        args = [*tensors[:i], wrong, *tensors[i + 1 :]]
        with pytest.raises((ValueError, RuntimeError), match=r"shape|heads|contiguous|device|cpu"):
            torch_ops.ATTENTION(*args, *rest)
    assert torch.equal(greenfast.attention(codes), wanted)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
def test_a_row_without_keys_whose_query_is_not_finite(wrong: float, precision: Any) -> None:
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda").bfloat16() for n in (200, 72, 72))
    q[0, 0, 3, 0] = q[0, 1, 100, 5] = wrong  # of rows 0 .. 127, which see no key
    options: Any = {"is_causal": True, "causal_alignment": "lower_right", "return_lse": True}
    codes = greenfast.quantize(q, k, v, precision=precision, log_sum_exp=True)
    for out, lse in (greenfast.sdpa(q, k, v, precision=precision, **options), greenfast.attention(codes, **options)):
        assert (lse[:, :, :128] == -float("inf")).all()
        assert (out[:, :, :128] == 0).all()
        assert lse[:, :, 128:].isfinite().all()
