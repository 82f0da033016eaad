"""Cases of paged attention: combinations of few values of every option, drawn so that all values of each appear."""

from __future__ import annotations

from typing import Any

import numpy as np

KEY_LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 257)
_VALUES: dict[str, tuple[Any, ...]] = {
    "page_size": (16, 32, 64, 128),
    "group": (1, 3, 8, 16),
    "head_dim": (64, 128, 256),
    "layout": ("grouped", "rows"),
    "scales": ("token", "head", "sequence", "one"),
    "strides": ("NHD", "HND"),
    "window": ((-1, -1), (0, 0), (1, 0), (64, 0), (0, 1), (64, 64), (-1, 1), (1, -1)),
    "causal": (True, False),
    "softcap": (0.0, 20.0),
    "sinks": (False, True),
    "fp8_queries": (False, False, True),
    "kv_heads": (1, 2),
}


def drawn(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Options of ``case``: each value of an option as often as the others, in random combination."""
    generator = np.random.Generator(np.random.PCG64(seed))
    columns = {}
    for name, values in _VALUES.items():
        places = generator.permutation(count) % len(values)
        columns[name] = [values[i] for i in places]
    lengths = []
    for i in range(count):
        keys = generator.permutation(KEY_LENGTHS)[:4].tolist()
        keys[0] = KEY_LENGTHS[i % len(KEY_LENGTHS)]
        queries = generator.integers(0, 6, len(keys)).tolist()
        queries[0] = 1 + i % 5
        lengths.append(list(zip(queries, keys, strict=True)))
    return [
        {"lengths": lengths[i], "seed": i, **{name: column[i] for name, column in columns.items()}}
        for i in range(count)
    ]
