"""One run of NVRTC: plain data in, plain data out, and a process that serves such runs. Imports little: it starts fast.

NVRTC crashes on some sources and takes its process along, so whoever compiles kernels that others wrote does it in
``greenfast.device.compiler_process``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuda.bindings import nvrtc


@dataclass(frozen=True)
class Job:
    """A source to compile: its text, the name that messages give it, and the compiler's options."""

    source: str
    name: str
    options: tuple[bytes, ...]


@dataclass(frozen=True)
class Output:
    """What one run gives. status: NVRTC's name of it; cubin: empty where that is not NVRTC_SUCCESS.

    log and ptx: there as well where the run failed; ptx is empty where the compiler did not get that far. It is of the
    same run as the machine code.
    """

    status: str
    cubin: bytes
    ptx: str
    log: str


def run(job: Job) -> Output:
    """Compile in this process. Raises RuntimeError where NVRTC does not even take the source."""
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
    """Child process: say that it started, then answer each Job on standard input until that closes.

    An answer is an Output, or the text of an error. Both ways are pickled; what the compiler itself may print goes to
    standard error.
    """
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer: Output | str | None = None
    while True:
        try:
            pickle.dump(answer, answers)
            answers.flush()
            job = pickle.load(jobs)
        except (EOFError, BrokenPipeError):
            os._exit(0)  # the parent has gone, or wants no more
        try:
            answer = run(job)
        except Exception as e:
            answer = f"{type(e).__name__}: {e}"
