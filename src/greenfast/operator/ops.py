"""The operators as PyTorch knows them, ``torch.ops.greenfast``: schemas, implementations, shapes, gradients, vmap.

They are registered with ``torch.library.Library``, whose calls cost the host less than those of
``torch.library.custom_op``. The functions that users call are in ``greenfast.operator.sdpa``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from greenfast.operator import cuda, reference
from greenfast.operator.backward import sdpa_backward
from greenfast.operator.layout import empty_rows
from greenfast.operator.quantized import QuantizedQKV, Recipe, check_tensors

LIBRARY: Any = torch.library.Library("greenfast", "DEF")  # type: ignore[no-untyped-call]
_INPUTS = "Tensor query, Tensor key, Tensor value"
_RECIPE = "str precision, bool blocks, str values, bool key_mean, bool rotate"
_QUANTIZED = (
    f"{_INPUTS}, Tensor query_scale, Tensor key_scale, Tensor value_scale, str precision, int head_dim, "
    "int key_length, ScalarType dtype, int causal, float scale"
)
_SCHEMAS = {
    "quantize": f"({_INPUTS}, {_RECIPE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "attention": f"({_QUANTIZED}) -> Tensor",
    "attention_lse": f"({_QUANTIZED}) -> (Tensor, Tensor)",
    "sdpa": f"({_INPUTS}, str precision, int causal, float scale) -> Tensor",
    "sdpa_lse": f"({_INPUTS}, str precision, int causal, float scale) -> (Tensor, Tensor)",
    "sdpa_backward": f"(Tensor grad, {_INPUTS}, Tensor out, Tensor lse, int causal, float scale) "
    "-> (Tensor, Tensor, Tensor)",
}

Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _quantize_cpu(
    query: Tensor, key: Tensor, value: Tensor, precision: str, blocks: bool, values: str, key_mean: bool,
    rotate: bool,
) -> Seven:  # fmt: skip
    check_tensors(query, key, value)
    return reference.quantize(query, key, value, Recipe(precision, blocks, values, key_mean, rotate)).tensors()


def _quantize_shapes(
    query: Tensor, key: Tensor, value: Tensor, precision: str, blocks: bool, values: str, key_mean: bool,
    rotate: bool,
) -> Seven:  # fmt: skip
    check_tensors(query, key, value)
    sizes = cuda.quantized_sizes(query.shape, key.shape, Recipe(precision, blocks, values, key_mean, rotate))
    return tuple(query.new_empty(shape, dtype=cuda.buffer_dtype(name)) for name, shape in sizes.items())  # type: ignore[return-value]


def _attention_cpu(*args: Any) -> Tensor:
    return _of_codes(args, exact_sums=False)[0]


def _attention_lse_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    return _of_codes(args, exact_sums=True)


def _of_codes(args: tuple[Any, ...], *, exact_sums: bool) -> tuple[Tensor, Tensor]:
    fields: tuple[Any, ...] = (*args[:6], None, *args[6:10])
    causal, scale = args[10:]
    quantized = QuantizedQKV(*fields)
    return reference.attention(quantized, causal, scale, exact_sums=exact_sums)


def _attention_shape(query: Tensor, *rest: Any) -> Tensor:
    head_dim, dtype = rest[6], rest[8]
    return query.new_empty((*query.shape[:3], head_dim), dtype=dtype)


def _attention_lse_shapes(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _attention_shape(query, *rest), query.new_empty(query.shape[:3], dtype=torch.float32)


def _sdpa_cpu(query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float) -> Tensor:
    check_tensors(query, key, value)
    quantized = reference.quantize(query, key, value, Recipe(precision))
    out, _ = reference.attention(quantized, causal, scale, exact_sums=False)
    return empty_rows(query, query.shape[3]).copy_(out)


def _sdpa_lse_cpu(
    query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float
) -> tuple[Tensor, Tensor]:
    check_tensors(query, key, value)
    quantized = reference.quantize(query, key, value, Recipe(precision))
    out, lse = reference.attention(quantized, causal, scale, exact_sums=True)
    return empty_rows(query, query.shape[3]).copy_(out), lse + mean_scores(quantized, scale)


def mean_scores(quantized: QuantizedQKV, scale: float) -> Tensor:
    """What the scores of each query, (B, H, S), lack since the mean was taken from the keys."""
    if quantized.key_mean is None:
        return quantized.query_scale.new_zeros(())
    share = quantized.query.shape[1] // quantized.key.shape[1]
    mean = quantized.key_mean.repeat_interleave(share, 1).unsqueeze(-1)
    return (reference.dequantized_queries(quantized) @ mean).squeeze(-1) * scale


def _sdpa_shape(query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float) -> Tensor:
    check_tensors(query, key, value)
    return empty_rows(query, query.shape[3])


def _sdpa_lse_shapes(
    query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float
) -> tuple[Tensor, Tensor]:
    out = _sdpa_shape(query, key, value, precision, causal, scale)
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _backward_shapes(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))  # type: ignore[return-value]


def _backward_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    found = reference.gradients(grad, query, key, value, out, lse, causal, scale)
    return tuple(x.contiguous() for x in found)  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, _, ctx.causal, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    found = torch.ops.greenfast.sdpa_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale)
    return (*found, None, None, None)


def _batched(op: Any) -> Any:
    """The rule of vmap: the new dimension becomes part of the batch."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        def merged(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            moved = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return moved.flatten(0, 1)

        def parted(x: Tensor) -> Tensor:
            return x.view(info.batch_size, x.shape[0] // info.batch_size, *x.shape[1:])

        found = op(*(merged(x, dim) for x, dim in zip(args, in_dims, strict=True)))
        if isinstance(found, Tensor):
            return parted(found), 0
        return tuple(parted(x) for x in found), (0,) * len(found)

    return rule


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "quantize": (_quantize_cpu, cuda.quantize, _quantize_shapes),
    "attention": (_attention_cpu, cuda.attention, _attention_shape),
    "attention_lse": (_attention_lse_cpu, cuda.attention_lse, _attention_lse_shapes),
    "sdpa": (_sdpa_cpu, cuda.sdpa, _sdpa_shape),
    "sdpa_lse": (_sdpa_lse_cpu, cuda.sdpa_lse, _sdpa_lse_shapes),
    "sdpa_backward": (_backward_cpu, sdpa_backward, _backward_shapes),
}

for _name, (_cpu, _cuda, _shapes) in _IMPLEMENTATIONS.items():
    LIBRARY.define(_name + _SCHEMAS[_name])
    LIBRARY.impl(_name, _cpu, "CPU")
    LIBRARY.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"greenfast::{_name}", _shapes, lib=LIBRARY)
torch.library.register_autograd("greenfast::sdpa_lse", _gradients, setup_context=_save, lib=LIBRARY)
for _name in ("sdpa", "sdpa_lse"):
    torch.library.register_vmap(f"greenfast::{_name}", _batched(getattr(torch.ops.greenfast, _name)), lib=LIBRARY)


def undisturbed(tensor: Tensor) -> bool:
    """Whether an eager call may skip the dispatcher, a third of its host time: a CUDA tensor, and nobody looks on.

    False under torch.compile, tracing, modes such as FakeTensorMode, functorch transforms and the profiler, and for
    subclasses of Tensor: all these see the registered operator.
    """
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and tensor.is_cuda
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._get_tracing_state()
        and not torch._C._autograd._profiler_enabled()
    )


QUANTIZE = torch.ops.greenfast.quantize.default
ATTENTION = torch.ops.greenfast.attention.default
ATTENTION_LSE = torch.ops.greenfast.attention_lse.default
SDPA = torch.ops.greenfast.sdpa.default
SDPA_LSE = torch.ops.greenfast.sdpa_lse.default
