"""``greenfast.context_parallel``: attention of sequences that are sharded over the ranks of a mesh."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from greenfast.operator import ops
from greenfast.operator.arguments import (
    causal_of,
    check_cast,
    check_flag,
    check_length,
    dropout_of,
    number,
    scale_of,
)
from greenfast.operator.quantized import DTYPES, PRECISIONS_AND_AUTO, check_choice
from greenfast.operator.routing import Explanation
from greenfast.operator.rules import Form, Refusal, arranged, dtype_of, form_of, restored
from greenfast.operator.scope import SCOPES
from greenfast.operator.serving import kind
from greenfast.parallel import cost
from greenfast.parallel.group import Group, group_of
from greenfast.parallel.layout import Layout
from greenfast.parallel.ops import CONTEXT_ATTENTION, METHODS
from greenfast.parallel.varlen import CONTEXT_VARLEN

Method = Literal["auto", "ring", "ulysses"]
_NAMES = ("query", "key", "value")


class context_parallel:  # noqa: N801 - read as a verb: with greenfast.context_parallel(mesh)
    """Inside it, ``greenfast.sdpa`` and ``flash_attn_varlen_func`` take each rank's rows of longer sequences.

        mesh = init_device_mesh("cuda", (size,))
        cp = greenfast.context_parallel(mesh)
        q, k, v = (cp.shard(x, dim=2) for x in (q, k, v))  # or as torch's context_parallel shards them
        with cp:
            out = greenfast.sdpa(q, k, v, is_causal=True)  # this rank's rows of the output
        out = cp.unshard(out, dim=2)

    mesh: a DeviceMesh of one dimension, such as ``mesh["cp"]``; all ranks of it make the same calls.
    method: "ring" sends codes of K and V round, "ulysses" exchanges sequences for heads; "auto" decides for each call,
    by its sizes (``explain``).
    load_balance: whether rank r has chunks r and 2 * size - 1 - r of 2 * size, as in
    torch.distributed.tensor.experimental.context_parallel, so that a causal mask leaves all ranks the same work; else
    it has the r-th of ``size``. timeout: seconds after which a rank that does not come to a call is given up, 600 at
    first.

    It applies to the whole process until it is left, the backward pass of PyTorch's threads included: with activation
    checkpointing, which computes attention again, the backward pass belongs inside. Results do not depend on which
    rank is which place of the mesh.

    Calls raise what ``greenfast.sdpa`` raises; ValueError on all ranks, with the calls, where these differ;
    RuntimeError with the rank's number where one is lost. Constructing it is a collective call of the mesh's ranks.
    Raises TypeError for anything but a mesh of one dimension and numbers, ValueError for an unknown method.
    """

    def __init__(
        self, mesh: DeviceMesh, method: Method = "auto", *, load_balance: bool = True, timeout: float | None = None
    ) -> None:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            found = f"one of {mesh.ndim} dimensions" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
            raise TypeError(f"mesh: {found}; a DeviceMesh of one dimension is needed, such as mesh['cp']")
        check_choice("method", method, ("auto", *METHODS))
        check_flag("load_balance", load_balance)
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
            raise TypeError(f"timeout: {timeout!r}; a positive number of seconds is needed, or None")
        self.mesh, self.method, self.load_balance = mesh, method, load_balance
        self.group: Group = group_of(mesh.get_group(), mesh.mesh.flatten().tolist(), timeout)
        self.name = self.group.name
        self.size = self.group.size

    def __enter__(self) -> context_parallel:
        SCOPES.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        SCOPES.pop()

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor, a copy. Raises ValueError for a length that has no such parts."""
        return Layout(self.size, self.load_balance).shard(tensor, dim, self.group.rank)

    def unshard(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole tensor, on each rank, from this rank's part. No gradient flows through it."""
        shards = self.group.gather(tensor.detach().contiguous())
        return Layout(self.size, self.load_balance).whole(shards, dim)

    def explain(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False
    ) -> Explanation:
        """Which method computes a call with these shards, and why; a ``kernel`` of "torch" where none does."""
        form = form_of(_local(query), _local(key), _local(value), None, 0.0, int(is_causal), enable_gqa, None)
        if isinstance(form, Refusal):
            return Explanation("torch", form.reason)
        fault = self._fault(form)
        return Explanation("torch", fault) if fault else Explanation(*self._method(form))

    def sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
        scale: float | None, enable_gqa: bool, precision: str, causal_alignment: str, return_lse: bool,
        float32_as: torch.dtype | None,
    ) -> Any:  # fmt: skip
        """``greenfast.sdpa`` inside this context."""
        given = (query, key, value)
        try:
            query, key, value = (self._shard_of(name, x) for name, x in zip(_NAMES, given, strict=True))
            causal = causal_of(is_causal, causal_alignment)
            check_choice("precision", precision, PRECISIONS_AND_AUTO)
            precision = "fp8" if precision == "auto" else precision  # which is the faster one; PyTorch's has no shards
            check_flag("return_lse", return_lse)
            check_cast(float32_as)
            form = form_of(query, key, value, attn_mask, dropout_of(dropout_p), causal, enable_gqa, float32_as)
            if isinstance(form, Refusal):
                raise form.error(f"{form.reason} (in a context_parallel)")
            fault = self._fault(form)
            if fault:
                raise ValueError(fault)
            if form.causal and self.load_balance and self.size > 1 and isinstance(given[0], DTensor):
                raise ValueError(
                    "query: a DTensor, whose rows are in order; with a mask the context needs load_balance=False"
                )
            factor = scale_of(scale, query.shape[-1])
        except Exception as error:
            if torch.compiler.is_compiling():
                raise
            self.group.agree((), "", error)
            raise
        widened = query.dtype == torch.float32
        query, key, value = (x.to(dtype_of(x, float32_as)) for x in (query, key, value))
        out, lse = self._attend(form, arranged(form, query, key, value), precision, factor, return_lse)
        out = restored(form, out)
        out = self._as_given(given[0], out.float() if widened else out)
        return (out, self._as_given(given[0], lse.reshape(form.out[:-1]))) if return_lse else out

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, starts: tuple[Any, Any], longest: tuple[Any, Any], scale: float | None,
        causal: bool, softcap: float, wants_lse: bool, out: Tensor | None, others: dict[str, Any],
    ) -> Any:  # fmt: skip
        """``flash_attn_varlen_func`` inside this context. others: arguments that it does not take, None by default."""
        try:
            for name, given in others.items():
                if given is not None:
                    raise NotImplementedError(f"{name}: it is not computed in a context_parallel; leave it out")
            factor = self._check_varlen(q, k, v, starts, longest, scale, causal, softcap)
        except Exception as error:
            if torch.compiler.is_compiling():
                raise
            self.group.agree((), "", error)
            raise
        method, _ = self._varlen_method(q, k, starts[0], causal)
        balanced = causal and self.load_balance
        found, lse = CONTEXT_VARLEN(
            q, k, v, *starts, *longest, causal, float(softcap), factor, method, balanced, self.name
        )
        if out is not None:
            found = out.copy_(found)
        return (found, lse) if wants_lse else found

    def _check_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, starts: tuple[Any, Any], longest: tuple[Any, Any], scale: float | None,
        causal: bool, softcap: float,
    ) -> float:  # fmt: skip
        """The scale. Raises TypeError and ValueError, naming the argument, for what does not fit."""
        check_flag("causal", causal)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.dim() != 3 or x.dtype not in DTYPES or x.dtype != q.dtype:
                raise ValueError(f"{name}: {kind(x)}; (total, heads, head_dim) of float16 or bfloat16 is needed, as q")
        if v.shape != k.shape or k.shape[2] != q.shape[2] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise ValueError(f"k, v: {kind(k)}, {kind(v)}; they do not fit q, {kind(q)}")
        for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True):
            if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.dim() != 1 or x.shape != starts[0].shape:
                raise ValueError(f"{name}: {kind(x)}; int32 (batch + 1,) is needed, this rank's rows of each sequence")
        for name, length in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True):
            check_length(name, length)
        if causal and (q.shape[0] != k.shape[0] or longest[0] != longest[1]):
            raise ValueError("causal: the shards of q and k differ in length; with a mask they must be as long")
        if causal and self.load_balance and q.device.type == "cpu" and bool((starts[0] % 2).any()):
            raise ValueError(
                "cu_seqlens_q: odd; with load_balance each sequence has two chunks of the same length here"
            )
        number("softcap", softcap)
        return scale_of(scale, q.shape[2])

    def _varlen_method(self, q: Tensor, k: Tensor, starts: Tensor, causal: bool) -> tuple[str, str]:
        if self.method != "auto":
            return self.method, f"{self.method} was asked for"
        batch = max(1, starts.shape[0] - 1)
        rows, keys = (max(1, x.shape[0] // batch) for x in (q, k))
        return cost.choose(cost.Sizes(self.size, batch, q.shape[1], k.shape[1], rows, keys, q.shape[2], causal))

    def _attend(
        self, form: Form, tensors: tuple[Tensor, Tensor, Tensor], precision: str, scale: float, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        causal = int(form.causal > 0)
        if self.size == 1:
            if with_lse:
                found: tuple[Tensor, Tensor] = ops.SDPA_LSE(*tensors, precision, causal, scale)
                return found
            out = ops.SDPA(*tensors, precision, causal, scale)
            return out, out
        method, _ = self._method(form)
        both: tuple[Tensor, Tensor] = CONTEXT_ATTENTION(
            *tensors, precision, with_lse, causal, scale, method, self._balanced(form), self.name
        )
        return both

    def _balanced(self, form: Form) -> bool:
        """Without a mask the order of the keys changes nothing, and rows may be odd in number."""
        return self.load_balance and (form.causal > 0 or not (form.query[2] % 2 or form.key[2] % 2))

    def _fault(self, form: Form) -> str:
        """What is wrong with the shapes of shards, or nothing."""
        rows, keys = form.query[2], form.key[2]
        if form.empty:
            return f"query: its shape is {tuple(form.query)}, key's {tuple(form.key)}; every rank needs rows and keys"
        if form.causal and rows != keys:
            return f"is_causal: the shards have {rows} queries and {keys} keys; with a mask they must be as many"
        if form.causal and self.load_balance and rows % 2:
            return (
                f"query: a shard of {rows} rows; two chunks of the same length are needed (load_balance). Pad the "
                "sequence to a multiple of twice the ranks"
            )
        return ""

    def _method(self, form: Form) -> tuple[str, str]:
        """The method of a call, and why."""
        if self.size == 1:
            return "single", "a mesh of one rank: nothing is exchanged"
        if self.method != "auto":
            return self.method, f"{self.method} was asked for"
        (batch, heads, rows, head_dim), (_, kv_heads, keys, _) = form.query, form.key
        sizes = cost.Sizes(self.size, batch, heads, kv_heads, rows, keys, head_dim, form.causal > 0)
        return cost.choose(sizes)

    def _shard_of(self, name: str, x: Any) -> Any:
        """This rank's rows of a DTensor; any other tensor is such rows."""
        if not isinstance(x, DTensor):
            return x
        dims = [i for i in range(x.device_mesh.ndim) if x.device_mesh.get_group(i) is self.group.process_group]
        place = x.placements[dims[0]] if dims else None
        others = [p for i, p in enumerate(x.placements) if [i] != dims]
        by_rows = isinstance(place, Shard) and place.dim % x.dim() == x.dim() - 2
        if not by_rows or not all(
            isinstance(p, Replicate) or (isinstance(p, Shard) and p.dim % x.dim() < x.dim() - 2) for p in others
        ):
            raise ValueError(
                f"{name}: a DTensor placed {x.placements} on {x.device_mesh}; on the ranks of the context it must be "
                f"Shard({x.dim() - 2}), sharded by rows, and on others replicated or sharded by batch or heads. Use "
                "redistribute()"
            )
        return x.to_local()

    def _as_given(self, like: Any, x: Tensor) -> Tensor:
        """A result as a DTensor where the query is one."""
        if not isinstance(like, DTensor):
            return x
        return DTensor.from_local(x, like.device_mesh, like.placements, run_check=False)


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x
