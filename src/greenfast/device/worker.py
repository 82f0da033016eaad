"""A Session in a separate process, so that a kernel that crashes or hangs kills only that process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from greenfast.device.gpu_session import GpuSession
from greenfast.device.python_process import PythonProcess
from greenfast.device.session import Block, Executable, RunResult, Started
from greenfast.device.worker_main import serve
from greenfast.spec.errors import GreenfastError
from greenfast.spec.facts import DeviceInfo, KernelCounts
from greenfast.spec.problem import Case

#: Time limit for the start of Python and the driver in seconds; it does not count toward a kernel's time-out.
START_S = 30.0


class WorkerError(GreenfastError):
    """A kernel's process failed: it crashed, exceeded its time-out, or its device reported an error.

    ended: whether the worker's process is gone; else other kernels, and other cases of this one, may run.
    """

    ended = True

    @property
    def fault(self) -> str:
        """The message, with an explanation of an illegal address: inputs are mapped read-only."""
        illegal = "CUDA_ERROR_ILLEGAL_ADDRESS" in str(self)
        return ("an access outside of its buffers, or a write to an input: " if illegal else "") + str(self)


class UnsupportedByDeviceError(WorkerError):
    """The device cannot run a kernel that may be correct; the message names the missing feature and its source line."""

    def __init__(self, message: str, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


class Worker:
    """A session in a child process. Use as a context manager; leaving it ends the process.

    Every method raises WorkerError, and closes the worker, if the process dies, exceeds ``timeout_s`` or reports an
    error. A kernel that the device cannot run raises UnsupportedByDeviceError; the worker remains usable. If the
    session ``emulates``, a dead or late process also raises UnsupportedByDeviceError: a kernel cannot crash an
    emulator.
    """

    def __init__(self, ordinal: int = 0, *, timeout_s: float, make_session: Callable[..., Any] = GpuSession) -> None:
        self._process = PythonProcess(serve, make_session, (ordinal,))  # a forked child cannot use CUDA
        self._connection = self._process.connection
        self._timeout_s = timeout_s
        self._started = False
        self._emulates = bool(getattr(make_session, "emulates", False))

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.close()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the session; return its result."""
        if not self._started:
            self._answer("start", START_S)
            self._started = True
        with self._failures(method):
            self._connection.send((method, args))
        return self._answer(method, self._timeout_s)

    def _answer(self, method: str, seconds: float) -> Any:
        """Return the child's next answer. Close the worker if it is an error or late. Raises as every method does."""
        with self._failures(method):
            if not self._connection.poll(seconds):
                self.close()
                raise self._lost(f"hang: {method} did not end within {seconds:g} s; its process was killed")
            status, value = self._connection.recv()
        if status == "unsupported":
            raise UnsupportedByDeviceError(f"{method}: {value}")
        if status == "error":
            self.close()
            raise WorkerError(f"{method}: {value}")
        return value

    def _lost(self, message: str) -> WorkerError:
        """Return the error for a process that has ended."""
        return UnsupportedByDeviceError(message, ended=True) if self._emulates else WorkerError(message)

    @contextlib.contextmanager
    def _failures(self, method: str) -> Iterator[None]:
        """Report a broken pipe as the crash that caused it."""
        try:
            yield
        except (EOFError, OSError) as e:
            code = self._process.exit_code(5)
            raise self._lost(f"crash: the process ended during {method} (exit {code})") from e

    def info(self) -> DeviceInfo:
        """Return the device."""
        result: DeviceInfo = self.call("info")
        return result

    def run(self, executable: Executable, case: Case, repeats: int) -> RunResult:
        """Run a case (see GpuSession.run)."""
        result: RunResult = self.call("run", executable, case, repeats)
        return result

    def sample(self, executable: Executable, case: Case, blocks: int) -> int:
        """Run some blocks on an emulator (see EmulatorSession.sample)."""
        count: int = self.call("sample", executable, case, blocks)
        return count

    def check_memory(self, executable: Executable, case: Case) -> RunResult:
        """Run a case between unmapped pages (see GpuSession.check_memory)."""
        result: RunResult = self.call("check_memory", executable, case)
        return result

    def prepare(self, key: str, executable: Executable, cases: Sequence[Case], warmup: int, seed: int) -> Started:
        """Bind cases under a key for timing, launch each, and warm up."""
        started: Started = self.call("prepare", key, executable, cases, warmup, seed)
        return started

    def time(self, key: str, warmup: int, iters: int, cold: bool, seed: int) -> Block:
        """Time one block of launches, each with one of the key's cases."""
        block: Block = self.call("time", key, warmup, iters, cold, seed)
        return block

    def finish(self, key: str) -> None:
        """Free the memory of a bound program."""
        self.call("finish", key)

    def phases(self, executable: Executable, case: Case, repeats: int) -> dict[str, float]:
        """Mean SM cycles per block and phase of an instrumented build."""
        result: dict[str, float] = self.call("phases", executable, case, repeats)
        return result

    def phase_counts(self, executable: Executable, case: Case) -> dict[str, KernelCounts]:
        """Return the counts of each phase of an instrumented build."""
        result: dict[str, KernelCounts] = self.call("phase_counts", executable, case)
        return result


def gpu_info(ordinal: int, timeout_s: float) -> DeviceInfo:
    """Describe a GPU. A separate process queries it, so that the caller's never holds a CUDA context.

    Raises WorkerError if the GPU cannot be used.
    """
    with Worker(ordinal, timeout_s=timeout_s) as worker:
        return worker.info()
