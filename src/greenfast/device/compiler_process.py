"""Run NVRTC in a separate process, so that a crash of NVRTC ends only that process.

The process starts with the first compile and serves all later ones; after a crash the next compile starts a new one.
"""

from __future__ import annotations

import atexit
import threading

from greenfast.device import nvrtc
from greenfast.device.python_process import PythonProcess, describe_exit, environment

#: Environment variables of the process: a source could include /proc/self/environ.
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")
_SERVE = nvrtc.serve

#: Time limit of one compile in seconds: templates and macros may never end.
COMPILE_S = 600.0


class CompilerCrashError(Exception):
    """The compiler's process crashed or was ended during a compile; the message has the cause."""


class _Compiler:
    """This program's single compiler process, and whether one can be started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: PythonProcess | None = None
        self._can_start = True

    def run(self, job: nvrtc.Job) -> nvrtc.CompilerOutput:
        with self._lock:
            if self._process is None or not self._process.is_running():
                self._start()
            if self._process is None:
                return nvrtc.run(job)
            try:
                return _run_in(self._process, job)
            except BaseException:  # after an interrupt an answer is in the pipe; a later job must not read it
                self._close()
                raise

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None

    def _start(self) -> None:
        self._close()
        if not self._can_start:
            return
        variables = {name: value for name, value in environment().items() if name in _KEPT}
        try:
            self._process = PythonProcess(_SERVE, variables=variables)
            self._process.connection.recv()  # it has started
        except (EOFError, OSError, ValueError):
            self._close()
            self._can_start = False


_COMPILER = _Compiler()
atexit.register(_COMPILER.close)


def _run_in(process: PythonProcess, job: nvrtc.Job) -> nvrtc.CompilerOutput:
    try:
        process.connection.send(job)
        if not process.connection.poll(COMPILE_S):
            raise CompilerCrashError(f"it did not end within {COMPILE_S:g} s")
        answer = process.connection.recv()
    except (EOFError, OSError):
        raise CompilerCrashError(describe_exit(process.exit_code(None))) from None
    if not isinstance(answer, nvrtc.CompilerOutput):
        raise RuntimeError(answer)
    return answer


def run(job: nvrtc.Job) -> nvrtc.CompilerOutput:
    """Run nvrtc.run in the separate process, or in this process if none can be started.

    Raises CompilerCrashError if the compiler crashes, and RuntimeError as nvrtc.run. Threads wait for each other.
    """
    return _COMPILER.run(job)
