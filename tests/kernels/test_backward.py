"""The backward kernels of Hopper on the emulator: codes and tables bit by bit, gradients against float64."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import pytest
import torch
from torch import Tensor

from greenfast.device.compiler import compile_kernel
from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention import backward
from greenfast.kernels.attention.config import padded_keys
from greenfast.ops import quantized_backward
from greenfast.ops.masked import MaskSpec
from greenfast.ops.reference import build_rotation
from greenfast.spec.kernel import KernelSource, Launch, find_buffers
from greenfast.spec.problem import Case, OutputSpec
from tests.emulator.kernels import run_source

DIM = 128
#: Relative errors (Frobenius) of a gradient, and the largest of a row: int8 for Q K^T and dO V^T, E4M3 for the others.
LARGEST_ERROR, LARGEST_ROW_ERROR = 0.05, 0.12
RANGE = backward.BackwardMask(shifts=(0, 0))
LENGTHS = backward.BackwardMask(shifts=(0, 0), lengths=True)


def draw(heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int = DIM, batch: int = 1) -> list[Tensor]:
    """Return Q, K, V and dO, bfloat16 (batch, heads, length, dim)."""
    generator = torch.Generator().manual_seed(0)
    of_queries, of_keys = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim)
    shapes = (of_queries, of_keys, of_keys, of_queries)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def attend(
    tensors: list[Tensor], causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return of exact attention the output, the rows' log-sum-exp and largest score, and dQ, dK and dV, in float64.

    mask: which keys queries attend to, bool, broadcastable to (B, H, S, KV). A row without a key is 0.
    """
    q, k, v, g = (x.double() for x in tensors)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    p = torch.softmax(scores, -1)
    if mask is not None:
        p = p.masked_fill(~mask, 0.0)
    out = p @ v
    ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * scale
    dk, dv = (x.view(len(x), -1, group, *x.shape[2:]).sum(2) for x in (ds.mT @ q, p.mT @ g))
    return out, torch.stack([torch.logsumexp(scores, -1), scores.amax(-1)], -1), [ds @ k, dk, dv]


def emulate(
    source: KernelSource, plan: Launch, buffers: dict[str, np.ndarray], outputs: dict[str, OutputSpec],
    partial: Collection[str] = (),
) -> None:  # fmt: skip
    """Run a kernel, and add its outputs to the buffers. Every byte of them must be written, except of partial ones.

    A later kernel that reads the others gets NaN.
    """
    used = {name for argument in plan.args for name in find_buffers(argument)}
    inputs = {name: x for name, x in buffers.items() if name in used and name not in outputs}
    result = run_source(source, plan, Case(inputs, outputs))
    assert not any(count for name, count in result.unwritten.items() if name not in partial)
    buffers |= result.outputs


def compute_gradients(
    codes: dict[str, Tensor], q_len: int, kv_len: int, mask: backward.BackwardMask = backward.FULL,
    kv_lengths: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return dQ, dK and dV, float64 (batch, heads, length, dim), of the kernels on the emulator."""
    batch = 1 if kv_lengths is None else len(kv_lengths)
    heads, kv_heads, dim = len(codes["q"]), len(codes["k"]), codes["q"].shape[2]
    sizes, of_keys, of_queries = (
        (heads, kv_heads, q_len, kv_len),
        backward.KEYS_TILINGS[dim],
        backward.QUERIES_TILINGS[dim],
    )
    buffers = {name: x.numpy() for name, x in codes.items()}
    if kv_lengths is not None:
        buffers["kv_lengths"] = kv_lengths.numpy()
    shapes = {"dq": (heads, q_len), "dk": (kv_heads, kv_len), "dv": (kv_heads, kv_len)}
    specs = {name: OutputSpec((*shape, dim), "uint16") for name, shape in shapes.items()}
    specs["ds"] = OutputSpec(backward.stored_shape(heads, q_len, kv_len, mask), "uint8")
    for tiles in of_keys:
        names = [*tiles.outputs.split(), *(["ds"] if "dk" in tiles.outputs else [])]
        plan = backward.keys_launch(tiles, *sizes, mask, batch)
        emulate(backward.keys_kernel(tiles, mask), plan, buffers, {name: specs[name] for name in names}, {"ds"})
    plan = backward.queries_launch(of_queries, *sizes, mask, batch)
    emulate(backward.queries_kernel(of_queries, mask), plan, buffers, {"dq": specs["dq"]})
    results = {name: torch.from_numpy(buffers[name]).view(torch.bfloat16).double() for name in shapes}
    return [x.view(batch, -1, *x.shape[1:]) for x in results.values()]


def check(got: Tensor, want: Tensor, rows: slice = slice(None)) -> None:
    """Check the relative errors of a gradient and of its rows."""
    error, norm = (got - want)[..., rows, :].norm(dim=-1), want[..., rows, :].norm(dim=-1)
    assert error.norm() < LARGEST_ERROR * norm.norm()
    assert (error < LARGEST_ROW_ERROR * norm).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "kv_len", "dim", "causal"),
    [
        (1, 1, 200, 300, 128, False),
        (4, 2, 130, 70, 128, True),
        (2, 1, 70, 200, 64, False),
        (2, 2, 200, 130, 64, True),
        (2, 1, 70, 100, 256, False),
        (1, 1, 130, 130, 256, True),
        pytest.param(1, 1, 300, 300, 128, True, marks=pytest.mark.slow),
        pytest.param(2, 1, 100, 200, 128, False, marks=pytest.mark.slow),
        pytest.param(2, 1, 300, 300, 64, True, marks=pytest.mark.slow),
    ],
)
def test_gradients_follow_float64(heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, causal: bool) -> None:
    """The lengths are no multiples of a tile, and with a mask some tiles have no visible key."""
    tensors = draw(heads, kv_heads, q_len, kv_len, dim)
    out, stats, exact = attend(tensors, causal)
    q, k, v, g = tensors
    codes = quantized_backward.encode(q, k, v, out.bfloat16(), stats.float(), g, dim**-0.5)
    dq, dk, dv = compute_gradients(codes, q_len, kv_len, backward.CAUSAL if causal else backward.FULL)
    check(dq, exact[0], slice(max(16, dim // 8) if causal else 0, None))  # dP - delta of the first rows is small
    check(dk, exact[1], slice(min(q_len, kv_len) - 8 if causal and q_len <= kv_len else None))
    check(dv, exact[2])


def build_case(
    sizes: tuple[int, int, int, int, int], alignment: int, left: int, right: int, lengths: list[int] | None, bias: float
) -> tuple[list[Tensor], backward.BackwardMask, Tensor | None, Tensor]:
    """Return Q, K, V and dO, with NaN in the padding; the mask of the kernels; lengths; the mask as booleans."""
    q_len, kv_len = sizes[2:4]
    tensors = draw(*sizes, batch=1 if lengths is None else len(lengths))
    tensors[1] += bias
    tensors[2][..., 0] += 3 * bias
    tensors[0][..., 7, 5] += 10 * bias
    kv_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    allowed = MaskSpec(alignment, left, right, kv_lengths).build_bool(q_len, kv_len, torch.device("cpu"))
    if kv_lengths is not None:
        padding = torch.arange(kv_len) >= kv_lengths.view(-1, 1, 1)
        for x in tensors[1:3]:
            x.masked_fill_(padding.unsqueeze(-1), math.nan)
    mask = backward.make_mask(alignment, left, right, q_len, kv_len, lengths=lengths is not None)
    return tensors, mask, kv_lengths, allowed


def clear(tensors: list[Tensor]) -> list[Tensor]:
    """Return Q, K, V and dO with zeros instead of the padding's NaN, for references."""
    return [x.nan_to_num(0.0) for x in tensors]


@pytest.mark.parametrize(
    ("sizes", "alignment", "left", "right", "lengths", "bias"),
    [
        ((2, 1, 200, 300, 64), 1, 20, 5, None, 0.0),  # narrower than a tile
        ((1, 1, 330, 300, 128), 1, 100, 0, None, 1.0),
        ((1, 1, 70, 150, 256), 2, -1, 0, None, 0.0),  # a causal mask aligned at the last key
        ((1, 1, 200, 70, 64), 2, 30, 10, None, 0.0),  # rows and tiles without a key
        ((1, 1, 130, 300, 128), 2, 0, 0, None, 0.0),  # one key, so dQ and dK are 0
        ((1, 1, 150, 260, 64), 1, -1, -1, [0, 1, 200], 0.0),
        ((1, 1, 20, 1, 128), 1, -1, -1, [0, 0], 0.0),  # no block may end before its loads of K and V
        ((2, 1, 70, 150, 128), 1, -1, 0, [150, 129], 1.0),
        ((1, 1, 150, 150, 64), 1, 20, 5, [100, 150], 0.0),  # a window begins after the last key, in its tile
        pytest.param((2, 1, 100, 130, 256), 2, 40, 3, [99, 130], 0.0, marks=pytest.mark.slow),
    ],
)
def test_masked_gradients_follow_float64(
    sizes: tuple[int, int, int, int, int], alignment: int, left: int, right: int, lengths: list[int] | None, bias: float
) -> None:
    """Gradients of the padding, and of rows and keys without a partner, are exactly 0, whatever the padding holds."""
    tensors, mask, kv_lengths, allowed = build_case(sizes, alignment, left, right, lengths, bias)
    q_len, kv_len = sizes[2:4]
    out, stats, exact = attend(clear(tensors), mask=allowed)
    buffers = quantize(tensors, out, stats, kv_lengths)
    used = {name: buffers[name] for name in quantized_backward._CODES}
    q, k, v, g = clear(tensors)
    mean = buffers["k_mean"].view(len(q), -1, sizes[4])
    wanted = quantized_backward.encode(q, k, v, out.bfloat16(), stats.float(), g, sizes[4] ** -0.5, mean, kv_lengths)
    for name in ("k", "v", "k_t"):
        assert (used[name] != wanted[name]).float().mean() < 2e-3
    blind = ~allowed.any(-1).squeeze(1), ~allowed.any(-2).squeeze(1)
    for i, got in enumerate(compute_gradients(used, q_len, kv_len, mask, kv_lengths)):
        empty = blind[min(i, 1)].unsqueeze(1).expand(got.shape[:3])
        assert not got[empty].any()
        # With one key dP - delta is the rounding of dP alone: dQ and dK are not 0, but small beside dV.
        assert (got - exact[i]).norm() <= LARGEST_ERROR * max(exact[i].norm(), exact[2].norm() / 2)


def test_each_query_has_its_scale() -> None:
    """Rows of dO differ by 1e6, within 64 queries and between them. Half of them have a key with most of the weight."""
    q, k, v, g = draw(1, 1, 192, 200)
    k[..., 5, :] = 0.0
    k[..., 5, 0], q[..., 0] = 24.0, 0.0
    q[..., ::2, 0] = 5.0
    g[..., :64, :] *= 1e-6
    g[..., 64::3, :] *= 1e6
    g[..., 3, :] = 0.0
    out, stats, exact = attend([q, k, v, g], causal=False)
    weights = torch.exp(stats[0, 0, :, 1] - stats[0, 0, :, 0])
    assert weights[::2].min() > 0.9
    assert weights[1::2].max() < 0.2
    codes = quantized_backward.encode(q, k, v, out.bfloat16(), stats.float(), g, DIM**-0.5)
    units = codes["tables"][..., 2 * backward.ROWS + 1 :]
    assert len(torch.unique(units[0, :, :2], dim=0)) > 1
    dq, dk, dv = compute_gradients(codes, 192, 200)
    assert not dq[..., 3, :].any()
    # Where a weight is almost 1, dP - delta is the rounding of dP.
    flat, others = [i for i in range(192) if i % 2 and i != 3], [i for i in range(200) if i != 5]
    check(dq[..., flat, :], exact[0][..., flat, :])
    check(dk[..., others, :], exact[1][..., others, :])
    check(dv, exact[2])


@pytest.mark.parametrize("kind", ["sink", "peaked"])
def test_rows_with_one_large_weight(kind: str) -> None:
    """A key has most of the weight of all rows, or of one row in 64. The gradients of other keys keep precision."""
    q, k, v, g = draw(1, 1, 192, 320)
    if kind == "sink":
        q += 10.0 * k[..., :1, :] / k[..., :1, :].float().norm(dim=-1, keepdim=True)
        v[..., 0, :] *= 0.1
    else:
        q[..., ::64, :] = 1.5 * k[..., :192:64, :]
    out, stats, exact = attend([q, k, v, g], causal=False)
    weights = torch.exp(stats[0, 0, :, 1] - stats[0, 0, :, 0])
    assert weights.median() > 0.9 if kind == "sink" else weights.max() > 0.99 > 10 * weights.median()
    codes = quantized_backward.encode(q, k, v, out.bfloat16(), stats.float(), g, DIM**-0.5)
    _, dk, dv = compute_gradients(codes, 192, 320)
    others = slice(1, None)  # dP - delta of a row's largest weight is the rounding of dP
    for got, wanted in ((dk, exact[1]), (dv, exact[2])):
        error = (got - wanted)[..., others, :].norm() / wanted[..., others, :].norm()
        assert error < 0.06


def test_gradients_that_fall_from_tile_to_tile() -> None:
    """Sums in the unit of the first tile would overflow if they were multiplied for each later one."""
    q, k, v, g = draw(1, 1, 192, 130)
    for i, size in enumerate((1e6, 1e-12, 1e-30)):
        g[..., 64 * i : 64 * (i + 1), :] *= size
    out, stats, exact = attend([q, k, v, g], causal=False)
    codes = quantized_backward.encode(q, k, v, out.bfloat16(), stats.float(), g, DIM**-0.5)
    for got, wanted in zip(compute_gradients(codes, 192, 130), exact, strict=True):
        check(got[..., :128, :], wanted[..., :128, :])


def test_the_heads_of_a_launch() -> None:
    """The second head of K alone gives the bits of a launch of both. Its dS is the first of its buffer."""
    q, k, v, g = draw(4, 2, 70, 200, 64)
    out, stats, _ = attend([q, k, v, g], causal=True)
    codes = quantized_backward.encode(q, k, v, out.bfloat16(), stats.float(), g, 64**-0.5)
    wanted = compute_gradients(codes, 70, 200, backward.CAUSAL)
    sizes, part = (4, 2, 70, 200, backward.CAUSAL, 1), backward.HeadRange(1, 2)
    buffers = {name: x.numpy() for name, x in codes.items()}
    specs = {name: OutputSpec((2, 200, 64), "uint16") for name in ("dk", "dv")}
    specs["ds"] = OutputSpec(backward.stored_shape(2, 70, 200, backward.CAUSAL), "uint8")
    of_keys, of_queries = backward.KEYS_TILINGS[64][0], backward.QUERIES_TILINGS[64]
    keys = backward.keys_kernel(of_keys, backward.CAUSAL), backward.keys_launch(of_keys, *sizes, part)
    queries = backward.queries_kernel(of_queries, backward.CAUSAL), backward.queries_launch(of_queries, *sizes, part)
    emulate(*keys, buffers, specs, specs)
    emulate(*queries, buffers, {"dq": OutputSpec((4, 70, 64), "uint16")}, {"dq"})
    for name, head, both in zip(("dq", "dk", "dv"), (2, 1, 1), wanted, strict=True):
        found = torch.from_numpy(buffers[name]).view(torch.bfloat16).double()
        assert torch.equal(found[head:], both[0, head:])


def test_differences_beyond_the_range_of_an_accumulator() -> None:
    """At head dim 256 dP of outliers of both signs, and so dP - delta, exceeds 2^22 in units of the codes."""
    dim = 256
    q, k, v, g = draw(1, 1, 64, 64, dim)
    q, k, v, g = q * 0.1, k * 0.1, v * 1e-2, g * 1e-2
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[..., 5, 0] = 14.0
    v[..., 3], g[..., 3] = 100.0, 100.0
    v[..., 5, 3] = -100.0
    out, stats, exact = attend([q, k, v, g], causal=False)
    codes = quantized_backward.encode(q, k, v, out.bfloat16(), stats.float(), g, dim**-0.5)
    products = codes["grad"].view(torch.int8).double() @ codes["v"].view(torch.int8).double().mT
    starts = codes["tables"][..., backward.ROWS : 2 * backward.ROWS] - quantized_backward._MAGIC_BITS
    assert products.max() + starts.max() > 2**22
    others = [i for i in range(64) if i != 5]
    _, dk, _ = compute_gradients(codes, 64, 64)
    check(dk[..., others, :], exact[1][..., others, :])


def quantize(tensors: list[Tensor], out: Tensor, stats: Tensor, kv_lengths: Tensor | None = None) -> dict[str, Tensor]:
    """Return the buffers of the quantizer's kernels on the emulator. Each kernel must write all of its outputs.

    The kernels get a log-sum-exp without the contribution of a vector near the keys' mean, as after a forward pass.
    """
    q, k, v, g = tensors
    (batch, heads, q_len, dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
    sizes = (batch, heads, kv_heads, q_len, kv_len)
    lengths = kv_lengths is not None
    inputs = (q, k, v, out.bfloat16(), g)
    buffers = {name: x.view(torch.uint16).numpy() for name, x in zip(backward.INPUTS, inputs, strict=True)}
    lse_mean = 0.9 * k.float().nan_to_num(0.0, 0.0).mean(2)
    shifts = (q.float() * lse_mean.repeat_interleave(heads // kv_heads, 1).unsqueeze(2)).sum(-1) * dim**-0.5
    buffers["row_stats"] = (stats.float() - shifts.nan_to_num(0.0).unsqueeze(-1)).numpy()
    buffers["lse_mean"], buffers["rotation"] = (lse_mean @ build_rotation(dim)).numpy(), build_rotation(dim).numpy()
    if kv_lengths is not None:
        buffers["kv_lengths"] = kv_lengths.numpy()
    heads, kv_heads = batch * heads, batch * kv_heads
    chunks, tiles, tables = (
        backward.count_chunks(kv_len),
        backward.count_blocks(kv_len, dim),
        -(-q_len // backward.ROWS),
    )
    floats = {
        "k_sums": (chunks, dim),
        "v_amax": (tiles,),
        "v_norm": (tiles,),
        "k_mean": (dim,),
        "k_amax": (tiles,),
        "factors": (3,),
    }
    floats["mean_shift"] = (dim,)
    specs = {name: OutputSpec((kv_heads, *shape), "float32") for name, shape in floats.items()}
    for name, (count, length) in {
        "q": (heads, q_len), "k": (kv_heads, kv_len), "v": (kv_heads, kv_len), "grad": (heads, q_len)
    }.items():  # fmt: skip
        specs[name] = OutputSpec((count, length, dim), "uint8")
        if name != "v":
            specs[f"{name}_t"] = OutputSpec((count, dim, padded_keys(length)), "uint8")
    specs["row_factors"] = OutputSpec((heads, q_len), "float32")
    specs["tables"] = OutputSpec((heads, tables, backward.TABLE_WORDS), "int32")
    # A kernel gets the outputs of later ones as arguments, and does not use them.
    buffers |= {name: np.zeros(x.shape, x.dtype) for name, x in specs.items()}
    written: list[tuple[str, ...]] = [("k_sums", "v_amax", "v_norm"), ("k_mean", "mean_shift", "k_amax")]
    written.append(tuple(specs.keys() - {*written[0], *written[1]}))
    strides = tuple(x.stride()[:3] for x in inputs)
    launches = backward.encode_launches(dim, *sizes, dim**-0.5, strides, lengths=lengths)
    for source, plan, names in zip(backward.encode_kernels(dim, lengths=lengths), launches, written, strict=True):
        emulate(source, plan, buffers, {name: specs[name] for name in names})
    return {name: torch.from_numpy(buffers[name]) for name in specs}


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_the_quantizer_writes_the_defined_codes(dim: int) -> None:
    q, k, v, g = draw(2, 1, 70, 140, dim)
    k += 2.0
    g[..., 5, :] = 0.0
    g[..., 7, :] *= 1e-3
    out, stats, _ = attend([q, k, v, g], causal=False)
    buffers = quantize([q, k, v, g], out, stats)
    mean = buffers["k_mean"].unsqueeze(0)
    torch.testing.assert_close(mean, k.float().mean(2), rtol=1e-6, atol=1e-6)
    want = quantized_backward.encode(q, k, v, out.bfloat16(), stats.float(), g, dim**-0.5, mean)
    starts, units = slice(0, 2 * backward.ROWS), slice(2 * backward.ROWS + 1, None)
    for name, expected in want.items():
        got = buffers[name]
        if name == "tables":
            assert (got[..., starts] - expected[..., starts]).abs().max() <= 1
            assert torch.equal(got[..., units], expected[..., units])
            got, expected = (x[..., 2 * backward.ROWS].view(torch.float32) for x in (got, expected))
        if name in ("tables", "factors", "row_factors"):
            torch.testing.assert_close(got, expected, rtol=4e-6, atol=0.0)
        else:
            assert (got != expected).float().mean() < 2e-3  # a sum in another order may round to the next code


@pytest.mark.parametrize(
    ("name", "value"), [("q", math.nan), ("k", math.inf), ("v", math.nan), ("grad", -math.inf), ("lse", math.nan)]
)
def test_numbers_that_are_not_finite_reach_the_gradients(name: str, value: float) -> None:
    """NaN where exact gradients are NaN. In a query, its gradient or its log-sum-exp: other tiles of dQ are right."""
    q, k, v, g = draw(1, 1, 100, 70, 64)
    if name != "lse":
        {"q": q, "k": k, "v": v, "grad": g}[name][..., 69, 3] = value
    tensors = [q, k, v, g]
    out, stats, exact = attend(tensors, causal=False)
    if name == "lse":
        stats[..., 69, :] = value
        exact[0][..., 69, :] = value
        exact[1], exact[2] = exact[1] * value, exact[2] * value
    for codes in (
        quantize(tensors, out, stats), quantized_backward.encode(q, k, v, out.bfloat16(), stats.float(), g, 64**-0.5)
    ):  # fmt: skip
        used = {name: codes[name] for name in (*quantized_backward._CODES,)}
        grads = compute_gradients(used, 100, 70)
        for got, wanted in zip(grads, exact, strict=True):
            assert got[wanted.isnan()].isnan().all()
        if name in ("q", "grad", "lse"):
            first = slice(backward.ROWS)
            check(grads[0][..., first, :], exact[0][..., first, :])


def test_the_mean_of_keys_is_that_of_all_chunks() -> None:
    """Three chunks of 1,024 keys or fewer, of two heads."""
    kv_heads, kv_len, dim = 2, 2100, 64
    q, k, v, _ = draw(kv_heads, kv_heads, 1, kv_len, dim)
    k += 3.0
    assert backward.count_chunks(kv_len) == 3
    assert [backward.count_chunks(n) for n in (1, 1024, 1025, 32768, 32769)] == [1, 1, 2, 32, 29]
    inputs = (q, k, v, q, q)
    buffers = {name: x.view(torch.uint16).numpy() for name, x in zip(backward.INPUTS, inputs, strict=True)}
    tiles = backward.count_blocks(kv_len, dim)
    summed = {name: OutputSpec((2, tiles), "float32") for name in ("v_amax", "v_norm")}
    summed["k_sums"] = OutputSpec((2, 3, dim), "float32")
    measured = {name: OutputSpec((2, dim), "float32") for name in ("k_mean", "mean_shift")}
    measured["k_amax"] = OutputSpec((2, tiles), "float32")
    lse_mean = k[0].float().mean(1) + 0.5
    buffers["lse_mean"], buffers["rotation"] = (lse_mean @ build_rotation(dim)).numpy(), build_rotation(dim).numpy()
    launches = backward.encode_launches(dim, 1, 2, 2, 1, kv_len, 1.0, tuple(x.stride()[:3] for x in inputs))
    unused = {name for plan in launches for x in plan.args for name in find_buffers(x)} - buffers.keys()
    buffers |= {name: np.zeros(1, np.float32) for name in unused - {*summed, *measured}}
    buffers |= {name: np.zeros(x.shape, x.dtype) for name, x in (summed | measured).items()}
    for source, plan, outputs in zip(backward.encode_kernels(dim)[:2], launches[:2], (summed, measured), strict=True):
        emulate(source, plan, buffers, outputs)
    mean = torch.from_numpy(buffers["k_mean"])
    torch.testing.assert_close(mean, k[0].float().mean(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(buffers["mean_shift"]), mean - lse_mean, rtol=1e-4, atol=1e-5)
    centered = (k[0].float() - mean.unsqueeze(1)).bfloat16().float() @ build_rotation(dim)
    root = 2 * dim**0.5
    for name, rotated in (("k_amax", centered), ("v_amax", v[0].float() @ build_rotation(dim))):
        wanted = torch.stack([x.abs().amax((1, 2)) for x in torch.split(rotated, 128, 1)], 1) / root
        torch.testing.assert_close(torch.from_numpy(buffers[name]), wanted, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", [backward.FULL, backward.CAUSAL, RANGE, LENGTHS], ids=str)
def test_products_overlap(mask: backward.BackwardMask, dim: int) -> None:
    """ptxas serializes wgmma (messages C7510 to C7517) after small changes of the loop, at half the speed."""
    for source in (
        *(backward.keys_kernel(tiles, mask) for tiles in backward.KEYS_TILINGS[dim]),
        backward.queries_kernel(backward.QUERIES_TILINGS[dim], mask),
    ):
        compiled = compile_kernel(source, backward.TARGET)
        assert "C75" not in compiled.log
        assert compiled.resources.spill_bytes == compiled.resources.stack_bytes == 0
