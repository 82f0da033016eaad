"""Every entry of the corpus, in one place; importing a file declares its entries."""

from __future__ import annotations

from tests.emulator.corpus import cuda_concurrency, cuda_grids, cuda_language, cuda_products, cuda_reductions, cuda_scans
from tests.emulator.corpus.entry import Entry, entries

FILES = (cuda_concurrency, cuda_grids, cuda_language, cuda_products, cuda_reductions, cuda_scans)
ENTRIES: tuple[Entry, ...] = tuple(entries().values())
