"""Every entry of the corpus that needs no other package, in one place; importing a file declares its entries."""

from __future__ import annotations

from tests.emulator.corpus import (  # noqa: F401
    bugs,
    cuda_concurrency,
    cuda_copies,
    cuda_grids,
    cuda_language,
    cuda_layers,
    cuda_numbers,
    cuda_products,
    cuda_reductions,
    cuda_scans,
    ptx_modules,
)  # fmt: skip
from tests.emulator.corpus.entry import Entry, entries

ENTRIES: tuple[Entry, ...] = tuple(entries().values())
