"""The machine code (SASS) of a compiled kernel, and its instructions by kind."""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import tempfile

from greenfast.device import cache, toolchain
from greenfast.device.elf import Image
from greenfast.spec.errors import MachineError

# Counter -> opcodes; an opcode also stands for its longer forms (HMMA for HMMA.16816.F32).
_OPCODES: dict[str, tuple[str, ...]] = {
    "cp_async": ("LDGSTS",),
    "hmma": ("HMMA",),
    "imma": ("IMMA",),
    "qmma": ("QMMA",),
    "hgmma": ("HGMMA",),
    "qgmma": ("QGMMA",),
    "igmma": ("IGMMA",),
    "mufu_ex2": ("MUFU.EX2",),
    "local_memory": ("LDL", "STL"),
    "ldsm": ("LDSM",),
    "bar_sync": ("BAR.SYNC", "BAR.RED"),
}
# "        /*0150*/              @!P0 LDGSTS.E.BYPASS.128 [R11], ..."; the encoding, "/* 0x...", does not match.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


def disassemble(cubin: bytes, entry: str) -> str:
    """The SASS of kernel ``entry`` and the functions that it calls, as nvdisasm prints it.

    Cached. Raises MachineError if nvdisasm is missing or cannot read the cubin, or if the cubin has no such kernel.
    """
    tool = toolchain.nvdisasm()
    # nvdisasm takes a quarter of a second to start, a cache load a millisecond.
    what = f"sass;{toolchain.file_fingerprint(tool)};{entry};".encode()
    key = hashlib.sha256(what + cubin).digest()
    cached = cache.load(key)
    if cached is not None:
        return cached[0].decode()
    command = [str(tool), "--print-code", *_only(cubin, entry)]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([*command, file.name], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise MachineError(f"nvdisasm cannot read the machine code of {entry!r}: {run.stderr.strip()}")
    sass = _section(run.stdout, entry)
    cache.store(key, [sass.encode()])
    return sass


def count_instructions(sass: str) -> dict[str, int]:
    """Instruction counts of a listing, by the counters of ``greenfast.judge.task.Counter``, and their ``total``.

    The counts are static: an instruction in a loop counts once. NOPs, which pad the end of a kernel, do not count.
    """
    opcodes = [opcode for opcode in _INSTRUCTION.findall(sass) if opcode != "NOP"]
    counts = {
        counter: sum(opcode == kind or opcode.startswith(f"{kind}.") for opcode in opcodes for kind in kinds)
        for counter, kinds in _OPCODES.items()
    }
    return {**counts, "total": len(opcodes)}


def _only(cubin: bytes, entry: str) -> list[str]:
    """Options that leave a library's other kernels out, which can take ten seconds; none where they do not apply."""
    try:
        symbols = Image(cubin).symbols
    except (LookupError, ValueError, struct.error):  # nvdisasm says what is wrong with it
        return []
    found = [number for number, symbol in enumerate(symbols) if symbol.name == entry]
    return ["--cuda-function-index", str(found[0])] if found else []


def _section(listing: str, entry: str) -> str:
    """The section of nvdisasm's listing for kernel ``entry``."""
    start = listing.find(f"\t.section\t.text.{entry},")
    if start < 0:
        raise MachineError(f"the machine code has no kernel {entry!r}")
    end = listing.find("\n//-----", start)
    return listing[start:] if end < 0 else listing[start:end].rstrip() + "\n"
