"""The identity of a measured kernel: a hash of its machine code, and the facts of its launch.

The hash shows whether a measured time is still valid. Renaming a struct, moving a header or editing a comment does not
change it. A hash over the sources (``compiler.kernel_hash``) changes with every edit.
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
from greenfast.device.cubin import ALLOC, UNDEFINED, Image, ImageError, read_attributes
from greenfast.device.machine_code import disassemble
from greenfast.device.module_variables import HEAP_BYTES, HEAP_FUNCTIONS
from greenfast.spec.errors import DamagedCodeError
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.kernel import Argument, KernelSource, Launch, Packed, Program, Struct, TensorMap

# Attributes of .nv.info with symbol numbers. These change with every unused constant.
_PARAM_CBANK, _EXTERNS = 0x0A, 0x0F
# c[0x4] holds the addresses of the module's variables, including unused ``static constexpr`` members.
_ADDRESSES = ".nv.constant4"
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]+)\*/.*?\bc\[0x4\]\[([^\]]*)\]")
# Fields of an instruction's first eight bytes. The offset is in units of 4 bytes, in LDCU of 8.
_OFFSET_SHIFT, _OFFSET_MASK, _BANK_SHIFT, _BANK_MASK = 40, 0x3FFF, 54, 0x1F
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
    """Check that the machine code that records and gates need can be read. A third-party cubin may be damaged.

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
    """Return the facts of a launch for a shape. Buffers are numbered by first use, without names and addresses."""
    numbers: dict[str, int] = {}
    return LaunchFacts(
        dims=dict(dims),
        grid=launch.grid,
        block=source.block,
        dynamic_smem_bytes=source.dynamic_smem_bytes,
        cluster=launch.cluster,
        early=launch.early,
        cooperative=launch.cooperative,
        arguments="; ".join(
            _describe_argument(a, lambda name: numbers.setdefault(name, len(numbers))) for a in launch.args
        ),
    )


@lru_cache(maxsize=256)  # reading an image of many megabytes is slow
def state_variables(kernel: CompiledKernel) -> Mapping[str, int]:
    """Return the variables that a kernel references and could use to keep state across launches: bytes by name.

    The name "" is for memory without a name: a section with computed addresses, or the device heap if the kernel
    allocates. Texts of asserts and printf do not count; read-only tables of numbers do.

    Used for a cubin with several kernels and no PTX: there ``Resources.global_bytes`` counts the whole module.

    Raises MachineError as ``code_hash`` does.
    """
    code, _ = _read_code(kernel)
    return code.referenced_variables((".nv.global", ".nv.constant3"))


def list_launches(program: Program, shape: str, dims: Mapping[str, int]) -> dict[str, tuple[KernelSource, LaunchFacts]]:
    """Return each launch of a program by its name in records: the shape, or "SHAPE launch NUMBER" for several."""
    return {
        shape if len(program.steps) == 1 else f"{shape} launch {n}": (
            step.kernel,
            launch_facts(step.kernel, step.launch, dims),
        )
        for n, step in enumerate(program.steps)
    }


def launch_differences(then: LaunchFacts, now: LaunchFacts) -> list[str]:
    """List the differences between two launches, such as "the grid (1x8x1, now 2x8x1)"."""
    before, after = then.arguments.split("; "), now.arguments.split("; ")
    pairs = [
        ("the grid", _join_extents(then.grid), _join_extents(now.grid)),
        ("the block", _join_extents(then.block), _join_extents(now.block)),
        ("the dynamic shared memory", f"{then.dynamic_smem_bytes} bytes", f"{now.dynamic_smem_bytes} bytes"),
        ("the cluster", _join_extents(then.cluster), _join_extents(now.cluster)),
        ("the early launch", "yes" if then.early else "no", "yes" if now.early else "no"),
        ("the cooperative launch", "yes" if then.cooperative else "no", "yes" if now.cooperative else "no"),
        ("the number of arguments", str(len(before)), str(len(after))),
    ]
    if len(before) == len(after):
        pairs += [(f"argument {i}", *both) for i, both in enumerate(zip(before, after, strict=True))]
    return [f"{name} ({old}, now {new})" for name, old, new in pairs if old != new]


def _join_extents(extents: Sequence[int]) -> str:
    return "x".join(map(str, extents))


def _describe_argument(argument: Argument | np.generic | Any, number: Callable[[str], int]) -> str:
    if isinstance(argument, str):
        return f"buffer {number(argument)}"
    if isinstance(argument, TensorMap):
        return (
            f"tensor map of buffer {number(argument.buffer)}: {argument.dtype} {_join_extents(argument.shape)}, "
            f"strides {_join_extents(argument.strides)}, box {_join_extents(argument.box)}, swizzle {argument.swizzle}"
        )
    if isinstance(argument, Struct):
        return f"{{{', '.join(_describe_argument(field, number) for field in argument.fields)}}}"
    if isinstance(argument, Packed):
        addresses = "".join(f", {n}: buffer {number(name)} + {offset}" for n, name, offset in argument.pointers)
        return f"bytes {argument.layout(lambda name: 0).hex()}{addresses}"
    if isinstance(argument, np.number | np.bool_):
        return f"{argument.dtype} {argument!s}"
    if isinstance(argument, np.ndarray):
        return f"{argument.dtype} {_join_extents(argument.shape)} {argument.tobytes().hex()}"
    return f"bytes {argument.tobytes().hex() if isinstance(argument, np.generic) else bytes(argument).hex()}"


class _Code:
    """The machine code of one kernel of a cubin, and its digest.

    Other sections count only if the kernel references them: each variable or function is numbered by first use and
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
        self._external: set[str] = set()  # symbols of the driver

    def digest(self) -> str:
        image = self._image
        self._add("image", image.flags)
        self._add_instructions()
        for index, section in enumerate(image.sections):
            if section.name.endswith(f".{self._entry}") and section.name.startswith((".nv.constant", ".nv.shared")):
                kind = section.name.removesuffix(self._entry)
                self._add(kind, section.size, section.alignment, section.data)
                self._add_relocations(index)
            elif self._is_module_section(section.name, section.flags):
                self._add(section.name, section.size, section.data)
        self._add_attributes()
        return self._digest.hexdigest()[:16]

    def _is_module_section(self, name: str, flags: int) -> bool:
        """Return whether a section is loaded for every kernel, such as bank 3 with ``__constant__`` variables."""
        # .nv.merc is Blackwell's second form of the same code, an input of later tools.
        counted_by_use = (".text.", ".nv.global", ".nv.shared", ".nv.merc.", _ADDRESSES)
        belongs_to_kernel = re.match(r"\.nv\.constant\d+\.", name) is not None
        return bool(flags & ALLOC) and not name.startswith(counted_by_use) and not belongs_to_kernel

    def referenced_variables(self, sections: tuple[str, ...]) -> dict[str, int]:
        """Return the bytes of the variables in some sections that the code references, by name, and of a used heap."""
        names = {(s.section, s.value, s.size): s.name for s in self._image.symbols if not s.is_section}
        sizes = Counter[str]()
        for (section, start), size in self._sizes.items():
            if self._image.sections[section].name.startswith(sections) and not self._is_text(section, start, size):
                sizes[names.get((section, start, size), "")] += size
        if self._external & HEAP_FUNCTIONS:
            sizes[""] += HEAP_BYTES
        return dict(sizes)

    def _is_text(self, section: int, start: int, size: int) -> bool:
        data = self._image.sections[section].data[start : start + size]
        return data.endswith(b"\0") and all(character in _PRINTABLE for character in data[:-1])

    def _add(self, label: str, *values: int | bytes) -> None:
        self._digest.update(f"\n{label}".encode())
        for value in values:
            data = value if isinstance(value, bytes) else str(value).encode()
            self._digest.update(b":%d:" % len(data) + data)

    def _add_instructions(self) -> None:
        """Add the kernel's section, including the functions that it calls.

        Bank 4 holds the address of each variable of the module. An instruction that reads from it counts with the
        variable, not with the offset of the variable's address in the bank.
        """
        section = self._image.sections[self._text]
        code = bytearray(section.data)
        addresses = self._image.find(_ADDRESSES)
        used: list[tuple[int, int]] = []
        if addresses is not None:
            for position, offset in self._address_reads(bytes(code)):
                if offset is None:  # a computed offset may belong to any variable
                    self._add("addresses", self._image.sections[addresses].data)
                    self._add_relocations(addresses)
                    continue
                word = int.from_bytes(code[position : position + 8], "little") & ~(_OFFSET_MASK << _OFFSET_SHIFT)
                code[position : position + 8] = word.to_bytes(8, "little")
                used.append((position, offset))
        self._add("text", section.flags, bytes(code))
        self._add_relocations(self._text)
        relocations = {r.offset: r for r in self._image.relocations(addresses)} if addresses is not None else {}
        for position, offset in used:
            aligned = offset - offset % 8  # an instruction may read the upper half of an address
            self._add("reads", position, offset % 8)
            if aligned in relocations:
                self._add_target(relocations[aligned].symbol, relocations[aligned].addend)

    def _address_reads(self, code: bytes) -> Iterator[tuple[int, int | None]]:
        """Yield (offset of the instruction, offset in bank 4) of every address read; None for a computed offset."""
        lines = (line for line in self._listing().splitlines() if "c[0x4][" in line)
        for hex_position, operand in (match.groups() for match in map(_ADDRESS.match, lines) if match):
            position = int(hex_position, 16)
            word = int.from_bytes(code[position : position + 8], "little")
            constant = operand.replace("URZ", "0x0")  # the zero register
            offset = int(constant, 16) if re.fullmatch(r"0x[0-9a-f]+", constant) else None
            units, bank = word >> _OFFSET_SHIFT & _OFFSET_MASK, word >> _BANK_SHIFT & _BANK_MASK
            yield position, offset if bank == 4 and offset in (4 * units, 8 * units) else None

    def _add_relocations(self, section: int) -> None:
        for r in self._image.relocations(section):
            self._add("address", r.offset, r.kind)
            self._add_target(r.symbol, r.addend)

    def _add_target(self, symbol: int, addend: int) -> None:
        """Add the target of an address, and recursively the targets of the addresses in it."""
        visits = [self._visit(symbol, addend)]
        while visits:
            inner = next(visits[-1], None)
            if inner is None:
                visits.pop()
            else:
                visits.append(self._visit(*inner))

    def _visit(self, symbol: int, addend: int) -> Iterator[tuple[int, int]]:
        """Add an offset in the kernel, a variable with its content, or an external symbol.

        Yields the symbol and addend of each address in the variable, in the order of the digest.
        """
        target = self._image.symbols[symbol]
        if target.section == UNDEFINED:
            self._external.add(target.name)
            self._add("outside", target.name.encode(), addend)
            return
        if target.section == self._text:
            self._add("own", target.value + addend)
            return
        if target.section >= len(self._image.sections):  # an absolute value
            self._add("value", target.value, addend)
            return
        start, size = target.value, target.size
        if target.is_section:
            start, size, addend = self._find_variable(target.section, addend)
        seen = (target.section, start) in self._seen
        self._sizes[target.section, start] = size
        number = self._seen.setdefault((target.section, start), len(self._seen))
        self._add("variable", number, addend)
        if seen:
            return
        section = self._image.sections[target.section]
        self._add("content", size, section.data[start : start + size])
        addresses = self._image.relocations(target.section)
        for r in addresses[bisect.bisect_left(addresses, start, key=lambda r: r.offset) :]:
            if r.offset >= start + size:
                break
            self._add("address", r.offset - start, r.kind)
            yield r.symbol, r.addend

    def _find_variable(self, section: int, offset: int) -> tuple[int, int, int]:
        """Return start, size and relative offset of the variable around an offset, else of the whole section."""
        for s in self._image.symbols:
            if s.section == section and not s.is_section and s.value <= offset < s.value + s.size:
                return s.value, s.size, offset - s.value
        return 0, self._image.sections[section].size, offset

    def _add_attributes(self) -> None:
        """Add the kernel's attributes for the driver: registers, stack, parameters, bounds, cluster."""
        attributes = []
        for code, value in read_attributes(self._image, f".nv.info.{self._entry}"):
            if code == _PARAM_CBANK:
                attributes.append((code, value[4:]))
            elif code != _EXTERNS:
                attributes.append((code, value))
        for code, value in read_attributes(
            self._image, ".nv.info"
        ):  # entries (symbol, number) of all kernels and functions
            if len(value) < 8:
                attributes.append((code, value))
                continue
            symbol = self._image.symbols[int.from_bytes(value[:4], "little")]
            if symbol.section == self._text:
                attributes.append((code, symbol.value.to_bytes(8, "little") + value[4:]))
        for code, value in sorted(attributes):
            self._add("attribute", code, value)
