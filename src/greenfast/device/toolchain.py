"""Find the compiler, its headers and the disassembler on this machine; name missing packages."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import shutil
import threading
from pathlib import Path

from cuda.pathfinder import (
    DynamicLibNotFoundError,
    find_nvidia_binary_utility,
    find_nvidia_header_directory,
    get_cuda_path_or_home,
    load_nvidia_dynamic_lib,
)

from greenfast.spec.errors import MachineError

# A header from each package that kernels include, and the pip package that provides it.
_HEADERS = {"cuda_fp8.h": "nvidia-cuda-runtime", "crt/mma.h": "nvidia-cuda-crt"}
_CCCL_HEADER = "cuda/std/version"
#: Standard headers of C and C++ for kernels, such as <cstdint>, <cmath> and <stdio.h>; NVRTC has none.
STANDARD_HEADERS = Path(__file__).parent / "standard"
_LOADING = threading.Lock()
_REMEDY = "install with pip: {} (version 13), or install a CUDA toolkit and set CUDA_PATH to its folder"


def nvrtc_library() -> Path:
    """Load NVRTC into this process and return its path. Raises MachineError if it is missing.

    Call this before any NVRTC function: the finder loads the library and then its builtins, and a thread that compiles
    between the two fails for lack of the builtins.
    """
    try:
        with _LOADING:
            path: str = load_nvidia_dynamic_lib("nvrtc").abs_path
    except DynamicLibNotFoundError as e:
        raise MachineError(f"NVRTC, the CUDA compiler, was not found; {_REMEDY.format('nvidia-cuda-nvrtc')}") from e
    return Path(path)


def cuda_include_dirs() -> tuple[Path, ...]:
    """Return the folders of the CUDA and CCCL headers, in the compiler's order.

    Packages in the Python environment come first, then CUDA_PATH or CUDA_HOME, then /usr/local/cuda; the first complete
    one is used. Raises MachineError naming the missing headers and the packages that provide them.
    """
    missing = list(_HEADERS)
    for folder in _header_folders():
        lacking = [header for header in _HEADERS if not (folder / header).is_file()]
        if not lacking:
            return (folder, *_cccl_folder(folder))
        if len(lacking) < len(missing):
            missing = lacking
    raise _missing_headers(missing, [_HEADERS[header] for header in missing])


def include_dirs() -> tuple[Path, ...]:
    """Return the folders of all headers that kernels can include. Raises as ``cuda_include_dirs``."""
    return (STANDARD_HEADERS, *cuda_include_dirs())


def nvdisasm() -> Path:
    """Return the path of the disassembler. Raises MachineError if it is missing."""
    path: str | None = find_nvidia_binary_utility("nvdisasm") or shutil.which("nvdisasm")
    if path is None:
        remedy = _REMEDY.format("nvidia-cuda-nvdisasm, part of 'greenfast[judge]',")
        raise MachineError(f"nvdisasm, the CUDA disassembler, was not found; {remedy}")
    return Path(path)


def assemblers() -> list[Path]:
    """Return the assemblers (ptxas) in order of preference. Only kernels in PTX need one.

    Order: the Python package nvidia-cuda-nvcc, CUDA_PATH, PATH, then Triton's: ptxas-blackwell (newest CUDA) and ptxas.
    """
    tools = [Path(tool) for tool in (find_nvidia_binary_utility("ptxas"), shutil.which("ptxas")) if tool]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        bundled = Path(triton.origin).parent / "backends" / "nvidia" / "bin"
        tools += [bundled / name for name in ("ptxas-blackwell", "ptxas")]
    return [tool for tool in dict.fromkeys(tools) if tool.is_file()]


def fingerprint() -> bytes:
    """Return bytes that change with every update of the compiler or its headers. Raises MachineError."""
    folders = cuda_include_dirs()
    files = [nvrtc_library(), *(folders[0] / header for header in _HEADERS), folders[-1] / _CCCL_HEADER]
    return ";".join(file_fingerprint(path) for path in files).encode() + _standard_headers_digest()


@functools.cache
def _standard_headers_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(STANDARD_HEADERS.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


def file_fingerprint(path: Path) -> str:
    """Return name, size and modification time of a file in place of its content; not its folder.

    The time is in whole seconds, as layers of container images store it: a cache that was filled while an image was
    built then works in the image.
    """
    stat = path.stat()
    return f"{path.name}:{stat.st_size}:{int(stat.st_mtime)}"


def _header_folders() -> list[Path]:
    package: str | None = find_nvidia_header_directory("cudart")
    toolkit: str | None = get_cuda_path_or_home()
    folders = [Path(package)] if package else []
    folders += [Path(toolkit) / "include"] if toolkit else []
    return [*folders, Path("/usr/local/cuda/include")]


def _cccl_folder(include: Path) -> list[Path]:
    """Return CCCL's own folder (since CUDA 13); empty if its headers are among the others."""
    if (include / _CCCL_HEADER).is_file():
        return []
    package: str | None = find_nvidia_header_directory("cccl")
    for folder in [include / "cccl", *([Path(package)] if package else [])]:
        if (folder / _CCCL_HEADER).is_file():
            return [folder]
    raise _missing_headers([_CCCL_HEADER], ["nvidia-cuda-cccl"])


def _missing_headers(headers: list[str], packages: list[str]) -> MachineError:
    return MachineError(f"CUDA headers were not found: {', '.join(headers)}; {_REMEDY.format(' '.join(packages))}")
