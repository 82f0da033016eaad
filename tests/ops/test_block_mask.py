"""Masks by tiles on the CPU: their fields against dense booleans, their sources, traces and refusals."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import greenfast
from greenfast import BlockMask
from greenfast.ops import block_mask as module

COMPILE: Any = torch.compile
LENGTHS = ((1, 1), (127, 129), (128, 128), (129, 127), (300, 640), (513, 130), (0, 5), (5, 0), (0, 0))


def make_dense(batch: int, heads: int, q_len: int, kv_len: int, seed: int = 0) -> Tensor:
    """Return booleans with empty, full and partial tiles, bool (batch, heads, q_len, kv_len)."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 4, (batch, heads, -(-q_len // 128), -(-kv_len // 128)), generator=generator)
    kinds = kinds.repeat_interleave(128, 2)[:, :, :q_len].repeat_interleave(128, 3)[..., :kv_len]
    noise = torch.rand((batch, heads, q_len, kv_len), generator=generator)
    # A quarter of the tiles each: empty, full, random, and full without a few places.
    return (kinds == 1) | (kinds == 2) & (noise < 0.3) | (kinds == 3) & (noise < 0.9999)


def check_fields(mask: BlockMask, dense: Tensor) -> None:
    """Check every field against booleans, a tile at a time, from the documented order of bits."""
    batch, heads, q_len, kv_len = dense.shape
    rows, tiles = -(-q_len // 128), -(-kv_len // 128)
    assert (mask.q_len, mask.kv_len, mask.batch, mask.heads) == (q_len, kv_len, batch, heads)
    assert mask.counts.shape == (batch, heads, rows, 2)
    assert mask.entries.shape == (batch, heads, rows, tiles, 2)
    assert mask.bits.shape[0] >= 1
    assert {x.dtype for x in (mask.counts, mask.entries, mask.bits)} == {torch.int32}
    column = [[[8 * j + 2 * quad + e for j in range(16) for e in range(2)] for quad in range(4)]]
    for b, h, r in ((b, h, r) for b in range(batch) for h in range(heads) for r in range(rows)):
        partial: list[int] = []
        full: list[int] = []
        for k in range(tiles):
            tile = dense[b, h, 128 * r : 128 * r + 128, 128 * k : 128 * k + 128]
            if tile.all() and 128 * k + 128 <= kv_len:
                full.append(k)
            elif tile.any():
                partial.append(k)
        entries = mask.entries[b, h, r].tolist()
        assert mask.counts[b, h, r].tolist() == [len(partial), len(full)]
        assert [k for k, _ in entries[: len(partial)]] == partial
        assert entries[len(partial) :] == [[k, -1] for k in full] + [[0, 0]] * (tiles - len(partial) - len(full))
        for k, n in entries[: len(partial)]:
            words = mask.bits[n].unsqueeze(-1) >> torch.arange(32) & 1
            found = torch.zeros(128, 128, dtype=torch.bool).scatter(
                1, torch.tensor(column).expand(128, 4, 32).flatten(1), words.flatten(1).bool()
            )
            wanted = torch.zeros(128, 128, dtype=torch.bool)
            tile = dense[b, h, 128 * r : 128 * r + 128, 128 * k : 128 * k + 128]
            wanted[: tile.shape[0], : tile.shape[1]] = tile
            assert torch.equal(found[: tile.shape[0]], wanted[: tile.shape[0]])
    assert torch.equal(mask.to_bool(), dense)
    listed = int(mask.counts.sum())
    assert float(mask.density) == pytest.approx(listed / max(1, batch * heads * rows * tiles))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (2, 3)], ids=str)
def test_booleans(lengths: tuple[int, int], heads: tuple[int, int]) -> None:
    dense = make_dense(*heads, *lengths)
    check_fields(BlockMask.from_bool(dense), dense)
    for whole in (torch.zeros_like(dense), torch.ones_like(dense)):
        check_fields(BlockMask.from_bool(whole), whole)


def test_a_batch_and_heads_are_optional() -> None:
    dense = make_dense(2, 3, 200, 300)
    check_fields(BlockMask.from_bool(dense[0]), dense[:1])
    check_fields(BlockMask.from_bool(dense[1, 2]), dense[1:, 2:])
    assert BlockMask.from_bool(dense[:0]).counts.shape == (0, 3, 2, 2)


def test_strides() -> None:
    dense = make_dense(2, 2, 260, 300)
    check_fields(BlockMask.from_bool(dense.mT), dense.mT)
    check_fields(BlockMask.from_bool(dense[:, :, ::2, 3::3]), dense[:, :, ::2, 3::3])
    check_fields(BlockMask.from_bool(dense.transpose(0, 1)), dense.transpose(0, 1))
    keys = dense[:, :1, :1].expand(2, 1, 260, 300)
    check_fields(BlockMask.from_bool(keys), keys)


def test_an_expanded_batch_and_heads_are_read_once() -> None:
    dense = make_dense(1, 1, 200, 300)
    check_fields(BlockMask.from_bool(dense.expand(4, 8, 200, 300)), dense)
    heads = make_dense(1, 3, 200, 300)
    check_fields(BlockMask.from_bool(heads.expand(4, 3, 200, 300)), heads)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lists_of_blocks(lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    rows, tiles = -(-q_len // 128), -(-kv_len // 128)
    generator = torch.Generator().manual_seed(1)
    table = torch.rand(2, 3, rows, tiles, generator=generator) < 0.5
    counts, indices = table.sum(-1), torch.argsort((~table).int(), dim=-1, descending=False)
    wanted = table.repeat_interleave(128, 2)[:, :, :q_len].repeat_interleave(128, 3)[..., :kv_len]
    for dtype in (torch.int32, torch.int64):
        check_fields(BlockMask.from_blocks(counts.to(dtype), indices.to(dtype), q_len, kv_len), wanted)
    assert BlockMask.from_blocks(counts, indices, q_len, kv_len).bits.shape[0] == 1


def test_repeated_and_unread_indices_of_blocks() -> None:
    counts = torch.tensor([[[4, 0, 1]]])
    indices = torch.tensor([[[[2, 0, 2, 2, 77], [-5, 9, 9, 9, 9], [1, -1, 1, 1, 1]]]])
    mask = BlockMask.from_blocks(counts, indices, 300, 300)
    assert mask.counts.tolist() == [[[[1, 1], [0, 0], [0, 1]]]]
    assert mask.entries.tolist() == [[[[[2, 0], [0, -1], [0, 0]], [[0, 0]] * 3, [[1, -1], [0, 0], [0, 0]]]]]


def documents(length: int) -> Tensor:
    return (torch.arange(length) ** 2 // (length * 16)).int()


MASKS: dict[str, Any] = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q - kv).abs() < 90,
    "document": lambda b, h, q, kv: documents(700)[q] == documents(700)[kv],
    "prefix": lambda b, h, q, kv: (kv < 200 + 100 * b) | (q >= kv + 50 * h),
    "nothing": lambda b, h, q, kv: q < 0,
}


@pytest.mark.parametrize("chunk", [1, 2**26])
@pytest.mark.parametrize("size", [64, 128, 256, (128, 64)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_flex_attention(name: str, size: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk)
    heads = (2, 3) if name == "prefix" else (1, 1)
    for q_len, kv_len in ((700, 700), (257, 600)):
        block_mask = flex.create_block_mask(MASKS[name], *heads, q_len, kv_len, "cpu", BLOCK_SIZE=size)
        wanted = flex.create_mask(MASKS[name], *heads, q_len, kv_len, "cpu")
        check_fields(BlockMask.from_flex(block_mask), wanted)


def test_blocks_that_flex_attention_does_not_list_are_empty() -> None:
    counts, indices = torch.tensor([[[1, 2, 1]]]).int(), torch.tensor([[[[2, 0], [0, 1], [1, 0]]]]).int()
    block_mask = flex.BlockMask.from_kv_blocks(counts, indices, mask_mod=MASKS["causal"], seq_lengths=(384, 384))
    wanted = torch.zeros(1, 1, 384, 384, dtype=torch.bool)
    wanted[..., 128:256, :128], wanted[..., 256:, 128:256] = True, True
    wanted[..., 128:256, 128:256] = torch.ones(128, 128).tril().bool()
    check_fields(BlockMask.from_flex(block_mask), wanted)
    few = flex.BlockMask.from_kv_blocks(counts, indices, seq_lengths=(385, 384))
    with pytest.raises(ValueError, match="block_mask: its lists have 3 blocks of 128 rows; 385 queries"):
        BlockMask.from_flex(few)


@pytest.mark.parametrize("chunk", [1, 2**26])
@pytest.mark.parametrize("causal", [False, True])
def test_segments(causal: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk)
    generator = torch.Generator().manual_seed(2)
    for batch, length in ((1, 0), (1, 1), (2, 129), (2, 700)):
        ordered = torch.randint(-1, 5, (batch, length), generator=generator).sort(-1).values
        shuffled = torch.randint(-2, 3, (batch, length), generator=generator, dtype=torch.int32)
        for queries, keys in ((ordered, None), (shuffled, None), (ordered, shuffled)):
            other = queries if keys is None else keys
            wanted = (queries[:, :, None] == other[:, None]) & (queries >= 0)[:, :, None]
            wanted = (wanted.tril() if causal else wanted).unsqueeze(1)
            check_fields(BlockMask.from_segments(queries, keys, causal=causal), wanted)
            one = BlockMask.from_segments(queries[0], None if keys is None else keys[0], causal=causal)
            check_fields(one, wanted[:1])


def test_segments_of_other_lengths() -> None:
    queries, keys = torch.tensor([0, 1, 1, -1, 3]), torch.arange(400) // 100
    wanted = torch.stack([keys == n for n in (0, 1, 1, 7, 3)])
    check_fields(BlockMask.from_segments(queries, keys), wanted[None, None])


def run_all(dense: Tensor, counts: Tensor, indices: Tensor, segments: Tensor) -> list[Tensor]:
    masks = (
        BlockMask.from_bool(dense),
        BlockMask.from_blocks(counts, indices, 300, 400),
        BlockMask.from_segments(segments, causal=True),
    )
    return [x for mask in masks for x in (mask.counts, mask.entries, mask.bits, mask.density, mask.to_bool())]


def make_arguments() -> tuple[Tensor, ...]:
    indices = torch.tensor([3, 1, 0, 2]).expand(1, 2, 3, 4)
    return make_dense(1, 2, 300, 400), torch.tensor([[[1, 4, 2], [0, 2, 3]]]), indices, documents(300)


@pytest.mark.parametrize(
    ("dynamic", "backend"),
    [(False, "aot_eager"), (True, "eager"), pytest.param(True, "aot_eager", marks=pytest.mark.slow)],
)
def test_compiled(dynamic: bool, backend: str) -> None:
    compiled = COMPILE(run_all, fullgraph=True, backend=backend, dynamic=dynamic)
    arguments = make_arguments()
    for found, wanted in zip(compiled(*arguments), run_all(*arguments), strict=True):
        assert torch.equal(found, wanted)


def test_a_mask_passes_through_a_compiled_function() -> None:
    def shift(mask: BlockMask) -> tuple[BlockMask, Tensor]:
        return mask, mask.counts + 1

    dense = make_dense(1, 2, 300, 400)
    mask = BlockMask.from_bool(dense)
    again, counts = COMPILE(shift, fullgraph=True, backend="aot_eager")(mask)
    assert torch.equal(counts, mask.counts + 1)
    check_fields(again, dense)


class Module(torch.nn.Module):
    def forward(self, dense: Tensor, counts: Tensor, indices: Tensor, segments: Tensor) -> list[Tensor]:
        return run_all(dense, counts, indices, segments)


def test_exported() -> None:
    arguments = make_arguments()
    program = torch.export.export(Module(), arguments)
    for found, wanted in zip(program.module()(*arguments), run_all(*arguments), strict=True):
        assert torch.equal(found, wanted)


def test_an_exported_program_takes_a_mask(tmp_path: Path) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, mask: BlockMask) -> Any:
            return greenfast.sdpa(q, q, q, attn_mask=mask)

    q, mask = torch.randn(1, 2, 300, 64).bfloat16(), BlockMask.from_segments(documents(300))
    program = torch.export.export(Attention(), (q, mask))
    torch.export.save(program, tmp_path / "program.pt2")
    other = BlockMask.from_segments(documents(300), causal=True)
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    assert torch.equal(loaded(q, other), greenfast.sdpa(q, q, q, attn_mask=other))


def test_exported_for_lengths_of_several_tiles() -> None:
    class Dense(torch.nn.Module):
        def forward(self, dense: Tensor) -> tuple[Tensor, Tensor]:
            mask = BlockMask.from_bool(dense)
            return mask.to_bool(), mask.density

    sizes = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Dense(), (make_dense(2, 2, 300, 400),), dynamic_shapes=(sizes,))
    for lengths in ((300, 400), (129, 250), (700, 513)):
        dense = make_dense(2, 2, *lengths)
        found, density = program.module()(dense)
        assert torch.equal(found, dense)
        assert torch.equal(density, BlockMask.from_bool(dense).density)


def test_opcheck() -> None:
    dense, counts, indices, _ = make_arguments()
    for mask in (dense, dense.mT, dense[:, :, :0]):
        torch.library.opcheck(module.BLOCK_MASK, (mask,))
    torch.library.opcheck(module.BLOCK_LISTS, (counts, indices, 400))
    torch.library.opcheck(module.SEGMENT_MASK, (documents(300)[None], documents(200)[None], False))


def test_pytree_copies_and_files() -> None:
    dense = make_dense(1, 2, 200, 300)
    mask = BlockMask.from_bool(dense)
    leaves, spec = pytree.tree_flatten(mask)
    assert len(leaves) == 3
    for same in (
        pytree.tree_unflatten(leaves, spec), copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)),
        mask.to("cpu"),
    ):  # fmt: skip
        check_fields(same, dense)
    assert mask.to("cpu") is mask
    assert mask.to("meta").device.type == "meta"
    assert repr(mask) == "BlockMask(batch=1, heads=2, q_len=200, kv_len=300, bits=(12, 128, 4), device=cpu)"
    assert mask != copy.copy(mask)
    with pytest.raises(TypeError, match=r"device: torch\.float16"):
        mask.to(torch.float16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (None, TypeError, "mask: a torch.Tensor is needed, got NoneType"),
        (torch.zeros(3, 3), TypeError, r"mask: a tensor of torch.float32 .*allowed: torch.bool; pass mask == 0"),
        (torch.zeros(3, 3).int(), TypeError, "mask: a tensor of torch.int32"),
        (torch.zeros(3).bool(), ValueError, r"mask: its shape is \(3,\); \(S, KV\)"),
        (torch.zeros(1, 1, 1, 3, 3).bool(), ValueError, "mask: its shape is"),
        (torch.zeros(3, 3).bool().to_sparse(), TypeError, "mask: it is nested or sparse"),
    ],
    ids=str,
)
def test_booleans_that_are_refused(mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BlockMask.from_bool(mask)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"counts": torch.zeros(1, 1, 3)}, TypeError, "counts: a tensor of torch.float32"),
        ({"counts": torch.zeros(1, 3).int()}, ValueError, r"counts: its shape is \(1, 3\); \(MB, MH, RB\)"),
        ({"indices": torch.zeros(1, 1, 2, 4).int()}, ValueError, r"indices: its shape is \(1, 1, 2, 4\)"),
        ({"indices": torch.zeros(1, 1, 3, 4).bool()}, TypeError, "indices: a tensor of torch.bool"),
        ({"indices": torch.zeros(1, 1, 3, 4, device="meta").int()}, ValueError, "indices: it is on meta"),
        ({"q_len": 200}, ValueError, r"counts: .*for q_len 200 it needs 2 blocks of 128 rows. For blocks"),
        ({"q_len": 2.0}, TypeError, "q_len: 2.0"),
        ({"kv_len": -1}, ValueError, "kv_len: -1"),
        ({"counts": torch.tensor([[[5, 0, 0]]])}, ValueError, "counts: from 0 to 5; 0 to 4"),
        ({"counts": torch.tensor([[[-1, 0, 0]]])}, ValueError, "counts: from -1 to 0; 0 to 4"),
        ({"kv_len": 256}, ValueError, "indices: 3; 2 tiles of 128 keys have indices from 0 to 1"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_lists_that_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "counts": torch.tensor([[[1, 0, 0]]]), "indices": torch.full((1, 1, 3, 4), 3), "q_len": 300, "kv_len": 400,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        BlockMask.from_blocks(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.zeros(3),), {}, TypeError, "q_segments: a tensor of torch.float32"),
        ((torch.zeros(1, 1, 3).int(),), {}, ValueError, "q_segments: its shape is"),
        ((torch.zeros(3).int(), torch.zeros(1, 3).int()), {}, ValueError, r"kv_segments: it is \("),
        ((torch.zeros(2, 3).int(), torch.zeros(1, 3).int()), {}, ValueError, r"kv_segments: it is \("),
        ((torch.zeros(3).int(), torch.zeros(3, device="meta").int()), {}, ValueError, "kv_segments: it is on meta"),
        ((torch.zeros(3).int(), torch.zeros(4).int()), {"causal": True}, ValueError, "causal: with 3 queries and 4"),
        ((torch.zeros(3).int(),), {"causal": 1}, TypeError, "causal: 1; True or False"),
    ],
)
def test_segments_that_are_refused(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BlockMask.from_segments(*arguments, **options)


def test_only_masks_of_flex_attention_are_converted() -> None:
    with pytest.raises(TypeError, match=r"block_mask: a Tensor; a torch.nn.attention.flex_attention.BlockMask"):
        BlockMask.from_flex(torch.zeros(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"counts": None}, TypeError, "counts: a torch.Tensor is needed"),
        ({"counts": torch.zeros(1, 2, 2, 2)}, TypeError, "counts: a tensor of torch.float32"),
        ({"counts": torch.zeros(1, 2, 3, 2).int()}, ValueError, r"counts: .*\(1, 2, 2, 2\) is needed for q_len 200"),
        ({"entries": torch.zeros(1, 1, 2, 3, 2).int()}, ValueError, r"entries: .*\(1, 2, 2, 3, 2\) is needed"),
        ({"entries": torch.zeros(1, 2, 2, 3).int()}, ValueError, r"entries: .*\(MB, MH, RB, KB, 2\)"),
        ({"bits": torch.zeros(0, 128, 4).int()}, ValueError, "bits: it is empty"),
        ({"bits": torch.zeros(1, 4, 128).int()}, ValueError, "bits: its shape is"),
        ({"bits": torch.zeros(1, 4, 128).int().mT}, ValueError, "bits: it is not contiguous"),
        ({"bits": torch.zeros(1, 128, 4, device="meta").int()}, ValueError, "bits: it is on meta"),
        ({"q_len": "2"}, TypeError, "q_len: '2'"),
        ({"kv_len": 2**31}, ValueError, "kv_len: 2147483648; at most 1073741824"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_fields_that_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    mask = BlockMask.from_bool(make_dense(1, 2, 200, 300))
    fields = {name: getattr(mask, name) for name in ("counts", "entries", "bits", "q_len", "kv_len")}
    assert greenfast.BlockMask(**fields).q_len == 200
    with pytest.raises(error, match=message):
        BlockMask(**(fields | changes))
