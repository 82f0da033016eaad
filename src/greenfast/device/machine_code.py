"""The machine code (SASS) of a compiled kernel: its instructions by kind, and faults that its control flow shows."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from greenfast.device import cache, toolchain
from greenfast.device.cubin import Image, ImageError, cubin_entries
from greenfast.device.tool_process import ToolError, memory_for, run_tool
from greenfast.spec.errors import DamagedCodeError

_TIMEOUT_S = 120
#: Bytes of a cubin up to which all of its kernels are listed at once.
_SMALL_CUBIN = 1 << 18
#: Memory for nvdisasm in addition to the limit of tools.
_LISTING_MEMORY = 1 << 30
_MAX_MESSAGE = 1000

# Counter -> opcodes; an opcode includes its longer forms (HMMA: HMMA.16816.F32).
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

_LABEL = re.compile(r"^([.$\w]+):")
_WHOLE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*)")
_TARGET = re.compile(r"`\(([.$\w]+)\)")
_BULK_STORE = re.compile(r"(?:UBLKCP|UBLKRED)\.G\.S\b|UTMASTG|UTMAREDG")


def disassemble(cubin: bytes, entry: str) -> str:
    """Return the SASS of kernel ``entry`` and of the functions that it calls, as printed by nvdisasm. Cached.

    Raises MachineError if nvdisasm is missing, DamagedCodeError if it cannot read the cubin, needs more time or
    memory than it may use, or if the cubin has no such kernel.
    """
    tool = toolchain.nvdisasm()
    # nvdisasm takes a quarter of a second to start, a cache load a millisecond.
    cached = cache.load(_make_key(tool, cubin, entry))
    if cached is not None:
        return cached[0].decode()
    with tempfile.TemporaryDirectory(prefix="greenfast-nvdisasm-") as temporary:
        folder = Path(temporary).resolve()
        file = folder / "kernel.cubin"
        file.write_bytes(cubin)
        kernels = _find_listed_kernels(cubin, entry)
        selection = ["--cuda-function-index", ",".join(map(str, kernels.values()))] if entry in kernels else []
        options = ["--print-code", *selection, str(file)]
        memory = _LISTING_MEMORY + memory_for(len(cubin))
        try:
            run = run_tool(tool, options, folder, name="nvdisasm", memory_bytes=memory, seconds=_TIMEOUT_S)
        except ToolError as e:
            raise DamagedCodeError(f"the machine code of {entry!r} cannot be read: nvdisasm {e}") from None
    if run.exit_code != 0:
        message = run.errors.strip().replace(str(file), "the cubin")[-_MAX_MESSAGE:]
        raise DamagedCodeError(f"nvdisasm cannot read the machine code of {entry!r}: {message}")
    sections = {name: _find_section(run.output, name) for name in (entry, *kernels)}
    for name, sass in sections.items():
        cache.store(_make_key(tool, cubin, name), [sass.encode()])
    return sections[entry]


def _make_key(tool: Path, cubin: bytes, entry: str) -> bytes:
    return hashlib.sha256(f"sass;{toolchain.file_fingerprint(tool)};{entry};".encode() + cubin).digest()


def count_instructions(sass: str) -> dict[str, int]:
    """Count the instructions of a listing by the counters of ``greenfast.judge.task.Counter``, and their ``total``.

    The counts are static: an instruction in a loop counts once. NOPs do not count: they pad the end of a kernel.
    """
    opcodes = [opcode for opcode in _INSTRUCTION.findall(sass) if opcode != "NOP"]
    counts = {
        counter: sum(opcode == kind or opcode.startswith(f"{kind}.") for opcode in opcodes for kind in kinds)
        for counter, kinds in _OPCODES.items()
    }
    return {**counts, "total": len(opcodes)}


def parse_listing(sass: str) -> tuple[list[tuple[str, str, str, str]], dict[str, int]]:
    """Return the instructions of a listing (address, predicate, opcode, operands), and the index of each label."""
    code: list[tuple[str, str, str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif match := _WHOLE.match(line):
            code.append((match[1], match[2] or "", match[3], match[4]))
    return code, labels


def find_reachable(
    code: list[tuple[str, str, str, str]], labels: dict[str, int], start: int, ends: Callable[[str, str], bool]
) -> set[int]:
    """Return the indices of the instructions on all paths from ``start``. Every branch may go both ways.

    ends: returns whether an instruction (opcode, operands) ends a path.
    """
    reached: set[int] = set()
    pending = [start]
    while pending:
        index = pending.pop()
        if index in reached or index >= len(code):
            continue
        reached.add(index)
        _, predicate, opcode, operands = code[index]
        kind = opcode.split(".")[0]
        if ends(opcode, operands):
            continue
        if kind in ("BRX", "JMX"):  # indirect branch
            pending += labels.values()
        if kind != "BSSY":  # its target is a reconvergence point
            pending += [labels[target] for target in _TARGET.findall(operands) if target in labels]
        always = not predicate and (kind in ("EXIT", "RET") or (kind == "BRA" and operands.lstrip().startswith("`")))
        if not always:
            pending.append(index + 1)
    return reached


def find_unawaited_stores(sass: str) -> list[str]:
    """Return the bulk stores from shared memory in a listing without any path to a wait.

    Machine code shows neither commits of stores nor conditions, so a wait on any path counts.
    """
    code, labels = parse_listing(sass)
    stores = []
    for index, (address, _, opcode, _) in enumerate(code):
        if _BULK_STORE.match(opcode):
            reached = find_reachable(code, labels, index, lambda *_: False)
            if not any(code[n][2].startswith("DEPBAR.LE") and code[n][3].split()[1:2] == ["0x0"] for n in reached):
                stores.append(f"{opcode} at {address}")
    return stores


def _find_listed_kernels(cubin: bytes, entry: str) -> dict[str, int]:
    """Return the kernels to list with ``entry``, and their symbols' numbers; empty for a cubin that cannot be read.

    A small cubin's kernels are listed together. Of a library's module ``entry`` is listed alone, to save 10 s.
    """
    try:
        image = Image(cubin)
        names = cubin_entries(image) if len(cubin) <= _SMALL_CUBIN else [entry]
        return {symbol.name: number for number, symbol in enumerate(image.symbols) if symbol.name in names}
    except ImageError:  # nvdisasm reports the damage
        return {}


def _find_section(listing: str, entry: str) -> str:
    """Return the section of kernel ``entry`` in a listing of nvdisasm."""
    start = listing.find(f"\t.section\t.text.{entry},")
    if start < 0:
        raise DamagedCodeError(f"the machine code has no kernel {entry!r}")
    end = listing.find("\n//-----", start)
    return listing[start:] if end < 0 else listing[start:end].rstrip() + "\n"


_WAIT = "ACQBULK"
# Accesses to global memory, without bulk copies (UBLKCP, UTMALDG): the instruction does not show their addresses.
_ACCESSES = frozenset(("LDG", "LD", "STG", "ST", "ATOM", "ATOMG", "RED", "REDG", "LDGSTS", "UTMASTG", "UTMAREDG"))

_LOADS = frozenset(("LDG", "LD", "LDGSTS"))


def early_launch_faults(sass: str, *, early_loads: bool = False, constant_loads: bool = False) -> list[str]:
    """List accesses to global memory that may happen before the wait, in a listing from ``machine_code.disassemble``.

    One line each, with the instruction and its address in the kernel; empty for a kernel that may be launched early.
    Every path from the entry is followed, as if every branch could go both ways.

    early_loads, constant_loads: whether loads before the wait, and loads of constant memory, are allowed. Machine code
    does not show which buffer they read.
    """
    code, labels = parse_listing(sass)
    faults = [
        f"{opcode} at {address}: a load of constant memory, and the compiler may move it ahead of the wait"
        for address, _, opcode, _ in code
        if not constant_loads and opcode.split(".")[0] == "LDG" and "CONSTANT" in opcode
    ]
    if not any(opcode == _WAIT for _, _, opcode, _ in code):
        return [*faults, f"no {_WAIT} (griddepcontrol.wait): the kernel never waits for the launch before it"]
    accesses = _ACCESSES - _LOADS if early_loads else _ACCESSES
    for index in sorted(find_reachable(code, labels, 0, lambda opcode, _: opcode == _WAIT)):
        address, _, opcode, _ = code[index]
        if opcode.split(".")[0] in accesses and "CONSTANT" not in opcode:
            faults.append(f"{opcode} at {address}: reached without a wait for the launch before")
    return faults
