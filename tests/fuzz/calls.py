"""The common part of all draws of the fuzzer: repeated calls and the report of faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tests.fuzz.guards import Guards

_AT_ONCE = 10  # repetitions that are queued before their results are compared


@dataclass(frozen=True)
class Run:
    """The device and the number of runs. busy: another stream multiplies matrices meanwhile."""

    device: str
    repeats: int
    busy: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


class Draw(Protocol):
    """A random call. Its repr shows the parameters."""

    def faults(self, run: Run) -> list[str]:
        """Return the faults of the call; empty if it is correct."""


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of its elements."""
    return x.detach().contiguous().flatten().view(torch.uint8)


def differ(what: str, one: Tensor, other: Tensor) -> list[str]:
    """A fault where two tensors of one shape and dtype have other bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return [f"{what}: {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"]
    if torch.equal(bits(one), bits(other)):
        return []
    rows = (bits(one) != bits(other)).view(-1, max(1, one.shape[-1] * one.element_size())).any(1).nonzero().flatten()
    return [f"{what}: other bits in {len(rows)} rows, first {rows[:4].tolist()}, last {int(rows[-1])}"]


def repeated(run: Run, call: Callable[[], Any]) -> tuple[tuple[Tensor, ...], list[str]]:
    """The results of a call in guarded memory, and faults: guards, and other bits when it is repeated."""

    def results() -> tuple[Tensor, ...]:
        result = call()
        return result if isinstance(result, tuple) else (result,)

    with Guards() as guards:
        first = results()
    if run.on_gpu:
        torch.cuda.synchronize()
    result = guards.faults()
    if run.busy and run.on_gpu:
        _keep_busy()
    for done in range(1, run.repeats, _AT_ONCE):
        queued = [results() for _ in range(min(_AT_ONCE, run.repeats - done))]  # without a pause between them
        for n, again in enumerate(queued, done):
            for i, (one, other) in enumerate(zip(first, again, strict=True)):
                result += differ(f"repeat {n}, result {i}", one, other)
        if result:
            break
    return first, result


def _keep_busy() -> None:
    """Queue some milliseconds of other work on another stream."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        x = torch.zeros(2048, 2048, device="cuda", dtype=torch.float16)
        for _ in range(20):
            x = x @ x
