"""Read the parts of ELF64 in a cubin: sections, symbols and relocations, little endian.

Cubins are plain ELF, so this is four struct formats; NVIDIA's sections are read in ``identity``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

NOBITS, ALLOC = 8, 2
_RELA, _REL, _SYMTAB = 4, 9, 2
UNDEFINED = 0  # the section index of a symbol that is defined elsewhere
_SECTION_SYMBOL = 3


@dataclass(frozen=True)
class ElfSection:
    """One section.

    data: its bytes; empty for NOBITS, whose ``size`` counts zeros. applies_to: for a relocation section, the index of
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
            raise ImageError(f"section {table.name!r} patches section {table.applies_to}, which does not exist")
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
            raise ImageError(f"section {table.name!r} names section {table.link}, which does not exist")
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
