"""Explanations of serving calls: which kernel runs, or why the call is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from greenfast.ops.routing import TORCH, Explanation, explain_device
from greenfast.serving.checks import E4M3

_HOPPER = (9, 0)
_NUMBERS = {"softmax_scale", "softcap", "eps"}  # arguments that may be tensors without dimensions


def explain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Return the kernel that ``flash_attn_varlen_func``, ``flash_attn_with_kvcache`` or ``append_kv`` would run.

    The call runs on tensors without memory, with all its checks. Nothing is launched or written, and no length is read.
    The kernel is "serving" on a Hopper GPU, or "hopper" if the dense kernel computes keys without a cache, and
    "reference" for CPU tensors. It is "torch" if the call is refused, with the error as the reason.
    """
    if not callable(function):
        raise TypeError(f"function: a {type(function).__name__}; the function to call comes first")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    launched: set[str] = set()
    try:
        call = inspect.signature(function).bind(*args, **kwargs)
        for name in _NUMBERS & call.arguments.keys():
            call.arguments[name] = _read_number(call.arguments[name])
        fake_args, fake_kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (call.args, call.kwargs))
        with mode, _OperatorNames(launched):
            function(*fake_args, **fake_kwargs)
    except (TypeError, ValueError, NotImplementedError) as e:
        return Explanation(TORCH, str(e))
    device = tensors[0].device
    if (elsewhere := explain_device("q", device)) is not None:
        return elsewhere
    capability = torch.cuda.get_device_capability(device)
    if capability != _HOPPER:
        return Explanation(
            TORCH, f"q: on a GPU of compute capability {capability[0]}.{capability[1]}; the kernels are for 9.0"
        )
    if "greenfast::varlen" in launched or "greenfast::varlen_lse" in launched:
        return Explanation("hopper", "K and V are quantized in a workspace, with scales for blocks of 128 keys", "fp8")
    return Explanation("serving", format_reason(tensors))


class _OperatorNames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the names of all operators that are called to a set."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


def _read_number(value: Any) -> Any:
    """Return the number of a tensor without dimensions. Return anything else as it is."""
    readable = isinstance(value, Tensor) and value.dim() == 0 and not (value.is_meta or value.requires_grad)
    return value.item() if readable else value


def format_reason(tensors: Sequence[Tensor]) -> str:
    """Describe the source of K and V and the layout of V, for a call that the kernels can compute."""
    dims = {x.dim() for x in tensors if x.dtype == E4M3}
    if dims <= {3}:
        return "K and V are put into temporary pages first, and quantized unless they are codes"
    if 5 in dims:
        return "an FP8 cache with V in groups, as the tensor cores read it"
    return "an FP8 cache with V in rows, transposed in the kernel: the same bits as V in groups"
