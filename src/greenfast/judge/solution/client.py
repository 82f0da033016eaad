"""The RPC client of a solution's process. Requests have time limits; replies have a size limit and a strict schema."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from greenfast.device.python_process import isolated, module_path
from greenfast.device.sandbox import BY_CGROUP, DATA_BYTES, PROCESSES, remove_cgroup
from greenfast.judge.solution.messages import (
    MAX_MESSAGE,
    Choose,
    ExceptionReply,
    Load,
    Ready,
    Render,
    RpcReply,
    RpcRequest,
)
from greenfast.spec.errors import SolutionError

#: Time limits in seconds for the start of the process and for one reply. Triton compiles a kernel within a reply.
START_S = 60.0
ANSWER_S = 180.0

_CHILD = (
    "import sys; questions, answers, readable, writable, gpu, current, *path = sys.argv[1:]; sys.path[:] = path; "
    "from greenfast.judge.solution.worker_main import main; "
    "main(int(questions), int(answers), readable.split(chr(0x1f)), writable, gpu == 'gpu', current)"
)
#: What a solution's folder may hold, and its processes together; the judge looks once in so many seconds.
SCRATCH_BYTES, SCRATCH_FILES = 16 << 30, 200_000
MEMORY_BYTES = 2 * DATA_BYTES
_LOOK_S = 1.0
#: The environment that a solution's code sees; everything else of the caller's stays out.
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME", "TZ")
_MOST_SHOWN = 2000


class SolutionProcess:
    """A confined process with a solution's code. It runs until ``close`` or garbage collection.

    what: the name of the solution in errors. folder: the folder of its code, readable for the process.
    Every method raises SolutionError if the process ends, hangs or sends an invalid reply.
    """

    def __init__(
        self, what: str, folder: Path, *, answer_s: float = ANSWER_S, gpu: int | None = None, imports: bool = False
    ) -> None:
        """Start the process. imports: True if the code is a module, possibly in the caller's current folder."""
        self._what = what
        self._answer_s = answer_s
        self._number = 0
        self._buffer = bytearray()
        #: The only folder that the process may write.
        self.scratch = Path(tempfile.mkdtemp(prefix="greenfast-solution-"))
        #: The folders that the process may read, besides the system's.
        path = module_path()
        # Python adds the current folder. Its files may be missing from the solution's digest.
        current = os.path.realpath(os.getcwd()) if imports and module_path(current_last=True) != path else ""
        self.readable = _readable(folder.resolve(), [*path, *([current] if current else [])])
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        their_questions, self._questions = os.pipe()
        self._answers, their_answers = os.pipe()
        try:
            self._child = _start(
                their_questions, their_answers, self.readable, path, current, str(self.scratch), self._output, gpu
            )
        finally:
            os.close(their_questions)
            os.close(their_answers)
        os.set_blocking(self._questions, False)
        pipes = (self._questions, self._answers)
        self._finalizer = weakref.finalize(self, _end, self._child, pipes, str(self.scratch), self._output)
        #: What protects this process from the solution, such as "no network".
        self.sandbox: list[str] = [BY_CGROUP]  # No code of the solution runs before the first reply.
        ready = self._receive(0, time.monotonic() + START_S)
        if not isinstance(ready, Ready):
            raise self._ended("it answered before it was asked")
        self.sandbox = list(ready.sandbox)

    def close(self) -> None:
        """Kill the process and remove its folder."""
        self._finalizer()

    def call(self, call: Load | Render | Choose) -> Any:
        """Send a request and return its reply, one of the types in ``RpcReply``."""
        if not self._finalizer.alive:
            raise SolutionError(f"{self._what}: the solution's process has ended")
        self._number += 1
        deadline = time.monotonic() + self._answer_s
        self._signal(signal.SIGCONT)
        self._send(msgspec.msgpack.encode(RpcRequest(self._number, call)), deadline)
        reply = self._receive(self._number, deadline)
        # The process is paused between requests, so that its threads cannot disturb a measurement.
        self._signal(signal.SIGSTOP)
        return reply

    def write(self, name: str, data: bytes) -> Path:
        """Write a new file in the process's folder; never through a link that the process may have put there."""
        path = self.scratch / name
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(data)
        return path

    def raised(self, said: ExceptionReply) -> SolutionError:
        """The error for an exception of the solution's code."""
        lines = "".join(f"\n  {line}" for line in said.lines[-5:])
        how = f"it {'called' if said.exits else 'raised'} {said.text}{lines}"
        return SolutionError(_shown(f"{self._what}: the solution ended without a verdict: {how}{sandbox_hint(how)}"))

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(len(data).to_bytes(4, "little") + data)
        while view:
            _, ready, _ = select.select([], [self._questions], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._ended(f"it did not answer within {self._answer_s:g} s")
            try:
                view = view[os.write(self._questions, view) :]
            except OSError:
                raise self._ended(self._describe_ending()) from None

    def _receive(self, number: int, deadline: float) -> Any:
        size = int.from_bytes(self._read(4, deadline), "little")
        if size > MAX_MESSAGE:
            raise self._ended(f"it answered with {size} bytes; at most {MAX_MESSAGE} are read")
        try:
            reply = msgspec.msgpack.decode(self._read(size, deadline), type=RpcReply)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise self._ended(f"its answer is not what was asked for: {e}") from None
        if reply.number != number:
            raise self._ended(f"it answered question {reply.number}, not {number}")
        return reply.reply

    def _read(self, size: int, deadline: float) -> bytes:
        while len(self._buffer) < size:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._answers], [], [], max(0.0, min(left, _LOOK_S)))
            if not ready and left > _LOOK_S:
                if excess := self._check_usage():
                    raise self._ended(excess)
                continue
            if not ready:
                raise self._ended(f"it did not answer within {self._answer_s if self._number else START_S:g} s")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise self._ended(self._describe_ending())
            self._buffer += part
        data = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return data

    def _check_usage(self) -> str:
        """Return the resource above its limit, in words; empty if none. Linux does not enforce these limits."""
        nbytes, files = _measure_folder(self.scratch)
        if nbytes > SCRATCH_BYTES or files > SCRATCH_FILES:
            return (
                f"its folder holds {files} files of {nbytes >> 20} MiB; "
                f"at most {SCRATCH_FILES} of {SCRATCH_BYTES >> 20} MiB are allowed"
            )
        if BY_CGROUP in self.sandbox:
            return ""
        memory, processes = _measure_process_group(self._child.pid)
        if memory > MEMORY_BYTES or processes > PROCESSES:
            return (
                f"its {processes} processes use {memory >> 20} MiB of memory; "
                f"at most {PROCESSES} with {MEMORY_BYTES >> 20} MiB are allowed"
            )
        return ""

    def _describe_ending(self) -> str:
        try:
            code = self._child.wait(5)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        if code >= 0:
            return f"its process ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process was ended by signal {-code}"

    def _ended(self, how: str) -> SolutionError:
        """Kill the process and return the error for it, with the last lines that it printed."""
        with contextlib.suppress(OSError):
            size = self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, size - _MOST_SHOWN))
            printed = self._output.read(_MOST_SHOWN).decode(errors="replace").strip()
            if printed:
                how += "\n  it printed: " + "\n  ".join(printed.splitlines()[-5:])
        self.close()
        return SolutionError(_shown(f"{self._what}: the solution ended without a verdict: {how}{sandbox_hint(how)}"))

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)


def _measure_folder(folder: Path) -> tuple[int, int]:
    """Return the bytes and the number of files below a folder. Stop counting above the limit."""
    nbytes, files, folders = 0, 0, [str(folder)]
    while folders and files <= SCRATCH_FILES:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                files += 1
                with contextlib.suppress(OSError):
                    nbytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return nbytes, files


def _measure_process_group(group: int) -> tuple[int, int]:
    """Return the memory of a process group in bytes, and its number of processes."""
    memory, processes = 0, 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if name.isdigit() and os.getpgid(int(name)) == group:
                processes += 1
                with open(f"/proc/{name}/status") as file:
                    lines = [line.split() for line in file if line.startswith(("RssAnon:", "RssShmem:"))]
                memory += sum(int(kib) << 10 for _, kib, *_ in lines)
    return memory, processes


def sandbox_hint(how: str) -> str:
    """Return a hint if the sandbox may have caused the ending; otherwise an empty text."""
    if "Operation not permitted" in how or "Permission denied" in how:
        return "\n  The sandbox refuses some system calls and files: docs/judging.md, What protects the judge"
    if "SIGKILL" in how or "SIGXCPU" in how:
        return "\n  Linux ends a process so that uses more memory or processor time than it may: docs/judging.md"
    return ""


def _shown(text: str) -> str:
    """Shorten a text of the solution. Errors remove control characters themselves."""
    return text if len(text) <= 2 * _MOST_SHOWN else text[: 2 * _MOST_SHOWN] + " ..."


def _readable(folder: Path, path: Sequence[str]) -> list[str]:
    return [str(folder), sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *path]


def _start(
    questions: int,
    answers: int,
    readable: Sequence[str],
    path: Sequence[str],
    current: str,
    scratch: str,
    output: IO[bytes],
    gpu: int | None,
) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    folders = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "GREENFAST_CACHE_DIR"), scratch)
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": _visible(gpu), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        isolated(
            *(_CHILD, str(questions), str(answers), "\x1f".join(readable), scratch),
            *("" if gpu is None else "gpu", current, *path),
        ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=scratch,
        env={**environment, **folders, **quiet, "OMP_NUM_THREADS": "1"},
        pass_fds=(questions, answers),
        start_new_session=True,
    )


def _visible(gpu: int | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for the process: the one GPU, or an empty text if it needs none."""
    if gpu is None:
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[gpu] if visible else str(gpu)


def _end(child: subprocess.Popen[bytes], pipes: Sequence[int], scratch: str, output: IO[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    remove_cgroup(child.pid)
    for pipe in pipes:
        os.close(pipe)
    output.close()
    shutil.rmtree(scratch, ignore_errors=True)
