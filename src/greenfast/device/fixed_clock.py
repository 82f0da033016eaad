"""Fix the compiler's clock, so that ``__DATE__`` and ``__TIME__`` do not change machine code.

NVRTC refuses to redefine these macros, a source can spell them by pasting tokens, and they come from one call of C's
``time``. So the entry for ``time`` in the import table of NVRTC's library is replaced. Other libraries keep the clock.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
import time
from pathlib import Path

#: Midnight local time of this day is the compiler's time: "Jan  2 1970" and "00:00:00" in every time zone.
_DAY = (1970, 1, 2, 0, 0, 0, 0, 0, -1)
#: The value of __TIMESTAMP__; NVRTC does not define it.
TIMESTAMP = "Fri Jan  2 00:00:00 1970"
# Tags of an ELF file's dynamic section, and the size of a relocation with addend.
_STRINGS, _SYMBOLS, _RELOCATIONS, _RELOCATION_BYTES, _CALLS, _CALL_BYTES = 5, 6, 7, 8, 23, 2
_RELOCATION = struct.Struct("<QQq")
_SYMBOL_BYTES = 24


def _return_fixed_time(result: int | None) -> int:
    """Implement C's ``time``: return the seconds, and store them in ``*result`` unless it is null."""
    seconds = int(time.mktime(_DAY))
    if result:
        ctypes.c_long.from_address(result).value = seconds
    return seconds


_TIME = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p)(_return_fixed_time)


@functools.cache
def fix_clock(library: Path) -> bool:
    """Replace the clock of a loaded library by a constant. Return False if glibc did not load it."""
    try:
        places = _imports(library, b"time")
        for place in places:
            page = place - place % mmap.PAGESIZE
            if ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 3):  # read and write
                return False
            ctypes.c_size_t.from_address(place).value = ctypes.cast(_TIME, ctypes.c_void_p).value or 0
    except (OSError, AttributeError, KeyError):
        return False
    return bool(places)


def _imports(library: Path, name: bytes) -> list[int]:
    """Return the import table entries of a function in a loaded library."""
    if not hasattr(os, "RTLD_NOLOAD") or os.confstr("CS_GNU_LIBC_VERSION") is None:
        raise OSError("the layout of loaded libraries is known of glibc alone")
    handle = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle
    # glibc's handle is its link_map: load address, name, dynamic section.
    base, _, dynamic = (ctypes.c_size_t.from_address(handle + 8 * n).value for n in range(3))
    tags: dict[int, int] = {}
    while True:
        tag, value = (ctypes.c_size_t.from_address(dynamic + 8 * n).value for n in range(2))
        if not tag:
            break
        tags[tag] = value
        dynamic += 16
    places = []
    for table, nbytes in ((_CALLS, _CALL_BYTES), (_RELOCATIONS, _RELOCATION_BYTES)):
        if table not in tags:
            continue
        data = ctypes.string_at(tags[table], tags[nbytes])
        for offset, info, _ in _RELOCATION.iter_unpack(data):
            symbol = info >> 32
            if not symbol:
                continue
            text = ctypes.c_uint32.from_address(tags[_SYMBOLS] + symbol * _SYMBOL_BYTES).value
            if ctypes.string_at(tags[_STRINGS] + text, len(name) + 1) == name + b"\0":
                places.append(base + offset)
    return places
