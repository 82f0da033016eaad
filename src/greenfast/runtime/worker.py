"""A Session in a process of its own, so that a kernel that crashes or hangs takes only that process with it."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from greenfast.runtime.device import KernelImage
from greenfast.runtime.session import Block, GpuSession, RunResult
from greenfast.spec.errors import GreenfastError
from greenfast.spec.kernel import Launch
from greenfast.spec.problem import Case
from greenfast.spec.record import DeviceInfo


class WorkerError(GreenfastError):
    """A kernel's process failed: it crashed, hung beyond its time-out, or its device reported an error."""


def _serve(connection: Connection, make_session: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Child process: answer (method, args) with ("ok", result) or ("error", message) until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle; it closes the pipe
    session: Any = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            if session is None:
                session = make_session(*args)
            reply = ("ok", getattr(session, method)(*arguments))
        except Exception as e:
            reply = ("error", f"{e}" if isinstance(e, GreenfastError) else f"{type(e).__name__}: {e}")
        sys.stdout.flush()
        connection.send(reply)


class Worker:
    """A session in a child process. Use as a context manager; leaving it ends the process.

    Every method raises WorkerError where the process dies, exceeds ``timeout_s`` or reports an error; the worker is
    closed then.
    """

    def __init__(self, ordinal: int = 0, *, timeout_s: float, make_session: Callable[..., Any] = GpuSession) -> None:
        context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make_session, (ordinal,)), daemon=True)
        self._process.start()
        theirs.close()
        self._timeout_s = timeout_s

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    def _call(self, method: str, *args: Any) -> Any:
        try:
            self._connection.send((method, args))
            if not self._connection.poll(self._timeout_s):
                raise WorkerError(f"hang: {method} did not end within {self._timeout_s:g} s; its process was killed")
            status, value = self._connection.recv()
        except (EOFError, OSError) as e:
            self._process.join(5)
            raise WorkerError(f"crash: the process ended during {method} (exit {self._process.exitcode})") from e
        except WorkerError:
            self.close()
            raise
        if status == "error":
            self.close()
            raise WorkerError(f"{method}: {value}")
        return value

    def info(self) -> DeviceInfo:
        """The device."""
        result: DeviceInfo = self._call("info")
        return result

    def run(self, image: KernelImage, plan: Launch, case: Case, repeats: int) -> RunResult:
        """Run a case (see GpuSession.run)."""
        result: RunResult = self._call("run", image, plan, case, repeats)
        return result

    def prepare(self, key: str, image: KernelImage, plan: Launch, case: Case, warmup: int) -> None:
        """Bind a case under a key for timing, and warm up."""
        self._call("prepare", key, image, plan, case, warmup)

    def time(self, key: str, warmup: int, iters: int, cold: bool) -> Block:
        """Time one block of launches of a prepared case."""
        block: Block = self._call("time", key, warmup, iters, cold)
        return block

    def finish(self, key: str) -> RunResult:
        """The outputs that the last timed launch left; frees the case."""
        result: RunResult = self._call("finish", key)
        return result

    def phases(self, image: KernelImage, plan: Launch, case: Case, repeats: int) -> dict[str, float]:
        """Mean SM cycles per block and phase of an instrumented build."""
        result: dict[str, float] = self._call("phases", image, plan, case, repeats)
        return result
