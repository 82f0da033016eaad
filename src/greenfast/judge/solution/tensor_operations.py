"""PyTorch's operations between a function's launches: recorded as data, and repeated on the emulator's memory.

A function may compute with PyTorch before, between and after its kernels. On a GPU the operations are kernels too.
Without one they are repeated on the CPU, by name, on the bytes of the program's buffers. Only operations that are
known here are repeated: they are deterministic, check their indices, and return shapes that depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves

from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.memory import UNWRITTEN, UNWRITTEN_READ, WRITTEN, GlobalMemory
from greenfast.spec.errors import UnsupportedError
from greenfast.spec.kernel import TensorOperation, TensorView, TorchConstant

_ELEMENTWISE = """
abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu cos cosh deg2rad digamma elu erf erfc erfinv exp exp2
expm1 fill floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf isposinf leaky_relu
lgamma log log10 log1p log2 log_sigmoid_forward logical_not logit mish nan_to_num neg positive rad2deg reciprocal relu
relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_erfcx special_i0e
special_i1 special_log_ndtr special_ndtr sqrt square tan tanh threshold trunc zero
add addcdiv addcmul atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp clamp_max
clamp_min copysign div eq float_power floor_divide fmax fmin fmod ge glu gt hypot le lerp logaddexp logaddexp2
logical_and logical_or logical_xor lt masked_fill maximum minimum mul ne pow _prelu_kernel remainder rsub sub where
xlogy __and__ __or__ __xor__
"""
_REDUCTIONS = """
all amax amin aminmax any argmax argmin argsort binary_cross_entropy count_nonzero cummax cummin cumprod cumsum
huber_loss kthvalue linalg_cross linalg_vector_norm logcumsumexp logsumexp _log_softmax max mean median min mode
mse_loss nansum nll_loss2d_forward nll_loss_forward norm prod smooth_l1_loss _softmax sort std std_mean sum topk trace
var var_mean
"""
_LAYERS = """
_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d addbmm addmm addmv addr avg_pool1d
avg_pool2d avg_pool3d baddbmm bmm _cdist_forward col2im convolution dot grid_sampler_2d grid_sampler_3d im2col linear
max_pool2d_with_indices max_pool3d_with_indices mm mv _native_batch_norm_legit _native_batch_norm_legit_functional
_native_batch_norm_legit_no_training native_batch_norm native_group_norm native_layer_norm
_scaled_dot_product_flash_attention_for_cpu upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_trilinear3d vdot
"""
_COPIES = """
cat clone constant_pad_nd copy diag_embed embedding flip gather index index_add index_copy index_fill index_put
index_select pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d repeat replication_pad1d
replication_pad2d replication_pad3d roll rot90 scatter scatter_add scatter_reduce stack take _to_copy tril triu
"""
#: Names of aten's operations that can be repeated, each with the forms that write to an argument (add_, add.out).
REPEATABLE = frozenset(f"{_ELEMENTWISE}{_REDUCTIONS}{_LAYERS}{_COPIES}".split())
#: Keywords for a result's place; here all is in one memory.
_PLACES = ("device", "pin_memory", "layout")


def is_repeatable(func: Any) -> bool:
    """Return whether an operation of PyTorch can be repeated."""
    name = func._schema.name.removeprefix("aten::")
    return func.namespace == "aten" and (name in REPEATABLE or (name[-1] == "_" and name[:-1] in REPEATABLE))


def find_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operation writes to."""
    written = []
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[n] if n < len(args) else kwargs.get(argument.name)
            written += [tensor for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)]
    return written


def encode_values(values: Any, encode: Callable[[torch.Tensor], TensorView]) -> Any:
    """Return arguments as data. encode: the view of a tensor. Raises UnsupportedError for a value that is no data."""
    if isinstance(values, torch.Tensor):
        return encode(values)
    if isinstance(values, dict):
        return {key: encode_values(value, encode) for key, value in values.items() if key not in _PLACES}
    if isinstance(values, (list, tuple)):
        return [encode_values(value, encode) for value in values]
    if isinstance(values, (torch.dtype, torch.memory_format)):
        return TorchConstant(str(values).removeprefix("torch."))
    if values is None or isinstance(values, (bool, int, float, str)):
        return values
    raise UnsupportedError(f"an argument of type {type(values).__name__}")


@dataclass(frozen=True)
class OperationRunner:
    """Repeats an operation on the memory of a run (``greenfast.emulator.grid.HostOperation``)."""

    operation: TensorOperation

    @property
    def name(self) -> str:
        """The operation's name, such as aten.add.Tensor."""
        return self.operation.name

    def run(self, memory: GlobalMemory) -> Collection[str]:
        """Repeat the operation. Return the buffers that it wrote.

        Raises KernelFaultError for a read of bytes that nothing has written, and UnsupportedError if PyTorch refuses.
        """
        try:
            func = _find_operation(self.name)
            given, kwargs = (self._decode(v, memory) for v in (self.operation.args, self.operation.kwargs))
            written = find_written(func, given, kwargs)
            overwrites = self.name.startswith(("aten.copy_.", "aten.fill_.", "aten.zero_."))
            read = (self.operation.args[overwrites:], self.operation.kwargs)
            self._check_written([*self._views(read)], memory)
            _check_extents(self.name, given)
            with torch.no_grad():
                result = func(*given, **kwargs)
            own = {id(tensor) for tensor in written}
            new = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and id(t) not in own]
            if len(new) != len(self.operation.results):
                raise ValueError(f"it gives {len(new)} results, recorded are {len(self.operation.results)}")
            for tensor, view in zip(new, self.operation.results, strict=True):
                if (_name(tensor.dtype), tuple(tensor.shape)) != (view.dtype, view.shape):
                    raise ValueError(f"it gives {tensor.dtype} {tuple(tensor.shape)}, recorded is {view}")
                _make_tensor(view, memory).copy_(tensor)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError, MemoryError) as e:
            raise UnsupportedError(f"PyTorch cannot repeat {self.name} on the CPU: {str(e).splitlines()[0]}") from e
        changed = [*self.operation.writes, *self.operation.results]
        for view in changed:
            _make_states(view, memory).fill_(int(WRITTEN))
        return {view.buffer for view in changed}

    def _decode(self, value: Any, memory: GlobalMemory) -> Any:
        if isinstance(value, TensorView):
            return _make_tensor(value, memory)
        if isinstance(value, TorchConstant):
            return _find_constant(value.name, (torch.dtype, torch.memory_format))
        if isinstance(value, dict):
            return {key: self._decode(item, memory) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._decode(item, memory) for item in value]
        return value

    def _views(self, value: Any) -> Iterator[TensorView]:
        if isinstance(value, TensorView):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                yield from self._views(item)

    def _check_written(self, views: Sequence[TensorView], memory: GlobalMemory) -> None:
        if memory.poisoned:  # a rerun: its fills show whether the values matter
            return
        outs = set(self.operation.writes) if self.operation.is_out else set()
        for view in views:
            count = int((_make_states(view, memory) == int(UNWRITTEN)).sum()) if view not in outs else 0
            if count:
                error = KernelFaultError(f"{self.name}: a read {UNWRITTEN_READ}: {count} bytes of {view.buffer!r}")
                error.unwritten, error.reason, error.kernel = True, f"read {UNWRITTEN_READ}", self.name
                raise error


def _check_extents(name: str, given: Sequence[Any]) -> None:
    """Raise ValueError for extents that PyTorch's Python functions check, and these operations do not."""
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    if "batch_norm" in name and any(tensor.shape != tensors[0].shape[1:2] for tensor in tensors[1:]):
        raise ValueError(f"{name} of tensors with {[tuple(tensor.shape) for tensor in tensors]}")
    if "dot_product" in name and not (
        tensors[0].shape[:2] == tensors[1].shape[:2] == tensors[2].shape[:2]
        and tensors[1].shape[2] == tensors[2].shape[2]
    ):
        raise ValueError(f"{name} of tensors with {[tuple(tensor.shape) for tensor in tensors]}")


def _find_operation(name: str) -> Any:
    """Return an operation by its name. Raises UnsupportedError for one that is not known here."""
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    func = getattr(getattr(torch.ops.aten, base, None), overload, None) if namespace == "aten" else None
    if func is None or not is_repeatable(func):
        raise UnsupportedError(f"{name} is no operation that can be repeated")
    return func


def _find_constant(name: str, kinds: tuple[type, ...]) -> Any:
    constant = getattr(torch, name, None)
    if not isinstance(constant, kinds):
        raise ValueError(f"torch.{name}")
    return constant


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _make_tensor(view: TensorView, memory: GlobalMemory) -> torch.Tensor:
    """Return a tensor on the memory of a view. Raises ValueError for a view that is not inside its buffer."""
    dtype = _find_constant(view.dtype, (torch.dtype,))
    return _place(view, memory.get_bytes(view.buffer), dtype, view.shape, view.strides)


def _make_states(view: TensorView, memory: GlobalMemory) -> torch.Tensor:
    """Return the states of the bytes of a view, as a tensor with the bytes of an element as the last dimension."""
    size = _find_constant(view.dtype, (torch.dtype,)).itemsize
    strides = (*(size * step for step in view.strides), 1)
    return _place(view, memory.get_states(view.buffer), torch.uint8, (*view.shape, size), strides)


def _place(
    view: TensorView, data: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    size = dtype.itemsize * (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)))
    if min((*shape, *strides, view.offset), default=0) < 0 or view.offset + size > len(data):
        raise ValueError(f"a view beyond the {len(data)} bytes of {view.buffer!r}")
    part = torch.from_numpy(data[view.offset : view.offset + size])
    return torch.as_strided(part.view(dtype), shape, strides)
