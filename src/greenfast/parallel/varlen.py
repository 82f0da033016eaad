"""Packed sequences on several ranks: ring and Ulysses around attention over FP8 pages.

Each rank has its rows of every sequence, the same number on all ranks; lengths stay on the device. The ring exchanges
pages: codes and scales of each token. Ulysses exchanges 16-bit rows, because the pages depend on the order of tokens.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from greenfast.ops import autograd, torch_ops
from greenfast.parallel import cost
from greenfast.parallel.blocks import LseMerge
from greenfast.parallel.group import RankGroup, find_group
from greenfast.parallel.layout import ShardLayout
from greenfast.parallel.ring import build_ring_steps
from greenfast.parallel.ulysses import ExchangedTensor, HeadExchange, HeadSharding
from greenfast.serving import torch_ops as serving_ops
from greenfast.serving.call import AttentionCall
from greenfast.serving.checks import should_check_values
from greenfast.serving.pages import PAGE, KVPages, count_pages, find_sequences, get_page_bytes, view_pages
from greenfast.serving.torch_ops import NO_GRADIENT

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, bool causal, float softcap, float scale, str method, bool balanced, str group) "
    "-> (Tensor, Tensor)"
)


class VarlenOptions(NamedTuple):
    """causal and softcap as in ``flash_attn_varlen_func``; scale: of the scores."""

    causal: bool
    softcap: float
    scale: float


class VarlenRows(NamedTuple):
    """Packed sequences: their starts, int32 (batch + 1,), and the length of the longest one."""

    starts: Tensor
    longest: int

    @property
    def lengths(self) -> Tensor:
        """The lengths of the sequences, int32 (batch,)."""
        return self.starts[1:] - self.starts[:-1]


def _run(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool, softcap: float, scale: float, method: str, balanced: bool, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ranks = find_group(group)
    layout, options = ShardLayout(ranks.size, balanced), VarlenOptions(causal, softcap, scale)
    queries, keys = VarlenRows(cu_seqlens_q, max_seqlen_q), VarlenRows(cu_seqlens_k, max_seqlen_k)
    batch = max(1, cu_seqlens_q.shape[0] - 1)
    sizes = cost.CallSizes(
        ranks.size, batch, q.shape[1], k.shape[1], -(-q.shape[0] // batch), -(-k.shape[0] // batch), q.shape[2], causal
    )
    method, _ = cost.select_method(method, sizes)
    starts = [x.tolist() if should_check_values(x) else tuple(x.shape) for x in (cu_seqlens_q, cu_seqlens_k)]
    ranks.agree(
        f"flash_attn_varlen_func by {method}, q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype}, causal {causal}, "
        f"softcap {softcap}, scale {scale}, load_balance {balanced}, max_seqlen_q {max_seqlen_q}, max_seqlen_k "
        f"{max_seqlen_k}, cu_seqlens_q {starts[0]}, cu_seqlens_k {starts[1]}"
    )
    if not q.shape[0] or not k.shape[0]:
        return torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
    run = _ring if method == "ring" else _ulysses
    with ranks.report_errors():
        return run(ranks, layout, q, k, v, queries, keys, options)


def _ring(
    group: RankGroup,
    layout: ShardLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: VarlenRows,
    keys: VarlenRows,
    options: VarlenOptions,
) -> tuple[Tensor, Tensor]:
    pages = count_pages(k.shape[0], keys.starts.shape[0] - 1)
    shape = (pages, get_page_bytes(PAGE, k.shape[1], k.shape[2]))
    here, there = (torch.empty(shape, dtype=torch.uint8, device=k.device) for _ in range(2))
    width = max(1, -(-keys.longest // PAGE))
    slots, _, _, table = serving_ops.token_slots(keys.starts, None, None, None, k.shape[0], width, PAGE)
    cache = view_pages(here, PAGE, *k.shape[1:])
    serving_ops.append_kv(None, k, v, *cache[:2], slots, *cache[2:], *[None] * 5, 0.0, False)
    plan = build_ring_steps(group.rank, layout, 2, options.causal)  # in halves of a sequence
    merged = LseMerge(count=sum(step is not None for step in plan))
    tails, tail_rows = _find_tails(queries, q.shape[0]) if layout.balanced else (None, queries)
    for number, step in enumerate(plan):
        with group.exchange(here, there) if number + 1 < group.size else nullcontext():
            if step is not None:
                first, count, masked = step
                used = keys.lengths if count == 2 else keys.lengths // 2
                step_options = options._replace(causal=bool(masked))
                cache = view_pages(here, PAGE, *k.shape[1:])
                if first and tails is not None:
                    out, lse = _scatter_rows(tails, q, *_attend(q[tails], tail_rows, cache, table, used, step_options))
                else:
                    out, lse = _attend(q, queries, cache, table, used, step_options)
                merged.add(_view_as_batch(out), lse.unsqueeze(0))
        here, there = there, here
    return merged.out.squeeze(0).transpose(0, 1), merged.lse.squeeze(0)


def _attend(
    q: Tensor, queries: VarlenRows, cache: KVPages, table: Tensor, used: Tensor, options: VarlenOptions
) -> tuple[Tensor, Tensor]:
    call = AttentionCall(
        q, queries.starts, queries.longest, options.scale, options.causal, (-1, -1), options.softcap, None, None, None
    )
    result: Any = call.attend(*cache[:2], table, used, (None, *cache[2:]), True)
    return result[0], result[1]


def _view_as_batch(out: Tensor) -> Tensor:
    """View (total, H, D) as (1, H, total, D)."""
    return out.transpose(0, 1).unsqueeze(0)


def _find_tails(rows: VarlenRows, total: int) -> tuple[Tensor, VarlenRows]:
    """Return the rows of the second half of each sequence, int64 (total / 2,), and these halves as packed sequences."""
    halves = VarlenRows(rows.starts // 2, rows.longest // 2)
    indices = torch.arange(total // 2, dtype=torch.int64, device=rows.starts.device)
    sequence_ids = find_sequences(halves.starts, indices)
    # Sequence s begins at twice the start of its tails. The tails begin half its length later.
    return indices + halves.starts[1:].long()[sequence_ids], halves


def _scatter_rows(indices: Tensor, like: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Scatter results of some rows into results of all rows. The others have seen no key."""
    whole, sums = torch.zeros_like(like), lse.new_full((lse.shape[0], like.shape[0]), -math.inf)
    return whole.index_copy_(0, indices, out), sums.index_copy_(1, indices, lse)


def _ulysses(
    group: RankGroup,
    layout: ShardLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: VarlenRows,
    keys: VarlenRows,
    options: VarlenOptions,
) -> tuple[Tensor, Tensor]:
    heads = HeadSharding(q.shape[1], k.shape[1], group.size)
    exchange = HeadExchange(group, layout, heads)
    fields = [ExchangedTensor(_view_as_batch(x), 2, key_order) for x, key_order in ((q, False), (k, True), (v, True))]
    received = exchange.wait(exchange.send([exchange.split_heads(field) for field in fields]))
    query_order, key_order = (
        _get_sequence_order(layout, queries, q.shape[0]),
        _get_sequence_order(layout, keys, k.shape[0]),
    )
    rows = []
    for x, order in zip(received, (query_order, key_order, key_order), strict=True):
        by_place = x.squeeze(1).transpose(1, 2).flatten(0, 1)  # (size * total, heads, D)
        rows.append(by_place.index_select(0, order))
    size = group.size
    whole = [VarlenRows(x.starts * size, x.longest * size) for x in (queries, keys)]
    call = AttentionCall(
        rows[0], whole[0].starts, whole[0].longest, options.scale, options.causal, (-1, -1), options.softcap, None,
        None, None,
    )  # fmt: skip
    result: Any = call.over_keys(rows[1], rows[2], whole[1].starts, whole[1].longest, None, (None, None, None), True)
    out, lse = torch.empty_like(rows[0]), torch.empty_like(result[1])
    out.index_copy_(0, query_order, result[0])
    lse.index_copy_(1, query_order, result[1])
    parts = (torch.unflatten(_view_as_batch(out), 2, (size, q.shape[0])), torch.unflatten(lse, 1, (size, q.shape[0])))
    going = [parts[0].movedim(2, 1), parts[1].transpose(0, 1).unsqueeze(0)]  # (1, size, heads, ...)
    outs, sums = (x.squeeze(1).flatten(0, 1)[: q.shape[1]] for x in exchange.wait(exchange.send(going)))
    return outs.transpose(0, 1).contiguous(), sums.contiguous()


def _get_sequence_order(layout: ShardLayout, rows: VarlenRows, total: int) -> Tensor:
    """Return the index in the ranks' rows of each row of the whole packed sequences: int64 (size * total,)."""
    device = rows.starts.device
    indices = torch.arange(total * layout.size, dtype=torch.int64, device=device)
    starts = rows.starts.long()
    sequence_ids = find_sequences(rows.starts * layout.size, indices)
    position = indices - starts[sequence_ids] * layout.size
    chunk = ((starts[1:] - starts[:-1])[sequence_ids] // layout.parts).clamp(min=1)
    number = (position // chunk).clamp(max=layout.parts * layout.size - 1)
    slots = torch.tensor(layout.get_chunk_order(), dtype=torch.int64, device=device)[number]
    order = slots // layout.parts * total + starts[sequence_ids] + slots % layout.parts * chunk + position % chunk
    # Rows after all sequences stay after them, in rank order.
    excess, spare = indices - starts[-1] * layout.size, (total - starts[-1]).clamp(min=1)
    return torch.where(excess < 0, order, excess // spare * total + starts[-1] + excess % spare)


def _fake(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


torch_ops.define_operator("context_varlen", _SCHEMA, _run, _run, _fake)
autograd.register(torch_ops.LIBRARY, "context_varlen", f"greenfast.flash_attn: {NO_GRADIENT}")

CONTEXT_VARLEN = torch.ops.greenfast.context_varlen.default
