"""The switch that routes PyTorch's attention to the FP8 kernels, by the rules of ``greenfast.explain``."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from greenfast.operator.arguments import check_length
from greenfast.operator.quantized import SDPA_PRECISIONS, AutoPrecision, check_choice
from greenfast.operator.routing import SHARDED, Routed, explain
from greenfast.operator.scope import sharded
from greenfast.operator.sdpa import sdpa

_TORCH_SDPA = torch.nn.functional.scaled_dot_product_attention
_TORCH_MHA = torch.nn.functional.multi_head_attention_forward

_Function = TypeVar("_Function", bound=Callable[..., Any])


class use(ContextDecorator):  # noqa: N801 - read as a verb: with greenfast.use()
    """Routes ``torch.nn.functional.scaled_dot_product_attention`` to ``greenfast.sdpa`` where ``explain`` says so.

    A context manager and a decorator; ``routed``, which it returns, counts the calls:

        with greenfast.use() as routed:
            model(x)
        print(routed.taken, routed.fallen_back)

    It routes PyTorch's function under any name it was imported by, also in ``torch.nn.MultiheadAttention``, and under
    torch.compile, where ``with greenfast.use():`` may be around the compiled call or inside it.
    It can be entered again; if nested, the innermost one decides. precision, min_length: see ``explain``; by default
    calls are routed that are faster so. Inside a ``context_parallel`` of several ranks all are, and what that does
    not compute raises its error: PyTorch's attention would be of one rank's rows.

    It applies to the thread and the asyncio task that entered it, and to tasks started inside, until it is left; other
    threads and tasks do not see it. On a decorated generator or coroutine it applies while the body runs, not while it
    is suspended. Activation checkpointing recomputes in the backward pass, outside of it: decorate the function that is
    checkpointed, not the step around it.
    """

    def __init__(self, precision: AutoPrecision = "fp8", min_length: int | None = None) -> None:
        """Raises ValueError for an unknown precision, and TypeError or ValueError for an invalid length."""
        check_choice("precision", precision, SDPA_PRECISIONS)
        if min_length is not None:
            check_length("min_length", min_length)
        self.precision: AutoPrecision = precision
        self.min_length = min_length
        self.routed = Routed()

    def __enter__(self) -> Routed:
        if torch.compiler.is_compiling():  # it cannot trace context variables; inside a graph no task switch happens
            outer = next((mode for mode in _modes() if isinstance(mode, _Routing) and mode.decided), None)
            if outer is not None:
                outer.decided = False
            torch._C._push_on_torch_function_stack(_Routing(self, outer))
        else:
            _Routing(self, None).resume()
        return self.routed

    def __exit__(self, *raised: object) -> None:
        """Raises RuntimeError if this thread and task have not entered it."""
        if torch.compiler.is_compiling():
            mode = torch._C._pop_torch_function_stack()
            if mode.outer is not None:
                mode.outer.decided = True
        else:
            self._entered().close()

    def _entered(self) -> _Routing:
        mode = _INNERMOST.get()
        while mode is not None:
            if mode.open and mode.settings is self:
                return mode
            mode = mode.outer
        for mode in reversed(_modes()):  # entered in another context
            if isinstance(mode, _Routing) and mode.open and mode.settings is self:
                return mode
        raise RuntimeError("greenfast.use: left in a thread that has not entered it; enter and leave it in one thread")

    def __call__(self, func: _Function) -> _Function:
        """``func``, routed whenever it runs; it may be a coroutine function or a generator function, async or not.

        Raises TypeError for a class, of which only the construction would be routed.
        """
        if isinstance(func, type):
            raise TypeError(f"greenfast.use: {func.__name__} is a class; decorate a method of it, such as forward")
        body = func if inspect.isroutine(func) or isinstance(func, functools.partial) else type(func).__call__
        routed: Any
        if inspect.iscoroutinefunction(body):

            async def routed(*args: Any, **kwargs: Any) -> Any:
                return await _Awaited(self, func(*args, **kwargs))

        elif inspect.isasyncgenfunction(body):

            async def routed(*args: Any, **kwargs: Any) -> Any:
                items = func(*args, **kwargs)
                step = items.asend(None)
                while True:
                    try:
                        item = await _Awaited(self, step)
                    except StopAsyncIteration:
                        return
                    try:
                        step = items.asend((yield item))
                    except GeneratorExit:
                        await _Awaited(self, items.aclose())
                        raise
                    except BaseException as e:
                        step = items.athrow(e)

        elif inspect.isgeneratorfunction(body):

            def routed(*args: Any, **kwargs: Any) -> Any:
                return (yield from _run(self, func(*args, **kwargs), stays=False))

        else:
            return super().__call__(func)
        return functools.wraps(func)(routed)  # type: ignore[return-value]

    def _recreate_cm(self) -> use:
        """The context that a call of a decorated function enters: torch.compile must see it constructed."""
        again = use(self.precision, self.min_length)
        again.routed = self.routed
        return again


class _Routing(TorchFunctionMode):
    """One entry of ``use``. It decides where it is the context's innermost open entry and a mode of the thread.

    outer: the entry that decided before. open: not left yet. decided: whether it decided when this thread last entered
    or left an entry; for torch.compile, whose guards cannot see context variables.
    """

    def __init__(self, settings: use, outer: _Routing | None) -> None:
        super().__init__()
        self.settings = settings
        self.outer = outer
        self.open = True
        self.decided = True

    def resume(self) -> None:
        """From here on, decide in this context, as a mode of this thread."""
        self.outer = _innermost()
        _INNERMOST.set(self)
        _settle(entering=self)

    def suspend(self, stays: bool) -> None:
        """Stop deciding in this context; with ``stays``, remain a mode of the thread, for contexts copied from it."""
        _INNERMOST.set(self.outer)
        _settle(leaving=None if stays else self)

    def close(self) -> None:
        self.open = False
        _INNERMOST.set(_innermost())
        _settle()

    def __torch_function__(self, func: Any, overriding: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _TORCH_SDPA and self._decides():
            return self._attend(*args, **kwargs)
        if func is _TORCH_MHA and set(overriding) <= {Tensor} and not torch.compiler.is_compiling() and self._decides():
            with self:  # this function calls attention, for which the mode has to be on the stack again
                return multi_head_attention()(*args, **kwargs)
        return func(*args, **kwargs)

    def _decides(self) -> bool:
        return self.decided if torch.compiler.is_compiling() else _innermost() is self

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        settings = self.settings
        dropout_p = float(dropout_p) if isinstance(dropout_p, bool) else dropout_p  # PyTorch takes True for 1
        scale = float(scale) if isinstance(scale, bool) else scale
        if sharded():  # nothing is left to PyTorch: what a context_parallel does not compute is an error there
            whole: Tensor = sdpa(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision=settings.precision
            )
            settings.routed.count(SHARDED)
            return whole
        found = explain(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision=settings.precision,
            min_length=settings.min_length,
        )  # fmt: skip
        settings.routed.count(found)
        if found.taken:
            out: Tensor = sdpa(
                query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
                precision=found.precision,
            )  # type: ignore[call-overload]  # fmt: skip
            return out
        return _TORCH_SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


@functools.cache
def multi_head_attention() -> Callable[..., Any]:
    """PyTorch's function, which asks no mode for another implementation before it computes.

    PyTorch 2.13 has redispatch_function for that, with which outer modes do not see the function either.
    """
    func: Any = _TORCH_MHA
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    body = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


#: The innermost entry of a context. Tasks inherit it; it may have been left since.
_INNERMOST: ContextVar[_Routing | None] = ContextVar("greenfast.use", default=None)


def _innermost() -> _Routing | None:
    mode = _INNERMOST.get()
    while mode is not None and not mode.open:
        mode = mode.outer
    return mode


def _modes() -> list[Any]:
    """PyTorch's stack of modes of this thread, the innermost last."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _settle(entering: _Routing | None = None, leaving: _Routing | None = None) -> None:
    """Remove the entries that were left, in any order, from this thread's stack of modes; note which entry decides."""
    stack = _modes()
    wanted = [mode for mode in stack if not isinstance(mode, _Routing) or (mode.open and mode is not leaving)]
    if entering is not None and entering not in wanted:
        wanted.append(entering)
    same = 0
    while same < min(len(stack), len(wanted)) and wanted[same] is stack[same]:
        same += 1
    for _ in stack[same:]:
        torch._C._pop_torch_function_stack()
    for mode in wanted[same:]:
        torch._C._push_on_torch_function_stack(mode)
    innermost = _innermost()
    for mode in wanted:
        if isinstance(mode, _Routing):
            mode.decided = mode is innermost


def _run(route: use, body: Any, stays: bool) -> Generator[Any, Any, Any]:
    """The generator or coroutine ``body``, routed while its code runs, and for a coroutine in the tasks it starts."""
    mode = _Routing(route, None)
    step, value = body.send, None
    try:
        while True:
            mode.resume()
            try:
                item = step(value)
            except StopIteration as e:
                return e.value
            mode.suspend(stays)
            try:
                value = yield item
                step = body.send
            except GeneratorExit:
                mode.resume()
                body.close()
                raise
            except BaseException as e:
                step, value = body.throw, e
    finally:
        mode.close()


@dataclass(frozen=True)
class _Awaited:
    """An awaitable for ``body``, run by ``_run``."""

    route: use
    body: Any

    def __await__(self) -> Generator[Any, Any, Any]:
        return _run(self.route, self.body, stays=True)
