"""The scope of ``greenfast.use`` in tasks, threads, coroutines and generators, and all ways to leave it."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import greenfast
from greenfast.integrations.switch import _get_modes as modes

Q, K, V = torch.randn(3, 1, 2, 20, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
OFF = "sdpa_kernel: PyTorch's fused backends are disabled, so only its math remains"


def attend() -> Tensor:
    return scaled_dot_product_attention(Q, K, V)


RESULTS = {"torch": attend(), "fp8": greenfast.sdpa(Q, K, V), "int8": greenfast.sdpa(Q, K, V, precision="int8")}


def computed_by() -> str:
    """The name of what computes a call of attention here."""
    result = attend()
    (name,) = (name for name, x in RESULTS.items() if torch.equal(x, result))
    return name


def routes(precision: Any = "fp8") -> greenfast.use:
    return greenfast.use(precision, min_length=0)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    assert modes() == []
    yield
    assert modes() == []
    assert computed_by() == "torch"


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


class Sequencer:
    """Runs steps of several tasks in a given order."""

    def __init__(self, order: str) -> None:
        self.order = list(order)
        self.changed = asyncio.Condition()

    async def wait_for(self, name: str) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.order[:1] == [name])
            self.order.pop(0)
            self.changed.notify_all()


#: Each letter is a step of that task: enter, attend, leave. In the last two a task outlives the one entered before it.
@pytest.mark.parametrize("order", ["aaabbbccc", "abcabcabc", "abcbacacb", "abcabccba", "cbaabcabc"])
def test_tasks_do_not_see_each_other(order: str) -> None:
    async def task(steps: Sequencer, name: str, route: greenfast.use | None, wanted: str) -> None:
        await steps.wait_for(name)
        if route is None:
            assert computed_by() == wanted
            await steps.wait_for(name)
        else:
            with route:
                assert computed_by() == wanted
                await steps.wait_for(name)
                assert computed_by() == wanted
        assert computed_by() == "torch"
        await steps.wait_for(name)
        assert computed_by() == "torch"

    async def main() -> None:
        steps = Sequencer(order)
        await asyncio.gather(
            task(steps, "a", routes("fp8"), "fp8"),
            task(steps, "b", routes("int8"), "int8"),
            task(steps, "c", None, "torch"),
        )

    run(main())


def test_tasks_may_share_one_switch() -> None:
    route = routes()

    async def task(steps: Sequencer, name: str) -> None:
        await steps.wait_for(name)
        with route:
            await steps.wait_for(name)
            assert computed_by() == "fp8"
        assert computed_by() == "torch"

    async def main() -> None:
        steps = Sequencer("abab")
        await asyncio.gather(task(steps, "a"), task(steps, "b"))

    run(main())
    assert route.routed.taken == 2


def test_it_is_left_in_any_order() -> None:
    first, second, third = routes("fp8"), routes("int8"), greenfast.use(min_length=10**9)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert computed_by() == "int8"
    third.__enter__()
    assert computed_by() == "torch"
    second.__exit__(None, None, None)
    assert computed_by() == "torch"
    assert third.routed.fallen_back.total() == 2
    third.__exit__(None, None, None)


class Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def test_other_modes_stay_where_they_are() -> None:
    with ExitStack() as stack:
        below, above = stack.enter_context(Watch()), Watch()
        route = routes()
        route.__enter__()
        stack.enter_context(above)
        assert computed_by() == "fp8"
        assert (below.seen, above.seen) == (0, 1), "modes below do not see calls that are taken"
        route.__exit__(None, None, None)
        assert modes() == [below, above]
        assert computed_by() == "torch"
        assert (below.seen, above.seen) == (1, 2)
        stack.enter_context(torch.device("meta"))
        with routes():
            assert torch.empty(1).is_meta
            assert computed_by() == "fp8"


def test_it_is_left_in_another_context() -> None:
    """Some frameworks run the two halves of a dependency in separate contexts."""
    route, outer = routes(), routes("int8")
    with outer:
        contextvars.copy_context().run(route.__enter__)
        assert computed_by() == "int8", "only that context has entered it"
        contextvars.copy_context().run(route.__exit__, None, None, None)
        assert computed_by() == "int8"


def test_it_cannot_be_left_in_another_thread() -> None:
    route, raised = routes(), []

    def leave() -> None:
        try:
            route.__exit__(None, None, None)
        except RuntimeError as e:
            raised.append(str(e))

    with route:
        in_thread(leave)
        assert computed_by() == "fp8"
    assert raised == ["greenfast.use: left in a thread that has not entered it; enter and leave it in one thread"]


def in_thread(function: Callable[[], Any]) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_it_holds_in_its_thread_alone() -> None:
    with routes() as routed:
        assert in_thread(computed_by) == "torch"
        context = contextvars.copy_context()
        assert in_thread(lambda: context.run(computed_by)) == "torch", "a copied context brings no mode"
        assert in_thread(lambda: context.run(routes("int8")(computed_by))) == "int8"
        assert computed_by() == "fp8"
    assert routed.taken == 1


def test_calls_of_many_threads_are_all_counted() -> None:
    routed = greenfast.use().routed
    taken, left = greenfast.Explanation("reference", ""), greenfast.Explanation("torch", "why")

    def count() -> None:
        for _ in range(2000):
            routed.count(taken)
            routed.count(left)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (routed.taken, routed.fallen_back) == (16000, {"why": 16000})


# Decorated coroutines and generators.


async def asks(*between: Callable[[], Awaitable[Any]]) -> list[str]:
    """Return the implementation of attention at its start and after each step."""
    result = [computed_by()]
    for wait in between:
        await wait()
        result.append(computed_by())
    return result


def test_a_decorated_coroutine() -> None:
    route = routes()
    decorated = route(asks)
    assert inspect.iscoroutinefunction(decorated)
    assert decorated.__doc__ == asks.__doc__

    async def main() -> None:
        waiting, go = asyncio.Event(), asyncio.Event()

        async def pause() -> None:
            waiting.set()
            await go.wait()

        task = asyncio.create_task(decorated(pause, lambda: asyncio.sleep(0)))
        await waiting.wait()
        assert computed_by() == "torch"
        with routes("int8"):
            go.set()
            assert await task == ["fp8"] * 3
            assert computed_by() == "int8"

    run(main())
    assert route.routed.taken == 3


def test_tasks_that_a_decorated_coroutine_starts() -> None:
    @routes()
    async def main() -> list[list[str]]:
        return await asyncio.gather(*(asks(lambda: asyncio.sleep(0)) for _ in range(2)))

    assert run(main()) == [["fp8", "fp8"]] * 2


@pytest.mark.parametrize("thread", [False, True])
def test_a_coroutine_that_is_driven_by_hand_holds_nothing_between(thread: bool) -> None:
    class Pause:
        def __await__(self) -> Generator[str, str, str]:
            return (yield "paused")

    @routes()
    async def body() -> tuple[str, str, str]:
        first = computed_by()
        got = await Pause()
        return first, got, computed_by()

    coroutine = body()
    assert coroutine.send(None) == "paused"
    assert computed_by() == "torch"

    def finish() -> Any:
        with routes("int8"), pytest.raises(StopIteration) as stopped:
            coroutine.send("sent")
        assert computed_by() == "torch"
        return stopped.value.value

    assert (in_thread(finish) if thread else finish()) == ("fp8", "sent", "fp8")
    if thread:
        with routes():  # removes the hook that the other thread could not remove
            pass


def generator() -> Generator[str, str, str]:
    """Yield the implementation of attention, and the values sent and thrown."""
    got = yield computed_by()
    try:
        yield f"{got} {computed_by()}"
    except KeyError:
        yield f"caught {computed_by()}"
    return computed_by()


def test_a_decorated_generator() -> None:
    route = routes()
    decorated = route(generator)
    assert inspect.isgeneratorfunction(decorated)
    steps = decorated()
    assert next(steps) == "fp8"
    assert computed_by() == "torch", "not where it is suspended"
    with routes("int8"):
        assert steps.send("sent") == "sent fp8"
        assert computed_by() == "int8"
    assert in_thread(lambda: steps.throw(KeyError())) == "caught fp8", "in the thread that takes the step"
    with pytest.raises(StopIteration) as stopped:
        next(steps)
    assert stopped.value.value == "fp8"
    assert route.routed.taken == 4
    with pytest.raises(ValueError, match="thrown"):
        decorated().throw(ValueError("thrown"))


def test_interleaved_generators() -> None:
    pairs = zip(routes("fp8")(generator)(), routes("int8")(generator)(), generator(), strict=True)
    assert list(pairs) == [("fp8", "int8", "torch"), ("None fp8", "None int8", "None torch")]


def test_a_generator_that_is_closed_early_ends_routed() -> None:
    result = []

    @routes()
    def body() -> Iterator[int]:
        try:
            yield 1
        finally:
            result.append(computed_by())

    steps = body()
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    never = body()
    del never
    dropped = body()
    next(dropped)
    del dropped
    assert result == ["fp8", "fp8"]


def test_a_with_block_in_a_generator_is_left_when_that_is_closed() -> None:
    def body(precision: str) -> Iterator[str]:
        with routes(precision):
            while True:
                yield computed_by()

    first, second = body("fp8"), body("int8")
    assert [next(first), next(second)] == ["fp8", "int8"]
    first.close()  # type: ignore[attr-defined]
    assert computed_by() == "int8"
    second.close()  # type: ignore[attr-defined]


def test_a_context_manager_made_of_a_decorated_generator() -> None:
    @contextmanager
    @routes()
    def body() -> Iterator[str]:
        yield computed_by()

    with body() as result:
        assert (result, computed_by()) == ("fp8", "torch")


def test_a_decorated_generator_leaves_no_mode_of_others() -> None:
    def body() -> Iterator[str]:
        with Watch():
            yield computed_by()
            with torch.device("meta"), routes("int8"):
                yield computed_by()
            yield computed_by()

    @routes()
    async def async_body() -> AsyncIterator[str]:
        with Watch():
            yield computed_by()
            await asyncio.sleep(0)
            yield computed_by()

    async def main() -> None:
        assert [name async for name in async_body()] == ["fp8", "fp8"]

    assert [*routes()(body)()] == ["fp8", "int8", "fp8"]
    assert modes() == []
    with Watch() as outer:
        assert [*routes()(body)()] == ["fp8", "int8", "fp8"]
        assert modes() == [outer]
    run(main())


def test_what_a_decorated_body_enters_and_does_not_leave_is_its_callers() -> None:
    """The same holds for a function that enters a context on a caller's ExitStack."""

    @routes()
    async def coroutine(stack: ExitStack) -> str:
        stack.enter_context(routes("int8"))
        await asyncio.sleep(0)
        return computed_by()

    @routes()
    def generator(stack: ExitStack) -> Iterator[str]:
        stack.enter_context(routes("int8"))
        yield computed_by()

    async def main() -> None:
        with ExitStack() as stack:
            assert await coroutine(stack) == "int8"
            assert computed_by() == "int8"
        assert computed_by() == "torch"

    run(main())
    with ExitStack() as stack:
        assert [*generator(stack)] == ["int8"]
        assert computed_by() == "int8"


def switch_of(name: str) -> greenfast.use:
    return greenfast.use(min_length=10**9) if name == "torch" else routes(name)


def random_body(rng: random.Random, name: str, depth: int) -> Callable[[], Iterator[None]]:
    """A decorated generator that enters switches and other bodies at random, and checks what computes attention."""

    @switch_of(name)
    def body() -> Iterator[None]:
        yield from block(name, depth)

    def block(current: str, depth: int) -> Iterator[None]:
        for _ in range(rng.randint(1, 3)):
            inner = rng.choice(list(RESULTS))
            kind = rng.random() if depth else 0.0
            if kind < 0.4:
                yield
            elif kind < 0.7:
                with switch_of(inner):
                    yield from block(inner, depth - 1)
            elif kind < 0.85:
                yield from random_body(rng, inner, depth - 1)()
            else:
                for _ in random_body(rng, inner, depth - 1)():
                    assert computed_by() == current
            assert computed_by() == current

    return body


@pytest.mark.parametrize("seed", range(6))
def test_random_bodies_that_are_interleaved(seed: int) -> None:
    rng = random.Random(seed)
    with ThreadPoolExecutor(1) as pool:
        for name in RESULTS:
            bodies = [random_body(rng, rng.choice(list(RESULTS)), 2)() for _ in range(3)]
            with switch_of(name):
                while bodies:
                    steps = rng.choice(bodies)
                    step = functools.partial(next, steps, "ended")
                    ended = pool.submit(step).result() if rng.random() < 0.3 else step()
                    if ended is not None or rng.random() < 0.1:
                        steps.close()  # type: ignore[attr-defined]
                        bodies.remove(steps)
                    assert computed_by() == name
        assert pool.submit(modes).result() == []


async def items() -> AsyncIterator[str]:
    """Yields what computes attention, before and after it waits."""
    try:
        for _ in range(3):
            result = computed_by()
            await asyncio.sleep(0)
            yield f"{result} {computed_by()}"
    except KeyError:
        yield f"caught {computed_by()}"
    finally:
        await asyncio.sleep(0)
        ENDS.append(computed_by())


ENDS: list[str] = []


def test_a_decorated_async_generator() -> None:
    decorated = routes()(items)
    assert inspect.isasyncgenfunction(decorated)

    async def main() -> None:
        ENDS.clear()
        async for item in decorated():
            assert (item, computed_by()) == ("fp8 fp8", "torch")
        async with aclosing(decorated()) as steps:
            assert await anext(steps) == "fp8 fp8"
        thrown: Any = decorated()
        await anext(thrown)
        assert await thrown.athrow(KeyError()) == "caught fp8"
        with pytest.raises(StopAsyncIteration):
            await anext(thrown)
        assert ENDS == ["fp8"] * 3

    run(main())


class Callables:
    async def __call__(self) -> list[str]:
        return await asks()

    @routes()
    async def method(self) -> list[str]:
        return await asks()


@pytest.mark.parametrize(
    "function",
    [
        routes()(Callables()),
        Callables().method,
        routes()(functools.partial(asks)),
        routes()(functools.partial(Callables())),
    ],
    ids=["object", "method", "partial", "partial of an object"],
)
def test_other_coroutine_functions(function: Any) -> None:
    assert run(function()) == ["fp8"]


def test_a_class_cannot_be_decorated() -> None:
    with pytest.raises(TypeError, match="Callables is a class; decorate a method of it, such as forward"):
        routes()(Callables)
    with pytest.raises(TypeError, match="a classmethod; a function is needed, so decorate it below that"):
        greenfast.use()(classmethod(lambda cls: None))  # type: ignore[type-var]


# The user's own choice of PyTorch's backends.


@pytest.mark.parametrize("inside", [False, True])
def test_a_choice_of_math_only_is_respected(inside: bool) -> None:
    outer, inner = (routes(), sdpa_kernel(SDPBackend.MATH)) if inside else (sdpa_kernel(SDPBackend.MATH), routes())
    with outer, inner:
        route = outer if isinstance(outer, greenfast.use) else inner
        result = attend()
        assert str(greenfast.explain(Q, K, V)) == f"torch: {OFF}"
    assert isinstance(route, greenfast.use)
    assert (route.routed.taken, route.routed.fallen_back) == (0, {OFF: 1})
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(result, attend())
    assert not torch.equal(result, RESULTS["fp8"])


@pytest.mark.parametrize(
    "backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
)
def test_greenfast_runs_where_a_fused_backend_is_allowed(backend: SDPBackend) -> None:
    with sdpa_kernel(backend), routes():
        assert computed_by() == "fp8"
        assert greenfast.explain(Q, K, V).taken


def test_math_alone_in_a_compiled_function() -> None:
    def function() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend()

    def both() -> tuple[Tensor, Tensor]:
        return function(), attend()

    torch._dynamo.reset()
    wanted = function()
    with routes():
        result, other = torch.compile(both, backend="aot_eager", fullgraph=True)()
    assert torch.equal(result, wanted)
    assert torch.equal(other, RESULTS["fp8"])


def test_a_compiled_function_in_a_decorated_coroutine_and_in_a_generator() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)

    @routes()
    async def coroutine() -> Tensor:
        await asyncio.sleep(0)
        return compiled()

    @routes("int8")
    def steps() -> Iterator[Tensor]:
        yield compiled()

    for _ in range(2):
        assert torch.equal(run(coroutine()), RESULTS["fp8"])
        for result in steps():
            assert torch.equal(result, RESULTS["int8"])
            assert torch.equal(compiled(), RESULTS["torch"])
