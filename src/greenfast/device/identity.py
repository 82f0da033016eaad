"""The identity of a measured kernel: its machine code and its launch.

A hash over the machine code shows whether a measured time is still valid: it does not change when a struct is renamed,
a header moved or a comment rewritten. A hash over the sources (``compiler.kernel_hash``) changes with every edit.
"""

from __future__ import annotations

import bisect
import hashlib
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from greenfast.device.compiler import CompiledKernel
from greenfast.device.elf import ALLOC, UNDEFINED, Image, ImageError
from greenfast.device.machine_code import disassemble
from greenfast.device.module_variables import HEAP_BYTES, HEAP_FUNCTIONS
from greenfast.spec.errors import DamagedCodeError
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.kernel import Argument, KernelSource, Launch, Packed, Program, Struct, TensorMap

# Attributes of .nv.info with symbol numbers, which change with every unused constant.
_PARAM_CBANK, _EXTERNS = 0x0A, 0x0F
_SIZED = 4  # the format of an attribute with a length and bytes; others have a 16-bit value
# c[0x4] holds the addresses of the module's variables, including unused ``static constexpr`` members.
_ADDRESSES = ".nv.constant4"
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]+)\*/.*?\bc\[0x4\]\[([^\]]*)\]")
# Fields of an instruction's first eight bytes. The offset is in units of 4 bytes, in LDCU of 8.
_OFFSET_AT, _OFFSET_MASK, _BANK_AT, _BANK_MASK = 40, 0x3FFF, 54, 0x1F
_PRINTABLE = frozenset(b"\t\n" + bytes(range(0x20, 0x7F)))


def code_hash(kernel: CompiledKernel) -> str:
    """Return 16 hexadecimal digits of a SHA-256 over the machine code that a launch of the kernel executes.

    Included: the instructions of the kernel and of called functions, constant banks, initial values of referenced
    variables, registers, stack and static shared memory, parameter layout, launch bounds, and cluster. Not included:
    names, line tables, paths, and unreferenced variables of the module. Grid, block, dynamic shared memory and
    arguments are in ``launch_facts``.

    Empty for PTX that was not assembled. Raises DamagedCodeError if the cubin cannot be read or has no such
    kernel, and MachineError without nvdisasm.
    """
    if kernel.reported is None:
        return ""
    return _read_code(kernel)[1]


def check_code(kernel: CompiledKernel) -> None:
    """Read all of a kernel's machine code that records and gates need, as another author's cubin may be damaged.

    Raises DamagedCodeError, or MachineError without nvdisasm.
    """
    if kernel.cubin:
        disassemble(kernel.cubin, kernel.source.entry)
        code_hash(kernel)
        state_variables(kernel)


def _read_code(kernel: CompiledKernel) -> tuple[_Code, str]:
    """Return the code and its digest. Raises DamagedCodeError."""
    try:
        code = _Code(kernel)
        return code, code.digest()
    except (LookupError, ValueError, struct.error, OverflowError) as e:
        raise DamagedCodeError(f"the machine code of {kernel.source.entry!r} cannot be read: {e}") from e


def launch_facts(source: KernelSource, launch: Launch, dims: Mapping[str, int]) -> LaunchFacts:
    """The facts of a launch for a shape. Buffers are numbered by first use: their names and addresses do not matter."""
    numbers: dict[str, int] = {}
    return LaunchFacts(
        dims=dict(dims),
        grid=launch.grid,
        block=source.block,
        dynamic_smem_bytes=source.dynamic_smem_bytes,
        cluster=launch.cluster,
        early=launch.early,
        cooperative=launch.cooperative,
        arguments="; ".join(_argument(a, lambda name: numbers.setdefault(name, len(numbers))) for a in launch.args),
    )


@lru_cache(maxsize=256)  # a listing and a pass over an image of many megabytes
def state_variables(kernel: CompiledKernel) -> Mapping[str, int]:
    """Return the variables that a kernel references and could use to keep state across launches: bytes by name.

    The name "" is for memory without a name: a section with computed addresses, or the device heap if the kernel
    allocates. Texts of asserts and printf do not count; read-only tables of numbers do.

    Used for a cubin with several kernels and no PTX: there ``Resources.global_bytes`` counts the whole module.

    Raises MachineError as ``code_hash`` does.
    """
    code, _ = _read_code(kernel)
    return code.reached((".nv.global", ".nv.constant3"))


def launches_of(program: Program, shape: str, dims: Mapping[str, int]) -> dict[str, tuple[KernelSource, LaunchFacts]]:
    """Return each launch of a program by its name in records: the shape, or "SHAPE launch NUMBER" for several."""
    return {
        shape if len(program.steps) == 1 else f"{shape} launch {n}": (
            step.kernel,
            launch_facts(step.kernel, step.launch, dims),
        )
        for n, step in enumerate(program.steps)
    }


def launch_differences(then: LaunchFacts, now: LaunchFacts) -> list[str]:
    """The differences between two launches, such as "the grid (1x8x1, now 2x8x1)"; empty if there are none."""
    before, after = then.arguments.split("; "), now.arguments.split("; ")
    pairs = [
        ("the grid", _by(then.grid), _by(now.grid)),
        ("the block", _by(then.block), _by(now.block)),
        ("the dynamic shared memory", f"{then.dynamic_smem_bytes} bytes", f"{now.dynamic_smem_bytes} bytes"),
        ("the cluster", _by(then.cluster), _by(now.cluster)),
        ("the early launch", "yes" if then.early else "no", "yes" if now.early else "no"),
        ("the cooperative launch", "yes" if then.cooperative else "no", "yes" if now.cooperative else "no"),
        ("the number of arguments", str(len(before)), str(len(after))),
    ]
    if len(before) == len(after):
        pairs += [(f"argument {i}", *both) for i, both in enumerate(zip(before, after, strict=True))]
    return [f"{what} ({old}, now {new})" for what, old, new in pairs if old != new]


def _by(extents: Sequence[int]) -> str:
    return "x".join(map(str, extents))


def _argument(argument: Argument | np.generic | Any, number: Callable[[str], int]) -> str:
    if isinstance(argument, str):
        return f"buffer {number(argument)}"
    if isinstance(argument, TensorMap):
        return (
            f"tensor map of buffer {number(argument.buffer)}: {argument.dtype} {_by(argument.shape)}, strides "
            f"{_by(argument.strides)}, box {_by(argument.box)}, swizzle {argument.swizzle}"
        )
    if isinstance(argument, Struct):
        return f"{{{', '.join(_argument(field, number) for field in argument.fields)}}}"
    if isinstance(argument, Packed):
        addresses = "".join(f", {at}: buffer {number(name)} + {more}" for at, name, more in argument.pointers)
        return f"bytes {argument.layout(lambda name: 0).hex()}{addresses}"
    if isinstance(argument, np.number | np.bool_):
        return f"{argument.dtype} {argument!s}"
    if isinstance(argument, np.ndarray):
        return f"{argument.dtype} {_by(argument.shape)} {argument.tobytes().hex()}"
    return f"bytes {argument.tobytes().hex() if isinstance(argument, np.generic) else bytes(argument).hex()}"


class _Code:
    """The digest over one kernel of a cubin.

    Other sections than the kernel's count only if referenced: each variable or function is numbered by first use and
    hashed with its content. Names and positions in the image do not count.
    """

    def __init__(self, kernel: CompiledKernel) -> None:
        self._entry = kernel.source.entry
        try:
            self._image = Image(kernel.cubin)
        except ImageError as e:
            raise DamagedCodeError(f"the machine code of {self._entry!r} cannot be read: {e}") from e
        text = self._image.find(f".text.{self._entry}")
        if text is None:
            raise DamagedCodeError(f"the machine code has no kernel {self._entry!r}")
        self._text = text
        self._listing: Callable[[], str] = lambda: disassemble(kernel.cubin, self._entry)
        self._digest = hashlib.sha256()
        self._seen: dict[tuple[int, int], int] = {}  # (section, offset) -> number
        self._sizes: dict[tuple[int, int], int] = {}
        self._outside: set[str] = set()  # what the driver provides

    def digest(self) -> str:
        image = self._image
        self._add("image", image.flags)
        self._instructions()
        for index, section in enumerate(image.sections):
            if section.name.endswith(f".{self._entry}") and section.name.startswith((".nv.constant", ".nv.shared")):
                kind = section.name.removesuffix(self._entry)
                self._add(kind, section.size, section.alignment, section.data)
                self._relocations(index)
            elif self._is_of_the_module(section.name, section.flags):
                self._add(section.name, section.size, section.data)
        self._attributes()
        return self._digest.hexdigest()[:16]

    def _is_of_the_module(self, name: str, flags: int) -> bool:
        """Return whether a section is loaded for every kernel, such as bank 3 with ``__constant__`` variables."""
        # .nv.merc: Blackwell's second form of the same code, an input of later tools.
        by_use = (".text.", ".nv.global", ".nv.shared", ".nv.merc.", _ADDRESSES)
        of_a_kernel = re.match(r"\.nv\.constant\d+\.", name) is not None
        return bool(flags & ALLOC) and not name.startswith(by_use) and not of_a_kernel

    def reached(self, sections: tuple[str, ...]) -> dict[str, int]:
        """Bytes of the variables of some sections that ``digest`` came to, by name, and of the heap if it is used."""
        names = {(s.section, s.value, s.size): s.name for s in self._image.symbols if not s.is_section}
        found = Counter[str]()
        for (section, start), size in self._sizes.items():
            in_one = self._image.sections[section].name.startswith(sections)
            if in_one and not self._is_text((section, start), size):
                found[names.get((section, start, size), "")] += size
        if self._outside & HEAP_FUNCTIONS:
            found[""] += HEAP_BYTES
        return dict(found)

    def _is_text(self, place: tuple[int, int], size: int) -> bool:
        section, start = place
        data = self._image.sections[section].data[start : start + size]
        return data.endswith(b"\0") and all(character in _PRINTABLE for character in data[:-1])

    def _add(self, what: str, *values: int | bytes) -> None:
        self._digest.update(f"\n{what}".encode())
        for value in values:
            data = value if isinstance(value, bytes) else str(value).encode()
            self._digest.update(b":%d:" % len(data) + data)

    def _instructions(self) -> None:
        """Add the kernel's section, including the functions that it calls.

        Bank 4 has the address of each variable of the module. For an instruction that reads from it, the variable
        counts, not the offset of its entry.
        """
        section = self._image.sections[self._text]
        code = bytearray(section.data)
        addresses = self._image.find(_ADDRESSES)
        used: list[tuple[int, int]] = []
        if addresses is not None:
            for at, offset in self._address_reads(bytes(code)):
                if offset is None:  # computed: it may be any entry
                    self._add("addresses", self._image.sections[addresses].data)
                    self._relocations(addresses)
                    continue
                word = int.from_bytes(code[at : at + 8], "little") & ~(_OFFSET_MASK << _OFFSET_AT)
                code[at : at + 8] = word.to_bytes(8, "little")
                used.append((at, offset))
        self._add("text", section.flags, bytes(code))
        self._relocations(self._text)
        places = {r.offset: r for r in self._image.relocations(addresses)} if addresses is not None else {}
        for at, offset in used:
            whole = offset - offset % 8  # the read may be of an address's upper half
            self._add("reads", at, offset % 8)
            if whole in places:
                self._target(places[whole].symbol, places[whole].addend)

    def _address_reads(self, code: bytes) -> Iterator[tuple[int, int | None]]:
        """Yield (offset of the instruction, offset in bank 4) of every address read; None for a computed offset."""
        lines = (line for line in self._listing().splitlines() if "c[0x4][" in line)  # few of very many
        for place, spelled in (found.groups() for found in map(_ADDRESS.match, lines) if found):
            at = int(place, 16)
            word = int.from_bytes(code[at : at + 8], "little")
            constant = spelled.replace("URZ", "0x0")  # the zero register
            offset = int(constant, 16) if re.fullmatch(r"0x[0-9a-f]+", constant) else None
            units, bank = word >> _OFFSET_AT & _OFFSET_MASK, word >> _BANK_AT & _BANK_MASK
            yield at, offset if bank == 4 and offset in (4 * units, 8 * units) else None

    def _relocations(self, section: int) -> None:
        for r in self._image.relocations(section):
            self._add("address", r.offset, r.kind)
            self._target(r.symbol, r.addend)

    def _target(self, symbol: int, addend: int) -> None:
        """Add the target of an address, and recursively the targets of the addresses in it."""
        visits = [self._visit(symbol, addend)]
        while visits:
            inner = next(visits[-1], None)
            if inner is None:
                visits.pop()
            else:
                visits.append(self._visit(*inner))

    def _visit(self, symbol: int, addend: int) -> Iterator[tuple[int, int]]:
        """Add an offset in the kernel, a variable with its content, or something outside.

        Yields the symbol and addend of each address in the variable, when it is that address's turn.
        """
        found = self._image.symbols[symbol]
        if found.section == UNDEFINED:
            self._outside.add(found.name)
            self._add("outside", found.name.encode(), addend)
            return
        if found.section == self._text:
            self._add("own", found.value + addend)
            return
        if found.section >= len(self._image.sections):  # an absolute value
            self._add("value", found.value, addend)
            return
        start, size = found.value, found.size
        if found.is_section:
            start, size, addend = self._variable_at(found.section, addend)
        known = (found.section, start) in self._seen
        self._sizes[found.section, start] = size
        number = self._seen.setdefault((found.section, start), len(self._seen))
        self._add("variable", number, addend)
        if known:
            return
        section = self._image.sections[found.section]
        self._add("content", size, section.data[start : start + size])
        addresses = self._image.relocations(found.section)
        for r in addresses[bisect.bisect_left(addresses, start, key=lambda r: r.offset) :]:
            if r.offset >= start + size:
                break
            self._add("address", r.offset - start, r.kind)
            yield r.symbol, r.addend

    def _variable_at(self, section: int, offset: int) -> tuple[int, int, int]:
        """Start and size of the variable around an offset in a section, and the offset within it; else the section."""
        for s in self._image.symbols:
            if s.section == section and not s.is_section and s.value <= offset < s.value + s.size:
                return s.value, s.size, offset - s.value
        return 0, self._image.sections[section].size, offset

    def _attributes(self) -> None:
        """The kernel's attributes for the driver: registers, stack, parameters, bounds, cluster."""
        found = []
        for code, value in self._attributes_of(f".nv.info.{self._entry}"):
            if code == _PARAM_CBANK:
                found.append((code, value[4:]))
            elif code != _EXTERNS:
                found.append((code, value))
        for code, value in self._attributes_of(".nv.info"):  # of every kernel and function: (symbol, number)
            if len(value) < 8:
                found.append((code, value))
                continue
            symbol = self._image.symbols[int.from_bytes(value[:4], "little")]
            if symbol.section == self._text:
                found.append((code, symbol.value.to_bytes(8, "little") + value[4:]))
        for code, value in sorted(found):
            self._add("attribute", code, value)

    def _attributes_of(self, name: str) -> Iterator[tuple[int, bytes]]:
        """(attribute, its bytes) for each attribute of a section."""
        index = self._image.find(name)
        data, at = self._image.sections[index].data if index is not None else b"", 0
        while at < len(data):
            form, code, value = struct.unpack_from("<BBH", data, at)
            at += 4
            if form == _SIZED:
                yield code, data[at : at + value]
                at += -(-value // 4) * 4
            else:
                yield code, value.to_bytes(2, "little")
