"""The switch that routes PyTorch's attention to the FP8 kernels, by the rules of ``greenfast.explain``.

How it works. Entering ``use`` does two things:

- it pushes a hook, a ``TorchFunctionMode``, on PyTorch's stack of modes of this thread: PyTorch then calls the hook for
  every function, under whatever name it was imported;
- it adds the hook to the context variable ``_ENTERED_HOOKS``. Each asyncio task has its own value, and inherits the
  value of the task that starts it.

Leaving undoes both. A call goes to the topmost hook of this thread that is in ``_ENTERED_HOOKS``. Therefore tasks
that share a thread do not see each other's hooks, and a thread that copied a context has none.

A decorated generator or coroutine has its own value of ``_ENTERED_HOOKS`` (``_BodyState``). Each step starts with that
value, and with its hooks on the stack of the current thread. Each step ends with the caller's value. Hooks that the
body entered and did not leave are part of its value, and stay active in the next step.

torch.compile cannot read context variables. While it traces, the topmost active hook decides, and a ``with`` block
inside the compiled function only pushes and pops a hook. If a graph breaks inside such a block, torch.compile runs that
function uncompiled, and the hook is entered as usual. ``_run_uncompiled`` keeps torch.compile from compiling the
functions of this module one by one.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from greenfast.ops.arguments import parse_length
from greenfast.ops.context_stack import in_context_parallel
from greenfast.ops.quantized import SDPA_PRECISIONS, AutoPrecision, check_choice
from greenfast.ops.routing import CONTEXT_PARALLEL, Routed, explain
from greenfast.ops.sdpa import sdpa

_TORCH_SDPA = torch.nn.functional.scaled_dot_product_attention
_TORCH_MHA = torch.nn.functional.multi_head_attention_forward
_ATEN_SDPA: Any = torch.ops.aten.scaled_dot_product_attention.default
_DYNAMO: Any = torch._C._dynamo.eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _run_uncompiled(function: _Function) -> _Function:
    """Keep torch.compile from compiling calls of ``function`` and its callees outside a graph.

    Unlike torch.compiler.disable, this lets torch.compile trace the function as a part of another one. It also saves
    the import of torch._dynamo, two seconds.
    """
    skip = _DYNAMO._FrameAction.SKIP
    _DYNAMO.set_code_exec_strategy(function.__code__, _DYNAMO._FrameExecStrategy(skip, skip))
    return function


class use(ContextDecorator):  # noqa: N801 - read as a verb: with greenfast.use()
    """Routes ``torch.nn.functional.scaled_dot_product_attention`` to ``greenfast.sdpa`` by the rules of ``explain``.

    It is a context manager and a decorator. It returns ``routed``, the counts of calls:

        with greenfast.use() as routed:
            model(x)
        print(routed.taken, routed.fallen_back)

    It routes PyTorch's function under any imported name, also in ``torch.nn.MultiheadAttention``, and under
    torch.compile, with ``with greenfast.use():`` around the compiled call or inside it. It can be entered again; if
    nested, the innermost one decides. precision, min_length: see ``explain``; by default it routes calls that are
    faster so. Inside a ``context_parallel`` of several ranks it routes all calls, and unsupported calls raise an error,
    because PyTorch's attention would use the rows of one rank.

    It applies to the thread and the asyncio task that entered it, and to tasks started inside, until it is left. Other
    threads and tasks do not see it. On a decorated generator or coroutine it applies while the body runs, not while it
    is suspended. Activation checkpointing recomputes in the backward pass, outside of the context: decorate the
    checkpointed function, not the step around it.
    """

    def __init__(self, precision: AutoPrecision = "fp8", min_length: int | None = None) -> None:
        """Raise ValueError for an unknown precision, and TypeError or ValueError for an invalid length."""
        check_choice("precision", precision, SDPA_PRECISIONS)
        if min_length is not None:
            min_length = parse_length("min_length", min_length)
        self.precision: AutoPrecision = precision
        self.min_length = min_length
        self.routed = Routed()

    @_run_uncompiled
    def __enter__(self) -> Routed:
        hook = _Hook(self)
        torch._C._push_on_torch_function_stack(hook)
        if not torch.compiler.is_dynamo_compiling():
            _ENTERED_HOOKS.set((*(entered for entered in _ENTERED_HOOKS.get() if not entered.closed), hook))
        return self.routed

    @_run_uncompiled
    def __exit__(self, *raised: object) -> None:
        """Raise RuntimeError if this thread has not entered it."""
        if torch.compiler.is_dynamo_compiling():  # in a graph, blocks are properly nested
            torch._C._pop_torch_function_stack()
            return
        own = [hook for hook in _get_modes() if isinstance(hook, _Hook) and hook.settings is self and not hook.closed]
        entered = _ENTERED_HOOKS.get()
        hook = next((hook for hook in reversed(own) if hook in entered), own[-1] if own else None)
        if hook is None:
            raise RuntimeError(
                "greenfast.use: left in a thread that has not entered it; enter and leave it in one thread"
            )
        hook.close()

    def __call__(self, func: _Function) -> _Function:
        """Return ``func``, routed whenever it runs.

        It may be a coroutine function or a generator function, async or not.

        Raises TypeError for a class, because only its construction would be routed.
        """
        if isinstance(func, type):
            raise TypeError(f"greenfast.use: {func.__name__} is a class; decorate a method of it, such as forward")
        if not callable(func):  # a classmethod or property
            raise TypeError(f"greenfast.use: a {type(func).__name__}; a function is needed, so decorate it below that")
        body: Any = func
        while isinstance(body, functools.partial):
            body = body.func
        body = body if inspect.isroutine(body) else type(body).__call__
        routed: Any
        if inspect.iscoroutinefunction(body):

            async def routed(*args: Any, **kwargs: Any) -> Any:
                state = _BodyState(self)
                try:
                    return await _AwaitableBody(state, func(*args, **kwargs))
                finally:
                    state.close()

        elif inspect.isasyncgenfunction(body):

            async def routed(*args: Any, **kwargs: Any) -> Any:
                state = _BodyState(self)
                items = func(*args, **kwargs)
                step = items.asend(None)
                try:
                    while True:
                        try:
                            item = await _AwaitableBody(state, step)
                        except StopAsyncIteration:
                            return
                        state.leave_thread()
                        try:
                            step = items.asend((yield item))
                        except GeneratorExit:
                            await _AwaitableBody(state, items.aclose())
                            raise
                        except BaseException as e:
                            step = items.athrow(e)
                finally:
                    state.close()

        elif inspect.isgeneratorfunction(body):

            def routed(*args: Any, **kwargs: Any) -> Any:
                state = _BodyState(self)
                try:
                    return (yield from _run_steps(state, func(*args, **kwargs), leaves=True))
                finally:
                    state.close()

        else:
            return super().__call__(func)
        return functools.wraps(func)(routed)  # type: ignore[return-value]

    def _recreate_cm(self) -> use:
        """Return the context that a call of a decorated function enters: torch.compile must see its construction."""
        settings = use(self.precision, self.min_length)
        settings.routed = self.routed
        return settings


class _Hook(TorchFunctionMode):
    """One entry of ``use``.

    active: a graph may use the hook. It is False while the decorated coroutine with this hook is suspended. closed: it
    was left. A hook that was left in another thread stays on this thread's stack until the next change there.
    """

    def __init__(self, settings: use) -> None:
        super().__init__()
        self.settings = settings
        self.active = True
        self.closed = False

    def close(self) -> None:
        self.closed = True
        _ENTERED_HOOKS.set(tuple(hook for hook in _ENTERED_HOOKS.get() if hook is not self))
        _set_modes(_get_modes())

    @_run_uncompiled
    def __torch_function__(self, func: Any, overriding: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _TORCH_SDPA and self._decides():
            return self._attend(all(kind is Tensor for kind in overriding), *args, **kwargs)
        if func is _TORCH_MHA and all(kind is Tensor for kind in overriding) and self._decides():
            if torch.compiler.is_compiling():
                return _trace_multi_head_attention(*args, **kwargs)
            with self:  # this function calls attention, so the mode must be on the stack again
                return _MULTI_HEAD_ATTENTION(*args, **kwargs)
        return func(*args, **kwargs)

    def _decides(self) -> bool:
        """Return whether this hook decides in this context. PyTorch calls hooks from the top of the stack down."""
        if torch.compiler.is_dynamo_compiling():
            return self.active
        return not self.closed and self in _ENTERED_HOOKS.get()

    def _attend(
        self, plain: bool, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Compute the call here or in PyTorch. plain: no tensor is of a subclass with its own functions."""
        settings = self.settings
        dropout_p = float(dropout_p) if isinstance(dropout_p, bool | np.bool_) else dropout_p  # for PyTorch True is 1
        scale = float(scale) if isinstance(scale, bool | np.bool_) else scale
        if in_context_parallel():  # PyTorch must not compute it; unsupported calls raise an error
            whole: Tensor = sdpa(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision=settings.precision
            )
            settings.routed.count(CONTEXT_PARALLEL)
            return whole
        explanation = explain(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision=settings.precision,
            min_length=settings.min_length,
        )  # fmt: skip
        settings.routed.count(explanation)
        if explanation.taken:
            out: Tensor = sdpa(
                query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
                precision=explanation.precision,
            )  # type: ignore[call-overload]  # fmt: skip
            return out
        return _attend_in_torch(
            plain, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _attend_in_torch(plain: bool, *args: Any, **kwargs: Any) -> Tensor:
    """Call PyTorch's attention so that foreign modes below this hook see it, but no other hook does."""
    out: Tensor
    if torch.compiler.is_dynamo_compiling():
        # Another hook below this one, or one that is active when the graph runs, does not see the operator.
        hooked = any(isinstance(mode, _Hook) for mode in _get_modes())
        out = (_ATEN_SDPA if plain and (hooked or not _has_other_modes()) else _TORCH_SDPA)(*args, **kwargs)
        return out
    before = _ENTERED_HOOKS.set(())
    try:
        out = _TORCH_SDPA(*args, **kwargs)
    finally:
        _ENTERED_HOOKS.reset(before)
    return out


@functools.cache
def build_multi_head_attention(attention: Callable[..., Any] = _TORCH_SDPA) -> Callable[..., Any]:
    """Build PyTorch's function without its check of modes for another implementation.

    attention: called in place of scaled_dot_product_attention. PyTorch 2.13 has redispatch_function for this, but that
    also hides the function from outer modes.
    """
    func: Any = _TORCH_MHA
    changes = {"has_torch_function": lambda tensors: False, "scaled_dot_product_attention": attention}
    body = types.FunctionType(
        func.__code__, {**func.__globals__, **changes}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _has_other_modes() -> bool:
    """Return whether foreign modes are on the stack, except a default device.

    They must see calls that PyTorch computes.
    """
    return any(not isinstance(mode, _Hook | DeviceContext) for mode in _get_modes())


def _trace_multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """Trace PyTorch's function in a graph. The graph may also run under a hook, as with backend="eager"."""
    if _has_other_modes():
        return _TORCH_MHA(*args, **kwargs)
    with torch._C.DisableTorchFunction():  # PyTorch 2.13 cannot trace Tensor.unflatten under a mode
        return _MULTI_HEAD_ATTENTION_IN_GRAPH(*args, **kwargs)


_MULTI_HEAD_ATTENTION = build_multi_head_attention()
_MULTI_HEAD_ATTENTION_IN_GRAPH = build_multi_head_attention(_ATEN_SDPA)

#: The hooks of a context, innermost last. Tasks inherit it. Some hooks may have been left since.
_ENTERED_HOOKS: ContextVar[tuple[_Hook, ...]] = ContextVar("greenfast.use", default=())


def _get_modes() -> list[Any]:
    """Return PyTorch's stack of modes of this thread, the innermost last."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _set_modes(modes: Sequence[Any]) -> None:
    """Replace this thread's stack of modes, without the hooks that were left."""
    modes = [mode for mode in modes if not (isinstance(mode, _Hook) and mode.closed)]
    stack = _get_modes()
    same = 0
    while same < min(len(stack), len(modes)) and modes[same] is stack[same]:
        same += 1
    for _ in stack[same:]:
        torch._C._pop_torch_function_stack()
    for mode in modes[same:]:
        torch._C._push_on_torch_function_stack(mode)


class _BodyState:
    """The hooks of a decorated generator or coroutine: the decorator's, and hooks that the body has entered.

    entered: the value of ``_ENTERED_HOOKS`` inside the body. outside: the caller's value during a step. above: for each
    hook, the foreign mode that was above it on the stack when it was removed, if any; it is inserted below that mode.
    """

    def __init__(self, settings: use) -> None:
        self.own = _Hook(settings)
        self.entered: tuple[_Hook, ...] = (self.own,)
        self.outside: tuple[_Hook, ...] = ()
        self.above: dict[_Hook, Any] = {}

    @_run_uncompiled
    def resume(self) -> None:
        """Begin a step of the body in this thread."""
        stack = _get_modes()
        for hook in self.entered:
            hook.active = True
            if hook not in stack:
                above = self.above.get(hook)
                stack.insert(stack.index(above) if above in stack else len(stack), hook)
        _set_modes(stack)
        self.outside = _ENTERED_HOOKS.get()
        _ENTERED_HOOKS.set(self.entered)

    @_run_uncompiled
    def suspend(self) -> None:
        """End a step. The hooks stay on the stack, for tasks that the body has started."""
        self.entered = tuple(hook for hook in _ENTERED_HOOKS.get() if not hook.closed)
        _ENTERED_HOOKS.set(self.outside)
        for hook in self.entered:
            hook.active = False

    @_run_uncompiled
    def leave_thread(self) -> None:
        """Remove the hooks from this thread's stack until the next step."""
        stack = _get_modes()
        others = [mode for mode in stack if mode not in self.entered]
        for hook in self.entered:
            if hook in stack:
                later = stack[stack.index(hook) :]
                self.above[hook] = next((mode for mode in later if mode in others), None)
        _set_modes(others)

    @_run_uncompiled
    def close(self) -> None:
        """End the body. Hooks that it entered and did not leave now belong to the caller, as for any function."""
        self.own.close()
        open_hooks = [hook for hook in self.entered if not hook.closed]
        if open_hooks:
            stack = _get_modes()
            _set_modes([*stack, *(hook for hook in open_hooks if hook not in stack)])
            _ENTERED_HOOKS.set((*_ENTERED_HOOKS.get(), *open_hooks))
            for hook in open_hooks:
                hook.active = True


def _run_steps(state: _BodyState, body: Any, leaves: bool) -> Generator[Any, Any, Any]:
    """Run the generator or coroutine ``body`` step by step. leaves: remove the hooks from the stack between steps."""
    step, value = body.send, None
    while True:
        state.resume()
        try:
            item = step(value)
        except StopIteration as e:
            return e.value
        finally:
            state.suspend()
            if leaves:
                state.leave_thread()
        try:
            value = yield item
            step = body.send
        except GeneratorExit:
            state.resume()
            try:
                body.close()
            finally:
                state.suspend()
            raise
        except BaseException as e:
            step, value = body.throw, e


@dataclass(frozen=True)
class _AwaitableBody:
    """An awaitable for ``body``, run by ``_run_steps``."""

    state: _BodyState
    body: Any

    def __await__(self) -> Generator[Any, Any, Any]:
        return _run_steps(self.state, self.body, leaves=False)
