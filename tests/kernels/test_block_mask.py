"""The kernels that make a mask by tiles, on the emulator, against the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from greenfast.kernels.attention import block_mask
from greenfast.ops.block_mask import BLOCK_MASK
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
