"""The backends of ``python -m benchmarks parallel``: each computes a rank's rows of one attention."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from greenfast.ops.sdpa import sdpa
from greenfast.parallel.blocks import LseMerge
from greenfast.parallel.context import Method, context_parallel
from greenfast.parallel.layout import ShardLayout
from greenfast.parallel.ring import build_ring_steps

#: Largest relative error of a correct output, by precision.
LIMITS = {"fp8": 0.1, "bf16": 0.02}
_FA3 = "fa3_fwd_interface"
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Shards:
    """A rank's rows, (B, H, S, D) in bfloat16, balanced for a causal mask. whole: length of the sequence."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    whole: int


@dataclass(frozen=True)
class ParallelBackend:
    """A backend.

    prepare: binds it to a rank's shards. whole: whether its output is attention over the whole sequence.
    """

    name: str
    label: str
    precision: Literal["fp8", "bf16"]
    prepare: Callable[[DeviceMesh, Shards], Call]
    needs: str = ""
    whole: bool = True

    def missing(self, device: str) -> str:
        """Return why it cannot be measured here, or an empty text."""
        if self.precision == "bf16" and device == "cpu":
            return "it is measured on GPUs only"
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return ""


def _greenfast(method: Method) -> Callable[[DeviceMesh, Shards], Call]:
    def prepare(mesh: DeviceMesh, shards: Shards) -> Call:
        cp = context_parallel(mesh, method, timeout=120)

        def call() -> Tensor:
            with cp:
                return sdpa(shards.query, shards.key, shards.value, is_causal=shards.causal, enable_gqa=True)

        return call

    return prepare


def _alone(mesh: DeviceMesh, shards: Shards) -> Call:
    """Bind this rank's share of the heads over the whole sequence, without communication: the fastest possible."""
    size = mesh.size()
    q, k, v = (
        torch.cat([x[:, : max(1, x.shape[1] // size)]] * size, 2) for x in (shards.query, shards.key, shards.value)
    )
    return lambda: sdpa(q, k, v, is_causal=shards.causal, enable_gqa=True)


def _torch(rotate: str) -> Callable[[DeviceMesh, Shards], Call]:
    """Return PyTorch's context_parallel with cuDNN's attention, on existing shards."""

    def prepare(mesh: DeviceMesh, shards: Shards) -> Call:
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
                            mesh, buffers=[nothing], buffer_seq_dims=[2], no_restore_buffers={nothing}
                        )
                    )
                    found: Any = torch.nn.functional.scaled_dot_product_attention(
                        shards.query, shards.key, shards.value, is_causal=shards.causal, enable_gqa=shared
                    )
            finally:
                options.enable_load_balance = balanced
                nothing.resize_(1, 1, shards.whole, 1)
            out: Tensor = found.to_local() if hasattr(found, "to_local") else found
            return out

        return call

    return prepare


def _fa3(mesh: DeviceMesh, shards: Shards) -> Call:
    """FlashAttention-3 in bfloat16: K and V go round while the present ones are attended to, merged as greenfast's."""
    fa3: Any = importlib.import_module(_FA3)
    names = inspect.signature(fa3.flash_attn_func).parameters
    more = {name: True for name in ("return_attn_probs", "return_softmax_lse") if name in names}
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    ranks = dist.get_process_group_ranks(group)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (shards.query, shards.key, shards.value))
    plan = build_ring_steps(rank, ShardLayout(size, True), q.shape[1], shards.causal)

    def attend(query: Tensor, both: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = fa3.flash_attn_func(query, both[0], both[1], causal=masked, **more)
        return out.transpose(1, 2), lse

    def call() -> Tensor:
        here = torch.stack([k, v])
        there = torch.empty_like(here)
        merged = LseMerge(count=size)
        for number, turn in enumerate(plan):
            works = []
            if number + 1 < size:
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, here, ranks[(rank + 1) % size], group),
                        dist.P2POp(dist.irecv, there, ranks[(rank - 1) % size], group),
                    ]
                )
            assert turn is not None
            first, count, masked = turn
            merged.add(*attend(q[:, first:], here[:, :, :count], bool(masked)), first)
            for work in works:
                work.wait()
            here, there = there, here
        return merged.out

    return call


BACKENDS = {
    c.name: c
    for c in (
        ParallelBackend("torch", "PyTorch, ring by all-gather, cuDNN bf16", "bf16", _torch("allgather")),
        ParallelBackend("torch_alltoall", "PyTorch, ring by all-to-all, cuDNN bf16", "bf16", _torch("alltoall")),
        ParallelBackend("fa3", "FA3 bf16, ring by hand", "bf16", _fa3, needs=_FA3),
        ParallelBackend("ring", "greenfast, ring", "fp8", _greenfast("ring")),
        ParallelBackend("ulysses", "greenfast, exchange by heads", "fp8", _greenfast("ulysses")),
        ParallelBackend("alone", "greenfast, its share of the heads, nothing exchanged", "fp8", _alone, whole=False),
    )
}
