"""A mask by tiles of 128 queries and 128 keys: which tiles attention skips, masks, or computes in full.

A ``BlockMask`` is made once, on the device, and used by all layers and heads. The host never reads it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from greenfast.kernels.attention.block_mask import EMPTY_TILE, FULL_TILE, ROW_WORDS, TILE
from greenfast.ops import torch_ops
from greenfast.ops.arguments import check_flag, check_once, parse_length
from greenfast.ops.layout import allocate_mask
from greenfast.ops.quantized import check_device, check_strided, format_tensor
from greenfast.ops.symbols import is_certain, require, require_same_shape

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

_MAX_LENGTH = 2**30  # so that sums in int32 cannot overflow
_CHUNK_BYTES = 2**26  # of the booleans that a constructor makes at once
_INTEGERS = (torch.int32, torch.int64)
_TENSORS = ("counts", "entries", "bits")
_LENGTHS = ("q_len", "kv_len")


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Which keys each query attends to, by tiles of 128 queries and 128 keys.

    Use ``from_bool``, ``from_blocks``, ``from_flex`` or ``from_segments`` to make one. S is the number of queries, KV
    the number of keys. MB and MH are the batch and the heads of a call, or 1 for all of them. There are
    RB = ceil(S / 128) blocks of rows, with KB = ceil(KV / 128) tiles each.

    counts: int32 (MB, MH, RB, 2), the partial and the full tiles of each block of rows. Other tiles are skipped.
    entries: int32 (MB, MH, RB, KB, 2), pairs of a tile and its index in ``bits``, -1 for a full tile. The partial tiles
    are first, then the full tiles, each in ascending order, then zeros.
    bits: int32 (N, 128, 4), N at least 1. Bit 2 j + e of [n, row, quad] is 1 if the row attends to column 8 j +
    2 quad + e of the tile; j is 0 to 15, quad 0 to 3, e 0 or 1.

    A tile that reaches beyond KV is always partial, and its columns from KV on are 0. Rows from S on have no meaning: a
    tile is full if its rows below S are.

    The tensors are contiguous and on one device. The class is a pytree (torch.utils._pytree).
    """

    counts: Tensor
    entries: Tensor
    bits: Tensor
    q_len: int
    kv_len: int

    def __post_init__(self) -> None:
        self.check()

    @staticmethod
    def from_bool(mask: Tensor) -> BlockMask:
        """Make the mask from booleans: bool (S, KV), (MH, S, KV) or (MB, MH, S, KV), True where a query attends.

        Any strides are allowed; rows at multiples of 16 bytes are read fastest. A batch or heads that ``expand`` made
        become 1. ``bits`` has room for every tile, S * KV / 8 bytes for each head of the mask.

        Raises TypeError and ValueError for other tensors.
        """
        _check_integers("mask", mask, (torch.bool,), (2, 3, 4), "(S, KV), (MH, S, KV) or (MB, MH, S, KV)")
        mask = mask[(None,) * (4 - mask.dim())]
        for dim in (0, 1):
            if is_certain(mask.shape[dim] > 1) and is_certain(mask.stride(dim) == 0):
                mask = mask.narrow(dim, 0, 1)
        counts, entries, bits = BLOCK_MASK(mask)
        return BlockMask(counts, entries, bits, mask.shape[2], mask.shape[3])

    @staticmethod
    def from_blocks(counts: Tensor, indices: Tensor, q_len: int, kv_len: int) -> BlockMask:
        """Make the mask from lists of full tiles, 128 queries by 128 keys.

        counts: int32 or int64 (MB, MH, RB), the tiles of each block of rows. indices: int32 or int64 (MB, MH, RB, K),
        their key tiles, in any order; those from the count on are not read. q_len, kv_len: S and KV.

        A tile that is listed twice counts once. On a GPU, indices out of range are ignored, and a count is limited to 0
        to K. Raises TypeError and ValueError for tensors and lengths that do not fit, and on the CPU ValueError for
        indices and counts out of range.
        """
        q_len, kv_len = parse_length("q_len", q_len, _MAX_LENGTH), parse_length("kv_len", kv_len, _MAX_LENGTH)
        check_lists(counts, indices)
        rows = -(-q_len // TILE)
        if not require(counts.shape[2] == rows):
            raise ValueError(
                f"counts: its shape is {tuple(counts.shape)}; for q_len {q_len} it needs {rows} blocks of {TILE} rows. "
                "For blocks of other sizes make a boolean mask with repeat_interleave and call BlockMask.from_bool"
            )
        counts, entries, bits = BLOCK_LISTS(counts, indices, kv_len)
        return BlockMask(counts, entries, bits, q_len, kv_len)

    @staticmethod
    def from_flex(block_mask: FlexBlockMask) -> BlockMask:
        """Make the mask from a BlockMask of ``torch.nn.attention.flex_attention``, with blocks of any size.

        Its partial blocks take ``mask_mod``, its full blocks are full, and others are empty. ``mask_mod`` is evaluated
        for some rows at a time. ``bits`` has room for every tile, S * KV / 8 bytes for each head of the mask.

        Raises TypeError unless it is a BlockMask of PyTorch, ValueError if its lists have too few rows.
        """
        flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
        if not isinstance(block_mask, flex.BlockMask):
            raise TypeError(
                f"block_mask: a {type(block_mask).__name__}; a torch.nn.attention.flex_attention.BlockMask is needed"
            )
        (q_len, kv_len), (q_size, kv_size) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
        key_blocks = -(-kv_len // kv_size)
        partial = _mark_blocks(*_as_lists(block_mask.kv_num_blocks, block_mask.kv_indices), key_blocks)
        full = torch.zeros_like(partial)
        if block_mask.full_kv_num_blocks is not None:
            full = _mark_blocks(*_as_lists(block_mask.full_kv_num_blocks, block_mask.full_kv_indices), key_blocks)
        if partial.shape[2] * q_size < q_len:
            raise ValueError(
                f"block_mask: its lists have {partial.shape[2]} blocks of {q_size} rows; {q_len} queries need more"
            )
        batch, heads, device = partial.shape[0], partial.shape[1], partial.device
        columns = torch.arange(kv_len, device=device) // kv_size

        def compute(first: int, last: int) -> Tensor:
            rows = torch.arange(first, last, device=device) // q_size
            shifted: Any = lambda b, h, q, kv: block_mask.mask_mod(b, h, q + first, kv)  # noqa: E731
            allowed: Tensor = flex.create_mask(shifted, batch, heads, last - first, kv_len, device)
            allowed = allowed & partial[:, :, rows][..., columns]
            return allowed | full[:, :, rows][..., columns]

        counts, entries, bits = _pack_in_chunks(compute, batch, heads, q_len, kv_len)
        return BlockMask(counts, entries, bits, q_len, kv_len)

    @staticmethod
    def from_segments(q_segments: Tensor, kv_segments: Tensor | None = None, *, causal: bool = False) -> BlockMask:
        """Make the mask of documents: a query attends to the keys with its own segment.

        q_segments: int32 or int64 (S,) or (B, S), the segment of each query. kv_segments: (KV,) or (B, KV), by default
        ``q_segments``. Tokens with negative numbers attend to nothing, and nothing attends to them. causal: a
        query attends to no later key; S must be KV. ``bits`` has room for every tile, S * KV / 8 bytes for each
        sequence.

        Raises TypeError and ValueError for tensors that do not fit.
        """
        check_flag("causal", causal)
        queries, keys = q_segments, q_segments if kv_segments is None else kv_segments
        for name, x in (("q_segments", queries), ("kv_segments", keys)):
            _check_integers(name, x, _INTEGERS, (1, 2), "(length,) or (B, length)")
        if keys.dim() != queries.dim():
            raise ValueError(
                f"kv_segments: it is {tuple(keys.shape)}, q_segments {tuple(queries.shape)}; both (length,) or both "
                "(B, length) are needed"
            )
        if queries.dim() == 1:
            queries, keys = queries.unsqueeze(0), keys.unsqueeze(0)
        check_segments(queries, keys)
        if causal and not require(keys.shape[1] == queries.shape[1]):
            raise ValueError(
                f"causal: with {queries.shape[1]} queries and {keys.shape[1]} keys; equal lengths are needed"
            )
        counts, entries, bits = SEGMENT_MASK(queries, keys, causal)
        return BlockMask(counts, entries, bits, queries.shape[1], keys.shape[1])

    @property
    def batch(self) -> int:
        """The batch of a call, or 1 for any."""
        return self.counts.shape[0]

    @property
    def heads(self) -> int:
        """The heads of a call, or 1 for any."""
        return self.counts.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.counts.device

    @property
    def density(self) -> Tensor:
        """The share of tiles that attention visits, float32 () on the device of the mask; 0 without tiles."""
        tiles = self.entries.numel() // 2
        return self.counts.sum() / max(1, tiles)

    def to_bool(self) -> Tensor:
        """Return the mask as booleans, bool (MB, MH, S, KV), on the same device, with strides of whole tiles."""
        batch, heads, rows, tiles, _ = self.entries.shape
        partial, full = (n.unsqueeze(-1) for n in self.counts.unbind(-1))
        order = torch.arange(tiles, device=self.device)
        index = torch.where(order < partial, self.entries[..., 1], FULL_TILE)
        listed = (order < partial + full) & (self.entries[..., 0] >= 0) & (self.entries[..., 0] < tiles)
        place = torch.where(listed, self.entries[..., 0], tiles).long()
        table = index.new_full((batch, heads, rows, tiles + 1), EMPTY_TILE).scatter(-1, place, index)[..., :tiles]
        words = self.bits[table.clamp(0, self.bits.shape[0] - 1).flatten().long()]
        words = torch.where(table.flatten()[:, None, None] >= 0, words, 0)
        words = torch.where(table.flatten()[:, None, None] == FULL_TILE, -1, words)
        dense = _unpack_bits(words).view(batch, heads, rows, tiles, TILE, TILE).transpose(3, 4)
        return dense.reshape(batch, heads, rows * TILE, tiles * TILE)[:, :, : self.q_len, : self.kv_len]

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> BlockMask:
        """Return a copy on a device, or self if it is there already. Raises TypeError for anything else."""
        if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
            raise TypeError(f"device: {device!r}; a torch.device, its name or its number is needed")
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in _TENSORS}
        return self if all(moved[name] is getattr(self, name) for name in _TENSORS) else replace(self, **moved)

    def check(self) -> None:
        """Raise TypeError or ValueError, naming the field, for fields that do not fit together. No value is read."""
        lengths = tuple(parse_length(name, getattr(self, name), _MAX_LENGTH) for name in _LENGTHS)
        check_once(_check_fields, (self.counts, self.entries, self.bits), lengths)

    def __repr__(self) -> str:
        """Describe the sizes; no value is read."""
        return (
            f"BlockMask(batch={self.batch}, heads={self.heads}, q_len={self.q_len}, kv_len={self.kv_len}, "
            f"bits={tuple(self.bits.shape)}, device={self.device})"
        )


def _flatten(x: BlockMask) -> tuple[list[Tensor], tuple[int, int]]:
    return [x.counts, x.entries, x.bits], (x.q_len, x.kv_len)


def _flatten_with_keys(x: BlockMask) -> tuple[list[tuple[Any, Tensor]], tuple[int, int]]:
    return [(pytree.GetAttrKey(name), getattr(x, name)) for name in _TENSORS], (x.q_len, x.kv_len)


def _unflatten(leaves: Iterable[Any], lengths: tuple[int, int]) -> BlockMask:
    """Unflatten without checks, because ``tree_map`` may return any leaves."""
    whole = object.__new__(BlockMask)
    for name, value in zip((*_TENSORS, *_LENGTHS), (*leaves, *lengths), strict=True):
        object.__setattr__(whole, name, value)
    return whole


pytree.register_pytree_node(
    BlockMask,
    _flatten,
    _unflatten,
    serialized_type_name="greenfast.BlockMask",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([BlockMask])


def _check_integers(name: str, x: Any, dtypes: tuple[torch.dtype, ...], dims: tuple[int, ...], shape: str) -> None:
    """Raise TypeError or ValueError unless x has an allowed dtype and number of dimensions."""
    check_strided(name, x)
    if x.dtype not in dtypes:
        hint = "; pass mask == 0 for an additive one" if name == "mask" and x.is_floating_point() else ""
        raise TypeError(f"{name}: {format_tensor(x)}; allowed: {', '.join(map(str, dtypes))}{hint}")
    if x.dim() not in dims:
        raise ValueError(f"{name}: its shape is {tuple(x.shape)}; {shape} is needed")


def _check_fields(counts: Any, entries: Any, bits: Any, q_len: int, kv_len: int) -> None:
    """Raise the errors of ``BlockMask.check``."""
    fields = {"counts": counts, "entries": entries, "bits": bits}
    for name, dims, shape in (
        ("counts", 4, "(MB, MH, RB, 2)"),
        ("entries", 5, "(MB, MH, RB, KB, 2)"),
        ("bits", 3, f"(N, {TILE}, {ROW_WORDS})"),
    ):
        x = fields[name]
        _check_integers(name, x, (torch.int32,), (dims,), shape)
        check_device(name, x, "counts", counts)
    batch, heads = counts.shape[:2]
    rows, tiles = -(-q_len // TILE), -(-kv_len // TILE)
    for name, sizes in (
        ("counts", (batch, heads, rows, 2)),
        ("entries", (batch, heads, rows, tiles, 2)),
        ("bits", (bits.shape[0], TILE, ROW_WORDS)),
    ):
        x = fields[name]
        if not require_same_shape(x.shape, sizes):
            raise ValueError(
                f"{name}: its shape is {tuple(x.shape)}; {sizes} is needed for q_len {q_len} and kv_len {kv_len}"
            )
        if not torch.compiler.is_compiling() and not x.is_contiguous():
            raise ValueError(f"{name}: it is not contiguous, strides {x.stride()}; call .contiguous() on it")
    if not require(bits.shape[0] >= 1):
        raise ValueError("bits: it is empty; at least one tile is needed, even if no entry names it")


def check_mask(mask: Any) -> None:
    """Raise TypeError or ValueError unless it is a mask for the operator."""
    _check_integers("mask", mask, (torch.bool,), (4,), "(MB, MH, S, KV)")
    for n in mask.shape[2:]:
        parse_length("mask", n, _MAX_LENGTH)


def check_segments(q_segments: Any, kv_segments: Any) -> None:
    """Raise TypeError or ValueError unless the two are segments of as many sequences."""
    for name, x in (("q_segments", q_segments), ("kv_segments", kv_segments)):
        _check_integers(name, x, _INTEGERS, (2,), "(B, length)")
        parse_length(name, x.shape[1], _MAX_LENGTH)
    check_device("kv_segments", kv_segments, "q_segments", q_segments)
    if not require(kv_segments.shape[0] == q_segments.shape[0]):
        raise ValueError(
            f"kv_segments: it is {tuple(kv_segments.shape)}, q_segments {tuple(q_segments.shape)}; the same B is needed"
        )


def check_lists(counts: Any, indices: Any) -> None:
    """Raise TypeError or ValueError unless the two are lists of blocks."""
    _check_integers("counts", counts, _INTEGERS, (3,), "(MB, MH, RB)")
    _check_integers("indices", indices, _INTEGERS, (4,), "(MB, MH, RB, K)")
    if not require_same_shape(indices.shape[:3], counts.shape):
        raise ValueError(
            f"indices: its shape is {tuple(indices.shape)}; {tuple(counts.shape)} of counts and their number is needed"
        )
    check_device("indices", indices, "counts", counts)


def _as_lists(counts: Any, indices: Any) -> tuple[Tensor, Tensor]:
    """Return the lists of PyTorch's BlockMask with a batch and heads."""
    more = (None,) * (4 - indices.dim())
    return counts[more], indices[more]


def _pack_bits(dense: Tensor) -> Tensor:
    """Return the bits, int32 (N, 128, 4), of tiles, bool (N, 128, 128)."""
    ordered = dense.reshape(-1, TILE, 4, 4, 4, 2).permute(0, 1, 4, 2, 3, 5).reshape(-1, TILE, 16, 8)
    return (ordered * _weigh_bits(dense.device)).sum(-1, dtype=torch.uint8).view(torch.int32)


def _unpack_bits(bits: Tensor) -> Tensor:
    """Return the tiles, bool (N, 128, 128), of bits, int32 (N, 128, 4)."""
    ordered = (bits.contiguous().view(torch.uint8).unsqueeze(-1) & _weigh_bits(bits.device)) != 0
    return ordered.view(-1, TILE, 4, 4, 4, 2).permute(0, 1, 3, 4, 2, 5).reshape(-1, TILE, TILE)


def _weigh_bits(device: torch.device) -> Tensor:
    """Return the value of each bit of a byte, uint8 (8,)."""
    return torch.ones(8, dtype=torch.uint8, device=device) << torch.arange(8, dtype=torch.uint8, device=device)


def _mark_blocks(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Return which blocks are listed, bool (MB, MH, RB, blocks). Indices and counts out of range are harmless."""
    order = torch.arange(indices.shape[3], device=indices.device)
    valid = (order < counts.unsqueeze(-1)) & (indices >= 0) & (indices < blocks)
    place = torch.where(valid, indices, blocks).long()
    table = torch.zeros((*counts.shape, blocks + 1), dtype=torch.bool, device=indices.device)
    return table.scatter(-1, place, True)[..., :blocks]


def _list_tiles(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the counts and the entries of a table of tiles, int32 (MB, MH, RB, KB)."""
    partial, full = tiles >= 0, tiles == FULL_TILE
    order = torch.where(partial, 0, torch.where(full, 1, 2)).argsort(dim=-1, stable=True)
    counts = torch.stack((partial.sum(-1), full.sum(-1)), -1).int()
    listed = torch.arange(tiles.shape[3], device=tiles.device) < counts.sum(-1, keepdim=True)
    entries = torch.stack((order.int(), tiles.gather(-1, order)), -1)
    return counts, torch.where(listed.unsqueeze(-1), entries, 0)


def _pack_in_chunks(
    compute: Callable[[int, int], Tensor], batch: int, heads: int, q_len: int, kv_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of a mask, made from booleans of some rows at a time.

    compute: returns the booleans of rows first .. last - 1, (batch, heads, last - first, kv_len).
    """
    rows = max(1, _CHUNK_BYTES // max(1, batch * heads * kv_len * TILE)) * TILE
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    base = 0
    for first in range(0, max(1, q_len), rows):  # once without queries
        counts, entries, bits = BLOCK_MASK(compute(first, min(first + rows, q_len)))
        if base:
            partial = torch.arange(entries.shape[3], device=entries.device) < counts[..., :1]
            entries = torch.stack((entries[..., 0], entries[..., 1] + base * partial.int()), -1)
        parts.append((counts, entries, bits))
        base += bits.shape[0]
    if len(parts) == 1:
        return parts[0]
    columns = [list(column) for column in zip(*parts, strict=True)]
    return torch.cat(columns[0], 2), torch.cat(columns[1], 2), torch.cat(columns[2])


def _block_mask_cpu(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_mask(mask)
    batch, heads, q_len, kv_len = mask.shape
    rows, tiles = -(-q_len // TILE), -(-kv_len // TILE)
    padded = mask.new_zeros((batch, heads, rows * TILE, tiles * TILE))
    padded[:, :, :q_len, :kv_len] = mask
    dense = padded.view(batch, heads, rows, TILE, tiles, TILE).transpose(3, 4)
    padded_rows = torch.arange(rows * TILE, device=mask.device).view(rows, 1, TILE, 1) >= q_len
    full = (dense | padded_rows).flatten(-2).all(-1)
    if not dense.numel():
        return *_list_tiles(full.int()), mask.new_zeros((1, TILE, ROW_WORDS), dtype=torch.int32)
    index = torch.arange(full.numel(), dtype=torch.int32, device=mask.device).view(full.shape)
    table = torch.where(full, FULL_TILE, torch.where(dense.flatten(-2).any(-1), index, EMPTY_TILE)).int()
    return *_list_tiles(table), _pack_bits(dense.reshape(-1, TILE, TILE))


def _block_mask_cuda(mask: Tensor) -> Any:
    check_once(check_mask, (mask,), ())
    return torch_ops.load_cuda().block_mask(mask)


def _block_mask_fake(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_mask(mask)
    return _allocate_for(mask, *mask.shape)


def _allocate_for(like: Tensor, batch: Any, heads: Any, q_len: Any, kv_len: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized fields of a mask with room for the bits of every tile."""
    rows, tiles = -(-q_len // TILE), -(-kv_len // TILE)
    bits = torch.sym_max(1, batch * heads * rows * tiles)  # type: ignore[no-untyped-call]
    return allocate_mask(like, (batch, heads, rows), tiles, bits)


def _segment_mask_cpu(q_segments: Tensor, kv_segments: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    check_segments(q_segments, kv_segments)
    places = torch.arange(kv_segments.shape[1])

    def compute(first: int, last: int) -> Tensor:
        own = q_segments[:, first:last].unsqueeze(2)
        mask = (own == kv_segments.unsqueeze(1)) & (own >= 0)
        if causal:
            mask &= places <= torch.arange(first, last).unsqueeze(1)
        return mask.unsqueeze(1)

    return _pack_in_chunks(compute, q_segments.shape[0], 1, q_segments.shape[1], kv_segments.shape[1])


def _segment_mask_cuda(q_segments: Tensor, kv_segments: Tensor, causal: bool) -> Any:
    check_segments(q_segments, kv_segments)
    return torch_ops.load_cuda().segment_mask(q_segments, kv_segments, causal)


def _segment_mask_fake(q_segments: Tensor, kv_segments: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    check_segments(q_segments, kv_segments)
    (batch, q_len), kv_len = q_segments.shape, kv_segments.shape[1]
    return _allocate_for(q_segments, batch, 1, q_len, kv_len)


def _block_lists_cpu(counts: Tensor, indices: Tensor, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    check_lists(counts, indices)
    blocks, width = -(-kv_len // TILE), indices.shape[3]
    if bool(((counts < 0) | (counts > width)).any()):
        raise ValueError(
            f"counts: from {counts.min()} to {counts.max()}; 0 to {width}, the width of indices, is needed"
        )
    listed = torch.arange(width) < counts.unsqueeze(-1)
    if bool((listed & ((indices < 0) | (indices >= blocks))).any()):
        wrong = indices[listed & ((indices < 0) | (indices >= blocks))]
        raise ValueError(f"indices: {wrong[0]}; {blocks} tiles of {TILE} keys have indices from 0 to {blocks - 1}")
    tiles = torch.where(_mark_blocks(counts, indices, blocks), FULL_TILE, EMPTY_TILE).int()
    if kv_len % TILE:
        tiles[..., -1] = torch.where(tiles[..., -1] == FULL_TILE, 0, EMPTY_TILE)
    return *_list_tiles(tiles), _pack_bits((torch.arange(TILE) < kv_len % TILE).expand(1, TILE, TILE))


def _block_lists_cuda(counts: Tensor, indices: Tensor, kv_len: int) -> Any:
    check_lists(counts, indices)
    return torch_ops.load_cuda().block_lists(counts, indices, kv_len)


def _block_lists_fake(counts: Tensor, indices: Tensor, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    check_lists(counts, indices)
    return allocate_mask(counts, counts.shape, -(-kv_len // TILE), 1)


for _name, _arguments, _cpu, _cuda, _fake in (
    ("block_mask", "Tensor mask", _block_mask_cpu, _block_mask_cuda, _block_mask_fake),
    (
        "segment_mask",
        "Tensor q_segments, Tensor kv_segments, bool causal",
        _segment_mask_cpu,
        _segment_mask_cuda,
        _segment_mask_fake,
    ),
    (
        "block_lists", "Tensor counts, Tensor indices, SymInt kv_len", _block_lists_cpu, _block_lists_cuda,
        _block_lists_fake,
    ),
):  # fmt: skip
    torch_ops.define_operator(_name, f"({_arguments}) -> (Tensor, Tensor, Tensor)", _cpu, _cuda, _fake)

BLOCK_MASK = torch.ops.greenfast.block_mask.default
SEGMENT_MASK = torch.ops.greenfast.segment_mask.default
BLOCK_LISTS = torch.ops.greenfast.block_lists.default
