"""``greenfast.context_parallel``: attention of sequences that are sharded over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import get_rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from greenfast.ops import torch_ops
from greenfast.ops.arguments import (
    check_cast_dtype,
    check_flag,
    check_starts,
    parse_causal,
    parse_dropout,
    parse_length,
    parse_number,
    parse_scale,
    parse_softcap,
)
from greenfast.ops.canonicalize import (
    CanonicalCall,
    Refusal,
    canonicalize,
    from_kernel_layout,
    get_cast_dtype,
    to_kernel_layout,
)
from greenfast.ops.context_stack import ACTIVE
from greenfast.ops.quantized import DTYPES, PRECISIONS_AND_AUTO, AutoPrecision, check_choice
from greenfast.ops.routing import Explanation
from greenfast.parallel import cost
from greenfast.parallel.group import RankGroup, get_group
from greenfast.parallel.layout import ShardLayout
from greenfast.parallel.torch_ops import CONTEXT_ATTENTION, METHODS
from greenfast.parallel.varlen import CONTEXT_VARLEN
from greenfast.serving.checks import check_keys, check_out, should_check_values
from greenfast.serving.plan import describe_tensor

Method = Literal["auto", "ring", "ulysses"]
_NAMES = ("query", "key", "value")
_MAX_TIMEOUT = 1e9  # seconds; PyTorch counts nanoseconds in 64 bits


class context_parallel:  # noqa: N801 - read as a verb: with greenfast.context_parallel(mesh)
    """Compute attention of longer sequences in ``greenfast.sdpa`` and ``flash_attn_varlen_func`` from each rank's rows.

        mesh = init_device_mesh("cuda", (size,))
        cp = greenfast.context_parallel(mesh)
        q, k, v = (cp.shard(x, dim=2) for x in (q, k, v))  # or as torch's context_parallel shards them
        with cp:
            out = greenfast.sdpa(q, k, v, is_causal=True)  # this rank's rows of the output
        out = cp.unshard(out, dim=2)

    mesh: a DeviceMesh of one dimension, such as ``mesh["cp"]``; all its ranks make the same calls. method: "ring"
    passes codes of K and V around a ring, "ulysses" exchanges sequences for heads; "auto" chooses for each call, by its
    sizes (``explain``). load_balance: rank r has chunks r and 2 * size - 1 - r of 2 * size, as in
    torch.distributed.tensor.experimental.context_parallel, so that a causal mask gives all ranks the same work.
    Otherwise rank r has the r-th of ``size`` chunks. timeout: seconds until a call fails if a rank does not make it,
    600 at first.

    It applies to the whole process until it is left, including the backward pass on PyTorch's threads. Activation
    checkpointing recomputes attention, so the backward pass must then be inside too. Results do not depend on the order
    of ranks in the mesh.

    Calls raise the errors of ``greenfast.sdpa``; ValueError on all ranks, with the calls, if these differ; RuntimeError
    with the rank's number if a rank is lost. The constructor is a collective call of the mesh's ranks. It raises
    TypeError for anything except a mesh of one dimension and numbers, ValueError for an unknown method, a timeout that
    is not positive and a mesh without this rank.
    """

    def __init__(
        self, mesh: DeviceMesh, method: Method = "auto", *, load_balance: bool = True, timeout: float | None = None
    ) -> None:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            actual = f"one of {mesh.ndim} dimensions" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
            raise TypeError(f"mesh: {actual}; a DeviceMesh of one dimension is needed, such as mesh['cp']")
        check_choice("method", method, ("auto", *METHODS))
        check_flag("load_balance", load_balance)
        if timeout is not None and not 0 < parse_number("timeout", timeout) <= _MAX_TIMEOUT:
            raise ValueError(f"timeout: {timeout}; seconds above 0, up to {_MAX_TIMEOUT:g}, are needed, or None")
        if mesh.get_coordinate() is None:
            raise ValueError(f"mesh: its ranks are {mesh.mesh.tolist()}, and this is rank {get_rank()}")
        self.mesh, self.method, self.load_balance = mesh, method, load_balance
        self.group: RankGroup = get_group(mesh.get_group(), mesh.mesh.flatten().tolist(), timeout)
        self.name = self.group.name
        self.size = self.group.size

    def __enter__(self) -> context_parallel:
        ACTIVE.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        """Raise RuntimeError if the context was not entered."""
        index = len(ACTIVE) - 1
        while index >= 0 and ACTIVE[index] is not self:  # a later one may still be active on another thread
            index -= 1
        if index < 0:
            raise RuntimeError("context_parallel: left, but not entered")
        del ACTIVE[index]

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a whole tensor, a copy.

        Raises TypeError for a DTensor, and ValueError for a length that the layout does not divide.
        """
        _check_no_dtensor("tensor", tensor, "distribute_tensor() and redistribute() shard it")
        return ShardLayout(self.size, self.load_balance).shard(tensor, dim, self.group.rank)

    def unshard(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the whole tensor, on each rank, from this rank's part. No gradient flows through it.

        Raises TypeError for a DTensor, and ValueError if the ranks' parts differ in shape or dtype.
        """
        _check_no_dtensor("tensor", tensor, "its full_tensor() is the whole")
        self.group.agree(f"unshard along {dim}, {tuple(tensor.shape)}, {tensor.dtype}")
        shards = self.group.gather(tensor.detach().contiguous())
        return ShardLayout(self.size, self.load_balance).unshard(shards, dim)

    def explain(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, enable_gqa: bool = False, *, precision: AutoPrecision = "fp8",
        causal_alignment: str = "upper_left", float32_as: torch.dtype | None = None,
    ) -> Explanation:  # fmt: skip
        """Return the method of a call with these shards, and the reason. ``kernel`` is "torch" if the call is refused.

        Raises TypeError and ValueError for flags, numbers and choices, as ``greenfast.sdpa`` does.
        """
        fixed = _parse_precision(precision)
        tensors = (query, key, value)
        _, form = self._canonicalize(tensors, attn_mask, dropout_p, is_causal, enable_gqa, causal_alignment, float32_as)
        if isinstance(form, Refusal):
            return Explanation("torch", form.reason)
        return Explanation(*self._select_method(form), fixed)

    def sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
        scale: float | None, enable_gqa: bool, precision: str, causal_alignment: str, return_lse: bool,
        float32_as: torch.dtype | None,
    ) -> Any:  # fmt: skip
        """Compute ``greenfast.sdpa`` inside this context."""
        inputs = (query, key, value)
        try:
            precision = _parse_precision(precision)
            check_flag("return_lse", return_lse)
            local, form = self._canonicalize(
                inputs, attn_mask, dropout_p, is_causal, enable_gqa, causal_alignment, float32_as
            )
            if isinstance(form, Refusal):
                raise form.error(f"{form.reason} (in a context_parallel)")
            factor = parse_scale(scale, query.shape[-1])
            widened = float32_as is not None and get_cast_dtype(local[0], None) == torch.float32
            q, k, v = (x.to(get_cast_dtype(x, float32_as)) for x in local)
            tensors = to_kernel_layout(form, q, k, v)
        except Exception as error:
            if torch.compiler.is_compiling():
                raise
            self.group.agree("", error)
            raise
        out, lse = self._attend(form, tensors, precision, factor, return_lse)
        out = from_kernel_layout(form, out)
        dims = len(form.out)
        out = _match_placement(query, out.float() if widened else out, dims)
        return (out, _match_placement(query, lse.reshape(form.out[:-1]), dims)) if return_lse else out

    def _canonicalize(
        self, tensors: tuple[Tensor, Tensor, Tensor], attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
        enable_gqa: bool, causal_alignment: str, float32_as: torch.dtype | None,
    ) -> tuple[list[Any], CanonicalCall | Refusal]:  # fmt: skip
        """Return this rank's rows, and the canonical form of their attention or its refusal."""
        causal = parse_causal(is_causal, causal_alignment)
        check_flag("enable_gqa", enable_gqa)
        check_cast_dtype(float32_as)
        dropout = parse_dropout(dropout_p)
        fault = self._find_placement_fault(tensors, enable_gqa)
        if fault:
            return [], Refusal(ValueError, fault)
        local = [_get_local_part(tensors[0], x) if isinstance(x, DTensor) else x for x in tensors]
        query, key, value = local
        form = canonicalize(query, key, value, attn_mask, dropout, causal, enable_gqa, float32_as)
        if isinstance(form, CanonicalCall) and form.mask is not None:
            form = Refusal(NotImplementedError, "attn_mask: the kernels take only causal masks here")
        fault = (
            ""
            if isinstance(form, Refusal)
            else self._find_shape_fault(form, any(isinstance(x, DTensor) for x in tensors))
        )
        return local, Refusal(ValueError, fault) if fault else form

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, starts: tuple[Any, Any], longest: tuple[Any, Any], scale: float | None,
        causal: bool, softcap: float, wants_lse: bool, out: Tensor | None, others: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Compute ``flash_attn_varlen_func`` inside this context. others: unsupported arguments, None by default."""
        try:
            for name, value in others.items():
                if value is not None and (name != "window_size" or tuple(value) != (-1, -1)):
                    raise NotImplementedError(f"{name}: it is not computed in a context_parallel; leave it out")
            factor = self._check_varlen(q, k, v, starts, longest, scale, causal, softcap)
            if out is not None:
                check_out(out, q, q.dtype)
        except Exception as error:
            if torch.compiler.is_compiling():
                raise
            self.group.agree("", error)
            raise
        balanced = causal and self.load_balance
        result, lse = CONTEXT_VARLEN(
            q, k, v, *starts, *longest, causal, float(softcap), factor, self.method, balanced, self.name
        )
        if out is not None:
            result = out.copy_(result)
        return (result, lse) if wants_lse else result

    def _check_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, starts: tuple[Any, Any], longest: tuple[Any, Any], scale: float | None,
        causal: bool, softcap: float,
    ) -> float:  # fmt: skip
        """Return the scale. Raises TypeError and ValueError, naming the argument, for arguments that do not fit."""
        check_flag("causal", causal)
        for name, x in (("q", q), ("k", k), ("v", v)):
            _check_no_dtensor(name, x, "pass its to_local()")
            if not isinstance(x, Tensor) or x.dim() != 3 or x.dtype not in DTYPES or x.dtype != q.dtype:
                raise ValueError(
                    f"{name}: {describe_tensor(x)}; (total, heads, head_dim) of float16 or bfloat16 is needed, as q"
                )
        if v.shape != k.shape or k.shape[2] != q.shape[2] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise ValueError(
                f"k, v: {describe_tensor(k)}, {describe_tensor(v)}; they do not fit q, {describe_tensor(q)}"
            )
        for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True):
            if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.dim() != 1 or x.shape != starts[0].shape:
                raise ValueError(
                    f"{name}: {describe_tensor(x)}; int32 (batch + 1,) is needed, this rank's rows of each sequence"
                )
        for name, length in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True):
            parse_length(name, length)
        if causal and (q.shape[0] != k.shape[0] or longest[0] != longest[1]):
            raise ValueError("causal: the shards of q and k differ in length; with a mask they must be as long")
        parse_softcap(softcap)
        if not torch.compiler.is_compiling() and should_check_values(q):
            lengths = check_starts("cu_seqlens_q", starts[0], q.shape[0], "q")
            if max(lengths, default=0) > longest[0]:
                raise ValueError(f"max_seqlen_q: {longest[0]}; a sequence has {max(lengths)} rows here")
            check_keys(starts[1], k.shape[0], longest[1], None)
            if causal and not torch.equal(*starts):
                raise ValueError("cu_seqlens_q, cu_seqlens_k: they differ; with a mask q and k must be as long")
            if causal and self.load_balance and any(n % 2 for n in lengths):
                raise ValueError(
                    f"cu_seqlens_q: {starts[0].tolist()}; with load_balance each sequence has two chunks of the same "
                    "length here. Pad it to a multiple of twice the ranks"
                )
        return parse_scale(scale, q.shape[2])

    def _attend(
        self, form: CanonicalCall, tensors: tuple[Tensor, Tensor, Tensor], precision: str, scale: float, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        if self.size == 1 and not form.empty:
            if with_lse:
                result: tuple[Tensor, Tensor] = torch_ops.SDPA_LSE(*tensors, precision, form.causal, scale)
                return result
            out = torch_ops.SDPA(*tensors, precision, form.causal, scale)
            return out, out
        both: tuple[Tensor, Tensor] = CONTEXT_ATTENTION(
            *tensors, precision, with_lse, int(form.causal > 0), scale, self.method, self._is_balanced(form), self.name
        )
        return both

    def _is_balanced(self, form: CanonicalCall) -> bool:
        """Return whether rows are balanced. Without a mask the order of keys changes nothing, and rows may be odd."""
        return self.load_balance and (form.causal > 0 or not (form.query[2] % 2 or form.key[2] % 2))

    def _find_shape_fault(self, form: CanonicalCall, in_order: bool) -> str:
        """Return the fault in the shapes of shards, or "".

        in_order: their rows are in sequence order, as a DTensor's.
        """
        rows, keys = form.query[2], form.key[2]
        if self.size == 1 or not form.causal:
            return ""
        if rows != keys:
            return f"is_causal: the shards have {rows} queries and {keys} keys; with a mask they must be as many"
        if self.load_balance and in_order:
            return "query: a DTensor; its rows are in order, so with a mask the context needs load_balance=False"
        if self.load_balance and rows % 2:
            return (
                f"query: a shard of {rows} rows; two chunks of the same length are needed (load_balance). Pad the "
                "sequence to a multiple of twice the ranks"
            )
        return ""

    def _select_method(self, form: CanonicalCall) -> tuple[str, str]:
        """Return the method of a call, and the reason."""
        (batch, heads, rows, head_dim), (_, kv_heads, keys, _) = form.query, form.key
        sizes = cost.CallSizes(self.size, batch, heads, kv_heads, rows, keys, head_dim, form.causal > 0)
        return cost.select_method(self.method, sizes)

    def _find_placement_fault(self, tensors: Sequence[Any], enable_gqa: bool) -> str:
        """Return why the DTensors of a call do not have this rank's rows of the same batches and heads; "" if they do.

        The result is the same on all ranks of their mesh: it depends on global shapes and placements only.
        """
        placed = {name: x for name, x in zip(_NAMES, tensors, strict=True) if isinstance(x, DTensor)}
        for name, x in placed.items():
            if not self._has_local_rows(x):
                return (
                    f"{name}: a DTensor placed {x.placements} on {x.device_mesh}; on the ranks of the context it must "
                    f"be Shard({x.dim() - 2}), sharded by rows, and on others replicated or sharded by batch or heads. "
                    "Use redistribute()"
                )
            if x.shape[-2] % self.size:
                return (
                    f"{name}: a DTensor of {x.shape[-2]} rows on {self.size} ranks; each needs as many rows. Pad "
                    "the sequence to a multiple of the ranks"
                )
        alike = len({(x.device_mesh, tuple(get_sharded_dims(x))) for x in placed.values()}) <= 1
        if not alike and not (len(placed) == len(_NAMES) and _have_replicated_heads(*placed.values())):
            shown = ", ".join(f"{name} {x.placements}" for name, x in placed.items())
            return (
                f"query, key and value: DTensors placed {shown}; they must be placed alike, or key and value "
                "replicated where query is sharded by heads. Use redistribute()"
            )
        if placed:
            first = next(iter(placed.values()))
            for dim in sorted({dim for dim in get_sharded_dims(first) if dim is not None and dim < -2}):
                fault = _find_uneven_sharding(placed, dim, enable_gqa)
                if fault:
                    return fault
        return ""

    def _has_local_rows(self, x: DTensor) -> bool:
        """Return whether a DTensor has this rank's rows of complete elements, of some batches and heads."""
        mesh = x.device_mesh
        dims = [i for i in range(mesh.ndim) if mesh.get_group(i) is self.group.process_group]
        if len(dims) != 1 or x.dim() < 2 or not all(map(_is_even_placement, x.placements)):
            return False
        coordinate = mesh.get_coordinate()
        if coordinate is None or coordinate[dims[0]] != self.group.rank:  # a mesh with the same ranks in another order
            return False
        by_dim = get_sharded_dims(x)
        others = [dim for i, dim in enumerate(by_dim) if i != dims[0]]
        return by_dim[dims[0]] == -2 and all(dim is None or dim < -2 for dim in others)


def _is_even_placement(placement: Any) -> bool:
    """Return whether a placement replicates, or shards in parts of consecutive rows."""
    return isinstance(placement, Shard | Replicate) and not isinstance(placement, _StridedShard)


def get_sharded_dims(x: DTensor) -> list[int | None]:
    """Return the dimension that each mesh dimension shards, counted from the last; None for Replicate.

    Tensors of one call can differ in the number of dimensions, but share the last ones.
    """
    return [p.dim % x.dim() - x.dim() if isinstance(p, Shard) else None for p in x.placements]


def _find_uneven_sharding(placed: dict[str, DTensor], dim: int, enable_gqa: bool) -> str:
    """Return why ranks have different batches or heads of the tensors along a sharded dimension; "" if they do not."""
    if len(placed) < len(_NAMES):
        return (
            f"{', '.join(placed)}: a DTensor sharded by batch or heads, beside a plain tensor with unknown batches and "
            "heads. Pass query, key and value as DTensors"
        )
    sizes = {name: x.shape[dim] for name, x in placed.items()}
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
    if len(set(sizes.values())) == 1:
        return ""
    if dim != -3 or not enable_gqa:
        return (
            f"query, key and value: DTensors sharded along dimension {dim}, in which their sizes differ ({shown}). Use "
            "redistribute() to replicate them there"
        )
    queries = placed["query"]
    for name in ("key", "value"):
        share = sizes["query"] // sizes[name] if sizes[name] else 0
        if share * sizes[name] != sizes["query"]:
            return f"{name}: the heads of query are not a multiple of its heads ({shown})"
        if dim not in get_sharded_dims(placed[name]):
            continue
        for heads, kv_heads in zip(_get_shard_ranges(queries, dim), _get_shard_ranges(placed[name], dim), strict=True):
            if heads != (kv_heads[0] * share, kv_heads[1] * share):
                return (
                    f"{name}: a DTensor of {sizes[name]} heads, sharded so that some rank has the query heads "
                    f"{_format_range(heads)} and the heads {_format_range(kv_heads)} of {name}, where {share} query "
                    f"heads share one ({shown}). Use as many ranks as divide the {sizes[name]} heads, or replicate key "
                    "and value with redistribute()"
                )
    return ""


def _have_replicated_heads(query: DTensor, key: DTensor, value: DTensor) -> bool:
    """Return whether key and value have all heads wherever query has a part, and are placed like query otherwise."""
    dims, own = get_sharded_dims(query), get_sharded_dims(key)
    if key.dim() < 3 or value.dim() < 3 or key.device_mesh != query.device_mesh or value.device_mesh != key.device_mesh:
        return False
    return own == get_sharded_dims(value) and own == [None if dim == -3 else dim for dim in dims]


def _get_local_part(query: Any, x: DTensor) -> Tensor:
    """Return this rank's part of a tensor. Of replicated keys or values, it has the heads of this rank's queries.

    Each rank then adds its part to the gradients of its heads.
    """
    mesh, own = x.device_mesh, get_sharded_dims(x)
    dims = get_sharded_dims(query) if isinstance(query, DTensor) else own
    coordinate = mesh.get_coordinate()
    if -3 not in dims or -3 in own or coordinate is None:
        return x.to_local()
    index = 0  # of this rank's part
    for i, dim in enumerate(dims):
        index = index * mesh.size(i) + coordinate[i] if dim == -3 else index
    first, end = _get_shard_ranges(query, -3)[index]
    grads = [Partial() if dim == -3 else p for dim, p in zip(dims, x.placements, strict=True)]
    local: Tensor = x.to_local(grad_placements=grads)
    share = query.shape[-3] // x.shape[-3]
    if first % share == 0 and end % share == 0:
        return local[..., first // share : end // share, :, :]
    return local.index_select(-3, torch.arange(first, end, device=local.device) // share)


def _format_range(part: tuple[int, int]) -> str:
    return f"{part[0]} to {part[1] - 1}" if part[1] > part[0] else "none"


def _get_shard_ranges(x: DTensor, dim: int) -> list[tuple[int, int]]:
    """Return the parts of a sharded dimension as (first, last + 1), for all mesh positions that shard it.

    DTensors are sharded by one mesh dimension after another, in parts as long as the first.
    """
    parts = [(0, x.shape[dim])]
    for i, sharded in enumerate(get_sharded_dims(x)):
        if sharded == dim:
            count = x.device_mesh.size(i)
            divided: list[tuple[int, int]] = []
            for first, end in parts:
                length = -(-(end - first) // count)
                cuts = [min(first + n * length, end) for n in range(count + 1)]
                divided += pairwise(cuts)
            parts = divided
    return parts


def _match_placement(like: Any, x: Tensor, dims: int) -> Tensor:
    """Return a result as a DTensor if the query is one, sharded along the same dimensions.

    dims: of the output. The result has these or, as the log-sum-exp, the first of them.
    """
    if not isinstance(like, DTensor):
        return x
    shape = list(x.shape)
    placements: list[Any] = []
    for dim in get_sharded_dims(like):
        placements.append(Replicate() if dim is None else Shard(dims + dim))
        if dim is not None:
            shape[dims + dim] = like.shape[dim]
    stride = [0] * len(shape)
    step = 1
    for i in sorted(range(len(shape)), key=lambda i: (x.stride(i), -i)):  # the order in memory of the local result
        stride[i] = step
        step *= max(1, shape[i])
    return DTensor.from_local(
        x, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def _check_no_dtensor(name: str, x: Any, instead: str) -> None:
    if isinstance(x, DTensor):
        raise TypeError(f"{name}: a DTensor; a plain tensor is needed: {instead}")


def _parse_precision(precision: str) -> str:
    """Check the precision. "auto" becomes "fp8", because PyTorch's own attention does not support shards."""
    check_choice("precision", precision, PRECISIONS_AND_AUTO)
    return "fp8" if precision == "auto" else precision
