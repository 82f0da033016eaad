"""Compile a kernel with NVRTC to machine code and PTX, through the cache. Needs no GPU and no driver."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions
from cuda.core.utils import make_program_cache_key

from greenfast.build import cache, toolchain
from greenfast.build.diagnostics import readable
from greenfast.build.resources import device_variable_bytes, parse_resources
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, MachineError, UsageError
from greenfast.spec.kernel import KernelSource
from greenfast.spec.record import Resources

# NVRTC looks for quoted includes in the program's own folder first, by default the current one, where a stray file
# could replace a project header unseen. No such folder exists; it also keeps the current one out of the line table.
_NO_FOLDER = "/greenfast-rendered/"
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(["<])([^">\n]+)[">]', re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_COMPILER = re.compile(r"Cuda compilation tools, release [\d.]+, V([\d.]+)")


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel as machine code, with what the compiler said of it.

    cubin: an ELF image for ``target``; it holds include folders in its line table, so equal kernels of two machines
    share ``kernel_hash`` but not always these bytes. log: the compiler's messages, of ``ptxas -v`` too.
    options: as given to the compiler, folders left out. compile_ms: wall time of this call's compile or cache load.
    """

    source: KernelSource
    target: Target
    cubin: bytes
    ptx: str
    log: str
    resources: Resources
    compiler: str
    options: tuple[str, ...]
    kernel_hash: str
    compile_ms: float
    from_cache: bool


@dataclass(frozen=True)
class _Output:
    """What one run of NVRTC gives."""

    cubin: bytes
    ptx: str
    log: str


def compile_kernel(source: KernelSource, target: Target, *, use_cache: bool = True) -> CompiledKernel:
    """Compile one kernel.

    Raises CompileError with the compiler's messages where it refuses the source or the source has no such kernel, and
    MachineError where NVRTC or the CUDA headers are missing, or NVRTC does not know the target. Raises UsageError for a
    target that is not the one that the source requires.
    """
    if source.requires and source.requires != target.name:
        raise UsageError(
            f"{source.name}: kernel {source.entry!r} is for {source.requires} alone and cannot be built for "
            f"{target.name}; --arch {source.requires} builds it"
        )
    start = time.perf_counter()
    output, from_cache = _build(source, target, use_cache)
    compile_ms = (time.perf_counter() - start) * 1e3
    found = entries(output.ptx)
    if source.entry not in found:
        raise CompileError(
            f"{source.name}: no kernel {source.entry!r}, only: {', '.join(found) or 'none'}; "
            f'is it a __global__ function declared extern "C"?'
        )
    version = _COMPILER.search(output.ptx)
    return CompiledKernel(
        source=source,
        target=target,
        cubin=output.cubin,
        ptx=output.ptx,
        log=output.log,
        resources=msgspec.structs.replace(
            parse_resources(output.log, source.entry, source.dynamic_smem_bytes),
            global_bytes=device_variable_bytes(output.ptx),
        ),
        compiler=f"NVRTC {version[1]}" if version else "NVRTC",
        options=tuple(flag.decode() for flag in _options(source, target, ()).as_bytes("nvrtc", "cubin")),
        kernel_hash=kernel_hash(source),
        compile_ms=compile_ms,
        from_cache=from_cache,
    )


def to_ptx(source: KernelSource, target: Target, *, use_cache: bool = True) -> str:
    """The PTX that the machine code of ``compile_kernel`` is assembled from, with ``.loc`` lines; raises the same.

    It holds every kernel of the source; ``source.entry`` need not be one of them and may be empty.
    """
    return _build(source, target, use_cache)[0].ptx


def entries(ptx: str) -> list[str]:
    """The kernels of a PTX text, under the names that the compiler gave them."""
    return _ENTRY.findall(ptx)


def kernel_hash(source: KernelSource) -> str:
    """16 hexadecimal digits of a SHA-256 over what decides the kernel.

    That is the entry, the source, the project headers that it reaches, the block and the dynamic shared memory; not
    file names or folders, the target or the compiler.
    """
    launch = f"{source.entry};{source.block};{source.dynamic_smem_bytes};".encode()
    return hashlib.sha256(launch + _sources_digest(source)).hexdigest()[:16]


def _build(source: KernelSource, target: Target, use_cache: bool) -> tuple[_Output, bool]:
    """The compiler's output for a source, and whether it came from the cache."""
    if not use_cache:
        return _run_nvrtc(source, target), False
    key: bytes = make_program_cache_key(
        code=source.source,
        code_type="c++",
        options=_options(source, target, ()),
        target_type="cubin",
        # In place of the folders' names, which say nothing about the content; the key's own compiler version has no
        # patch release.
        extra_digest=_sources_digest(source) + toolchain.fingerprint(),
    )
    parts = cache.load(key)
    if parts is not None and len(parts) == 3:
        cubin, ptx, log = parts
        return _Output(cubin, ptx.decode(), log.decode()), True
    output = _run_nvrtc(source, target)
    cache.store(key, [output.cubin, output.ptx.encode(), output.log.encode()])
    return output, False


def _run_nvrtc(source: KernelSource, target: Target) -> _Output:
    toolchain.nvrtc_library()
    folders = (*(folder.resolve() for folder in source.include_dirs), *toolchain.cuda_include_dirs())
    program = Program(source.source, "c++", options=_options(source, target, folders))
    try:
        cubin = bytes(program.compile("cubin").code)
    except Exception as e:  # cuda.core exports no class for a compiler's error; its message names NVRTC's status
        if "NVRTC_ERROR_COMPILATION" in str(e):
            messages = readable(_log(program, source), _ptx(program, source))
            kernel = f": kernel {source.entry!r}" if source.entry else ""
            what = f"{source.name}{kernel} does not compile for {target.name}"
            raise CompileError(f"{what}:\n{messages}") from None
        if "NVRTC_ERROR_INVALID_OPTION" in str(e):
            version = ".".join(str(number) for number in nvrtc.nvrtcVersion()[1:])
            what = f"NVRTC {version} does not take the options for {target.name}, a newer one may"
            raise MachineError(f"{what}: {_log(program, source).strip()}") from None
        raise
    return _Output(cubin, _ptx(program, source), _log(program, source))


def _options(source: KernelSource, target: Target, folders: tuple[Path, ...]) -> ProgramOptions:
    return ProgramOptions(
        name=_NO_FOLDER + source.name,
        arch=target.name,
        std="c++17",
        lineinfo=True,
        ptxas_options=["-v"],
        # With a driver at hand NVRTC keeps a cache of its own, and what comes from there has no ptxas log.
        no_cache=True,
        include_path=[str(folder) for folder in folders],
    )


def _log(program: Program, source: KernelSource) -> str:
    """The compiler's log, also where it failed."""
    return _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program, source)


def _ptx(program: Program, source: KernelSource) -> str:
    """The PTX, also where ptxas refused it; empty where the compiler did not get that far.

    It is that of the same run as the machine code. Compiling to PTX with cuda.core would be a second run, and asks
    for a driver.
    """
    return _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program, source)


def _text(get_size: Callable[..., Any], get: Callable[..., Any], program: Program, source: KernelSource) -> str:
    _, size = get_size(program.handle)
    if not size:
        return ""
    buffer = bytearray(size)
    get(program.handle, buffer)
    text = buffer.decode(errors="replace").replace("\0", "")
    return text.replace(_NO_FOLDER + source.name, source.name).rstrip() + "\n"


def _sources_digest(source: KernelSource) -> bytes:
    """SHA-256 over the source and, in the order of their includes, the project headers that it reaches.

    Includes are followed wherever they resolve in ``include_dirs`` or beside the including header; the others are the
    compiler's own, or missing. Conditions are not evaluated, so a header that is never read may count as well.
    """
    digest = hashlib.sha256()
    seen: set[Path] = set()

    def visit(spelled: bytes, text: bytes, folder: Path | None) -> None:
        digest.update(b"%d:%s;%d:%s;" % (len(spelled), spelled, len(text), text))
        for quote, name in _INCLUDE.findall(text):
            beside = [folder] if folder is not None and quote == b'"' else []
            for candidate in (*beside, *source.include_dirs):
                path = candidate / name.decode(errors="replace")
                if path.is_file():
                    if path.resolve() not in seen:
                        seen.add(path.resolve())
                        visit(name, path.read_bytes(), path.parent)
                    break

    visit(b"", source.source.encode(), None)
    return digest.digest()
