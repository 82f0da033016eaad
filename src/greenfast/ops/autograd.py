"""The operators' kernels for the dispatch keys of autograd, forward-mode differentiation and autocast.

``torch.library.register_autograd`` makes a node that functorch refuses and forward-mode differentiation does not see;
both see the nodes made here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_AUTOCAST = ("AutocastCPU", "AutocastCUDA")
_LSE_MESSAGE = (
    "greenfast.sdpa: a gradient reaches its log-sum-exp, for which none is computed; use lse.detach() if none is meant"
)

#: Saved before the inputs. If PyTorch's attention recomputes a call of this operator, it saves the inputs in another
#: order, and a checkpoint would use K as Q. The checkpoint compares shapes, and this extra tensor makes it fail.
with torch.inference_mode(False):  # the first call imports this module, perhaps in inference mode
    _MARK = torch.empty(0)


class _Node(torch.autograd.Function):
    """The autograd node of one operator call.

    Its arguments are the operator, the dispatch keys and the arguments of the call.
    """

    @classmethod
    def call(cls, *args: Any) -> Any:
        """Call ``apply``. Under a functorch transform, ``apply`` accepts only calls from outside the dispatcher."""
        if torch._C._functorch.peek_interpreter_stack() is None:
            return cls.apply(*args)  # type: ignore[no-untyped-call]
        with enable_single_level_autograd_function():
            return _make_single_level(cls).apply(*args)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.name}: it has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual numbers); "
            "torch.func.vjp, grad and jacrev work on greenfast.sdpa, and PyTorch's attention under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has both"
        )


@cache
def _make_single_level(node: type[_Node]) -> Any:
    """Return the node as functorch calls nodes itself: a class without the checks of ``autograd.Function``."""
    methods = {name: staticmethod(getattr(node, name)) for name in ("forward", "backward", "jvp")}
    return type(node.__name__, (_SingleLevelFunction,), methods)


#: Number of arguments of _AttentionNode before the arguments of the call.
_NODE_OPTIONS = 7


class _AttentionNode(_Node):
    """Attention of query, key and value, with gradients on the unquantized inputs.

    backward: the operator of the gradients, one for each of ``inputs``. Its arguments are the gradient of the output,
    the inputs before ``first``, with ``keeps`` the results of the operator, and the arguments from ``first`` on.
    inputs: the positions of the arguments with gradients, tensors or None. public: the public function, for errors.
    """

    @staticmethod
    def forward(
        ctx: Any, op: Any, keys: Any, backward: str, first: int, inputs: tuple[int, ...], public: str, keeps: bool,
        *args: Any,
    ) -> Any:  # fmt: skip
        ctx.name, ctx.of, ctx.first, ctx.inputs = public, backward, first, inputs
        # Lengths and lists of tiles are saved too: the backward pass refuses tensors that were written to since.
        # Inference tensors cannot be saved, because they have no count of writes.
        others = [i for i, x in enumerate(args) if isinstance(x, Tensor) and i not in inputs and not x.is_inference()]
        ctx.saved = (*inputs, *others)
        ctx.options = [None if i in ctx.saved else x for i, x in enumerate(args)]
        ctx.set_materialize_grads(False)
        results = _redispatch_in_node(op, keys, args)
        ctx.save_for_backward(_MARK, *[args[i] for i in ctx.saved], *(results if keeps else ()))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_lse = (*grads, None)[:2]
        _, *saved = ctx.saved_tensors
        args = [*ctx.options]
        kept = saved[len(ctx.saved) :]
        for i, x in zip(ctx.saved, saved, strict=False):
            args[i] = x
        grads_in: list[Tensor | None] = [None] * len(args)
        if grad is not None:
            before = [args[i] for i in ctx.inputs if i < ctx.first]
            results = getattr(torch.ops.greenfast, ctx.of)(grad, *before, *kept, *args[ctx.first :])
            for i, result in zip(ctx.inputs, results, strict=True):
                grads_in[i] = None if args[i] is None else result
        if grad_lse is not None:
            needed = [i for i in ctx.inputs if ctx.needs_input_grad[_NODE_OPTIONS + i]]
            refused = _refuse_gradients(_LSE_MESSAGE, [True] * len(needed), [args[i].shape for i in needed], grad_lse)
            for i, zeros in zip(needed, refused, strict=True):
                own = grads_in[i]
                grads_in[i] = zeros if own is None or zeros is None else own + zeros
        return (*[None] * _NODE_OPTIONS, *grads_in)


class _NoGradientNode(_Node):
    """An operator without gradients: its results may be used, but a gradient that reaches them raises an error."""

    @staticmethod
    def forward(ctx: Any, op: Any, keys: Any, message: str, *args: Any) -> Any:
        ctx.name, ctx.message = message.split(":")[0], message
        ctx.shapes = [x.shape if isinstance(x, Tensor) else None for x in args]
        ctx.set_materialize_grads(False)
        return _redispatch_in_node(op, keys, args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grads_in: list[Tensor | None] = [None] * len(ctx.shapes)
        for grad in grads:
            if grad is not None:
                grads_in = _refuse_gradients(ctx.message, ctx.needs_input_grad[3:], ctx.shapes, grad)
        return (None, None, None, *grads_in)


def _refuse_gradients(message: str, needed: Any, shapes: Any, grad: Tensor) -> list[Tensor | None]:
    """Return zeros of the shapes if ``grad`` is zero; the check runs with the operator, not while it is traced.

    AOTAutograd and reentrant checkpoints send zeros to every output that does not affect the loss.
    """
    refuse = torch.ops.greenfast.refuse_gradient
    return [refuse(grad, shape, message) if need else None for need, shape in zip(needed, shapes, strict=True)]


def refuse_gradient(grad: Tensor, size: list[int], message: str) -> Tensor:
    """Compute ``torch.ops.greenfast.refuse_gradient``: return zeros, (*size).

    Raises NotImplementedError unless ``grad`` is zero.
    """
    if grad.any():
        raise NotImplementedError(message)
    return grad.new_zeros(size)


def _redispatch(op: Any, keys: Any, args: tuple[Any, ...]) -> Any:
    """Call the operator itself.

    Its results must not be views for autograd, because views cannot be changed in place.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _redispatch_in_node(op: Any, keys: Any, args: tuple[Any, ...]) -> Any:
    """Call ``_redispatch`` inside a node's ``forward``, with differentiation on for outer functorch transforms."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _redispatch(op, keys, args)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _redispatch(op, keys, args)


def _build_autograd_kernel(op: Any, node: type[_Node], *first: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any) -> Any:
        requires_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        if requires_grad or forward_ad._current_level >= 0:
            return node.call(op, keys, *first, *args)
        return _redispatch(op, keys, args)

    return kernel


def _build_autocast_kernel(op: Any) -> Callable[..., Any]:
    """Build the kernel for autocast: it calls the operator outside autocast.

    Autocast casts the inputs of ``greenfast.sdpa``, but must not change the operator's arithmetic.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
        torch._C.DispatchKey.AutocastCUDA
    )

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*args)

    return kernel


def register(
    library: Any, name: str, message: str | None, backward: str = "sdpa_backward", first: int = 4,
    inputs: tuple[int, ...] = (0, 1, 2), public: str = "greenfast.sdpa", keeps: bool = False,
) -> None:  # fmt: skip
    """Register the kernels of ``torch.ops.greenfast.<name>``.

    message: the error for a gradient that reaches the results, beginning with the public name and a colon. None for an
    operator with gradients. These come from ``backward``; it, ``first``, ``inputs``, ``public`` and ``keeps`` are as
    for ``_AttentionNode``.
    """
    op = getattr(torch.ops.greenfast, name).default
    kernel = (
        _build_autograd_kernel(op, _AttentionNode, backward, first, inputs, public, keeps)
        if message is None
        else _build_autograd_kernel(op, _NoGradientNode, message)
    )
    library.impl(name, kernel, "Autograd", with_keyset=True)
    for key in _AUTOCAST:
        library.impl(name, _build_autocast_kernel(op), key)
