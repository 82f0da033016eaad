"""Assemble PTX to machine code with ptxas, a separate program. Needs no GPU."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

from greenfast.device import cache, toolchain
from greenfast.device.nvrtc import CompilerOutput
from greenfast.device.tool_process import ToolError, memory_for, run_tool
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError

_TIMEOUT_S = 600
_VERSION = re.compile(r"release [\d.]+, V(([\d]+)\.([\d]+)[\d.]*)")
_PTX_VERSION = re.compile(r"^\s*\.version\s+(\d+)\.(\d+)", re.MULTILINE)
_NOISE = re.compile(r"ptxas fatal +: Ptx assembly aborted|ptxas info ")
#: The message without ptxas.
MISSING = "no ptxas here; pip install nvidia-cuda-nvcc (version 13), or put a CUDA toolkit's bin folder on PATH"


def options(target: Target) -> tuple[str, ...]:
    """Return ptxas's options for a target."""
    return (f"--gpu-name={target.name}", "--verbose", "--generate-line-info")


def compiler(ptx: str) -> str:
    """Return the assembler for a PTX text with its patch release, such as "ptxas 13.0.88", or "no assembler"."""
    tool = _tool_for(ptx)
    return f"ptxas {_release(tool)[0]}" if tool is not None else "no assembler"


def _tool_for(ptx: str) -> Path | None:
    """Return the first assembler that supports the text's PTX version, else the first assembler."""
    tools = toolchain.assemblers()
    asked = _PTX_VERSION.search(ptx)
    needed = (int(asked[1]), int(asked[2])) if asked else (0, 0)
    return next((tool for tool in tools if _release(tool)[1] >= needed), tools[0] if tools else None)


@functools.cache
def _release(tool: Path) -> tuple[str, tuple[int, int]]:
    """Return an assembler's release, and the newest PTX version that it supports."""
    output = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
    version = _VERSION.search(output)
    if version is None:
        return "of unknown release", (0, 0)
    major, minor = int(version[2]), int(version[3])
    # CUDA 12.0 to 12.5 read PTX 8.0 to 8.5, CUDA 12.6 to 12.9 PTX 8.5 to 8.8, and CUDA 13.0 begins with PTX 9.0.
    return version[1], (major - 4, minor - 1 if major == 12 and minor > 5 else minor)


def assemble(ptx: str, name: str, target: Target, *, use_cache: bool = True) -> tuple[CompilerOutput, bool]:
    """Assemble a PTX text; return the machine code (empty without an assembler), and whether it came from the cache.

    name: of the source, for messages. Raises CompileError with the assembler's messages.
    """
    tool = _tool_for(ptx)
    if tool is None:
        return CompilerOutput("no assembler", b"", ptx, ""), False
    named = "\0".join((compiler(ptx), *options(target), ptx))
    key = b"ptxas2:" + hashlib.sha256(named.encode()).digest()
    parts = cache.load(key) if use_cache else None
    if parts is not None and len(parts) == 2:
        return CompilerOutput("assembled", parts[0], ptx, parts[1].decode()), True
    with tempfile.TemporaryDirectory(prefix="greenfast-ptxas-") as temporary:
        folder = Path(temporary).resolve()
        source, cubin = folder / "source.ptx", folder / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        try:
            # The name for messages: Triton's executable is called ptxas-blackwell.
            done = run_tool(
                tool,
                [*options(target), str(source), "--output-file", str(cubin)],
                folder,
                name="ptxas",
                memory_bytes=memory_for(len(ptx)),
                seconds=_TIMEOUT_S,
            )
        except ToolError as e:
            raise CompileError(f"{name}: ptxas {e} for {target.name}; shorten the kernel until it assembles") from None
        log = (done.errors + done.output).replace(str(source), name)
        if done.exit_code != 0 or not cubin.is_file() or cubin.is_symlink():
            lines = [line for line in log.splitlines() if line.strip() and not _NOISE.match(line)]
            raise CompileError(f"{name} does not assemble for {target.name}:\n" + "\n".join(lines[:20]))
        output = CompilerOutput("assembled", cubin.read_bytes(), ptx, log)
    if use_cache:
        cache.store(key, [output.cubin, log.encode()])
    return output, False
