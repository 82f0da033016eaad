"""Read a cubin: its ELF image, kernels, architecture and resources.

Cubins are plain ELF64, little endian, so four struct formats are enough for sections, symbols and relocations.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from greenfast.spec.errors import CompileError, DamagedCodeError
from greenfast.spec.facts import Resources

NOBITS, ALLOC = 8, 2
_RELA, _REL, _SYMTAB = 4, 9, 2
UNDEFINED = 0  # the section index of a symbol that is defined elsewhere
_SECTION_SYMBOL = 3


@dataclass(frozen=True)
class ElfSection:
    """One section.

    data: its bytes; empty for NOBITS: there ``size`` counts zeros. applies_to: for a relocation section, the index of
    the section that it patches.
    """

    name: str
    kind: int
    flags: int
    data: bytes
    size: int
    link: int
    applies_to: int
    alignment: int


@dataclass(frozen=True)
class ElfSymbol:
    """A name for bytes of a section, from ``value`` on. is_section: the symbol is the section itself."""

    name: str
    section: int
    value: int
    size: int
    is_section: bool


@dataclass(frozen=True)
class ElfRelocation:
    """An address to fill in when the image is loaded: ``symbol`` plus ``addend``, at ``offset``."""

    offset: int
    kind: int
    symbol: int
    addend: int


class ImageError(ValueError):
    """The bytes are no complete ELF image; the message names the fault."""


#: No GPU has so much memory: larger sizes and addresses are damage.
_MAX_BYTES = 1 << 40
_HEADER, _ROW = 64, struct.calcsize("<2I4Q2I2Q")


class Image:
    """An ELF image. Raises ImageError for other bytes.

    Linked sections exist. A symbol may refer to a missing section (ELF uses this for absolute values), and a relocation
    to a stripped symbol.
    """

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01" or len(data) < _HEADER:
            raise ImageError("not an ELF image of 64 bits, little endian")
        (table,) = struct.unpack_from("<Q", data, 0x28)
        (self.flags,) = struct.unpack_from("<I", data, 0x30)
        size, count, names = struct.unpack_from("<3H", data, 0x3A)
        if size != _ROW or table + size * count > len(data):
            raise ImageError(f"not a whole ELF image: {count} section headers of {size} bytes at {table}")
        headers = [struct.unpack_from("<2I4Q2I2Q", data, table + i * size) for i in range(count)]
        total = sum(header[5] for header in headers if header[1] != NOBITS)
        if names >= count or total > 2 * len(data):  # sections that overlap often would take any amount of memory
            raise ImageError(f"not a whole ELF image: {count} sections of {total} bytes in {len(data)}")
        for _, kind, _, address, offset, nbytes, *_ in headers:
            if max(address, nbytes) > _MAX_BYTES or (kind != NOBITS and offset + nbytes > len(data)):
                raise ImageError(f"not a whole ELF image: a section of {nbytes} bytes at {offset} in {len(data)} bytes")
        start, length = headers[names][4:6]
        strings = data[start : start + length]
        self.sections = [
            ElfSection(
                name=_text(strings, name),
                kind=kind,
                flags=flags,
                data=b"" if kind == NOBITS else data[offset : offset + size],
                size=size,
                link=link,
                applies_to=info,
                alignment=alignment,
            )
            for name, kind, flags, _, offset, size, link, info, alignment, _ in headers
        ]
        self.symbols = [symbol for s in self.sections if s.kind == _SYMTAB for symbol in self._symbols(s)]
        self._relocations: dict[int, list[ElfRelocation]] = {}
        for s in self.sections:
            if s.kind in (_RELA, _REL):
                self._relocations.setdefault(s.applies_to, []).extend(self._relocations_in(s))
        for relocations in self._relocations.values():
            relocations.sort(key=lambda r: (r.offset, r.kind))

    def find(self, name: str) -> int | None:
        """Return the index of the section with this name; None if there is none."""
        return next((i for i, section in enumerate(self.sections) if section.name == name), None)

    def relocations(self, section: int) -> list[ElfRelocation]:
        """Return the relocations of a section, sorted by offset."""
        return self._relocations.get(section, [])

    def _relocations_in(self, table: ElfSection) -> Iterator[ElfRelocation]:
        if table.applies_to >= len(self.sections):
            raise ImageError(f"section {table.name!r} patches section {table.applies_to}, but there is none")
        target = self.sections[table.applies_to]
        for row in _rows("<QQq" if table.kind == _RELA else "<QQ", table):
            offset, info = row[:2]
            # Without an addend in the row, it is stored at the offset.
            addend = row[2] if table.kind == _RELA else _signed(target.data, offset)
            if offset > target.size:
                raise ImageError(f"section {table.name!r} has an address at {offset} of {target.size} bytes")
            yield ElfRelocation(offset, info & 0xFFFFFFFF, info >> 32, addend)

    def _symbols(self, table: ElfSection) -> Iterator[ElfSymbol]:
        if table.link >= len(self.sections):
            raise ImageError(f"section {table.name!r} names section {table.link}, but there is none")
        strings = self.sections[table.link].data
        for name, info, _, section, value, size in _rows("<IBBHQQ", table):
            if max(value, size) > _MAX_BYTES:
                raise ImageError(f"a symbol of {size} bytes at {value}")
            yield ElfSymbol(_text(strings, name), section, value, size, info & 15 == _SECTION_SYMBOL)


def _rows(form: str, table: ElfSection) -> Iterator[tuple[int, ...]]:
    size = struct.calcsize(form)
    if len(table.data) % size:
        raise ImageError(f"section {table.name!r} has {len(table.data)} bytes, no multiple of {size}")
    return struct.iter_unpack(form, table.data)


def _text(strings: bytes, start: int) -> str:
    end = strings.find(b"\0", start)
    if start > len(strings) or end < 0:
        raise ImageError(f"a name at {start} of {len(strings)} bytes, without an end")
    try:
        return strings[start:end].decode()
    except UnicodeDecodeError:
        raise ImageError(f"the name at {start} is no text") from None


def _signed(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 8], "little", signed=True)


# Attributes of .nv.info with a symbol's number and a 32-bit value.
_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12
#: Attributes of a kernel with three extents: the product is the maximum number of threads, or the exact block.
_MAX_THREADS, _EXACT_BLOCK = 0x05, 0x10
#: Format of an attribute with a length and bytes. Attributes of other formats have a 16-bit value.
_SIZED = 4
_TEXT = ".text."
#: Bytes reserved by the system at the start of a block's shared memory, from compute capability 9.0 on.
_RESERVED_SHARED = 1024
#: From this ABI version (CUDA 13) on, the architecture is in the second byte of the ELF flags.
_NEW_FLAGS = 8


def read_cubin(cubin: bytes, name: str) -> Image:
    """Parse a cubin. Raises DamagedCodeError with the file's name for other bytes."""
    try:
        return Image(cubin)
    except ImageError as e:
        raise DamagedCodeError(f"{name}: not a cubin ({e}); nvcc -cubin or ptxas makes one") from None


def cubin_entries(image: Image) -> list[str]:
    """Return the compiled names of the kernels of a cubin."""
    return [s.name.removeprefix(_TEXT) for s in image.sections if s.name.startswith(_TEXT)]


def cubin_capability(cubin: bytes, image: Image) -> tuple[int, int]:
    """Return the (major, minor) compute capability of a cubin."""
    number = image.flags >> 8 & 0xFF if cubin[8] >= _NEW_FLAGS else image.flags & 0xFF
    return number // 10, number % 10


def cubin_resources(cubin: bytes, image: Image, entry: str, dynamic_smem_bytes: int) -> Resources:
    """Read a kernel's resources from its cubin. Raises CompileError if the cubin has no register count.

    A cubin does not distinguish spills from other stack memory, so the stack includes spills, and spills are 0.
    """
    attributes: dict[int, int] = {}
    for code, value in read_attributes(image, ".nv.info"):
        if len(value) == 8:
            symbol, number = struct.unpack("<II", value)
            if symbol < len(image.symbols) and image.symbols[symbol].name == entry:
                attributes[code] = number
    if _REGISTERS not in attributes:
        raise CompileError(f"the cubin does not state the registers of kernel {entry!r}; make it with CUDA 11 or newer")
    shared = image.find(f".nv.shared.{entry}")
    static = image.sections[shared].size if shared is not None else 0
    if cubin_capability(cubin, image) >= (9, 0):
        static = max(0, static - _RESERVED_SHARED)
    return Resources(
        registers=attributes[_REGISTERS],
        static_smem_bytes=static,
        dynamic_smem_bytes=dynamic_smem_bytes,
        stack_bytes=max(attributes.get(_FRAME, 0), attributes.get(_STACK, 0)),
        spill_store_bytes=0,
        spill_load_bytes=0,
    )


def block_fault(image: Image, entry: str, block: tuple[int, int, int]) -> str:
    """Describe why __launch_bounds__ or .reqntid forbid a launch with this block; empty if it is allowed."""
    attributes = dict(read_attributes(image, f".nv.info.{entry}"))
    shown = " x ".join(map(str, block))
    for code, value in attributes.items():
        if code in (_MAX_THREADS, _EXACT_BLOCK) and len(value) == 12:
            bound: tuple[int, ...] = struct.unpack("<3I", value)
            limit = math.prod(bound)
            if code == _MAX_THREADS and math.prod(block) > limit:
                return (
                    f"its block of {shown} has {math.prod(block)} threads; the kernel is compiled for at most {limit}"
                )
            if code == _EXACT_BLOCK and block != bound:
                return f"its block is {shown}; the kernel is compiled for {' x '.join(map(str, bound))}"
    return ""


def read_attributes(image: Image, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the code and the bytes of each attribute in a section ``.nv.info``."""
    index = image.find(name)
    data, position = image.sections[index].data if index is not None else b"", 0
    while position + 4 <= len(data):
        form, code, value = struct.unpack_from("<BBH", data, position)
        position += 4
        if form == _SIZED:
            yield code, data[position : position + value]
            position += -(-value // 4) * 4
        else:
            yield code, value.to_bytes(2, "little")
