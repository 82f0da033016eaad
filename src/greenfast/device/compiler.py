"""Compile a kernel to machine code and PTX, through the cache. Needs no GPU and no driver.

CUDA is compiled by NVRTC, PTX assembled by ptxas; a cubin is read.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cuda.core import ProgramOptions
from cuda.core.utils import make_program_cache_key

from greenfast.device import assembler, cache, compiler_process, nvrtc, toolchain
from greenfast.device.compiler_log import parse_resources, readable
from greenfast.device.cubin import cubin_capability, cubin_entries, cubin_resources, read_cubin
from greenfast.device.module_variables import variable_bytes
from greenfast.device.nvrtc import fix_clock
from greenfast.device.sandbox import COMPILER_BYTES
from greenfast.device.tool_process import OUTPUT_BYTES
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, MachineError, UsageError
from greenfast.spec.facts import Resources
from greenfast.spec.kernel import KernelSource

# NVRTC looks for quoted includes in the program's folder first, by default the current one. There a stray file could
# silently replace a project header. This folder does not exist; it also keeps the current one out of the line table.
_NO_FOLDER = "/greenfast-rendered/"
#: Maximum number of files that an include by a macro may refer to.
_MAX_CANDIDATES = 4096
# A header's name as a compiler in its folder writes it, in a message and in PTX.
_RELATIVE = re.compile(r"(?:^|(?<= of ))\.{1,2}/[^\s\"(]*", re.MULTILINE)
_FILE_LINE = re.compile(r"^(\s*\.file\s+\d+ \")(/[^\"]*/\.{1,2}/[^\"]*)", re.MULTILINE)
_FILE = re.compile(r"^(\s*\.file\s+\d+ \")([^\"]*)", re.MULTILINE)
_LINE_NAME = re.compile(r'^[ \t]*#[ \t]*(?:line[ \t]+)?\d+[ \t]+"([^"\n]+)"', re.MULTILINE)
_NUMBERED_FOLDER = re.compile(r"<folder (\d+)>/")
_TIME = re.compile(rb"__(?:DATE|TIME)__")
_FILE_NAME = re.compile(rb"_FILE|source_location|(?<!static_)assert")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_COMPILER = re.compile(r"Cuda compilation tools, release [\d.]+, V([\d.]+)")


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel as machine code, with the compiler's report.

    A kernel in PTX has neither machine code nor resources without an assembler. A kernel in a cubin has no PTX.

    cubin: an ELF image for ``target``; its line table contains include folders, so equal kernels on two machines share
    ``kernel_hash`` but not always these bytes. log: the compiler's messages, including ``ptxas -v``.
    options: as given to the compiler, without folders. compile_ms: wall time of this call's compile or cache load.
    reported: its resources, None without machine code.
    """

    source: KernelSource
    target: Target
    cubin: bytes
    ptx: str
    log: str
    reported: Resources | None
    compiler: str
    options: tuple[str, ...]
    kernel_hash: str
    compile_ms: float
    from_cache: bool

    @property
    def resources(self) -> Resources:
        """The kernel's resources. Raises MachineError without machine code."""
        if self.reported is None:
            raise MachineError(f"{self.source.name}: {assembler.MISSING}")
        return self.reported


def compile_kernel(
    source: KernelSource, target: Target, *, use_cache: bool = True, isolated: bool = False
) -> CompiledKernel:
    """Compile one kernel.

    isolated: run NVRTC in a separate process, for third-party kernels: NVRTC may crash. A cached kernel starts no
    process.

    Raises CompileError with the compiler's messages if it refuses the source, if the source has no such kernel, if a
    file that it includes changes meanwhile, or if it crashes in a separate process; MachineError if NVRTC or the CUDA
    headers are missing or NVRTC does not know the target; UsageError for a target other than the one that the source
    requires.
    """
    if source.requires and source.requires != target.name:
        raise UsageError(
            f"{source.name}: kernel {source.entry!r} is for {source.requires} only and cannot be built for "
            f"{target.name}; --arch {source.requires} builds it"
        )
    start = time.perf_counter()
    content = _content(source)
    output, from_cache = _build(source, content, target, use_cache, isolated)
    compile_ms = (time.perf_counter() - start) * 1e3
    names = entries(output.ptx) if source.language != "cubin" else cubin_entries(read_cubin(output.cubin, source.name))
    if source.entry not in names:
        raise CompileError(
            f"{source.name}: no kernel {source.entry!r}, only: {', '.join(names) or 'none'}; "
            f'is it a __global__ function declared extern "C"?'
        )
    return CompiledKernel(
        source=source,
        target=target,
        cubin=output.cubin,
        ptx=output.ptx,
        log=output.log,
        reported=_resources(source, output) if output.cubin else None,
        compiler=_compiler(source, output.ptx),
        options=compile_options(source, target),
        kernel_hash=_hash(source, content),
        compile_ms=compile_ms,
        from_cache=from_cache,
    )


def _resources(source: KernelSource, output: nvrtc.CompilerOutput) -> Resources:
    if source.language == "cubin":
        image = read_cubin(output.cubin, source.name)
        resources = cubin_resources(output.cubin, image, source.entry, source.dynamic_smem_bytes)
    else:
        resources = parse_resources(output.log, source.entry, source.dynamic_smem_bytes)
    global_bytes, constant_bytes = variable_bytes(output.cubin, output.ptx)
    return replace(resources, global_bytes=global_bytes, constant_bytes=constant_bytes)


@functools.cache  # of the library that this process has loaded
def compiler_version() -> str:
    """Return this machine's compiler with its patch release, as in ``CompiledKernel.compiler``. Raises as a compile."""
    empty = KernelSource(
        entry="", source="// which compiler is this?\n", name="version.cu", include_dirs=(), block=(1, 1, 1)
    )
    return _read_compiler(to_ptx(empty, Target("sm_90")))


def compile_options(source: KernelSource, target: Target) -> tuple[str, ...]:
    """Return the compiler's options for a kernel, as in ``CompiledKernel.options``."""
    if source.language != "cuda":
        return assembler.options(target) if source.language == "ptx" else ()
    return tuple(flag.decode() for flag in _options(source, target, ()).as_bytes("nvrtc", "cubin"))


def to_ptx(
    source: KernelSource, target: Target, *, use_cache: bool = True, isolated: bool = False, assemble: bool = True
) -> str:
    """Compile to PTX with ``.loc`` lines, the input of ``compile_kernel``'s assembler. Raises the same errors.

    It contains every kernel of the source; ``source.entry`` may be empty or unknown.

    assemble: False skips machine code: it takes half of the time, and does not detect errors of the assembler.
    """
    return _build(source, _content(source), target, use_cache, isolated, assemble)[0].ptx


def entries(ptx: str) -> list[str]:
    """Return the compiled names of the kernels of a PTX text."""
    return _ENTRY.findall(ptx)


def _compiler(source: KernelSource, ptx: str) -> str:
    if source.language == "cubin":
        return "given as machine code"
    return assembler.compiler(ptx) if source.language == "ptx" else _read_compiler(ptx)


def _read_compiler(ptx: str) -> str:
    version = _COMPILER.search(ptx)
    return f"NVRTC {version[1]}" if version else "NVRTC"


def kernel_hash(source: KernelSource) -> str:
    """Return 16 hexadecimal digits of a SHA-256 over everything that determines the kernel.

    Included: entry, source, included project headers, block, dynamic shared memory. Not included: file names, folders,
    target, compiler.
    """
    return _hash(source, _content(source))


def _content(source: KernelSource) -> bytes:
    """Return the compiler's input; for CUDA its digest."""
    return _sources_digest(source) if source.language == "cuda" else source.source.encode() + source.binary


def _hash(source: KernelSource, content: bytes) -> str:
    launch = f"{source.entry};{source.block};{source.dynamic_smem_bytes};".encode()
    return hashlib.sha256(launch + content).hexdigest()[:16]


def _build(
    source: KernelSource, content: bytes, target: Target, use_cache: bool, isolated: bool, assemble: bool = True
) -> tuple[nvrtc.CompilerOutput, bool]:
    """Compile a source. Return the output, and whether it came from the cache. content: from ``_content``."""
    if "\0" in source.source:
        line = source.source[: source.source.index("\0")].count("\n") + 1
        raise CompileError(f"{source.name}: line {line} has a NUL byte, at which a compiler stops reading; delete it")
    if source.language == "ptx":
        return assembler.assemble(source.source, source.name, target, use_cache=use_cache)
    if source.language == "cubin":
        image = read_cubin(source.binary, source.name)
        capability = cubin_capability(source.binary, image)
        if capability[0] != target.capability[0] or capability[1] > target.capability[1]:
            raise CompileError(
                f"{source.name}: machine code for sm_{capability[0]}{capability[1]} does not run on {target.name}"
            )
        return nvrtc.CompilerOutput("read", source.binary, "", ""), False
    if not use_cache:
        return _run_nvrtc(source, content, target, isolated, assemble), False
    key: bytes = make_program_cache_key(
        code=source.source,
        code_type="c++",
        options=_options(source, target, (), assemble),
        target_type="cubin" if assemble else "ptx",
        # In place of the names of folders: they do not determine the content. The key has the compiler version without
        # its patch release.
        extra_digest=b"numbered folders;" + content + toolchain.fingerprint(),
    )
    folders = [*(str(folder.resolve()) for folder in source.include_dirs), *map(str, toolchain.include_dirs())]
    parts = cache.load(key)
    if parts is not None and len(parts) == 3:
        cubin, ptx, log = parts
        texts = _name_folders(ptx.decode(), log.decode(), folders)
        if texts is not None:
            return nvrtc.CompilerOutput("NVRTC_SUCCESS", cubin, *texts), True
    output = _run_nvrtc(source, content, target, isolated, assemble)
    numbered = _number_folders(output.ptx, output.log, folders, source.name)
    cache.store(key, [output.cubin, *(text.encode() for text in numbered)])
    return output, False


def _number_folders(ptx: str, log: str, folders: Sequence[str], source_name: str) -> tuple[str, str]:
    """Replace the folders of headers by their numbers, for the cache: they differ between environments.

    A header outside of all folders (``#include "../a.cuh"``) is stored relative to the nearest one. A name that no file
    has, from a #line directive, stays.
    """

    def number_folder(line: re.Match[str]) -> str:
        path = line[2]
        if path == source_name or not os.path.isabs(path) or not os.path.exists(path):
            return line[0]
        lengths = [len(os.path.commonpath([path, folder])) for folder in folders]
        nearest = lengths.index(max(lengths))
        return f"{line[1]}<folder {nearest}>/{os.path.relpath(path, folders[nearest])}"

    for number, folder in sorted(enumerate(folders), key=lambda item: len(item[1]), reverse=True):
        log = log.replace(f"{folder}/", f"<folder {number}>/")
    return _FILE.sub(number_folder, ptx), log


def _name_folders(ptx: str, log: str, folders: Sequence[str]) -> tuple[str, str] | None:
    """Undo ``_number_folders`` with this environment's folders. None if a header is not there."""

    def name_folder(numbered: re.Match[str]) -> str:
        return f"{folders[int(numbered[1])]}/"

    def name_file(line: re.Match[str]) -> str:
        path = _NUMBERED_FOLDER.sub(name_folder, line[2])
        if path == line[2]:
            return line[0]
        path = os.path.normpath(path)
        os.stat(path)
        return line[1] + path

    try:
        return _FILE.sub(name_file, ptx), _NUMBERED_FOLDER.sub(name_folder, log)
    except (IndexError, FileNotFoundError, NotADirectoryError):
        return None


def _run_nvrtc(
    source: KernelSource, content: bytes, target: Target, isolated: bool, assemble: bool
) -> nvrtc.CompilerOutput:
    library = toolchain.nvrtc_library()
    _require_fixed_clock(source, library)
    folders = tuple(str(folder.resolve()) for folder in source.include_dirs)
    headers = toolchain.include_dirs()
    options = tuple(_options(source, target, headers, assemble).as_bytes("nvrtc", "cubin"))
    may_read = (*folders, *map(str, headers), str(library.parent), str(library.resolve().parent))
    # A separate process can compile in the project's folder, so that __FILE__ does not contain that folder.
    isolated = isolated or any(_FILE_NAME.search(text) for text in _sources(source))
    job = nvrtc.Job(source.source, _NO_FOLDER + source.name, options, folders, may_read if isolated else None)
    title = f"{source.name}{f': kernel {source.entry!r}' if source.entry else ''}"
    try:
        output = compiler_process.run(job) if isolated else nvrtc.run(job)
    except compiler_process.CompilerCrashError as e:
        raise CompileError(
            f"{title}: the compiler, {_nvrtc_version()}, crashed ({e}) while it compiled for {target.name}, without a "
            f"message; it may use {COMPILER_BYTES >> 20} MiB of memory; shorten the kernel until it compiles, or try "
            "nvcc"
        ) from None
    if len(output.cubin) + len(output.ptx) > OUTPUT_BYTES:
        raise CompileError(
            f"{title}: its machine code has {len(output.cubin) >> 20} MiB; at most {OUTPUT_BYTES >> 20} are judged"
        )
    if _content(source) != content:  # its hash, and its place in the cache, would be another kernel's
        raise CompileError(f"{title}: a file that it includes changed while it was compiled; compile it again")
    ptx, log = _text(output.ptx, source, folders), _text(output.log, source, folders)
    if output.status == "NVRTC_ERROR_COMPILATION":
        raise CompileError(f"{title} does not compile for {target.name}:\n{readable(log, ptx)}")
    if output.status == "NVRTC_ERROR_INVALID_OPTION":
        reason = f"{_nvrtc_version()} does not take the options for {target.name}, but a newer one may"
        raise MachineError(f"{reason}: {log.strip()}")
    if output.status == "NVRTC_ERROR_OUT_OF_MEMORY":
        raise CompileError(f"{title}: the compiler needs more than the {COMPILER_BYTES >> 20} MiB that it may use")
    if output.status != "NVRTC_SUCCESS":
        raise RuntimeError(f"{title}: {output.status}: {log.strip()}")
    return nvrtc.CompilerOutput(output.status, output.cubin, ptx, log)


def _nvrtc_version() -> str:
    return "NVRTC " + ".".join(str(number) for number in nvrtc.version())


def _options(source: KernelSource, target: Target, folders: tuple[Path, ...], assemble: bool = True) -> ProgramOptions:
    return ProgramOptions(
        name=_NO_FOLDER + source.name,
        # For a virtual architecture NVRTC stops after PTX.
        arch=target.name if assemble else target.name.replace("sm_", "compute_"),
        std="c++17",
        lineinfo=True,
        ptxas_options=["-v"] if assemble else None,
        # With a driver installed NVRTC uses its own cache; its results have no ptxas log.
        no_cache=True,
        include_path=[str(folder) for folder in folders],
    )


def _text(text: str, source: KernelSource, folders: Sequence[str]) -> str:
    """Restore the source's name and the headers' absolute paths in the compiler's output.

    A separate process compiles in the first folder, so its paths are relative to it. The compiler puts its folder in
    front of names in #line directives; the text has them as written.
    """
    text = text.replace(_NO_FOLDER + source.name, source.name)
    if folders:
        text = _RELATIVE.sub(lambda name: os.path.normpath(os.path.join(folders[0], name[0])), text)
        text = _FILE_LINE.sub(lambda line: line[1] + os.path.normpath(line[2]), text)
    if names := [name for name in _LINE_NAME.findall(source.source) if not os.path.isabs(name)]:

        def restore_name(line: re.Match[str]) -> str:
            written = [name for name in names if line[2].endswith(f"/{name}")]
            return f"{line[1]}{written[0]}" if written and not os.path.exists(line[2]) else line[0]

        text = _FILE.sub(restore_name, text)
    return text.rstrip() + "\n" if text else ""


def _require_fixed_clock(source: KernelSource, library: Path) -> None:
    """Raise CompileError for a source with __DATE__ or __TIME__ if the compiler's clock cannot be fixed."""
    if fix_clock(library):
        return
    if any(_TIME.search(text) for text in _sources(source)):
        raise CompileError(
            f"{source.name}: it or a header that it includes has __DATE__ or __TIME__, with which one source gives two "
            "machine codes, and the compiler's clock cannot be fixed on this system; take them out"
        )


def _sources_digest(source: KernelSource) -> bytes:
    """Return a SHA-256 over ``_sources``. Raises CompileError."""
    digest = hashlib.sha256()
    for text in _sources(source):
        digest.update(text)
    return digest.digest()


def _sources(source: KernelSource) -> Iterator[bytes]:
    """Yield the source and its project headers in the order of inclusion, each after its name and length.

    Includes are followed if they resolve in ``include_dirs`` or next to the including header; other headers belong to
    the compiler or are missing. Conditions are not evaluated, so an unused header may count too. For ``#include MACRO``
    all files of the folders count. Raises CompileError for a pipe or a device, and for too many files.
    """
    folders = [os.fspath(folder) for folder in source.include_dirs]
    seen: set[tuple[int, int]] = set()

    def visit(included_name: bytes, text: bytes, folder: str | None) -> Iterator[bytes]:
        yield b"%d:%s;%d:%s;" % (len(included_name), included_name, len(text), text)
        for quote, name in includes(text):
            including = [folder] if folder is not None and quote == b'"' else []
            for candidate in (*including, *folders):
                path = os.path.join(candidate, name.decode(errors="replace"))
                try:
                    status = os.stat(path)
                except (OSError, ValueError):
                    continue
                _require_no_pipe(source, name.decode(errors="replace"), status)
                if stat.S_ISREG(status.st_mode):
                    if (status.st_dev, status.st_ino) not in seen:
                        seen.add((status.st_dev, status.st_ino))
                        yield from visit(name, Path(path).read_bytes(), os.path.dirname(path))
                    break
        if includes_by_a_macro(text):
            for file in _list_files(source, folders):
                status = file.stat()
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    yield b"%d;" % status.st_size + file.read_bytes()

    yield from visit(b"", source.source.encode(), None)


def _list_files(source: KernelSource, folders: Sequence[str]) -> list[Path]:
    """List all files in the folders. Raises CompileError for a pipe, and for too many files."""
    files = []
    for path in (path for folder in folders for path in Path(folder).rglob("*")):
        try:
            status = path.stat()
        except OSError:  # a broken link
            continue
        _require_no_pipe(source, path.name, status)
        if stat.S_ISREG(status.st_mode):
            files.append(path)
        if len(files) > _MAX_CANDIDATES:
            raise CompileError(
                f"{source.name}: it includes a file by a macro, and this may be any of more than {_MAX_CANDIDATES} in "
                f"{', '.join(folders)}; write the name out, or keep the source in a folder of its own"
            )
    return sorted(files)


def _require_no_pipe(source: KernelSource, name: str, status: os.stat_result) -> None:
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise CompileError(
            f"{source.name}: it includes {name!r}, a pipe or a device: a compiler would wait for it; include "
            "ordinary files"
        )


_INCLUDE = re.compile(
    rb'(?:^[ \t]*#[ \t]*include[ \t]*|\b__has_include[ \t]*\([ \t]*)(["<])([^">\n]+)[">]', re.MULTILINE
)
#: Any directive that opens a file, also forms that _INCLUDE does not match: with a macro or a comment.
_ANY_INCLUDE = re.compile(rb"(?:#|%:)(?:\s|/\*.*?\*/)*(?:include|import)|\b__has_include", re.DOTALL)
_ASKS_FOR_IT = re.compile(rb"(?:#[ \t]*ifn?def[ \t]+|\bdefined[ \t]*\(?[ \t]*)__has_include\b")
_SPLICE = re.compile(rb"\\[ \t]*\r?\n")


@functools.lru_cache(maxsize=512)
def includes(text: bytes) -> list[tuple[bytes, bytes]]:
    """Return (opening quote, name) of each include, cached: a process hashes the same headers for every kernel.

    Conditions are not evaluated, so some may never be read.
    """
    return _INCLUDE.findall(_SPLICE.sub(b"", text))


@functools.lru_cache(maxsize=512)
def includes_by_a_macro(text: bytes) -> bool:
    """Return whether a source may open a file that is not in ``includes``."""
    rest = _INCLUDE.sub(b"", _ASKS_FOR_IT.sub(b"", _SPLICE.sub(b"", text)))
    return _ANY_INCLUDE.search(rest) is not None
