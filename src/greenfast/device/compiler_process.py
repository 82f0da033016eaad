"""Run NVRTC in a separate process, so that a crash of NVRTC ends only that process.

The process starts with the first compile and serves all later ones; after a crash the next compile starts a new one. It
does not use ``multiprocessing``: that imports the caller's main module again, and a script without a guard would break.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import subprocess
import threading

from greenfast.device import nvrtc
from greenfast.device.python_process import empty_folder, environment, interrupts_blocked, isolated, module_path

#: Environment variables of the process: a source could include /proc/self/environ.
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from greenfast.device import nvrtc; nvrtc.serve()"

#: Time limit of one compile in seconds: templates and macros may never end.
COMPILE_S = 600.0


class CompilerCrashError(Exception):
    """The compiler's process crashed or was ended during a compile; the message has the cause."""


class _Process:
    """The child and the two pipes to it. Raises OSError, ValueError or EOFError if it cannot start."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        # The parent handles interrupts: the child inherits the blocked signal.
        with interrupts_blocked():
            self._child = subprocess.Popen(
                isolated(_CHILD, *module_path()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=empty_folder(),
                env={name: value for name, value in environment().items() if name in _KEPT},
            )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def usable(self) -> bool:
        """Whether it runs and was not inherited through a fork: its pipes then belong to the parent."""
        return self._owner == os.getpid() and self._child.poll() is None

    def run(self, job: nvrtc.Job) -> nvrtc.CompilerOutput:
        """Run nvrtc.run in the child. Raises CompilerCrashError if the process ends; other errors make it unusable."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            pickle.dump(job, self._child.stdin)
            self._child.stdin.flush()
            if not select.select([self._child.stdout], [], [], COMPILE_S)[0]:
                self.close()
                raise CompilerCrashError(f"it did not end within {COMPILE_S:g} s")
            answer = self._answer()
        except (EOFError, OSError, pickle.UnpicklingError):
            raise CompilerCrashError(_ending(self._child.wait())) from None
        if not isinstance(answer, nvrtc.CompilerOutput):
            raise RuntimeError(answer)
        return answer

    def _answer(self) -> object:
        assert self._child.stdout is not None
        return pickle.load(self._child.stdout)

    def close(self) -> None:
        """End the process, including a running compile."""
        if self._owner != os.getpid():
            return
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):  # unwritten data in the pipe's buffer
                if pipe is not None:
                    pipe.close()


class _Compiler:
    """This program's single compiler process, and whether one can be started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._can_start = True

    def run(self, job: nvrtc.Job) -> nvrtc.CompilerOutput:
        with self._lock:
            if self._process is None or not self._process.usable:
                self._process = self._start()
            if self._process is None:
                return nvrtc.run(job)
            try:
                return self._process.run(job)
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

    def _start(self) -> _Process | None:
        if not self._can_start:
            return None
        try:
            return _Process()
        except (EOFError, OSError, ValueError):
            self._can_start = False
            return None


_COMPILER = _Compiler()
atexit.register(_COMPILER.close)


def run(job: nvrtc.Job) -> nvrtc.CompilerOutput:
    """Run nvrtc.run in the separate process, or in this process if none can be started.

    Raises CompilerCrashError if the compiler crashes, and RuntimeError as nvrtc.run. Threads wait for each other.
    """
    return _COMPILER.run(job)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
