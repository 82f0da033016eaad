"""The registered operators ``torch.ops.greenfast``: schemas, implementations, shapes, vmap and FLOPs.

They are registered with ``torch.library.Library``, since its calls cost the host less than calls of
``torch.library.custom_op``. The public functions are in ``greenfast.ops.sdpa``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import flop_counter

from greenfast.ops import autograd, reference
from greenfast.ops.arguments import check_once
from greenfast.ops.backward import sdpa_backward, sdpa_kept_backward
from greenfast.ops.layout import empty_rows
from greenfast.ops.quantized import QuantizedQKV, build_config, check_operator_codes, check_tensors, pad_head_dim_size

LIBRARY: Any = torch.library.Library("greenfast", "DEF")  # type: ignore[no-untyped-call]
_INPUTS = "Tensor query, Tensor key, Tensor value"
_OPTIONS = "str precision, bool blocks, str values, bool key_mean, bool rotate"
_QUANTIZED = (
    f"{_INPUTS}, Tensor query_scale, Tensor key_scale, Tensor value_scale, str precision, int head_dim, "
    "SymInt key_length, ScalarType dtype, int causal, float scale"
)
_NUM_CODES = 6  # tensors of ``attention``: codes and scales; causal and scale are its last arguments
_SCHEMAS = {
    "quantize": f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "sdpa_backward": f"(Tensor grad, {_INPUTS}, int causal, float scale) -> (Tensor, Tensor, Tensor)",
    "sdpa_kept": f"({_INPUTS}, str precision, int causal, float scale, int bits) -> (Tensor, Tensor, Tensor)",
    "sdpa_kept_backward": (
        f"(Tensor grad, {_INPUTS}, Tensor out, Tensor row_stats, Tensor key_mean, int causal, float scale, int bits) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "mean_scores": "(Tensor query, Tensor key_mean, bool rotated) -> Tensor",
    "refuse_gradient": "(Tensor grad, SymInt[] size, str message) -> Tensor",
}

#: The codes of Q, K and V, their scales, and the mean of the keys.
QuantizedTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@cache
def load_cuda() -> Any:
    """Import ``greenfast.ops.cuda`` at the first CUDA tensor: most of the import time is cuda.core."""
    return importlib.import_module("greenfast.ops.cuda")


def _dispatch_cuda(name: str) -> Callable[..., Any]:
    return lambda *args: getattr(load_cuda(), name)(*args)


def quantize_cpu(
    query: Tensor, key: Tensor, value: Tensor, precision: str, blocks: bool, values: str, key_mean: bool,
    rotate: bool,
) -> QuantizedTensors:  # fmt: skip
    """Compute ``torch.ops.greenfast.quantize`` of CPU tensors."""
    check_tensors(query, key, value)
    config = build_config(query.shape[3], query.dtype, precision, blocks, values, key_mean, rotate)
    return reference.quantize(query, key, value, config).tensors()


def quantize_fake(
    query: Tensor, key: Tensor, value: Tensor, precision: str, blocks: bool, values: str, key_mean: bool,
    rotate: bool,
) -> QuantizedTensors:  # fmt: skip
    """Return the results of ``torch.ops.greenfast.quantize`` for tensors without data."""
    check_tensors(query, key, value)
    config = build_config(query.shape[3], query.dtype, precision, blocks, values, key_mean, rotate)
    sizes = load_cuda().get_quantized_shapes(query.shape, key.shape, config)
    if torch.compiler.is_exporting():
        sizes = {name: _free_block_count(name, shape) for name, shape in sizes.items()}
    return tuple(query.new_empty(shape, dtype=load_cuda().get_buffer_dtype(name)) for name, shape in sizes.items())  # type: ignore[return-value]


def _free_block_count(name: str, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the shape of a buffer with an unbacked symbol for its number of blocks.

    The metadata of an exported tensor fixes whether a size is 1. If the size is a length divided by the block size,
    that would restrict the lengths to one block, or to more than one.
    """
    if not name.endswith("scale") or len(shape) < 3 or not isinstance(shape[2], torch.SymInt):
        return shape
    return (*shape[:2], torch.library.get_ctx().new_dynamic_size(), *shape[3:])


def _attention_cuda(lse: bool, *args: Any) -> Any:
    check_once(check_operator_codes, args[:_NUM_CODES], args[_NUM_CODES:-2])
    return load_cuda().attend_codes(lse, *args)


def _attention_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors_and_options, causal, scale = args
    tensors, options = tensors_and_options[:_NUM_CODES], tensors_and_options[_NUM_CODES:]
    fields: tuple[Any, ...] = (*tensors, None, *options)  # without key_mean
    return reference.attention(QuantizedQKV(*fields), causal, scale)


def _attention_fake(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *_, head_dim, _, dtype, _, _ = args
    out = query.new_empty((*query.shape[:3], head_dim), dtype=dtype)
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _sdpa_cuda(lse: bool, *args: Any) -> Any:
    return load_cuda().sdpa_lse(*args) if lse else (load_cuda().sdpa(*args),)


def _sdpa_cpu(
    query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, mean = _sdpa_kept_cpu(query, key, value, precision, causal, scale, 0)
    if query.numel() and key.numel():
        scores = reference.compute_mean_scores(query, mean, rotated=True)
        lse = reference.add_mean_scores(lse, scores, causal, scale)
    return out, lse


def _sdpa_kept_cpu(
    query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``torch.ops.greenfast.sdpa_kept``: output, log-sum-exp without the keys' mean, and this mean, rotated.

    bits: of the products in the backward pass, 8 or 16. With 8 each row has two numbers, (B, H, S, 2): the log-sum-exp
    and the largest score.
    """
    check_tensors(query, key, value)
    if query.numel() == 0 or key.numel() == 0:
        out, lse, mean = _sdpa_kept_fake(query, key, value, precision, causal, scale, bits)
        return out.zero_(), lse.fill_(-float("inf")), mean.zero_()
    quantized = reference.quantize(query, key, value, build_config(query.shape[3], query.dtype, precision))
    out, lse = reference.attention(quantized, causal, scale)
    out = empty_rows(query, query.shape[3]).copy_(out)
    return out, bound_scores(lse) if bits == 8 else lse, quantized.tensors()[-1]


def bound_scores(lse: Tensor) -> Tensor:
    """Return two numbers of each row: the log-sum-exp twice, as it bounds the largest score.

    For CPU tensors: their gradients do not use these numbers.
    """
    return torch.stack([lse, lse], -1)


def _sdpa_kept_backward_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, row_stats: Tensor, key_mean: Tensor,
    causal: int, scale: float, bits: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.sdpa_kept_backward`` of CPU tensors: the exact gradients, in float32."""
    return reference.compute_gradients(grad, query, key, value, causal, scale)


def _sdpa_kept_backward_cuda(*args: Any) -> Any:
    *others, bits = args
    if bits == 16:
        return sdpa_kept_backward(*others)
    return importlib.import_module("greenfast.ops.quantized_backward").sdpa_kept_backward(*others)


def _mean_scores(query: Tensor, key_mean: Tensor, rotated: bool) -> Tensor:
    return reference.compute_mean_scores(query, key_mean, rotated=rotated)


def infer_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Return the shapes of the output and of the log-sum-exp, for the operators of attention."""
    check_tensors(query, key, value)
    return empty_rows(query, query.shape[3]), query.new_empty(query.shape[:3], dtype=torch.float32)


def _sdpa_kept_fake(
    query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    mean_shape = (*key.shape[:2], pad_head_dim_size(query.shape[3]))
    out, lse = infer_attention(query, key, value)
    row_stats = lse.new_empty((*lse.shape, 2)) if bits == 8 else lse
    return out, row_stats, query.new_empty(mean_shape, dtype=torch.float32)


def infer_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shapes of the gradients of query, key and value, for the operators of backward passes."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def infer_score_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the shapes of the gradients of query, key, value and sinks; the last is empty without sinks."""
    by_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return *infer_gradients(grad, query, key, value), by_sinks


def define_operator(name: str, schema: str, cpu: Any, cuda: Any, fake: Any) -> None:
    """Define an operator of this library. fake: returns results without numbers, for tracing."""
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"greenfast::{name}", fake, lib=LIBRARY)


def define_pair(name: str, arguments: str, cpu: Any, cuda: Any, fake: Any) -> tuple[str, str]:
    """Define an operator, and ``{name}_lse`` with the log-sum-exp as second result. Return both names.

    cpu, fake: give both results. cuda: takes first whether the log-sum-exp is wanted.
    """
    define_operator(
        name, f"({arguments}) -> Tensor", lambda *args: cpu(*args)[0], lambda *args: cuda(False, *args)[0],
        lambda *args: fake(*args)[0],
    )  # fmt: skip
    define_operator(f"{name}_lse", f"({arguments}) -> (Tensor, Tensor)", cpu, partial(cuda, True), fake)
    return name, f"{name}_lse"


def build_vmap_rule(op: Any) -> Any:
    """Build the rule of vmap: the new dimension becomes part of the batch."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        def merged(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            moved = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return moved.flatten(0, 1)

        def parted(x: Tensor) -> Tensor:
            empty_size = args[0].shape[1 if in_dims[0] == 0 else 0]  # if the new dimension is empty
            each = x.shape[0] // info.batch_size if info.batch_size else empty_size
            return x.view(info.batch_size, each, *x.shape[1:])

        result = op(*(merged(x, dim) for x, dim in zip(args, in_dims, strict=True)))
        if isinstance(result, Tensor):
            return parted(result), 0
        return tuple(parted(x) for x in result), (0,) * len(result)

    return rule


def _vmap_refuse_gradient(info: Any, in_dims: Any, grad: Tensor, size: list[int], message: str) -> tuple[Tensor, int]:
    return torch.ops.greenfast.refuse_gradient(grad, [info.batch_size, *size], message), 0


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "quantize": (quantize_cpu, _dispatch_cuda("quantize"), quantize_fake),
    "sdpa_backward": (reference.compute_gradients, sdpa_backward, infer_gradients),
    "sdpa_kept": (_sdpa_kept_cpu, _dispatch_cuda("sdpa_kept"), _sdpa_kept_fake),
    "sdpa_kept_backward": (_sdpa_kept_backward_cpu, _sdpa_kept_backward_cuda, infer_gradients),
    "mean_scores": (
        _mean_scores,
        _mean_scores,
        lambda query, *_: query.new_empty(query.shape[:3], dtype=torch.float32),
    ),
    "refuse_gradient": (autograd.refuse_gradient, autograd.refuse_gradient, lambda grad, size, _: grad.new_empty(size)),
}  # fmt: skip
#: The error for a gradient that reaches the results of an operator; None for an operator with gradients.
_CODES = "no gradient flows to codes; greenfast.sdpa on the tensors themselves has gradients"
CODES_REFUSAL = f"greenfast.attention: {_CODES}"
_NOT_TWICE = (
    "greenfast.sdpa: its gradients are not differentiable; for second derivatives use PyTorch's attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)
_REFUSALS = {
    "quantize": f"greenfast.quantize: {_CODES}",
    "attention": CODES_REFUSAL,
    "attention_lse": CODES_REFUSAL,
    "sdpa": None,
    "sdpa_lse": None,
    "sdpa_kept": None,
    "sdpa_backward": _NOT_TWICE,
    "sdpa_kept_backward": _NOT_TWICE,
    "mean_scores": f"greenfast.quantize: {_CODES}",
    "refuse_gradient": "greenfast: a gradient that is refused has none",
}

define_pair("attention", _QUANTIZED, _attention_cpu, _attention_cuda, _attention_fake)
define_pair("sdpa", f"{_INPUTS}, str precision, int causal, float scale", _sdpa_cpu, _sdpa_cuda, infer_attention)
for _name, _implementations in _IMPLEMENTATIONS.items():
    define_operator(_name, _SCHEMAS[_name], *_implementations)
for _name in _REFUSALS:
    if _name == "sdpa_kept":
        autograd.register(LIBRARY, _name, None, "sdpa_kept_backward", keeps=True)
    else:
        autograd.register(LIBRARY, _name, _REFUSALS[_name])
    _rule = (
        _vmap_refuse_gradient if _name == "refuse_gradient" else build_vmap_rule(getattr(torch.ops.greenfast, _name))
    )
    torch.library.register_vmap(f"greenfast::{_name}", _rule, lib=LIBRARY)
for _name, _layout in product(
    ("quantize", "sdpa", "sdpa_lse", "sdpa_kept"), ("Sparse", "SparseCsr", "Mkldnn", "Quantized")
):
    for _device in ("CPU", "CUDA"):  # without these the dispatcher's error is a page-long list of registered kernels
        if _layout + _device != "MkldnnCUDA":
            LIBRARY.impl(_name, lambda query, key, value, *rest: check_tensors(query, key, value), _layout + _device)


def count_flops(products: int, query: Any, keys: int) -> int:
    """Count FLOPs as ``FlopCounterMode`` does: products of (S, D) by (D, KV), without regard to the mask."""
    batch, heads, length, head_dim = query
    return products * 2 * batch * heads * length * keys * head_dim  # type: ignore[no-any-return]


def register_sdpa_flops(*ops: Any) -> None:
    """Make FlopCounterMode count operators with query and key as the first arguments as attention."""
    flop_counter.register_flop_formula(ops)(lambda query, key, *args, **kwargs: count_flops(2, query, key[2]))


register_sdpa_flops(torch.ops.greenfast.sdpa, torch.ops.greenfast.sdpa_lse, torch.ops.greenfast.sdpa_kept)


@flop_counter.register_flop_formula([torch.ops.greenfast.attention, torch.ops.greenfast.attention_lse], get_raw=True)
def _attention_flops(query: Tensor, *args: Any, **kwargs: Any) -> int:
    _, _, _, _, _, _, head_dim, key_length, *_ = args
    return count_flops(2, (*query.shape[:3], head_dim), key_length)


@flop_counter.register_flop_formula([torch.ops.greenfast.sdpa_backward, torch.ops.greenfast.sdpa_kept_backward])
def _backward_flops(grad: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> int:
    return count_flops(5, query, key[2])  # as for PyTorch's backward, without the recomputed forward


def get_autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that autocast gives an input: its own for all floats except float64, as in PyTorch."""
    dtype, device = tensor.dtype, tensor.device.type
    eligible = dtype.is_floating_point and dtype != torch.float64 and device in ("cpu", "cuda")
    return torch.get_autocast_dtype(device) if eligible and torch.is_autocast_enabled(device) else dtype


def can_skip_dispatcher(*tensors: Tensor) -> bool:
    """Return whether an eager call on CUDA tensors may skip the dispatcher. That saves a third of its host time.

    False under torch.compile, tracing, modes such as FakeTensorMode, functorch transforms, dual numbers, autocast and
    the profiler. False also if a gradient is required, for subclasses of Tensor, and for views with the negative bit
    (the imaginary part of a conjugate). In these cases PyTorch must see the registered operator.
    """
    if torch.compiler.is_compiling():
        return False
    differentiable = torch.is_grad_enabled()
    for x in tensors:  # a comprehension would cost a microsecond
        if type(x) is not Tensor or (differentiable and x.requires_grad) or x.is_neg():
            return False
    return tensors[0].is_cuda and dispatcher_unused()


def dispatcher_unused() -> bool:
    """Return whether nothing except the tensors may need the dispatcher in this thread."""
    return (
        not dispatch_mode_active()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._get_tracing_state()
    )


def dispatch_mode_active() -> bool:
    """Return whether a dispatch mode, dual numbers or the profiler is active.

    Tensors' dispatch keys do not show these.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._autograd._profiler_enabled()
    )


QUANTIZE = torch.ops.greenfast.quantize.default
ATTENTION = torch.ops.greenfast.attention.default
ATTENTION_LSE = torch.ops.greenfast.attention_lse.default
SDPA = torch.ops.greenfast.sdpa.default
SDPA_LSE = torch.ops.greenfast.sdpa_lse.default
SDPA_KEPT = torch.ops.greenfast.sdpa_kept.default
MEAN_SCORES = torch.ops.greenfast.mean_scores.default
