"""Read the PTX of a fat binary, the form in which nvcc embeds device code in a program."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from greenfast.spec.errors import UnsupportedError

_MAGIC = 0xBA55ED50
_PTX = 1
#: kind, version, header bytes, padded bytes, compressed bytes, -, version of the code, architecture, -, -, flags, -,
#: uncompressed bytes.
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_LZ4, _ZSTD = 0x2000, 0x8000
_FIX = "compile with: nvcc -cudart shared -gencode arch=compute_90,code=compute_90 -no-compress -lineinfo"


@dataclass(frozen=True)
class EmbeddedPtx:
    """A PTX text and the architecture that it was compiled for, such as 90."""

    text: str
    architecture: int


def read_ptx(data: bytes) -> list[EmbeddedPtx]:
    """Return the PTX texts of a fat binary. Raises UnsupportedError if it cannot be read."""
    result, start = [], 0
    while start + 16 <= len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, start)
        if magic != _MAGIC:
            break
        position, end = start + header, start + header + size
        while position + _ENTRY.size <= end:
            fields = _ENTRY.unpack_from(data, position)
            kind, _, head, padded, compressed, *_ = fields
            architecture, flags, whole = fields[8], fields[11], fields[13]
            if kind == _PTX:
                body = data[position + head : position + head + (compressed or padded)]
                text = _decompress(body, flags, whole).split(b"\0", 1)[0].decode(errors="replace")
                result.append(EmbeddedPtx(text, architecture))
            position += head + padded
        start = end
    return result


def choose_ptx(texts: list[EmbeddedPtx], most: int = 90) -> str:
    """Return the PTX that a GPU of architecture ``most`` would load. Raises UnsupportedError if there is none."""
    fitting = [ptx for ptx in texts if ptx.architecture <= most]
    if not fitting:
        listed = ", ".join(f"compute_{ptx.architecture}" for ptx in texts) or "none, only machine code"
        raise UnsupportedError(f"the program embeds no PTX for compute_{most} or below (it has {listed}); {_FIX}")
    best = max(fitting, key=lambda ptx: (ptx.architecture, bool(re.search(r"\.target\s+sm_\d+a", ptx.text))))
    return best.text


def _decompress(body: bytes, flags: int, size: int) -> bytes:
    if flags & _ZSTD:
        return _decompress_zstd(body, size)
    if flags & _LZ4:
        return _decompress_lz4(body, size)
    return body


def _decompress_zstd(body: bytes, size: int) -> bytes:
    for name in ("compression.zstd", "backports.zstd", "zstandard"):
        try:
            module = __import__(name, fromlist=["decompress"])
        except ImportError:
            continue
        content: bytes = (
            module.ZstdDecompressor().decompress(body, max_output_size=size)
            if name == "zstandard"
            else module.decompress(body)
        )
        return content
    raise UnsupportedError(f"the program's PTX is compressed with zstd: install zstandard with pip, or {_FIX}")


def _decompress_lz4(body: bytes, size: int) -> bytes:
    """Return the content of an LZ4 block."""
    result, position = bytearray(), 0

    def read_length(position: int, length: int) -> tuple[int, int]:
        if length == 15:
            while body[position] == 255:
                length, position = length + 255, position + 1
            length, position = length + body[position], position + 1
        return position, length

    while position < len(body) and len(result) < size:
        token = body[position]
        position, literals = read_length(position + 1, token >> 4)
        result += body[position : position + literals]
        position += literals
        if position + 2 > len(body) or len(result) >= size:
            break
        distance = body[position] | body[position + 1] << 8
        position, length = read_length(position + 2, token & 15)
        begin = len(result) - distance
        for n in range(length + 4):
            result.append(result[begin + n])
    return bytes(result)
