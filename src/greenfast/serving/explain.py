"""Which kernel a serving call would run, or why it is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from greenfast.ops.routing import TORCH, Explanation
from greenfast.serving.checks import E4M3

_HOPPER = (9, 0)


def explain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What a call of ``flash_attn_varlen_func``, ``flash_attn_with_kvcache`` or ``append_kv`` would run.

    The call is made on tensors without memory, so it is checked as it would be, and nothing is launched or written; no
    length is read. The kernel is "serving" on a Hopper GPU and "reference" for CPU tensors; "torch" stands for a call
    that is refused, with the error as the reason.
    """
    if not callable(function):
        raise TypeError(f"function: a {type(function).__name__}; the function that is to be called comes first")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given, given_named = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    try:
        with mode:
            function(*given, **given_named)
    except (TypeError, ValueError, NotImplementedError) as e:
        return Explanation(TORCH, str(e))
    device = tensors[0].device
    if device.type == "cpu":
        return Explanation("reference", "the kernels' arithmetic in PyTorch, for CPU tensors; slow")
    if device.type == "meta":
        return Explanation("meta", "a shape and a dtype: meta tensors hold no numbers")
    if device.type != "cuda":
        return Explanation(TORCH, f"q: on {device.type}, for which there are no kernels")
    found = torch.cuda.get_device_capability(device)
    if found != _HOPPER:
        return Explanation(TORCH, f"q: on a GPU of compute capability {found[0]}.{found[1]}; the kernels are for 9.0")
    return Explanation("serving", format_reason(tensors))


def format_reason(tensors: Sequence[Tensor]) -> str:
    """Where K and V come from, and how V lies there, of a call with these tensors that the kernels take."""
    dims = {x.dim() for x in tensors if x.dtype == E4M3}
    if dims <= {3}:
        return "K and V are put into temporary pages first, and quantized unless they are codes"
    if 5 in dims:
        return "an FP8 cache with V in groups, as the tensor cores take it"
    return "an FP8 cache with V in rows, turned on their way to the tensor cores: the bits of V in groups"
