"""A reader for the parts of ELF64 that a cubin uses: sections, symbols and relocations, little endian.

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
class Section:
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
class Symbol:
    """A name for bytes of a section, from ``value`` on; ``is_section`` if it stands for the section itself."""

    name: str
    section: int
    value: int
    size: int
    is_section: bool


@dataclass(frozen=True)
class Relocation:
    """An address to fill in when the image is loaded: ``symbol`` plus ``addend``, at ``offset``."""

    offset: int
    kind: int
    symbol: int
    addend: int


class Image:
    """An ELF image. Raises ValueError for other bytes."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not an ELF image of 64 bits, little endian")
        try:
            (table,) = struct.unpack_from("<Q", data, 0x28)
            (self.flags,) = struct.unpack_from("<I", data, 0x30)
            size, count, names = struct.unpack_from("<3H", data, 0x3A)
            headers = [struct.unpack_from("<2I4Q2I2Q", data, table + i * size) for i in range(count)]
        except struct.error as e:
            raise ValueError(f"not a whole ELF image: {e}") from None
        strings = data[headers[names][4] :]
        self.sections = [
            Section(
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

    def find(self, name: str) -> int | None:
        """The index of the section with this name."""
        return next((i for i, section in enumerate(self.sections) if section.name == name), None)

    def relocations(self, section: int) -> list[Relocation]:
        """The relocations of a section, by offset."""
        found = []
        for s in self.sections:
            if s.kind not in (_RELA, _REL) or s.applies_to != section:
                continue
            if s.kind == _RELA:
                rows = struct.iter_unpack("<QQq", s.data)
            else:  # the addend is stored at the offset
                held = self.sections[section].data
                rows = ((at, info, _signed(held, at)) for at, info in struct.iter_unpack("<QQ", s.data))
            found += [Relocation(at, info & 0xFFFFFFFF, info >> 32, addend) for at, info, addend in rows]
        return sorted(found, key=lambda r: (r.offset, r.kind))

    def _symbols(self, table: Section) -> Iterator[Symbol]:
        strings = self.sections[table.link].data
        for name, info, _, section, value, size in struct.iter_unpack("<IBBHQQ", table.data):
            yield Symbol(_text(strings, name), section, value, size, info & 15 == _SECTION_SYMBOL)


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _signed(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little", signed=True)
