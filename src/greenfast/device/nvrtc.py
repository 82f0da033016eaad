"""One run of NVRTC, with plain data in and out, and a process that serves such runs. Imports little, to start fast.

NVRTC crashes on some sources and kills its process, so third-party kernels are compiled through
``greenfast.device.compiler_process``.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuda.bindings import nvrtc


@dataclass(frozen=True)
class Job:
    """A source to compile: its text, its name in messages, and the compiler's options."""

    source: str
    name: str
    options: tuple[bytes, ...]


@dataclass(frozen=True)
class Output:
    """The result of one run. status: NVRTC's name for it. cubin: empty unless that is NVRTC_SUCCESS.

    log and ptx: also present if the run failed; ptx is empty if the compiler did not get that far, and is from the same
    run as the machine code.
    """

    status: str
    cubin: bytes
    ptx: str
    log: str


def run(job: Job) -> Output:
    """Compile in this process. Raises RuntimeError if NVRTC cannot create a program from the source."""
    status, program = nvrtc.nvrtcCreateProgram(job.source.encode(), job.name.encode(), 0, [], [])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"nvrtcCreateProgram: {status.name}")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(job.options), list(job.options))
        succeeded = status == nvrtc.nvrtcResult.NVRTC_SUCCESS
        return Output(
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
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answer: Output | str | None = None
    while True:
        try:
            pickle.dump(answer, answers)
            answers.flush()
            job = pickle.load(jobs)
        except (EOFError, BrokenPipeError):
            os._exit(0)  # the parent has exited or closed the pipe
        try:
            answer = run(job)
        except Exception as e:
            answer = f"{type(e).__name__}: {e}"


def _end_with(parent: int) -> None:
    """A compile that may take long would outlive a parent that was killed: only between jobs is its pipe looked at."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)
