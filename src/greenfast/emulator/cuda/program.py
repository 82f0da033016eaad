"""Compile a CUDA program if it is a source, and run it with its kernels in the emulator."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cuda.pathfinder import find_nvidia_binary_utility

from greenfast.emulator.cuda.library import build_library
from greenfast.emulator.cuda.server import Server
from greenfast.emulator.findings import Findings
from greenfast.emulator.machine.observed import NOTHING, Observe, Observed
from greenfast.emulator.watches import insert_watches
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, MachineError, UnsupportedError, UsageError

SOURCES = (".cu",)
#: Libraries without PTX, by the beginning of the names of their headers, functions and files.
LIBRARIES = {
    **{"cublas": "cuBLAS", "cudnn": "cuDNN", "cufft": "cuFFT", "curand": "cuRAND's host API", "cusolver": "cuSOLVER"},
    **{"cusparse": "cuSPARSE", "cutensor": "cuTENSOR", "nccl": "NCCL", "npp": "NPP", "nvjpeg": "nvJPEG"},
}
_NAMES = "|".join(LIBRARIES)
#: Names by which a program needs them, and messages of nvcc and the linker if they are missing.
_NEEDED = re.compile(rf"\0(lib({_NAMES})\w*\.so)".encode())
_MISSING = re.compile(
    rf"(?:fatal error: |undefined reference to [`'\"]|cannot find -l)(({_NAMES})\w*(?:\.h\b)?)", re.IGNORECASE
)
#: Names by which a program needs CUDA's runtime.
_DYNAMIC = re.compile(rb"libcudart\.so\.(\d+)\0")


@dataclass(frozen=True)
class ProgramResult:
    """The end of a program. code: its exit code, or 128 and the number of the signal that ended it.

    observed: the observations of all launches, None without any.
    """

    code: int
    launches: dict[str, int]
    seconds: dict[str, float]
    observed: Observed | None = None


def find_nvcc() -> Path:
    """Return the path of nvcc. Raises MachineError if it is missing."""
    path = find_nvidia_binary_utility("nvcc") or shutil.which("nvcc")
    if path is None:
        raise MachineError(
            "nvcc, the compiler of whole CUDA programs, was not found; install with pip: nvidia-cuda-nvcc "
            "(version 13), or install a CUDA toolkit with nvcc on the PATH"
        )
    return Path(path)


def compile_program(
    source: Path, output: Path, arch: str, options: Sequence[str] = (), watch: Sequence[str] = ()
) -> None:
    """Compile a CUDA source to a program with PTX and source lines. Raises CompileError and UsageError.

    Raises UnsupportedError for a source that needs cuBLAS or another library without PTX, and MachineError without nvcc
    or cuRAND's headers for kernels.
    watch: expressions to record, as in ``Observe``.
    """
    compiled = source
    if watch:
        path = str(source.resolve())
        compiled = output.with_name(f"{output.name}-watched") / source.name
        compiled.parent.mkdir()
        compiled.write_text(insert_watches(source.read_text(), path, watch))
        options = (*options, f"-I{Path(path).parent}")
    number = Target.parse(arch).name.removeprefix("sm_")
    embed = ("-gencode", f"arch=compute_{number},code=compute_{number}", "-cudart", "shared", "-no-compress")
    command = [str(find_nvcc()), *embed, "-lineinfo", "-g", "-O1", *options, str(compiled), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if (missing := _MISSING.search(done.stderr)) is not None:
            if missing[1].startswith("curand_"):  # functions for kernels
                raise MachineError(
                    f"{source}: {missing[1]} was not found; install with pip: nvidia-curand, or name its folder: "
                    "--nvcc=-IFOLDER"
                )
            raise _make_refusal(source, missing[1], missing[2])
        if "separate compilation mode" in done.stderr:
            raise UnsupportedError(f"{source}: kernels that launch kernels (dynamic parallelism) are not emulated")
        hint = "\n(with --watch: its lines must be in kernels, its expressions valid there)" if watch else ""
        raise CompileError(f"nvcc cannot compile {source}:\n{(done.stderr or done.stdout).strip()}{hint}")


def _make_refusal(program: Path, used: str, library: str) -> UnsupportedError:
    return UnsupportedError(
        f"{program}: uses {LIBRARIES[library.lower()]} ({used}). Its kernels have no PTX, so they cannot be emulated; "
        "replace its calls by kernels of your own"
    )


def check_program(program: Path) -> None:
    """Raise UsageError for a file that is no CUDA program that can run here, UnsupportedError for cuBLAS and others."""
    try:
        content = program.read_bytes()
    except OSError as e:
        raise UsageError(f"{program}: cannot be read ({e.strerror})") from e
    if content[:4] != b"\x7fELF":
        raise UsageError(f"{program}: neither a CUDA source (.cu), a Python script (.py) nor a program")
    if not os.access(program, os.X_OK):
        raise UsageError(f"{program}: is not executable; run chmod +x {program}")
    if (needed := _NEEDED.search(content)) is not None:
        raise _make_refusal(Path(program.name), needed[1].decode(), needed[2].decode())
    version = _DYNAMIC.search(content)
    if version is None and b"cudart" in content and b".nv_fatbin" in content:
        raise UsageError(
            f"{program}: CUDA's runtime is linked statically, so that it cannot be replaced; compile with: "
            "nvcc -cudart shared -gencode arch=compute_90,code=compute_90 -lineinfo"
        )
    if version is not None and version[0][:-1].decode() not in {path.name for path in build_library().iterdir()}:
        raise UsageError(
            f"{program}: needs {version[0][:-1].decode()}, and the installed headers are of another version; "
            "compile it with their toolkit (CUDA 13)"
        )


def run_program(
    program: Path,
    arguments: Sequence[str],
    findings: Findings,
    *,
    seed: int = 0,
    orders: int = 1,
    output: IO[str] | None = None,
    observe: Observe = NOTHING,
) -> ProgramResult:
    """Run a program and its kernels. output: the file of its standard output (default: this process's).

    observe: what to observe in the first order of each launch.

    Raises UsageError for a program that cannot run here, and MachineError.
    """
    check_program(program)
    library = build_library()
    server = Server(findings, seed, orders, observe)
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    folders = [str(library), *filter(None, environment.get("LD_LIBRARY_PATH", "").split(":"))]
    environment["LD_LIBRARY_PATH"] = ":".join(folders)
    environment["GREENFAST_CHANNEL"] = f"{theirs.fileno()},{server.memory.file}"
    # Its libraries may come from a path that is written into the program, so the runtime is loaded first.
    environment["LD_PRELOAD"] = " ".join(filter(None, (str(library / "libcudart.so"), environment.get("LD_PRELOAD"))))
    process = subprocess.Popen(
        [str(program.resolve()), *arguments],
        env=environment,
        pass_fds=(theirs.fileno(), server.memory.file),
        stdout=output,
    )
    theirs.close()
    server.process = process.pid
    try:
        server.serve(ours)
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    observer = server.launcher.observer
    return ProgramResult(
        code if code >= 0 else 128 - code,
        dict(server.launches),
        dict(server.seconds),
        observer.observed() if observer is not None else None,
    )
