"""Find the memory of a module that outlives a launch: a kernel could keep state there."""

from __future__ import annotations

from functools import lru_cache

from greenfast.device.elf import UNDEFINED, ElfSection, ElfSymbol, Image, ImageError
from greenfast.device.readonly_globals import find_readonly_globals
from greenfast.spec.errors import DamagedCodeError

_GLOBAL = (".nv.global", ".nv.global.init")
#: Bank 3: ``__constant__`` variables. A kernel can write them through their address in global memory.
_CONSTANT = ".nv.constant3"
#: The device heap outlives a launch, and an allocation contains the freed data.
HEAP_FUNCTIONS = {"malloc", "__nv_aligned_device_malloc"}
HEAP_BYTES = 8 << 20  # the driver's default


def variable_bytes(cubin: bytes, ptx: str = "") -> tuple[int, int]:
    """Return the bytes of state that a module can keep across launches, and those of its ``__constant__`` variables.

    State is every variable in global memory (also managed ones, and ones declared in a function by inline PTX) and
    every ``__constant__`` variable. Variables that ``ptx`` never writes are not state: ``static constexpr`` tables and
    strings of printf. Without PTX all variables count. A kernel that allocates on the device heap counts with
    ``HEAP_BYTES``.

    Raises DamagedCodeError for a cubin that cannot be read.
    """
    image, sections = _find_variables(cubin)
    constants = set(read_only_variables(cubin, ptx))
    state = sum(
        section.size - sum(v.size for v in variables if v.name in constants) - _padding(section, variables)
        for section, variables in sections
    )
    heap = any(symbol.section == UNDEFINED and symbol.name in HEAP_FUNCTIONS for symbol in image.symbols)
    constant = sum(section.size for section, _ in sections if section.name == _CONSTANT)
    return state + heap * HEAP_BYTES, constant


@lru_cache(maxsize=64)
def read_only_variables(cubin: bytes, ptx: str) -> tuple[str, ...]:
    """Return the variables of a module that its PTX never writes.

    They are not state, so a launch that changes one is wrong. Raises DamagedCodeError as ``variable_bytes``.
    """
    _, sections = _find_variables(cubin)
    names = {v.name for _, variables in sections for v in variables}
    return tuple(sorted(find_readonly_globals(ptx, names))) if names else ()


def _find_variables(cubin: bytes) -> tuple[Image, list[tuple[ElfSection, list[ElfSymbol]]]]:
    """Return the image of a cubin, and each section of variables with its variables."""
    try:
        image = Image(cubin)
    except ImageError as e:
        raise DamagedCodeError(f"the machine code cannot be read: {e}") from e
    sections = [(n, s) for n, s in enumerate(image.sections) if s.name in (*_GLOBAL, _CONSTANT)]
    return image, [(section, _list_variables(image, n)) for n, section in sections]


def _list_variables(image: Image, section: int) -> list[ElfSymbol]:
    """Return the variables of a section by address, without aliases."""
    symbols = {(s.value, s.size): s for s in image.symbols if s.section == section and not s.is_section and s.size}
    return [symbols[key] for key in sorted(symbols)]


def _padding(section: ElfSection, variables: list[ElfSymbol]) -> int:
    """Return the bytes between variables that alignment explains; 0 for a section without variables."""
    if not variables:
        return 0
    total, end = 0, 0
    for variable in variables:
        gap = variable.value - end
        total += gap if 0 < gap < max(section.alignment, 1) else 0
        end = max(end, variable.value + variable.size)
    return total
