"""Read a cubin's kernels, architecture and resources."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from greenfast.device.elf import Image, ImageError
from greenfast.spec.errors import CompileError, DamagedCodeError
from greenfast.spec.facts import Resources

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
