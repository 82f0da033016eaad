"""The judge's side of a solution in Python: its family, and the process that runs its code.

Requests to the process have time limits; replies have a size limit and a strict schema.
"""

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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec

from greenfast.device.python_process import describe_exit, isolated, module_path
from greenfast.device.sandbox import BY_CGROUP, DATA_BYTES, PROCESSES, remove_cgroup
from greenfast.judge.solution.messages import (
    MAX_MESSAGE,
    Buffer,
    Choose,
    Chosen,
    CompileFailed,
    ExceptionReply,
    Load,
    Loaded,
    MissingDependency,
    Ready,
    Rejected,
    Render,
    Rendered,
    RpcReply,
    RpcRequest,
    decode_program,
)
from greenfast.judge.solution.schema import SolutionConfig
from greenfast.spec.arch import Target
from greenfast.spec.errors import AbsentError, CompileError, GreenfastError, SolutionError, UsageError
from greenfast.spec.kernel import Choice, Program, Step
from greenfast.spec.problem import Problem

#: Time limits in seconds for the start of the process and for one reply. Triton compiles a kernel within a reply.
START_S = 60.0
ANSWER_S = 180.0

_CHILD = (
    "import sys; questions, answers, readable, writable, gpu, current, *path = sys.argv[1:]; sys.path[:] = path; "
    "from greenfast.judge.solution.worker_main import main; "
    "main(int(questions), int(answers), readable.split(chr(0x1f)), writable, gpu == 'gpu', current)"
)
#: Limits of a solution's folder, and of its processes together; the judge checks them once in so many seconds.
SCRATCH_BYTES, SCRATCH_FILES = 16 << 30, 200_000
MEMORY_BYTES = 2 * DATA_BYTES
_LOOK_S = 1.0
#: The environment that a solution's code sees; everything else of the caller's stays out.
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME", "TZ")
_MOST_SHOWN = 2000
#: Seed of the inputs that a callable is captured with. No task uses it.
EXAMPLE_SEED = 987_654_321


class RemoteFamily:
    """A family or solution in Python. Its code runs in a confined process and returns only data.

    Raises UsageError if the code cannot be imported, SolutionError if the process ends or does not answer.
    """

    def __init__(
        self,
        label: str,
        folder: Path,
        solution: SolutionConfig,
        *,
        module: str = "",
        target: Target | None = None,
        answer_s: float = ANSWER_S,
        problem: Problem | None = None,
        gpu: int | None = None,
    ) -> None:
        """Start the process and import the code.

        label: the name of the solution in errors.
        module: an importable module that replaces the solution's file.
        target: the compile target, for languages that need one.
        answer_s: time limit per reply in seconds.
        problem: the problem with the buffers that the solution receives.
        gpu: the ordinal of the GPU that captures a callable.
        """
        self._label = label
        self._target = target or Target("sm_90a")
        self._toggles = dict(solution.toggles)
        self._problem = problem
        self._with_data = solution.language == "callable"
        self._binaries: dict[bytes, bytes] = {}
        gpu = gpu if self._with_data else None
        self._process = SolutionProcess(label, folder, answer_s=answer_s, gpu=gpu, imports=bool(module))
        self.sandbox = self._process.sandbox
        reply = self._process.request(Load(solution, str(folder.resolve()), module))
        if isinstance(reply, ExceptionReply):
            self._process.close()
            if reply.exits:
                raise self._process.raised(reply)
            lines = "".join(f"\n  {line}" for line in reply.lines[-5:])
            raise UsageError(f"{label} cannot be imported: {reply.text}{lines}{sandbox_hint(reply.text)}")
        if isinstance(reply, Rejected):
            self._process.close()
            raise UsageError(f"{label}: {reply.text}")
        if not isinstance(reply, Loaded):
            raise self._convert_error(reply)
        #: The names of the solution's functions.
        self.functions = tuple(reply.functions)

    def program(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> Program:
        """Return the program for a shape. Raises UsageError if the solution rejects it, SolutionError if it fails."""
        target = self._target
        settings = {**self._toggles, **toggles}
        buffers = self._describe_buffers(fmt, dims)
        reply = self._process.request(
            Render(settings, fmt, dict(dims), target.name, target.multiprocessors, instrumented, buffers)
        )
        if not isinstance(reply, Rendered):
            raise self._convert_error(reply)
        try:
            program = decode_program(reply)
        except (ValueError, TypeError) as e:
            raise UsageError(f"{self._label}: {e}") from None
        self._require_readable(program)
        return replace(program, steps=tuple(map(self._share_binary, program.steps)))

    def _require_readable(self, program: Program) -> None:
        """Raise UsageError for an include folder that the solution may not read: the compiler would open it."""
        allowed = [Path(path).resolve() for path in (*self._process.readable, str(self._process.scratch))]
        folders: set[Path] = {folder for step in program.steps for folder in step.kernel.include_dirs}
        for folder in sorted(folders):
            if not any(folder.resolve().is_relative_to(path) for path in allowed):
                raise UsageError(f"{self._label}: include_dirs: {folder} is not the solution's; copy its headers there")

    def _share_binary(self, step: Step) -> Step:
        """Return the step with its machine code shared: each kernel of a library comes with the whole library."""
        code = step.kernel.binary
        return replace(step, kernel=replace(step.kernel, binary=self._binaries.setdefault(code, code)))

    def _describe_buffers(self, fmt: str, dims: Mapping[str, int]) -> dict[str, Buffer]:
        """Return the buffers of the problem's case. For a callable, each input has a file with example data."""
        if self._problem is None:
            return {}
        case = self._problem.make_case(dims, EXAMPLE_SEED, fmt)
        inputs = {
            name: Buffer(array.dtype.name, list(array.shape), name in case.outputs)
            for name, array in case.inputs.items()
        }
        if self._with_data:
            for number, (name, array) in enumerate(case.inputs.items()):
                path = self._process.write(f"input{number}", array.tobytes())
                inputs[name] = msgspec.structs.replace(inputs[name], path=str(path))
        outputs = {n: Buffer(spec.dtype, list(spec.shape), True) for n, spec in case.outputs.items() if n not in inputs}
        return inputs | outputs

    def __getattr__(self, name: str) -> Any:
        """Return ``choose`` if the family defines it."""
        if name == "choose" and "choose" in self.__dict__.get("functions", ()):
            return self._choose
        raise AttributeError(name)

    def _choose(self, target: Target, fmt: str, dims: Mapping[str, int]) -> Choice:
        reply = self._process.request(Choose(target.name, target.multiprocessors, fmt, dict(dims)))
        if not isinstance(reply, Chosen):
            raise self._convert_error(reply)
        return Choice(reply.rung, reply.reason)

    def _convert_error(self, reply: Any) -> GreenfastError:
        if isinstance(reply, MissingDependency):
            return AbsentError(f"{self._label}: {reply.text}")
        if isinstance(reply, Rejected):
            return UsageError(reply.text)
        if isinstance(reply, CompileFailed):
            return CompileError(reply.text)
        if isinstance(reply, ExceptionReply):
            return self._process.raised(reply)
        with contextlib.suppress(Exception):
            self._process.close()
        return SolutionError(f"{self._label}: the solution ended without a verdict: it answered another question")


class SolutionProcess:
    """A confined process with a solution's code. It runs until ``close`` or garbage collection.

    label: the name of the solution in errors. folder: the folder of its code, readable for the process.
    Every method raises SolutionError if the process ends, hangs or sends an invalid reply.
    """

    def __init__(
        self, label: str, folder: Path, *, answer_s: float = ANSWER_S, gpu: int | None = None, imports: bool = False
    ) -> None:
        """Start the process. imports: True if the code is a module, possibly in the caller's current folder."""
        self._label = label
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
        #: The protections from the solution that are active, such as "no network".
        self.sandbox: list[str] = [BY_CGROUP]  # No code of the solution runs before the first reply.
        ready = self._receive(0, time.monotonic() + START_S)
        if not isinstance(ready, Ready):
            raise self._ended("it answered before it was asked")
        self.sandbox = list(ready.sandbox)

    def close(self) -> None:
        """Kill the process and remove its folder."""
        self._finalizer()

    def request(self, call: Load | Render | Choose) -> Any:
        """Send a request and return its reply, one of the types in ``RpcReply``."""
        if not self._finalizer.alive:
            raise SolutionError(f"{self._label}: the solution's process has ended")
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

    def raised(self, reply: ExceptionReply) -> SolutionError:
        """Return the error for an exception of the solution's code."""
        lines = "".join(f"\n  {line}" for line in reply.lines[-5:])
        how = f"it {'called' if reply.exits else 'raised'} {reply.text}{lines}"
        return SolutionError(_shown(f"{self._label}: the solution ended without a verdict: {how}{sandbox_hint(how)}"))

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
        return f"its process {'ended with' if code >= 0 else 'was ended by'} {describe_exit(code)}"

    def _ended(self, how: str) -> SolutionError:
        """Kill the process and return the error for it, with the last lines that it printed."""
        with contextlib.suppress(OSError):
            size = self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, size - _MOST_SHOWN))
            printed = self._output.read(_MOST_SHOWN).decode(errors="replace").strip()
            if printed:
                how += "\n  it printed: " + "\n  ".join(printed.splitlines()[-5:])
        self.close()
        return SolutionError(_shown(f"{self._label}: the solution ended without a verdict: {how}{sandbox_hint(how)}"))

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
