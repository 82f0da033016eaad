"""Functions of a mesh that ``tests.parallel.ranks`` runs on each rank."""

from __future__ import annotations

import importlib
import os
import time
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from msgspec import to_builtins
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

import greenfast
from benchmarks.parallel import ParallelCase, measure
from benchmarks.parallel_backends import BACKENDS
from greenfast.ops.context_stack import ACTIVE
from greenfast.parallel import blocks
from greenfast.parallel import varlen as varlen_ranks
from greenfast.parallel.ulysses import HeadExchange
from tests import snippets

_TIMEOUT = 30.0  # seconds, if no rank is lost
Array = np.ndarray[Any, Any]
sdpa: Any = greenfast.sdpa  # its overloads do not accept these options
attention_block: Any = greenfast.attention_block
attend_varlen: Any = greenfast.flash_attn_varlen_func


def inputs(shape: tuple[int, ...], kv_heads: int, seed: int, keys: int = 0, bias: float = 0.0) -> Any:
    """Q, K and V of a whole sequence, (B, H, S, D) and (B, HK, keys or S, D), the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    batch, _, rows, head_dim = shape
    shapes = [shape, *[(batch, kv_heads, keys or rows, head_dim)] * 2]
    q, k, v = (torch.randn(s, generator=generator) for s in shapes)
    if bias:
        k = k + bias * torch.randn(1, kv_heads, 1, head_dim, generator=generator)
    return [x.bfloat16() for x in (q, k, v)]


def places(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh by their places in its process group; nothing where these are in order."""
    return greenfast.context_parallel(mesh, timeout=_TIMEOUT).group.places


def construct(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    greenfast.context_parallel(mesh, **options)


def layout(mesh: DeviceMesh) -> list[bool]:
    """Return whether a rank's rows equal PyTorch's context_parallel, and unshard restores the whole."""
    experimental: Any = importlib.import_module("torch.distributed.tensor.experimental")
    cp = greenfast.context_parallel(mesh, timeout=_TIMEOUT)
    whole = torch.arange(24.0 * mesh.size()).view(2, -1, 3)
    buffer = whole.clone()
    with experimental.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1], no_restore_buffers={buffer}):
        mine = buffer.clone()
    result = [torch.equal(mine, cp.shard(whole, 1)), torch.equal(cp.unshard(mine, -2), whole)]
    try:
        cp.unshard(mine[:, 1:], 1)
    except ValueError as error:
        result.append("3 rows of a rank; with load_balance two chunks" in str(error))
    return result


def on(mesh: DeviceMesh, given: dict[str, Any]) -> Any:
    """``inputs`` on the mesh's devices."""
    return [x.to(mesh.device_type) for x in inputs(**given)]


def array(x: Tensor) -> Array:
    return x.detach().float().cpu().numpy()


def attend(mesh: DeviceMesh, method: Any, given: dict[str, Any], options: dict[str, Any], balanced: bool) -> Any:
    """The whole output (and log-sum-exp) that the ranks computed of their shards, on each of them; the method."""
    tensors = on(mesh, given)
    cp: Any = greenfast.context_parallel(mesh, method, load_balance=balanced, timeout=_TIMEOUT)
    shards = [cp.shard(x, 2) for x in tensors]
    grouped = tensors[0].shape[1] != tensors[1].shape[1]
    with cp:
        result = sdpa(*shards, enable_gqa=grouped, **options)
    chosen = cp.explain(*shards, is_causal=options.get("is_causal", False), enable_gqa=grouped)
    results = result if isinstance(result, tuple) else (result,)
    return [array(cp.unshard(x, 2)) for x in results], str(chosen)


def block(mesh: DeviceMesh, method: Any, given: dict[str, Any]) -> list[Any]:
    """The whole output of attention_block with norm and RoPE, of shards of rows and tables; a mask's refusal."""
    tensors = on(mesh, given)
    cp = greenfast.context_parallel(mesh, method, timeout=_TIMEOUT)
    shards = [cp.shard(x, 2) for x in tensors]
    tables = tuple(cp.shard(x.to(mesh.device_type), 0) for x in angles(given["shape"]))
    with cp:
        out = attention_block(*shards, is_causal=True, q_norm=True, k_norm=True, rope=tables)
        try:
            attention_block(*shards, q_norm=True, k_norm=True, kv_lengths=torch.ones(1, dtype=torch.int32))
        except NotImplementedError as e:
            refusal = str(e)
    return [array(cp.unshard(out, 2)), refusal]


def angles(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """cos and sin of a rotary embedding, (S, D / 2)."""
    turns = torch.outer(torch.arange(shape[2]), 1e4 ** -torch.linspace(0, 1, shape[3] // 2))
    return turns.cos(), turns.sin()


def train(mesh: DeviceMesh, method: Any, given: dict[str, Any], causal: bool, balanced: bool = True) -> list[Array]:
    """The whole gradients of Q, K and V of a loss that weighs each element of the output differently."""
    tensors = on(mesh, given)
    cp = greenfast.context_parallel(mesh, method, load_balance=balanced, timeout=_TIMEOUT)
    grad = on(mesh, {"shape": given["shape"], "kv_heads": 1, "seed": 99})[0]
    q, k, v = (cp.shard(x, 2).requires_grad_() for x in tensors)
    with cp:
        out = sdpa(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        out.backward(cp.shard(grad, 2))
    return [array(cp.unshard(x.grad, 2)) for x in (q, k, v)]  # type: ignore[arg-type]


def varlen(mesh: DeviceMesh, method: Any, lengths: list[int], causal: bool, balanced: bool) -> Any:
    """Compute each rank's rows of packed sequences: the outputs and log-sum-exps, one sequence at a time."""
    cp: Any = greenfast.context_parallel(mesh, method, load_balance=balanced, timeout=_TIMEOUT)
    whole = [on(mesh, {"shape": (1, 4, n, 64), "kv_heads": 2, "seed": n}) for n in lengths]
    q, k, v = (torch.cat([cp.shard(x[i], 2) for x in whole], 2)[0].transpose(0, 1) for i in range(3))
    each = [n // mesh.size() for n in lengths]
    starts = torch.tensor([0, *each], dtype=torch.int32, device=mesh.device_type).cumsum(0).int()
    with cp:
        out, lse = greenfast.flash_attn_varlen_func(
            q, k, v, starts, starts, max(each), max(each), causal=causal, softcap=20.0, return_softmax_lse=True
        )
        refused = ""
        try:
            greenfast.flash_attn_varlen_func(q, k, v, starts, starts, max(each), max(each), window_size=(8, 0))
        except NotImplementedError as error:
            refused = str(error)
    outs = [array(cp.unshard(x, 0)) for x in out.split(each)]
    return outs, [array(cp.unshard(x, 1)) for x in lse.split(each, 1)], refused


def as_dtensors(mesh: DeviceMesh, given: dict[str, Any]) -> Any:
    """Compute attention of DTensors without the head-tail layout: the whole output, its placements, and gradients."""
    cp = greenfast.context_parallel(mesh, "ulysses", load_balance=False, timeout=_TIMEOUT)
    whole = on(mesh, given)
    parts = [cp.shard(x, 2).requires_grad_() for x in whole]
    q, k, v = (DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in parts)
    with cp:
        out = sdpa(q, k, v, is_causal=True)
        out.sum().to_local().backward()
        refused = ""
        try:
            greenfast.sdpa(DTensor.from_local(whole[0], mesh, [Replicate()], run_check=False), k, v)
        except ValueError as error:
            refused = str(error)
    assert isinstance(out, DTensor)
    grads = [array(x.grad) for x in parts if x.grad is not None]
    return array(out.full_tensor()), str(out.placements), grads, refused


def compiled(mesh: DeviceMesh, method: Any, given: dict[str, Any]) -> Any:
    """Outputs and gradients with and without torch.compile; and the same graph's and function's outside the context."""
    cp = greenfast.context_parallel(mesh, method, timeout=_TIMEOUT)
    shards = [cp.shard(x, 2) for x in on(mesh, given)]

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return greenfast.sdpa(q, k, v, is_causal=True) * 2

    graph = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=method == "auto")
    alone = graph(*shards)
    result = []
    for call in (model, graph):
        tensors = [x.clone().requires_grad_() for x in shards]
        with cp:
            out: Any = call(*tensors)
            out.sum().backward()
        result.append([array(x) for x in (out, *(t.grad for t in tensors))])
    return result, array(alone), array(model(*shards))


def benchmark(mesh: DeviceMesh) -> Any:
    """The record of a small case."""
    case = ParallelCase("small", 256 * mesh.size(), True, heads=2, kv_heads=2, head_dim=64)
    (record,) = measure(mesh, [case], 2, tuple(BACKENDS))
    return to_builtins(record)


def routed(mesh: DeviceMesh, given: dict[str, Any]) -> Any:
    """Outputs and gradients of ``greenfast.sdpa``, of PyTorch's attention routed, and of both in a checkpoint."""
    cp = greenfast.context_parallel(mesh, "ring", timeout=_TIMEOUT)
    own = partial(sdpa, is_causal=True)
    theirs: Any = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    again: Any = partial(checkpoint, use_reentrant=False)
    result = []
    for call in (own, theirs, partial(again, own), partial(again, greenfast.use(min_length=0)(theirs))):
        tensors = [cp.shard(x, 2).requires_grad_() for x in on(mesh, given)]
        with cp, greenfast.use(min_length=0):
            out = call(*tensors)
            out.float().square().sum().backward()
        result.append([array(x) for x in (out, *(t.grad for t in tensors))])
    return result


def left_to_pytorch(mesh: DeviceMesh, given: dict[str, Any]) -> Any:
    """Run short shards under the default rules of ``use``: outputs; and the errors of unsupported calls."""
    cp = greenfast.context_parallel(mesh, "ring", timeout=_TIMEOUT)
    shards = [cp.shard(x, 2) for x in on(mesh, given)]
    theirs: Any = torch.nn.functional.scaled_dot_product_attention
    mask = torch.ones(shards[0].shape[2], shards[1].shape[2], dtype=torch.bool).tril()
    with cp:
        own = sdpa(*shards, is_causal=True)
        with greenfast.use() as routed:
            result = theirs(*shards, is_causal=True)
            refused = []
            for change in ({"attn_mask": mask}, {"dropout_p": 0.5}, {"scale": -1.0}):
                try:
                    theirs(*shards, **change)
                except (NotImplementedError, ValueError) as error:
                    refused.append(str(error))
            try:
                theirs(*(x.float() for x in shards))
            except TypeError as error:
                refused.append(str(error))
    return array(own), array(result), routed.taken, refused


def placed(mesh: DeviceMesh) -> list[str]:
    """The errors for DTensors that are not a rank's rows, in order, of whole numbers."""
    square = DeviceMesh(mesh.device_type, [[0, 1], [2, 3]], mesh_dim_names=("other", "cp"))
    plain, turned = (greenfast.context_parallel(square["cp"], load_balance=b, timeout=_TIMEOUT) for b in (False, True))
    local = torch.randn(1, 2, 64, 64).bfloat16()
    rows = Shard(2)
    refused = []
    for cp, placements in (
        (plain, (Partial(), rows)), (plain, (Shard(2), rows)), (plain, (Shard(3), rows)), (plain, (rows, Replicate())),
        (turned, (Replicate(), rows)),
    ):  # fmt: skip
        x = DTensor.from_local(local, square, placements, run_check=False)
        with cp:
            try:
                sdpa(x, x, x, is_causal=True)
            except ValueError as error:
                refused.append(str(error))
    whole, batches = (DTensor.from_local(local, square, (p, rows), run_check=False) for p in (Replicate(), Shard(0)))
    for cp, query in ((plain, batches), (turned, local)):  # other batches than the keys, and rows that are in no order
        with cp:
            try:
                sdpa(query, whole, whole, is_causal=True)
            except ValueError as error:
                refused.append(str(error))
    for placements in ((Replicate(), rows), (Shard(1), rows), (Shard(0), rows)):
        x = DTensor.from_local(local, square, placements, run_check=False)
        with plain:
            assert sdpa(x, x, x, is_causal=True).placements == placements
    return refused


#: DTensors on a mesh of 2 x 2; the context has its second dimension: shapes of Q and of K and V, the
#: dimension that the first one shards of each, and whether heads are shared.
PLACED: list[tuple[tuple[int, ...], tuple[int, ...], int | None, int | None, bool]] = [
    ((2, 3, 64, 64), (2, 3, 64, 64), 1, 1, False),  # 2 heads and 1
    ((3, 2, 64, 64), (3, 2, 64, 64), 0, 0, False),  # 2 batches and 1
    ((1, 1, 64, 64), (1, 1, 64, 64), 1, 1, False),  # a head and none
    ((1, 12, 32, 64), (1, 4, 32, 64), 1, 1, True),
    ((1, 6, 32, 64), (1, 3, 32, 64), None, None, True),
    ((1, 9, 32, 64), (1, 3, 32, 64), 1, 1, True),  # 6 and 3 query heads, 2 and 1 heads of K and V: refused, 5 and 4
    ((1, 12, 32, 64), (1, 3, 32, 64), 1, None, True),  # replicated K and V: heads 0, 1 and 1, 2
    ((2, 7, 32, 64), (2, 1, 32, 64), 1, None, True),
    ((3, 32, 64), (1, 3, 32, 64), 0, None, False),
    ((4, 64, 64), (1, 4, 64, 64), None, None, False),  # Q without a batch
    ((3, 64, 64), (1, 3, 64, 64), 0, 1, False),
    ((2, 1, 2, 64, 64), (1, 2, 64, 64), 2, 1, False),
    ((1, 2, 64, 64), (2, 64, 64), None, None, False),
    ((64, 64), (64, 64), None, None, False),
]


def dtensors(mesh: DeviceMesh) -> list[Any]:
    """Return whole outputs, log-sum-exps and gradients of ``PLACED``, or the error; and the results of one process."""
    square = DeviceMesh(mesh.device_type, [[0, 1], [2, 3]], mesh_dim_names=("other", "cp"))
    cp = greenfast.context_parallel(square["cp"], "ulysses", load_balance=False, timeout=_TIMEOUT)
    result: list[Any] = []
    for shape, kv_shape, of_query, of_keys, shared in PLACED:
        generator = torch.Generator().manual_seed(len(result))
        whole = [torch.randn(s, generator=generator).bfloat16() for s in (shape, kv_shape, kv_shape)]
        alone = [x.clone().requires_grad_() for x in whole]
        out, lse = sdpa(*alone, is_causal=True, enable_gqa=shared, return_lse=True)
        weights = torch.randn(out.shape, generator=generator).bfloat16()
        out.backward(weights)
        wanted = [array(x) for x in (out, lse, *(x.grad for x in alone))]
        inputs = []
        for x, dim in zip(whole, (of_query, of_keys, of_keys), strict=True):
            placements = [Replicate() if dim is None else Shard(dim), Shard(x.dim() - 2)]
            inputs.append(distribute_tensor(x, square, placements).requires_grad_())
        try:
            with cp:
                out, lse = sdpa(*inputs, is_causal=True, enable_gqa=shared, return_lse=True)
                out.backward(distribute_tensor(weights, square, out.placements))
        except ValueError as error:
            result.append((str(error), wanted))
            continue
        grads: Any = [x.grad for x in inputs]
        result.append(([array(x.full_tensor()) for x in (out, lse, *grads)], wanted))
    return result


def unlike(mesh: DeviceMesh) -> list[str]:
    """Return the errors for DTensors with parts of different batches, heads or rows."""
    square = DeviceMesh(mesh.device_type, [[0, 1], [2, 3]], mesh_dim_names=("other", "cp"))
    cp = greenfast.context_parallel(square["cp"], load_balance=False, timeout=_TIMEOUT)
    rows = Shard(2)

    def placed(shape: tuple[int, ...], *placements: Any) -> DTensor:
        return distribute_tensor(torch.zeros(shape, dtype=torch.bfloat16), square, placements)

    def of_heads(count: int) -> DTensor:
        return placed((2, count, 64, 64), Shard(1), rows)

    twelve, strided = of_heads(12), placed((2, 4, 64, 64), Replicate(), Shard(1))
    strided = DTensor.from_local(strided.to_local(), square, (_StridedShard(0, split_factor=2), rows), run_check=False)
    plain = twelve.to_local()
    calls: list[tuple[Any, ...]] = [
        (twelve, of_heads(3), of_heads(3), True),  # 3 heads on 2 ranks
        (of_heads(6), of_heads(3), of_heads(6), True),
        (of_heads(6), of_heads(6), of_heads(1), True),
        (of_heads(4), of_heads(2), of_heads(2), False),  # in parts they could be broadcast
        (of_heads(2), of_heads(1), of_heads(1), False),
        (*[placed((n, 2, 64, 64), Shard(0), rows) for n in (4, 2, 2)], False),
        (twelve, plain, plain, False),
        (strided, strided, strided, False),
        (*[placed((1, 2, 65, 64), Replicate(), rows)] * 3, False),
    ]
    refused = []
    for q, k, v, shared in calls:
        with cp:
            try:
                sdpa(q, k, v, enable_gqa=shared)
            except ValueError as error:
                refused.append(str(error))
    turned = DeviceMesh(mesh.device_type, [2, 0, 3, 1])  # it has the process group of the mesh
    x = DTensor.from_local(plain, turned, (rows,), run_check=False)
    with greenfast.context_parallel(mesh, load_balance=False, timeout=_TIMEOUT):
        try:
            sdpa(x, x, x)
        except ValueError as error:
            refused.append(str(error))
    starts = torch.tensor([0, 8], dtype=torch.int32)
    sharded: Any = DTensor.from_local(torch.zeros(8, 2, 64).bfloat16(), square, [Replicate(), Shard(0)])
    others: list[Any] = [
        lambda: attend_varlen(sharded, sharded, sharded, starts, starts, 8, 8),
        lambda: cp.shard(sharded, 0),
        lambda: cp.unshard(sharded, 0),
    ]
    for call in others:
        with cp:
            try:
                call()
            except TypeError as error:
                refused.append(str(error))
    return refused


def examples(mesh: DeviceMesh, page: str) -> list[Array]:
    """Run a page's blocks for several processes: its first whole output, the model's last weights, the last output."""
    names: dict[str, Any] = {"__name__": "__main__"}
    result = []
    with patch.dict(os.environ, {"WORLD_SIZE": str(mesh.size())}):  # as torchrun sets it
        for block in snippets.blocks(page, snippets.read(page)):
            if "2 processes" in block.needs:
                code = snippets.runnable(block, "").replace(snippets.ANY_DEVICE, '"cuda"')
                code = code.replace('"cuda"', f'"{mesh.device_type}"')
                snippets.execute(block, code, names)
                result.append(array(names["out"]))
    return [array(names["whole"]), array(names["model"].logits.weight), result[-1]]


def mismatch(mesh: DeviceMesh, kind: str) -> None:
    """One rank makes another call than the others."""
    odd = mesh.get_local_rank() == 1
    cp = greenfast.context_parallel(mesh, "ring", load_balance=not (odd and kind == "layout"), timeout=_TIMEOUT)
    rows = 64 if odd and kind == "rows" else 65 if odd and kind == "refused" else 128
    q, k, v = on(mesh, {"shape": (1, 2, rows, 64), "kv_heads": 2, "seed": 0})
    if kind == "unshard":
        cp.unshard(q[..., :8] if odd else q, 2)
    options: dict[str, Any] = {"is_causal": kind != "mask" or odd}
    others = {"scale": 0.25, "precision": "int8", "return_lse": True}
    if odd and kind in others:
        options[kind] = others[kind]
    with cp:
        if not kind.startswith("varlen"):
            sdpa(q, k, v, **options)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        starts = torch.tensor([0, 40 if odd and kind == "varlen lengths" else 60, 128], dtype=torch.int32)
        if odd and kind == "varlen refused":
            q = q[None]
        attend_varlen(q, k, v, starts, starts, 88, 88, causal=True)


def raised_on_all(mesh: DeviceMesh) -> list[str]:
    """Errors that all ranks raise in the middle of a call, after which they compute another one."""
    cp = greenfast.context_parallel(mesh, "ring", timeout=_TIMEOUT)
    q, k, v = on(mesh, {"shape": (1, 2, 64, 64), "kv_heads": 2, "seed": 0})
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    starts = torch.tensor([0, 64], dtype=torch.int32)
    result = []
    calls: Any = (
        (blocks, "attend", partial(sdpa, q, k, v)),
        (varlen_ranks, "_attend", partial(attend_varlen, *rows, starts, starts, 64, 64)),
    )
    for module, name, call in calls:
        with cp:
            wanted = call()
            with patch.object(module, name, side_effect=MemoryError(f"in {name}")):
                try:
                    call()
                except MemoryError as error:
                    result.append(str(error))
            assert torch.equal(call(), wanted)
    return result


def die(mesh: DeviceMesh, timeout: float, when: str) -> None:
    """Rank 1 ends, or hangs, at some time."""
    gone = mesh.get_local_rank() == 1
    if gone and when == "before":
        os._exit(1)
    cp = greenfast.context_parallel(mesh, "ring", timeout=timeout)
    q, k, v = on(mesh, {"shape": (1, 2, 64, 64), "kv_heads": 2, "seed": 0})
    with cp:
        greenfast.sdpa(q, k, v)
        if gone and when == "exchanges":
            with patch.object(blocks, "attend", side_effect=lambda *_: time.sleep(600)):
                greenfast.sdpa(q, k, v)
        if gone:
            if when == "hangs":
                time.sleep(600)
            os._exit(1)
        for _ in range(2):
            greenfast.sdpa(q, k, v)


def catches(mesh: DeviceMesh, kind: str) -> list[str]:
    """Rank 1 of the mesh fails in the middle of a call, catches its error, and makes the next call as the others."""
    method: Any = "ulysses" if kind == "gradient" else "ring"
    cp = greenfast.context_parallel(mesh, method, timeout=_TIMEOUT)
    q, k, v = (x.requires_grad_() for x in on(mesh, {"shape": (1, 2, 64, 64), "kv_heads": 2, "seed": 0}))
    rows = [x[0].transpose(0, 1).detach() for x in (q, k, v)]
    starts = torch.tensor([0, 64], dtype=torch.int32)

    def call() -> None:
        if kind == "varlen":
            attend_varlen(*rows, starts, starts, 64, 64)
        else:
            out = sdpa(q, k, v)
            if kind == "gradient":
                out.sum().backward()

    module, name = {"varlen": (varlen_ranks, "_attend"), "ring": (blocks, "attend")}.get(kind, (HeadExchange, "wait"))
    message = []
    with cp:
        call()
        cp.group.timeout = 2.0
        if cp.group.rank == 1:
            with patch.object(module, name, side_effect=MemoryError("too little")), suppress(MemoryError):
                call()
        try:
            call()
        except RuntimeError as error:
            message.append(str(error))
    return message


def out_of_step(mesh: DeviceMesh) -> list[str]:
    """Let rank 1 begin one exchange less than the others, which do not wait for it, as with NCCL."""
    cp = greenfast.context_parallel(mesh, "ring", timeout=_TIMEOUT)
    q, k, v = on(mesh, {"shape": (1, 2, 64, 64), "kv_heads": 2, "seed": 0})
    message = []
    behind = cp.group.rank == 1
    with cp:
        sdpa(q, k, v)
        cp.group.exchanges -= behind
        for _ in range(2):
            try:
                sdpa(q, k, v)
            except RuntimeError as error:
                message.append(str(error))
        cp.group.exchanges += behind
        sdpa(q, k, v)
    return message


def under_autocast(mesh: DeviceMesh, method: Any) -> Any:
    """Outputs, log-sum-exps and gradients of float32 tensors under autocast, and of the same in bfloat16 without it."""
    cp = greenfast.context_parallel(mesh, method, timeout=_TIMEOUT)
    whole = [x.float() for x in on(mesh, {"shape": (1, 2, 96, 64), "kv_heads": 2, "seed": 1, "bias": 9.0})]
    result = []
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [cp.shard(x, 2).to(dtype).requires_grad_() for x in whole]
        with cp, torch.autocast(mesh.device_type, torch.bfloat16, enabled=dtype == torch.float32):
            out, lse = sdpa(*tensors, is_causal=True, return_lse=True)
            out.sum().backward()
        result.append([str(out.dtype), *(array(x) for x in (out, lse, *(t.grad for t in tensors)))])
    return result


def nothing(mesh: DeviceMesh, method: Any) -> list[bool]:
    """Return whether calls without rows, keys, batches or heads agree with calls outside, with zero gradients."""
    cp = greenfast.context_parallel(mesh, method, timeout=_TIMEOUT)
    result = []
    for shape, keys in (((1, 2, 0, 64), 32), ((1, 2, 16, 64), 0), ((0, 2, 16, 64), 16), ((1, 0, 16, 64), 16)):
        lengths = (shape[2], keys, keys)
        tensors = [torch.ones(*shape[:2], n, 64, dtype=torch.bfloat16, requires_grad=True) for n in lengths]
        with cp:
            out, lse = sdpa(*tensors, return_lse=True)
            out.sum().backward()
        wanted, sums = sdpa(*tensors, return_lse=True)
        without = all(x.grad is not None and not x.grad.any() for x in tensors)
        result.append(torch.equal(out, wanted) and torch.equal(lse, sums) and without)
    q = torch.zeros(0, 4, 64, dtype=torch.bfloat16)
    starts = torch.zeros(3, dtype=torch.int32)
    with cp:
        result.append(attend_varlen(q, q, q, starts, starts, 0, 0, causal=True).shape == q.shape)
    return result


def other_calls(mesh: DeviceMesh) -> list[Any]:
    """Call ``explain`` inside, leave contexts in another order, and compute gradients by ``torch.func``."""
    ring, plain = (greenfast.context_parallel(mesh, "ring", load_balance=b, timeout=_TIMEOUT) for b in (True, False))
    q, k, v = on(mesh, {"shape": (1, 2, 64, 64), "kv_heads": 2, "seed": 0})
    with ring:
        explained = [str(greenfast.explain(q, k, v)), str(greenfast.explain(q, k, v, torch.zeros(64, 64).bool()))]
        by_func = torch.func.grad(lambda x: sdpa(x, k, v, is_causal=True).sum())(q)
        x = q.clone().requires_grad_()
        sdpa(x, k, v, is_causal=True).sum().backward()
    ring.__enter__()
    plain.__enter__()
    ring.__exit__()
    left = [plain] == ACTIVE
    plain.__exit__()
    try:
        plain.__exit__()
    except RuntimeError as error:
        explained.append(str(error))
    return [*explained, left and not ACTIVE, torch.equal(by_func, x.grad)]


def alone(mesh: DeviceMesh) -> list[bool]:
    """Return whether a mesh of one agrees with calls outside of it, for calls that several ranks would refuse."""
    cp = greenfast.context_parallel(mesh)
    q, k, v = on(mesh, {"shape": (1, 2, 7, 64), "kv_heads": 2, "seed": 0, "keys": 19})
    result = []
    for options in ({"is_causal": True}, {"is_causal": True, "causal_alignment": "lower_right"}, {"return_lse": True}):
        with cp:
            mine = sdpa(q, k, v, **options)
        wanted = sdpa(q, k, v, **options)
        result.append(all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True)))
    return result
