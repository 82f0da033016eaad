"""The kernels that make a mask by tiles, on the emulator, against the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from greenfast.kernels.attention import block_mask
from greenfast.ops.block_mask import BLOCK_LISTS, BLOCK_MASK, SEGMENT_MASK
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import Case, OutputSpec
from tests.emulator.kernels import run_source
from tests.ops.test_block_mask import make_dense


def run(kernel: KernelSource, launch: Launch, inputs: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Any:
    case = Case(inputs, {name: OutputSpec(shape, "int32") for name, shape in shapes.items()})
    return run_source(kernel, launch, case).outputs


def list_tiles(tiles: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    blocks, key_tiles = int(np.prod(tiles.shape[:-1])), tiles.shape[-1]
    shapes = {"counts": (*tiles.shape[:-1], 2), "entries": (*tiles.shape, 2)}
    found = run(block_mask.list_kernel(), block_mask.list_launch(blocks, key_tiles), {"tiles": tiles}, shapes)
    return torch.from_numpy(found["counts"]), torch.from_numpy(found["entries"])


def check(whole: Tensor, mask: Tensor) -> None:
    """Check a view of ``whole`` that begins at its first element."""
    sizes = block_mask.MaskSizes(*mask.shape)
    shape = (sizes.batch, sizes.heads, sizes.row_blocks, sizes.key_tiles)
    shapes = {"tiles": shape, "bits": (sizes.tiles, block_mask.TILE, block_mask.ROW_WORDS)}
    launch = block_mask.pack_launch(sizes, mask.stride())
    found = run(block_mask.pack_kernel(), launch, {"mask": whole.view(torch.uint8).numpy()}, shapes)
    counts, entries, bits = BLOCK_MASK(mask)
    assert torch.equal(torch.from_numpy(found["bits"]), bits)
    for x, wanted in zip(list_tiles(found["tiles"]), (counts, entries), strict=True):
        assert torch.equal(x, wanted)


SIZES = ((1, 2, 300, 400), (2, 1, 128, 256), (1, 1, 127, 129), (1, 1, 1, 1), (1, 1, 130, 528))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_masks_agree_with_the_cpu(sizes: tuple[int, int, int, int]) -> None:
    dense = make_dense(*sizes)
    check(dense, dense)


def test_rows_at_multiples_of_16_bytes_that_end_inside_a_load() -> None:
    whole = make_dense(1, 1, 140, 416)
    check(whole, whole[..., :394])


def test_strides() -> None:
    whole = make_dense(2, 1, 200, 264)
    check(whole, whole.mT)
    check(whole, whole.transpose(0, 1))
    check(whole, whole[:, :, ::2, ::3])
    check(whole, whole[:1, :, :1].expand(1, 3, 150, 264))


def test_any_byte_except_0_is_true() -> None:
    whole = (make_dense(1, 1, 128, 272).view(torch.uint8) * torch.arange(1, 129).view(128, 1)).to(torch.uint8)
    whole[..., :128, 1] = 255
    sizes = block_mask.MaskSizes(1, 1, 128, 272)
    shapes = {"tiles": (3,), "bits": (3, block_mask.TILE, block_mask.ROW_WORDS)}
    launch = block_mask.pack_launch(sizes, whole.stride())
    found = run(block_mask.pack_kernel(), launch, {"mask": whole.numpy()}, shapes)
    assert torch.equal(torch.from_numpy(found["bits"]), BLOCK_MASK(whole != 0)[2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("causal", [False, True])
def test_segments_agree_with_the_cpu(causal: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for batch, q_len, kv_len in ((2, 300, 300), (1, 1, 129)):
        if causal and q_len != kv_len:
            continue
        queries, keys = (
            torch.randint(-2, 2, (batch, n // 40 + 1), generator=generator, dtype=dtype).repeat_interleave(40, 1)[:, :n]
            for n in (q_len, kv_len)
        )
        if dtype == torch.int64:
            queries, keys = torch.where(queries == 1, 2**40, queries), torch.where(keys == 1, 2**40, keys)
        sizes = block_mask.MaskSizes(batch, 1, q_len, kv_len)
        found = run(
            block_mask.segments_kernel(str(dtype).removeprefix("torch.")),
            block_mask.segments_launch(sizes, causal=causal),
            {"q_segments": queries.contiguous().numpy(), "kv_segments": keys.contiguous().numpy()},
            {"tiles": (batch, 1, sizes.row_blocks, sizes.key_tiles), "bits": (sizes.tiles, 128, 4)},
        )
        counts, entries, bits = SEGMENT_MASK(queries, keys, causal)
        assert torch.equal(torch.from_numpy(found["bits"]), bits)
        for x, wanted in zip(list_tiles(found["tiles"]), (counts, entries), strict=True):
            assert torch.equal(x, wanted)


@pytest.mark.parametrize("key_tiles", [1, 31, 32, 33, 100])
def test_lists_of_any_length(key_tiles: int) -> None:
    tiles = np.random.default_rng(key_tiles).integers(-2, 3, (7, key_tiles)).astype(np.int32)
    tiles[0], tiles[1], tiles[2] = 5, -1, -2
    counts, entries = list_tiles(tiles)
    for row, count, listed in zip(tiles.tolist(), counts.tolist(), entries.tolist(), strict=True):
        partial = [[k, n] for k, n in enumerate(row) if n >= 0]
        full = [[k, -1] for k, n in enumerate(row) if n == -1]
        assert count == [len(partial), len(full)]
        assert listed == partial + full + [[0, 0]] * (key_tiles - len(partial) - len(full))


def list_blocks(counts: Tensor, indices: Tensor, kv_len: int) -> list[Tensor]:
    tiles = -(-kv_len // block_mask.TILE)
    shapes = {"counts": (*counts.shape, 2), "entries": (*counts.shape, tiles, 2), "bits": (1, 128, 4)}
    kernel = block_mask.blocks_kernel(str(indices.dtype).removeprefix("torch."))
    launch = block_mask.blocks_launch(counts.numel(), indices.shape[3], kv_len)
    found = run(kernel, launch, {"list_counts": counts.numpy(), "indices": indices.numpy()}, shapes)
    return [torch.from_numpy(found[name]) for name in shapes]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tiles", "width"), [(1, 1), (5, 9), (33, 40), (100, 0), pytest.param(2100, 70, marks=pytest.mark.slow)]
)
def test_lists_of_blocks_agree_with_the_cpu(tiles: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tiles)
    indices = torch.randint(0, tiles, (1, 2, 3, width), generator=generator, dtype=dtype)
    counts = torch.randint(0, width + 1, (1, 2, 3), generator=generator, dtype=dtype)
    counts[0, 0], indices[0, 1, 2, : width // 2] = torch.tensor([0, width, width]), tiles - 1
    for columns in (128, 127, 1, 8, 66):
        kv_len = (tiles - 1) * 128 + columns
        for found, wanted in zip(
            list_blocks(counts, indices, kv_len), BLOCK_LISTS(counts, indices, kv_len), strict=True
        ):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_of_blocks_may_hold_any_numbers(dtype: torch.dtype) -> None:
    """A GPU's lists are not read by the host."""
    limits = torch.iinfo(dtype)
    counts = torch.tensor([[[-3, 99, limits.max, limits.min]]], dtype=dtype)
    indices = torch.tensor([[[[0, 1, 2], [-1, 1, limits.max], [5, 0, limits.min], [0, 1, 2]]]], dtype=dtype)
    indices[0, 0, 1, 0] = -(2**31) if dtype == torch.int32 else 2**32 + 1
    found, entries, _ = list_blocks(counts, indices, 300)
    assert found.tolist() == [[[[0, 0], [0, 1], [0, 1], [0, 0]]]]
    assert entries[0, 0, :, 0].tolist() == [[0, 0], [1, -1], [0, -1], [0, 0]]
    assert not entries[0, 0, :, 1:].any()
