"""The kernel that computes the slots of new tokens in a paged cache, ``kernels/serving/slots.cuh``."""

from __future__ import annotations

import numpy as np

from greenfast.kernels import make_source
from greenfast.spec.kernel import Launch, Struct

ENTRY = "token_slots"
_THREADS, _MOST_BLOCKS = 128, 1024

KERNEL = make_source(
    ENTRY,
    f"""#include "serving/slots.cuh"

extern "C" __global__ void __launch_bounds__({_THREADS})
{ENTRY}(const __grid_constant__ greenfast::serving::SlotParams p) {{
  greenfast::serving::find_slots(p);
}}
""",
    _THREADS,
)


def launch(sequences: int, tokens: int, page: int, entries: int, table_row: int, optional: frozenset[str]) -> Launch:
    """Return the launch for at least one sequence.

    Buffers: starts, slots, positions, lengths, and the names in ``optional`` ("before", "counted_from", "block_table");
    without block_table also made_table, (sequences, entries). table_row: row stride of block_table.
    """
    pointers = {n: n if n in optional else np.int64(0) for n in ("before", "counted_from", "block_table")}
    made_table = np.int64(0) if "block_table" in optional else "made_table"
    numbers = (np.int32(n) for n in (sequences, tokens, page, entries))
    params = Struct(
        ("starts", *pointers.values(), made_table, "slots", "positions", "lengths", *numbers, np.int64(table_row))
    )
    work = max(tokens, sequences, 0 if "block_table" in optional else sequences * entries)
    return Launch(grid=(max(1, min(_MOST_BLOCKS, -(-work // _THREADS))), 1, 1), args=(params,))
