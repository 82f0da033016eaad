"""Run an entry of the corpus on the emulator and classify its outcome.

right: every output is correct. refused: an unsupported instruction, by name. wrong: an output is wrong. accused: a
fault in a correct kernel. found: the fault of a kernel with a bug, with its line. missed: no fault, another fault or
another line. crashed: an error without a message to the user. slow: no end within LIMIT_S.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import run_grid
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.arch import Target
from greenfast.spec.errors import GreenfastError, UnsupportedError
from greenfast.spec.kernel import KernelSource, Launch
from tests.emulator.corpus.entry import Bound, Entry, bind

#: Seconds that an entry may take, compiling left out.
LIMIT_S = 20.0
#: Each run has another order of the warps and blocks.
ORDERS = 3
GOOD = ("right", "found")


@dataclass(frozen=True)
class Outcome:
    """The outcome of an entry, the reason, and the seconds of its runs."""

    entry: Entry
    status: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.entry.name}: {self.status} ({self.seconds:.1f} s) {self.detail}"


class TooSlowError(BaseException):
    """An entry that did not end in time; nothing between here and there may take it for something else."""


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise TooSlowError in the main thread once that many seconds have passed."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def kernel_of(entry: Entry) -> KernelSource:
    """Return a CUDA entry as the compiler takes it."""
    return KernelSource("k", entry.source, "k.cu", (), entry.block, entry.smem)


def ptx_of(entry: Entry) -> str:
    """Return an entry's PTX."""
    if entry.kind in ("ptx", "triton"):
        return entry.source
    return to_ptx(kernel_of(entry), Target(entry.target), assemble=False)


def classify(entry: Entry, orders: int = ORDERS, limit: float | None = None) -> Outcome:
    """Run an entry in some orders of its warps, for at most ``limit`` seconds, or the entry's limit."""
    limit = limit or entry.limit or LIMIT_S
    ptx = ptx_of(entry)
    start = time.perf_counter()
    try:
        with _within(limit):
            status, detail = _run(entry, ptx, orders)
    except TooSlowError:
        status, detail = "slow", f"no end within {limit:g} s"
    return Outcome(entry, status, detail, time.perf_counter() - start)


def _run(entry: Entry, ptx: str, orders: int) -> tuple[str, str]:
    bound = bind(entry)
    for seed in range(orders):
        try:
            wrong = run_once(entry, ptx, bound, seed)
        except KernelFaultError as fault:
            return _judged(entry, str(fault))
        except UnsupportedError as e:
            # An unforeseen failure of the emulator has a message too; it counts as a crash.
            return ("crashed" if "a bug in the emulator" in str(e) else "refused"), str(e)
        except GreenfastError as e:  # a refusal for a reason other than an instruction
            return "refused", f"{type(e).__name__}: {e}"
        except Exception as e:  # any error counts as a crash
            return "crashed", f"{type(e).__name__}: {e}"
        if wrong and not entry.faults:
            return "wrong", f"order {seed}: {wrong}"
    return ("missed", f"no fault in {orders} orders") if entry.faults else ("right", "")


def run_once(entry: Entry, ptx: str, bound: Bound, seed: int) -> str:
    """Run once. Return the errors in the outputs."""
    plan = Launch(entry.grid, tuple(bound.args))
    result = run_grid(ptx, entry.kernel, entry.block, entry.smem, plan, bound.inputs, bound.outputs, seed=seed)
    if entry.faults:
        return ""
    if result.input_writes:
        return "; ".join(result.input_writes.values())
    if entry.prints and not re.fullmatch(entry.prints, result.printed, re.DOTALL):
        return f"printed {result.printed!r}"
    return bound.differences(result.outputs)


def _judged(entry: Entry, fault: str) -> tuple[str, str]:
    if not entry.faults:
        return "accused", fault
    if not re.search(entry.faults, fault):
        return "missed", f"another fault: {fault}"
    named = {int(n) for n in re.findall(r"k\.cu:(\d+)", fault)}
    if not named & set(entry.lines):
        return "missed", f"lines {sorted(named)} in place of {entry.lines}: {fault}"
    return "found", fault
