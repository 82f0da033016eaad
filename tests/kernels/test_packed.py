"""The kernels of packed sequences on the emulator: the schedule, the quantizer and attention, against the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from greenfast.kernels.attention import hopper, packed, schedule
from greenfast.kernels.attention.config import ROW_BLOCK, AttentionConfig, Mask, Strides
from greenfast.kernels.attention.heuristics import Tiling
from greenfast.ops.quantized import build_config
from greenfast.ops.reference import add_packed_mean_scores
from greenfast.ops.varlen import VARLEN_LSE
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import Case, OutputSpec
from tests.emulator.kernels import run_source

#: Lengths of queries and of keys: empty ones, one row, whole and partial tiles, more queries than keys.
LENGTHS = ([0, 1, 130, 0, 64, 70], [5, 128, 260, 0, 0, 40])


def starts(lengths: list[int]) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def run(kernel: KernelSource, launch: Launch, inputs: dict[str, Any], outputs: dict[str, tuple[str, Any]]) -> Any:
    case = Case(inputs, {name: OutputSpec(tuple(shape), dtype) for name, (dtype, shape) in outputs.items()})
    return run_source(kernel, launch, case).outputs


def make_schedule(
    config: AttentionConfig, sizes: packed.PackedSizes, tiles: Tiling, inputs: dict[str, Any],
    window: tuple[int, int] = (0, 0),
) -> dict[str, Any]:  # fmt: skip
    shapes = packed.buffer_shapes(config, sizes, tiles)
    names = ("tiles", "tile_count", "sequences", "block_sequence")
    arguments = packed.schedule_arguments(sizes, used="seqused_k" in inputs)
    launch = schedule.launch(arguments, config, tiles, sizes.batch, sizes.max_tiles(tiles), window)
    found: dict[str, Any] = run(schedule.packed_kernel(), launch, inputs, {name: shapes[name] for name in names})
    return found


def make_sizes(lengths: tuple[list[int], list[int]], heads: int, kv_heads: int) -> packed.PackedSizes:
    q, k = lengths
    return packed.PackedSizes(len(q), heads, kv_heads, sum(q), sum(k), max(q), max(k))


@pytest.mark.parametrize("causal", [False, True])
def test_the_schedule_has_each_tile_once_by_descending_work(causal: bool) -> None:
    lengths = ([300, 0, 1, 5000, 129, 128, 64], [300, 10, 9000, 5000, 0, 1, 64])
    config = replace(build_config(64, torch.bfloat16, "fp8"), mask=Mask(2 * causal))
    sizes, tiles = make_sizes(lengths, 4, 2), Tiling(128, 2, 4, 64)
    inputs = {"cu_seqlens_q": starts(lengths[0]), "cu_seqlens_k": starts(lengths[1])}
    found = make_schedule(config, sizes, tiles, inputs)
    count = int(found["tile_count"][0])
    q_ends, k_ends = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    expected: set[tuple[int, ...]] = set()
    work: dict[tuple[int, ...], int] = {}
    for b, (q_len, kv_len) in enumerate(zip(*lengths, strict=True)):
        first_key = (k_ends[b] + b * ROW_BLOCK) // ROW_BLOCK * ROW_BLOCK
        for row in range(0, q_len, tiles.block_m):
            tile = (int(q_ends[b]), q_len, int(first_key), kv_len, row)
            expected.add(tile)
            keys = min(kv_len, max(0, min(row + tiles.block_m, q_len) + kv_len - q_len)) if causal else kv_len
            work[tile] = -(-keys // tiles.block_n)
    listed = [tuple(map(int, tile[:5])) for tile in found["tiles"][:count]]
    assert len(listed) == len(expected)
    assert set(listed) == expected
    loads = [work[tile] for tile in listed]
    assert all(later <= earlier * (1 + 1 / 16) for earlier, later in pairwise(loads))
    blocks = found["block_sequence"]
    for b, kv_len in enumerate(lengths[1]):
        first = found["sequences"][b][1] // ROW_BLOCK
        assert (blocks[first : first - (-kv_len // ROW_BLOCK)] == b).all()
    assert (blocks >= 0).sum() == sum(-(-n // ROW_BLOCK) for n in lengths[1])


@pytest.mark.parametrize("ends", [[0, 400, 100, 5000], [-7, 3, 2**31 - 1, 90], [90, 60, 30, 0]], ids=str)
def test_starts_that_do_not_fit_never_reach_beyond_the_tensors(ends: list[int]) -> None:
    """The kernels cannot raise: whatever the numbers, rows stay inside Q, K, V and their codes."""
    config = replace(build_config(64, torch.bfloat16, "fp8"), mask=Mask(2))
    sizes, tiles = packed.PackedSizes(3, 2, 2, 500, 300, 100, 100), Tiling(128, 1, 4, 64)
    inputs = {name: np.array(ends, np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    inputs["seqused_k"] = np.array([-1, 2**31 - 1, 50], np.int32)
    found = make_schedule(config, sizes, tiles, inputs)
    for first_q_row, q_len, first_key, kv_len, row, *_ in found["tiles"][: found["tile_count"][0]]:
        assert 0 <= first_q_row <= first_q_row + row < first_q_row + q_len <= sizes.q_rows
        assert 0 <= first_key <= first_key - (-kv_len // ROW_BLOCK * ROW_BLOCK) <= sizes.code_rows
        assert first_key % ROW_BLOCK == 0
    for first_input_row, first_key, kv_len, _ in found["sequences"]:
        assert 0 <= first_input_row <= first_input_row + kv_len <= sizes.k_rows
        assert 0 <= first_key <= sizes.code_rows


#: Head dim, columns, precision, tiles, and what else differs: window, softcap, sinks, lse, used, heads, lengths.
CASES: dict[str, tuple[int, int, str, Tiling, dict[str, Any]]] = {
    "causal": (64, 64, "fp8", Tiling(128, 1, 4, 64, overlap=True), {"window": (-1, 0), "lse": True}),
    "narrow": (64, 40, "int8", Tiling(128, 2, 4, 64, True, 12, overlap=True), {"heads": (2, 2), "used": True}),
    "ping-pong": (128, 128, "fp8", Tiling(128, 2, 3, 128, True, 8, overlap=True), {"window": (-1, 0), "used": True}),
    "fine": (128, 128, "int8_fine", Tiling(128, 2, 4, 128, True, overlap=True), {"heads": (1, 1), "lse": True}),
    "head dim 256": (
        256, 256, "fp8", Tiling(128, 2, 3, 256, overlap=True, two_levels=False), {"window": (-1, 0), "heads": (1, 1)},
    ),
    "window": (64, 64, "fp8", Tiling(128, 1, 4, 64, overlap=True), {"window": (50, 0), "lse": True}),
    "window on both sides": (64, 64, "fp8", Tiling(128, 2, 4, 64, True, 12, overlap=True), {"window": (90, 20)}),
    "window of many tiles": (
        64, 64, "int8", Tiling(128, 4, 4, 64, False, 8), {"window": (300, 0), "lengths": ([200, 60], [700, 300])},
    ),
    "window, head dim 256": (
        256, 256, "fp8", Tiling(128, 2, 2, 128, True), {"window": (130, -1), "heads": (1, 1)},
    ),
    "right limit, softcap and sinks": (
        64, 64, "fp8", Tiling(128, 2, 4, 64, True, overlap=True),
        {"window": (-1, 5), "softcap": 3.0, "sinks": (-1.0, 70.0), "lse": True},
    ),
}  # fmt: skip


#: The other cases are slow; tests/gpu/test_varlen.py has their like.
QUICK = ("ping-pong", "window on both sides", "right limit, softcap and sinks")


@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_sequences_of_several_lengths_agree_with_the_cpu(case: str) -> None:
    """Some sequences hold numbers that are not finite: their neighbours must not see them."""
    head_dim, columns, precision, tiles, options = CASES[case]
    heads, kv_heads = options.get("heads", (2, 1))
    lengths = options.get("lengths", LENGTHS)
    left, right = window = options.get("window", (-1, -1))
    softcap, sinks, lse = options.get("softcap", 0.0), options.get("sinks"), options.get("lse", False)
    sizes = make_sizes(lengths, heads, kv_heads)
    config = replace(
        build_config(columns, torch.bfloat16, precision, key_mean=softcap == 0.0 and sinks is None),
        mask=Mask.NONE if right < 0 else Mask.LOWER_RIGHT, log_sum_exp=lse, fuse_q_quant=True, scheduled=True,
        window=left >= 0, sinks=sinks is not None, softcap=softcap,
    )  # fmt: skip
    if config.sum_unrounded_p:
        tiles = replace(tiles, polynomials=0)
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (
        (torch.randn(rows, count, columns, generator=generator) * 2 + 0.5).bfloat16()
        for rows, count in ((sizes.q_rows, heads), (sizes.k_rows, kv_heads), (sizes.k_rows, kv_heads))
    )
    cu_q, cu_k = starts(lengths[0]), starts(lengths[1])
    q[cu_q[-3]], k[cu_k[1]], v[cu_k[1] + 3] = float("nan"), float("inf"), float("nan")
    inputs: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    if options.get("used"):
        inputs["seqused_k"] = np.array([5, 100, 201, 0, 0, 39], np.int32)
    limits = max(0, left), max(0, right)
    schedule = make_schedule(config, sizes, tiles, inputs, limits)
    shapes = packed.buffer_shapes(config, sizes, tiles)
    codes = run(
        packed.quantize_kernel(config, sizes),
        packed.quantize_launch(sizes, (k.stride(0), k.stride(1)), (v.stride(0), v.stride(1))),
        {"k": as_numpy(k), "v": as_numpy(v), **{name: schedule[name] for name in ("sequences", "block_sequence")}},
        {name: shapes[name] for name in ("k_codes", "v_codes", "k_scale", "v_scale", "k_mean")},
    )
    strides = (0, columns, heads * columns)
    launch = hopper.launch(
        config, sizes.as_sizes(), columns**-0.5, Strides(query=strides, out=strides), 2, tiles=tiles,
        max_tiles=sizes.max_tiles(tiles), window=limits,
    )  # fmt: skip
    outputs: dict[str, tuple[str, Any]] = {"out": ("uint16", q.shape)}
    if lse:
        outputs["lse"] = ("float32", (heads, sizes.q_rows))
    attended = run(
        hopper.kernel(config, sizes.as_sizes(), 2, tiles=tiles),
        launch,
        {
            "q": as_numpy(q), "k": codes["k_codes"], "v_t": codes["v_codes"], "k_scale": codes["k_scale"],
            "v_scale": codes["v_scale"], "tiles": schedule["tiles"], "tile_count": schedule["tile_count"],
            **({"sinks": np.array(sinks, np.float32)} if sinks else {}),
        },
        outputs,
    )  # fmt: skip
    found = torch.from_numpy(attended["out"].view(np.int16)).view(torch.bfloat16)
    used = torch.from_numpy(inputs["seqused_k"]) if "seqused_k" in inputs else None
    wanted, wanted_lse = VARLEN_LSE(
        q, k, v, torch.from_numpy(cu_q), torch.from_numpy(cu_k), used, torch.tensor(sinks) if sinks else None,
        sizes.max_q, sizes.max_k, precision, *window, softcap, columns**-0.5,
    )  # fmt: skip
    assert torch.equal(found.isnan(), wanted.isnan())
    assert wanted.isnan().any()
    finite = ~wanted.isnan()
    assert (found.double() - wanted.double())[finite].norm() < 0.03 * wanted.double()[finite].norm()
    if lse:
        sums = torch.from_numpy(attended["lse"])
        if config.key_mean:
            means = torch.from_numpy(codes["k_mean"])
            sums = add_packed_mean_scores(sums, q, means, torch.from_numpy(cu_q), columns**-0.5)
        assert torch.equal(sums.isnan(), wanted_lse.isnan())
        assert torch.equal(sums == -np.inf, wanted_lse == -np.inf)
        assert (sums - wanted_lse)[wanted_lse.isfinite()].abs().max() < 0.05


def as_numpy(x: Tensor) -> np.ndarray[Any, Any]:
    return x.view(torch.int16).numpy().view(np.uint16)
