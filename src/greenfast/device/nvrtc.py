"""One run of NVRTC, with plain data in and out, and a process that serves such runs. Imports little, to start fast.

NVRTC crashes on some sources and kills its process, and opens every file that a source includes, so third-party
kernels are compiled through ``greenfast.device.compiler_process``.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cuda.bindings import nvrtc

from greenfast.device import toolchain
from greenfast.device.fixed_clock import TIMESTAMP, fix_clock
from greenfast.device.sandbox import confine_compiler


@dataclass(frozen=True)
class Job:
    """A source to compile: its text, its name in messages, and the compiler's options.

    folders: the project's include folders, before those of the options.
    readable: the only folders that the compiler may read, in a separate process; None for no limit.
    """

    source: str
    name: str
    options: tuple[bytes, ...]
    folders: tuple[str, ...] = ()
    readable: tuple[str, ...] | None = None


@dataclass(frozen=True)
class CompilerOutput:
    """The result of one run. status: NVRTC's name for it. cubin: empty unless that is NVRTC_SUCCESS.

    log and ptx: also present if the run failed; ptx is empty if the compiler did not get that far, and is from the same
    run as the machine code.
    """

    status: str
    cubin: bytes
    ptx: str
    log: str


def run(job: Job) -> CompilerOutput:
    """Compile in this process, with a fixed clock if ``fix_clock`` works here.

    Raises RuntimeError if NVRTC cannot create a program from the source.
    """
    fix_clock(toolchain.nvrtc_library())
    folders = (b"--include-path=" + os.fsencode(folder) for folder in job.folders)
    options = [*folders, *job.options, f'--define-macro=__TIMESTAMP__="{TIMESTAMP}"'.encode()]
    status, program = nvrtc.nvrtcCreateProgram(job.source.encode(), job.name.encode(), 0, [], [])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"nvrtcCreateProgram: {status.name}")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        succeeded = status == nvrtc.nvrtcResult.NVRTC_SUCCESS
        return CompilerOutput(
            status.name,
            _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program) if succeeded else b"",
            _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program),
            _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program),
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def version() -> tuple[int, int]:
    """The compiler's major and minor version."""
    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


def _bytes(get_size: Callable[..., Any], get: Callable[..., Any], program: Any) -> bytes:
    _, size = get_size(program)
    buffer = bytearray(size or 0)
    if buffer:
        get(program, buffer)
    return bytes(buffer)


def _text(get_size: Callable[..., Any], get: Callable[..., Any], program: Any) -> str:
    return _bytes(get_size, get, program).decode(errors="replace").replace("\0", "")


def serve() -> None:
    """Child process: report that it started, then answer each Job on standard input until that closes.

    An answer is an Output, or the text of an error. Messages both ways are pickled; anything that the compiler prints
    goes to standard error.
    """
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    fix_clock(toolchain.nvrtc_library())  # the library is loaded before a job is confined
    nvrtc.nvrtcVersion()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answer: CompilerOutput | str | None = None
    while True:
        try:
            pickle.dump(answer, answers)
            answers.flush()
            job = pickle.load(jobs)
        except (EOFError, BrokenPipeError):
            os._exit(0)  # the parent has exited or closed the pipe
        answer = _answer(job) if job.readable is None else _confined(job)


def _answer(job: Job) -> CompilerOutput | str:
    try:
        return run(job)
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def _confined(job: Job) -> CompilerOutput | str:
    """The answer of a copy of this process that reads the job's folders alone; ends by a signal as that one does."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            confine_compiler(job.readable or ())
            with os.fdopen(writing, "wb") as answers:
                pickle.dump(_answer(_relative(job)), answers)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        data = answers.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    answer: CompilerOutput | str = pickle.loads(data)
    return answer


def _relative(job: Job) -> Job:
    """Return the job with folders relative to the first one, and make that the current folder.

    ``__FILE__`` then is a path inside the project, and a project in another folder gives the same machine code.
    """
    if not job.folders:
        return job
    os.chdir(job.folders[0])
    return replace(job, folders=tuple(os.path.relpath(folder, job.folders[0]) for folder in job.folders))


def _end_with(parent: int) -> None:
    """End this process with its parent: during a long compile the closed pipe is not noticed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)
