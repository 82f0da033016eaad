"""One run of NVRTC, with plain data in and out, and a process that serves such runs. Imports little, to start fast.

NVRTC crashes on some sources and kills its process, and opens every file that a source includes, so third-party
kernels are compiled through ``greenfast.device.compiler_process``.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import pickle
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from greenfast.device import toolchain
from greenfast.device.sandbox import confine_compiler


@dataclass(frozen=True)
class Job:
    """A source to compile: its text, its name in messages, and the compiler's options.

    folders: the project's include folders, before the options' folders.
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
    """Return the compiler's major and minor version."""
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


def serve(connection: Connection) -> None:
    """Child process: report that it started by None, then answer each Job until the connection closes.

    An answer is a CompilerOutput, or the text of an error. Anything that the compiler prints goes to standard error.
    """
    os.dup2(2, 1)
    fix_clock(toolchain.nvrtc_library())  # the library is loaded before a job is confined
    nvrtc.nvrtcVersion()
    answer: CompilerOutput | str | None = None
    while True:
        try:
            connection.send(answer)
            job = connection.recv()
        except (EOFError, BrokenPipeError):
            os._exit(0)  # the parent has exited or closed the pipe
        answer = _answer(job) if job.readable is None else _confined(job)


def _answer(job: Job) -> CompilerOutput | str:
    try:
        return run(job)
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def _confined(job: Job) -> CompilerOutput | str:
    """Run the job in a copy of this process that reads only the job's folders. Ends by the same signal as the copy."""
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


#: Midnight local time of this day is the compiler's time: "Jan  2 1970" and "00:00:00" in every time zone.
_DAY = (1970, 1, 2, 0, 0, 0, 0, 0, -1)
#: The value of __TIMESTAMP__; NVRTC does not define it.
TIMESTAMP = "Fri Jan  2 00:00:00 1970"
# Tags of an ELF file's dynamic section, and the size of a relocation with addend.
_STRINGS, _SYMBOLS, _RELOCATIONS, _RELOCATION_BYTES, _CALLS, _CALL_BYTES = 5, 6, 7, 8, 23, 2
_RELOCATION = struct.Struct("<QQq")
_SYMBOL_BYTES = 24


def _return_fixed_time(result: int | None) -> int:
    """Implement C's ``time``: return the seconds, and store them in ``*result`` unless it is null."""
    seconds = int(time.mktime(_DAY))
    if result:
        ctypes.c_long.from_address(result).value = seconds
    return seconds


_TIME = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p)(_return_fixed_time)


@functools.cache
def fix_clock(library: Path) -> bool:
    """Replace the clock of a loaded library by a constant. Return False if glibc did not load it."""
    try:
        places = _imports(library, b"time")
        for place in places:
            page = place - place % mmap.PAGESIZE
            if ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 3):  # read and write
                return False
            ctypes.c_size_t.from_address(place).value = ctypes.cast(_TIME, ctypes.c_void_p).value or 0
    except (OSError, AttributeError, KeyError):
        return False
    return bool(places)


def _imports(library: Path, name: bytes) -> list[int]:
    """Return the import table entries of a function in a loaded library."""
    if not hasattr(os, "RTLD_NOLOAD") or os.confstr("CS_GNU_LIBC_VERSION") is None:
        raise OSError("the layout of loaded libraries is known of glibc alone")
    handle = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle
    # glibc's handle is its link_map: load address, name, dynamic section.
    base, _, dynamic = (ctypes.c_size_t.from_address(handle + 8 * n).value for n in range(3))
    tags: dict[int, int] = {}
    while True:
        tag, value = (ctypes.c_size_t.from_address(dynamic + 8 * n).value for n in range(2))
        if not tag:
            break
        tags[tag] = value
        dynamic += 16
    places = []
    for table, nbytes in ((_CALLS, _CALL_BYTES), (_RELOCATIONS, _RELOCATION_BYTES)):
        if table not in tags:
            continue
        data = ctypes.string_at(tags[table], tags[nbytes])
        for offset, info, _ in _RELOCATION.iter_unpack(data):
            symbol = info >> 32
            if not symbol:
                continue
            text = ctypes.c_uint32.from_address(tags[_SYMBOLS] + symbol * _SYMBOL_BYTES).value
            if ctypes.string_at(tags[_STRINGS] + text, len(name) + 1) == name + b"\0":
                places.append(base + offset)
    return places
