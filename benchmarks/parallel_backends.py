"""The backends of ``python -m benchmarks parallel``: each computes a rank's rows of one attention."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.registry import GREENFAST, TORCH, BoundCall, Suite
from greenfast.ops.sdpa import sdpa
from greenfast.parallel.blocks import LseMerge
from greenfast.parallel.context import Method, context_parallel
from greenfast.parallel.layout import ShardLayout
from greenfast.parallel.ring import build_ring_steps

#: Largest relative error of a correct output, by precision.
LIMITS = {"fp8": 0.1, "bf16": 0.02}
_FA3 = ("fa3_fwd_interface", "fa3-fwd")
#: All backends by name, in the order of measuring.
BACKENDS = Suite()
_register = BACKENDS.register


@dataclass(frozen=True)
class Shards:
    """A rank's rows, (B, H, S, D) in bfloat16, balanced for a causal mask. whole: length of the sequence."""

    mesh: DeviceMesh
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    whole: int


def start_ring_step(group: dist.ProcessGroup, sent: Tensor, received: Tensor) -> list[Any]:
    """Start to send to the next rank and to receive from the previous one; return the works to wait for."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    following, previous = ranks[(rank + 1) % len(ranks)], ranks[(rank - 1) % len(ranks)]
    operations = [
        dist.P2POp(dist.isend, sent, following, group), dist.P2POp(dist.irecv, received, previous, group),
    ]  # fmt: skip
    works: list[Any] = dist.batch_isend_irecv(operations)
    return works


@_register("torch_alltoall", "PyTorch, ring by all-to-all, cuDNN bf16", "bf16", TORCH, rotate="alltoall")
@_register("torch", "PyTorch, ring by all-gather, cuDNN bf16", "bf16", TORCH, rotate="allgather")
def _torch(shards: Shards, rotate: str) -> BoundCall:
    """Bind PyTorch's context_parallel with cuDNN's attention, on existing shards."""
    experimental: Any = importlib.import_module("torch.distributed.tensor.experimental")
    attention: Any = importlib.import_module("torch.distributed.tensor.experimental._attention")
    options = attention._cp_options
    nothing = torch.zeros(1, 1, shards.whole, 1, device=shards.query.device)
    shared = shards.query.shape[1] != shards.key.shape[1]

    def call() -> Tensor:
        balanced, options.enable_load_balance = options.enable_load_balance, shards.causal
        attention.set_rotate_method(rotate)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
                stack.enter_context(
                    experimental.context_parallel(
                        shards.mesh, buffers=[nothing], buffer_seq_dims=[2], no_restore_buffers={nothing}
                    )
                )
                result: Any = torch.nn.functional.scaled_dot_product_attention(
                    shards.query, shards.key, shards.value, is_causal=shards.causal, enable_gqa=shared
                )
        finally:
            options.enable_load_balance = balanced
            nothing.resize_(1, 1, shards.whole, 1)
        out: Tensor = result.to_local() if hasattr(result, "to_local") else result
        return out

    return BoundCall(call)


@_register("fa3", "FA3 bf16, ring by hand", "bf16", _FA3)
def _fa3(shards: Shards) -> BoundCall:
    """Bind FlashAttention-3 in bfloat16 in a ring: K and V move while the present ones are attended to."""
    fa3: Any = importlib.import_module(_FA3[0])
    names = inspect.signature(fa3.flash_attn_func).parameters
    more = {name: True for name in ("return_attn_probs", "return_softmax_lse") if name in names}
    size, group = shards.mesh.size(), shards.mesh.get_group()
    q, k, v = (x.transpose(1, 2).contiguous() for x in (shards.query, shards.key, shards.value))
    plan = build_ring_steps(shards.mesh.get_local_rank(), ShardLayout(size, True), q.shape[1], shards.causal)

    def attend(query: Tensor, both: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = fa3.flash_attn_func(query, both[0], both[1], causal=masked, **more)
        return out.transpose(1, 2), lse

    def call() -> Tensor:
        here = torch.stack([k, v])
        there = torch.empty_like(here)
        merged = LseMerge(count=size)
        for number, turn in enumerate(plan):
            works = start_ring_step(group, here, there) if number + 1 < size else []
            assert turn is not None
            first, count, masked = turn
            merged.add(*attend(q[:, first:], here[:, :, :count], bool(masked)), first)
            for work in works:
                work.wait()
            here, there = there, here
        return merged.out

    return BoundCall(call)


@_register("ulysses", "greenfast, exchange by heads", "fp8", GREENFAST, method="ulysses")
@_register("ring", "greenfast, ring", "fp8", GREENFAST, method="ring")
def _greenfast(shards: Shards, method: Method) -> BoundCall:
    cp = context_parallel(shards.mesh, method, timeout=120)

    def call() -> Tensor:
        with cp:
            return sdpa(shards.query, shards.key, shards.value, is_causal=shards.causal, enable_gqa=True)

    return BoundCall(call)


@_register("alone", "greenfast, its share of the heads, nothing exchanged", "fp8", GREENFAST, attention=False)
def _alone(shards: Shards) -> BoundCall:
    """Bind this rank's share of the heads over the whole sequence, without communication: the fastest possible."""
    size = shards.mesh.size()
    q, k, v = (
        torch.cat([x[:, : max(1, x.shape[1] // size)]] * size, 2) for x in (shards.query, shards.key, shards.value)
    )
    return BoundCall(lambda: sdpa(q, k, v, is_causal=shards.causal, enable_gqa=True))
