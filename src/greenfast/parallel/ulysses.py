"""Ulysses attention: all-to-all exchanges give each rank the whole sequence for its share of the heads, and back.

After Jacobs et al., "DeepSpeed Ulysses" (2023). A rank quantizes its rows, and sends 8-bit codes and scales of Q, K and
V; it receives the output. Heads are exchanged in parts, so that an exchange overlaps the attention of the part before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from greenfast.kernels.attention.config import KEY_GROUP
from greenfast.ops import torch_ops
from greenfast.ops.quantized import QuantizedQKV
from greenfast.parallel import blocks
from greenfast.parallel.group import RankGroup
from greenfast.parallel.layout import ShardLayout
from greenfast.parallel.quantized_kv import allocate_buffers, view_buffers
from greenfast.parallel.ring import gather_samples

PendingExchange = tuple[tuple[Tensor, ...], object]  # the received tensors, and the work to wait for

_PART_COUNTS = (4, 2)
_MIN_PART_BYTES = 2 << 20  # bytes of a part per rank; links are slow below


@dataclass(frozen=True)
class HeadSharding:
    """The heads of each rank: ``q_heads_per_rank`` heads of Q, ``group_size`` per head of K and V.

    If the ranks do not divide the heads, the last ranks have heads that do not exist. With fewer heads of K and V than
    ranks, or with groups that span ranks, ranks get copies.
    """

    heads: int
    kv_heads: int
    size: int

    @property
    def q_heads_per_rank(self) -> int:
        """Heads of Q per rank."""
        return -(-self.heads // self.size)

    @property
    def group_size(self) -> int:
        """The largest number of heads of Q that share one of K and V on every rank."""
        kv_heads = self._assign_kv_heads()
        for size in range(self.q_heads_per_rank, 0, -1):
            runs = [kv_heads[start : start + size] for start in range(0, len(kv_heads), size)]
            if self.q_heads_per_rank % size == 0 and all(len(set(run)) == 1 for run in runs):
                return size
        raise AssertionError

    @property
    def assigned_kv_heads(self) -> list[int]:
        """The heads of K and V of all ranks, in rank order, as many for each."""
        return self._assign_kv_heads()[:: self.group_size]

    def _assign_kv_heads(self) -> list[int]:
        shared = self.heads // self.kv_heads
        return [min(head // shared, self.kv_heads - 1) for head in range(self.q_heads_per_rank * self.size)]


@dataclass(frozen=True)
class ExchangedTensor:
    """A tensor to exchange: (B, heads, ...), with the rows of the sequence in dimension ``rows``.

    is_kv: it has the heads of K and V.
    """

    tensor: Tensor
    rows: int
    is_kv: bool


class HeadExchange:
    """The exchanges of a group for one attention."""

    def __init__(self, group: RankGroup, layout: ShardLayout, heads: HeadSharding) -> None:
        self.group, self.layout, self.heads = group, layout, heads

    def split_heads(self, field: ExchangedTensor) -> Tensor:
        """Split the heads of a tensor among the ranks: (B, size, heads per rank, ...)."""
        x, size = field.tensor, self.group.size
        if field.is_kv:
            if self.heads.assigned_kv_heads != list(range(x.shape[1])):
                x = x[:, self.heads.assigned_kv_heads]
        elif x.shape[1] != self.heads.q_heads_per_rank * size:
            missing = x.new_zeros(x.shape[0], self.heads.q_heads_per_rank * size - x.shape[1], *x.shape[2:])
            x = torch.cat([x, missing], 1)
        return torch.unflatten(x, 1, (size, x.shape[1] // size))

    def send(self, fields: Sequence[Tensor]) -> PendingExchange:
        """Exchange tensors (B, size, heads, ...).

        Return the received ones, (size, B, heads, ...), and the work to wait for.
        """
        shapes = [(x.shape[0], *x.shape[2:]) for x in fields]
        return self._exchange(fields, shapes, lambda x, into: into.copy_(x.transpose(0, 1)))

    def send_back(self, results: Sequence[Tensor]) -> PendingExchange:
        """Exchange results of whole sequences, (B, heads, S, ...): each rank receives its own rows."""
        shapes = [(*x.shape[:2], x.shape[2] // self.group.size, *x.shape[3:]) for x in results]
        return self._exchange(results, shapes, self.scatter)

    def _exchange(
        self, tensors: Sequence[Tensor], shapes: list[tuple[int, ...]], write: Callable[[Tensor, Tensor], object]
    ) -> PendingExchange:
        """Exchange tensors in one buffer.

        shapes: of each tensor for one rank. write(tensor, into): fills (size, *shape).
        """
        dtypes = [x.dtype for x in tensors]
        # One buffer for each rank, so that there is one exchange.
        sent = allocate_buffers(self.group.size, shapes, dtypes, tensors[0].device)
        for x, into in zip(tensors, view_buffers(sent, shapes, dtypes), strict=True):
            write(x, into)
        received, work = self.group.all_to_all(sent)
        return view_buffers(received, shapes, dtypes), work

    def wait(self, coming: PendingExchange) -> tuple[Tensor, ...]:
        """Wait for the tensors of ``send``, in the order of the ranks."""
        received, work = coming
        self.group.wait(received[0], work)
        positions = self.group.places
        return tuple(x[positions] for x in received) if positions else received

    def gather_sequence(self, x: Tensor, rows: int) -> Tensor:
        """Reorder a received tensor (size, B, heads, ...) to (B, heads, ...), with the rows in sequence order."""
        parts, size = self.layout.parts, self.group.size
        chunk = x.shape[rows + 1] // parts
        chunks = torch.unflatten(x, rows + 1, (parts, chunk))
        shape = (*x.shape[1 : rows + 1], parts * size, chunk, *x.shape[rows + 2 :])
        out = x.new_empty(shape)
        into = out.movedim(rows, 0)
        for position, chosen in self._pair_chunks(chunks, rows + 1):
            into[position].copy_(chosen)
        return out.flatten(rows, rows + 1)

    def scatter(self, x: Tensor, into: Tensor) -> None:
        """Reorder x (B, heads, rows of the sequence, ...) to (size, B, heads, ...), with the rows in each rank's order.

        The inverse of ``gather_sequence``.
        """
        parts, size = self.layout.parts, self.group.size
        chunk = into.shape[3] // parts
        chunks = torch.unflatten(x, 2, (parts * size, chunk)).movedim(2, 0)
        for position, chosen in self._pair_chunks(torch.unflatten(into, 3, (parts, chunk)), 3):
            chosen.copy_(chunks[position])

    def _pair_chunks(self, chunks: Tensor, parts: int) -> list[tuple[slice | int, Tensor]]:
        """Pair positions in the sequence with views of chunks (size, ..., parts, ...), in as few pairs as possible."""
        size = self.group.size
        heads = (slice(0, size), chunks.select(parts, 0))
        if not self.layout.balanced:
            return [heads]
        tails = chunks.select(parts, 1)
        return [heads, *((2 * size - 1 - rank, tails[rank]) for rank in range(size))]


def _view_as_int64(x: Tensor, together: int) -> Tensor:
    """View x as int64 to copy faster than bytes, or return x if the layout does not allow it.

    together: this many neighbours in the last dimension are never separated.
    """
    count = torch.int64.itemsize // x.dtype.itemsize
    *strides, last = x.stride()
    if last != 1 or any(n % count for n in (together, x.shape[-1], x.storage_offset(), *strides)):
        return x
    return x.view(torch.int64)


def _view_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """View a dense tensor as another dtype."""
    return x if x.dtype == dtype else x.view(dtype)


def forward(
    group: RankGroup, layout: ShardLayout, query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int,
    scale: float, with_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output of this rank's queries over all keys, contiguous, and their log-sum-exp, float32 (B, H, S)."""
    batch, count, length, head_dim = query.shape
    heads = HeadSharding(count, key.shape[1], group.size)
    exchange = HeadExchange(group, layout, heads)
    as_codes = all(blocks.can_send_quantized(x.shape[2] // layout.parts) for x in (query, key))
    mean = None
    scales: list[ExchangedTensor] = []
    if as_codes:
        codes = blocks.quantize(query, key, value, gather_samples(group, layout, key), precision)
        mean = codes.key_mean
        q, k, v, *block_scales = codes.tensors()[:6]
        v = _view_as_int64(v, key.shape[2] // layout.parts)
        fields = [
            ExchangedTensor(_view_as_int64(q, q.shape[3]), 2, False),
            ExchangedTensor(_view_as_int64(k, k.shape[3]), 2, True),
            ExchangedTensor(v, 3, True),
        ]
        scales = [ExchangedTensor(x, 2, is_kv) for x, is_kv in zip(block_scales, (False, True, True), strict=True)]
    else:
        fields = [
            ExchangedTensor(_view_as_int64(x, head_dim), 2, is_kv)
            for x, is_kv in ((query, False), (key, True), (value, True))
        ]
    divided = [exchange.split_heads(field) for field in fields]
    parts = count_parts(divided, heads)
    # Scales are small: the first exchange has the scales of all parts.
    coming = exchange.send([*(x.tensor_split(parts, 2)[0] for x in divided), *map(exchange.split_heads, scales)])
    scale_parts: list[list[Tensor]] = []
    going = []
    result: tuple[Tensor, ...]
    for part in range(parts):
        pending = coming
        if part + 1 < parts:  # overlap the next exchange with this part's attention
            coming = exchange.send([x.tensor_split(parts, 2)[part + 1] for x in divided])
        received = exchange.wait(pending)
        if part == 0:
            all_scales = (
                exchange.gather_sequence(x, field.rows) for x, field in zip(received[3:], scales, strict=True)
            )
            scale_parts = [[one.contiguous() for one in x.tensor_split(parts, 1)] for x in all_scales]
        whole = [
            _view_as(exchange.gather_sequence(x, field.rows), torch.uint8 if as_codes else query.dtype)
            for x, field in zip(received[:3], fields, strict=True)
        ] + [x[part] for x in scale_parts]
        if as_codes:
            result = _attend(whole, precision, head_dim, query.dtype, causal, scale, with_lse)
        elif with_lse:
            result = torch_ops.SDPA_LSE(*whole, precision, causal, scale)
        else:
            result = (torch_ops.SDPA(*whole, precision, causal, scale),)
        going.append(exchange.send_back([_view_as_int64(result[0], head_dim), *result[1 : 1 + with_lse]]))
    out = query.new_empty(batch, group.size, heads.q_heads_per_rank, length, head_dim)
    lse = query.new_empty(out.shape[:4] if with_lse else (0,), dtype=torch.float32)
    for part, pending in enumerate(going):
        for into, x in zip((out, lse), exchange.wait(pending), strict=False):
            _view_as(into, x.dtype).tensor_split(parts, 2)[part].copy_(x.transpose(0, 1))
    out = out.flatten(1, 2)[:, :count]
    if with_lse:
        lse = lse.flatten(1, 2)[:, :count]
        if mean is not None:
            lse = lse + torch_ops.MEAN_SCORES(query, mean, True) * scale
    return out.contiguous(), lse.contiguous()


def count_parts(divided: list[Tensor], heads: HeadSharding) -> int:
    """Return the number of parts of the exchange: each has whole heads of K and V, and enough bytes."""
    keys = heads.q_heads_per_rank // heads.group_size
    each = sum(x.nbytes for x in divided) // heads.size
    return next((n for n in _PART_COUNTS if keys % n == 0 and each >= n * _MIN_PART_BYTES), 1)


def _attend(
    whole: list[Tensor], precision: str, head_dim: int, dtype: torch.dtype, causal: int, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor]:
    query, key, value, query_scale, key_scale, value_scale = whole
    assert value.shape[3] % KEY_GROUP == 0
    codes = QuantizedQKV(
        query, key, value, query_scale, key_scale, value_scale, None, precision, head_dim, key.shape[2], dtype
    )
    if query.is_cuda:
        result: tuple[Tensor, Tensor] = blocks.load_cuda().attend_codes(codes, causal, scale, with_lse)
        return result
    arguments = (*codes.tensors()[:6], precision, head_dim, codes.key_length, dtype, causal, scale)
    return torch_ops.ATTENTION_LSE(*arguments)  # type: ignore[no-any-return]


def backward(
    group: RankGroup,
    layout: ShardLayout,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's queries, keys and values, by ``sdpa_backward`` of whole heads.

    The exchange is in 16 bits for every precision of the forward pass.
    """
    heads = HeadSharding(query.shape[1], key.shape[1], group.size)
    exchange = HeadExchange(group, layout, heads)
    both = ((grad, False), (query, False), (key, True), (value, True))
    fields = [ExchangedTensor(x, 2, is_kv) for x, is_kv in both]
    received = exchange.wait(exchange.send([exchange.split_heads(field) for field in fields]))
    whole = [exchange.gather_sequence(x, 2) for x in received]
    grads = torch.ops.greenfast.sdpa_backward(*whole, causal, scale)
    received = exchange.wait(exchange.send_back(grads))
    by_query, by_key, by_value = (x.transpose(0, 1).flatten(1, 2) for x in received)
    return (
        torch.empty_like(query).copy_(by_query[:, : query.shape[1]]),
        *(_sum_copies(x, heads, like) for x, like in ((by_key, key), (by_value, value))),
    )  # type: ignore[return-value]


def _sum_copies(x: Tensor, heads: HeadSharding, like: Tensor) -> Tensor:
    """Sum the gradients of copies of K or V: (B, heads of all ranks, KV, D) to (B, HK, KV, D)."""
    out = torch.empty_like(like)
    if heads.assigned_kv_heads == list(range(like.shape[1])):
        return out.copy_(x)
    total = x.new_zeros(like.shape, dtype=torch.float32)
    for copy, head in enumerate(heads.assigned_kv_heads):  # one after another, for a fixed order of the sum
        total[:, head] += x[:, copy]
    return out.copy_(total)
