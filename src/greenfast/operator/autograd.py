"""What autograd, forward-mode differentiation and autocast meet above the operators: kernels of their dispatch keys.

``torch.library.register_autograd`` makes a node that functorch refuses and forward-mode differentiation does not see;
these nodes are met by both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_AUTOCAST = ("AutocastCPU", "AutocastCUDA")
_LSE = "greenfast.sdpa: a gradient reaches its log-sum-exp, through which none flows; lse.detach() where none is meant"


class _Node(torch.autograd.Function):
    """A node for one call of an operator; its arguments: the operator, the dispatcher's keys, and those of the call."""

    @classmethod
    def of(cls, *args: Any) -> Any:
        """``apply``, which under a functorch transform is meant for calls from outside the dispatcher alone."""
        if torch._C._functorch.peek_interpreter_stack() is None:
            return cls.apply(*args)  # type: ignore[no-untyped-call]
        single: Any = super(torch.autograd.Function, cls)
        with enable_single_level_autograd_function():
            return single.apply(*args)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.name}: it has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual numbers); "
            "torch.func.vjp, grad and jacrev work on greenfast.sdpa, and PyTorch's attention under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has both"
        )


class _Attention(_Node):
    """``sdpa`` and ``sdpa_lse``: the gradients of attention on their unquantized inputs."""

    @staticmethod
    def forward(ctx: Any, op: Any, keys: Any, *args: Any) -> Any:
        query, key, value, _, ctx.causal, ctx.scale = args
        ctx.name = "greenfast.sdpa"
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value)
        return _below_node(op, keys, args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, of_lse = (*grads, None)[:2]
        query, key, value = ctx.saved_tensors
        found: list[Tensor | None] = [None, None, None]
        if grad is not None:
            found = list(torch.ops.greenfast.sdpa_backward(grad, query, key, value, ctx.causal, ctx.scale))
        if of_lse is not None:
            refused = _refusals(_LSE, ctx.needs_input_grad[2:5], (query.shape, key.shape, value.shape), of_lse)
            found = [b if a is None else a if b is None else a + b for a, b in zip(found, refused, strict=True)]
        return (None, None, *found, None, None, None)


class _Undifferentiable(_Node):
    """The others: what they compute may be used, but a gradient that reaches it ends in an error."""

    @staticmethod
    def forward(ctx: Any, op: Any, keys: Any, message: str, *args: Any) -> Any:
        ctx.name, ctx.message = message.split(":")[0], message
        ctx.shapes = [x.shape if isinstance(x, Tensor) else None for x in args]
        ctx.set_materialize_grads(False)
        return _below_node(op, keys, args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(ctx.shapes)
        for grad in grads:
            if grad is not None:
                found = _refusals(ctx.message, ctx.needs_input_grad[3:], ctx.shapes, grad)
        return (None, None, None, *found)


def _refusals(message: str, needed: Any, shapes: Any, grad: Tensor) -> list[Tensor | None]:
    """Zeros of these shapes where ``grad`` is zero: that is looked at when the operator runs, not when it is traced.

    AOTAutograd and reentrant checkpoints send zeros to each output that a loss does not depend on.
    """
    refuse = torch.ops.greenfast.refuse_gradient
    return [refuse(grad, shape, message) if need else None for need, shape in zip(needed, shapes, strict=True)]


def refuse_gradient(grad: Tensor, size: list[int], message: str) -> Tensor:
    """``torch.ops.greenfast.refuse_gradient``: zeros, (*size). Raises NotImplementedError unless ``grad`` is zero."""
    if grad.any():
        raise NotImplementedError(message)
    return grad.new_zeros(size)


def _below(op: Any, keys: Any, args: tuple[Any, ...]) -> Any:
    """The operator itself. Its results are no views to autograd, which would refuse to have them changed in place."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _below_node(op: Any, keys: Any, args: tuple[Any, ...]) -> Any:
    """Within ``forward`` of a node all differentiation is off, which functorch's outer transforms must not find so."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _below(op, keys, args)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _below(op, keys, args)


def _kernel(op: Any, node: type[_Node], *first: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any) -> Any:
        wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        if wanted or forward_ad._current_level >= 0:
            return node.of(op, keys, *first, *args)
        return _below(op, keys, args)

    return kernel


def _without_autocast(op: Any) -> Callable[..., Any]:
    """What an operator computes with is its own: an autocast context chooses the inputs of ``greenfast.sdpa`` alone."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
        torch._C.DispatchKey.AutocastCUDA
    )

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*args)

    return kernel


def register(library: Any, name: str, message: str | None) -> None:
    """Register the kernels of ``torch.ops.greenfast.<name>``.

    message: what a gradient that reaches its results is answered with, after its public name and a colon; None where it
    has gradients.
    """
    op = getattr(torch.ops.greenfast, name).default
    kernel = _kernel(op, _Attention) if message is None else _kernel(op, _Undifferentiable, message)
    library.impl(name, kernel, "Autograd", with_keyset=True)
    for key in _AUTOCAST:
        library.impl(name, _without_autocast(op), key)
