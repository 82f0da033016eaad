"""What a cubin says of itself: its kernels, its architecture, and what a kernel needs to run."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from greenfast.device.elf import Image, ImageError
from greenfast.spec.errors import CompileError, DamagedCodeError
from greenfast.spec.facts import Resources

# Attributes of .nv.info, each with a symbol's number and a 32-bit value; and the form of an attribute with a length.
_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12
#: And of a kernel's own: three extents of a block, of which the product is the most threads, or which it must have.
_MOST_THREADS, _EXACT_BLOCK = 0x05, 0x10
_SIZED = 4
_TEXT = ".text."
#: From compute capability 9.0 on, a block's shared memory begins with this many bytes of the system's.
_RESERVED_SHARED = 1024
#: The ABI's version from which the ELF flags hold the architecture in their second byte, as CUDA 13 writes them.
_NEW_FLAGS = 8


def read_cubin(cubin: bytes, name: str) -> Image:
    """The image of a cubin. Raises DamagedCodeError, with the file's name, for other bytes."""
    try:
        return Image(cubin)
    except ImageError as e:
        raise DamagedCodeError(f"{name}: not a cubin ({e}); nvcc -cubin or ptxas makes one") from None


def cubin_entries(image: Image) -> list[str]:
    """The kernels of a cubin, by their compiled names."""
    return [s.name.removeprefix(_TEXT) for s in image.sections if s.name.startswith(_TEXT)]


def cubin_capability(cubin: bytes, image: Image) -> tuple[int, int]:
    """(major, minor) compute capability that a cubin is for."""
    number = image.flags >> 8 & 0xFF if cubin[8] >= _NEW_FLAGS else image.flags & 0xFF
    return number // 10, number % 10


def cubin_resources(cubin: bytes, image: Image, entry: str, dynamic_smem_bytes: int) -> Resources:
    """A kernel's resources from its cubin. Raises CompileError where it does not state the registers.

    The stack includes what was spilled to it: a cubin does not tell one from the other, so spills are 0.
    """
    of_kernel: dict[int, int] = {}
    for code, value in _attributes(image, ".nv.info"):
        if len(value) == 8:
            symbol, number = struct.unpack("<II", value)
            if symbol < len(image.symbols) and image.symbols[symbol].name == entry:
                of_kernel[code] = number
    if _REGISTERS not in of_kernel:
        raise CompileError(f"the cubin does not state the registers of kernel {entry!r}; make it with CUDA 11 or newer")
    shared = image.find(f".nv.shared.{entry}")
    static = image.sections[shared].size if shared is not None else 0
    if cubin_capability(cubin, image) >= (9, 0):
        static = max(0, static - _RESERVED_SHARED)
    return Resources(
        registers=of_kernel[_REGISTERS],
        static_smem_bytes=static,
        dynamic_smem_bytes=dynamic_smem_bytes,
        stack_bytes=max(of_kernel.get(_FRAME, 0), of_kernel.get(_STACK, 0)),
        spill_store_bytes=0,
        spill_load_bytes=0,
    )


def block_fault(image: Image, entry: str, block: tuple[int, int, int]) -> str:
    """Why a kernel cannot be launched with a block, from __launch_bounds__ or .reqntid; empty where it can."""
    found = dict(_attributes(image, f".nv.info.{entry}"))
    shown = " x ".join(map(str, block))
    for code, value in found.items():
        if code in (_MOST_THREADS, _EXACT_BLOCK) and len(value) == 12:
            bound: tuple[int, ...] = struct.unpack("<3I", value)
            most = math.prod(bound)
            if code == _MOST_THREADS and math.prod(block) > most:
                return f"its block of {shown} has {math.prod(block)} threads; the kernel is compiled for at most {most}"
            if code == _EXACT_BLOCK and block != bound:
                return f"its block is {shown}; the kernel is compiled for {' x '.join(map(str, bound))}"
    return ""


def _attributes(image: Image, name: str) -> Iterator[tuple[int, bytes]]:
    index = image.find(name)
    data, at = image.sections[index].data if index is not None else b"", 0
    while at + 4 <= len(data):
        form, code, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield code, data[at : at + value]
            at += -(-value // 4) * 4
