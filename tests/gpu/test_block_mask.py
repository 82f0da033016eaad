"""Masks by tiles on a GPU: they agree with the CPU, and no constructor waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from greenfast import BlockMask
from tests.ops.test_block_mask import LENGTHS, MASKS, documents, make_dense

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def check(found: BlockMask, wanted: BlockMask) -> None:
    assert found.device.type == "cuda"
    for name in ("counts", "entries", "bits"):
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name
    torch.testing.assert_close(found.density.cpu(), wanted.density)  # the last bit of a quotient may differ
    assert torch.equal(found.to_bool().cpu(), wanted.to_bool())


@pytest.mark.parametrize("lengths", [*LENGTHS, (2000, 4111), (4096, 4096)], ids=str)
def test_booleans_agree_with_the_cpu(lengths: tuple[int, int]) -> None:
    dense = make_dense(2, 3, *lengths)
    on_gpu = dense.cuda()
    views: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x, lambda x: x.mT, lambda x: x[:, :, ::2, 1:], lambda x: x[:1].expand(4, 3, *lengths),
        lambda x: x[0, 0],
    )  # fmt: skip
    for view in views:
        check(BlockMask.from_bool(view(on_gpu)), BlockMask.from_bool(view(dense)))


def test_a_mask_of_more_than_2_gib() -> None:
    dense = torch.zeros(3, 32768, 32768, dtype=torch.bool, device="cuda")
    dense[2, 32000:, 32100:] = True
    mask = BlockMask.from_bool(dense)
    assert mask.counts.sum((0, 1, 2)).tolist() == [6, 30]
    tile, index = mask.entries[0, 2, 255, 0].tolist()
    assert tile == 250
    wanted = BlockMask.from_bool(dense[2, 32640:, 32000:32128].cpu())
    assert torch.equal(mask.bits[index].cpu(), wanted.bits[0])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lists_of_blocks_agree_with_the_cpu(lengths: tuple[int, int]) -> None:
    rows, tiles = (-(-n // 128) for n in lengths)
    table = torch.rand(2, 3, rows, tiles, generator=torch.Generator().manual_seed(1)) < 0.5
    counts, indices = table.sum(-1), torch.argsort((~table).int(), dim=-1)
    check(
        BlockMask.from_blocks(counts.cuda(), indices.cuda(), *lengths), BlockMask.from_blocks(counts, indices, *lengths)
    )


def test_lists_with_numbers_out_of_range_are_limited() -> None:
    counts = torch.tensor([[[-3, 99, 2**31 - 1]]]).cuda()
    indices = torch.tensor([[[[0, 1, 2], [-1, 1, 2**31 - 1], [5, 0, 0]]]]).cuda()
    mask = BlockMask.from_blocks(counts, indices, 384, 384)
    assert mask.counts.tolist() == [[[[0, 0], [0, 1], [0, 1]]]]
    assert mask.entries[..., 0, :].tolist() == [[[[0, 0], [1, -1], [0, -1]]]]


@pytest.mark.parametrize("name", [name for name in MASKS if name != "document"])
def test_masks_of_flex_attention_agree_with_the_cpu(name: str) -> None:
    masks = [
        BlockMask.from_flex(flex.create_block_mask(MASKS[name], 2, 3, 700, 513, device, BLOCK_SIZE=(128, 64)))
        for device in ("cuda", "cpu")
    ]
    check(*masks)


@pytest.mark.parametrize("causal", [False, True])
def test_segments_agree_with_the_cpu(causal: bool) -> None:
    segments = torch.stack([documents(5000), documents(5000) - 2])
    found = BlockMask.from_segments(segments.cuda(), causal=causal)
    check(found, BlockMask.from_segments(segments, causal=causal))


def make_masks(dense: Tensor, counts: Tensor, indices: Tensor, segments: Tensor) -> list[BlockMask]:
    return [
        BlockMask.from_bool(dense), BlockMask.from_blocks(counts, indices, 300, 400),
        BlockMask.from_segments(segments, causal=True),
    ]  # fmt: skip


def test_a_graph_makes_masks_of_new_values() -> None:
    dense, segments = make_dense(1, 2, 300, 400).cuda(), documents(300).cuda()
    counts, indices = torch.tensor([[[1, 4, 2]]]).cuda(), torch.tensor([3, 1, 0, 2]).repeat(1, 1, 3, 1).cuda()
    arguments = (dense, counts, indices, segments)
    make_masks(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a capture fails if the host reads a tensor
        captured = make_masks(*arguments)
    dense.logical_not_()
    counts.fill_(3)
    segments.fill_(1)
    graph.replay()
    for found, wanted in zip(captured, make_masks(*arguments), strict=True):
        for name in ("counts", "entries", "bits"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))
    assert captured[1].counts.sum() == 9


def test_compiled() -> None:
    def run(dense: Tensor) -> tuple[Tensor, ...]:
        mask = BlockMask.from_bool(dense)
        return mask.counts, mask.entries, mask.bits, mask.density

    compile_function: Any = torch.compile
    dense = make_dense(1, 2, 300, 400).cuda()
    for found, wanted in zip(compile_function(run, fullgraph=True)(dense), run(dense), strict=True):
        torch.testing.assert_close(found, wanted)  # integers exactly
