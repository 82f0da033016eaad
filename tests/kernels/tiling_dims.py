"""Shapes on which a measured rule for tiles is taken."""

from __future__ import annotations

from greenfast.kernels.attention.config import QUERY_BLOCK, ROW_BLOCK
from greenfast.kernels.attention.heuristics import Rule

#: Few multiprocessors, so that few queries make blocks of several warpgroups, each with several work tiles.
MULTIPROCESSORS = 2


def rule_dims(rule: Rule) -> dict[str, int]:
    """On a GPU of MULTIPROCESSORS; with a tail in queries and keys."""
    head_dim, causal, _, _, values, _ = rule.key
    dims = {"B": 1, "H": 2, "S": 1000, "KV": rule.keys[0] + 76, "D": head_dim}
    blocks = {"QBLOCK": QUERY_BLOCK, "KBLOCK": ROW_BLOCK, "VBLOCK": ROW_BLOCK} if values == "block" else {}
    return dims | ({"CAUSAL": 2} if causal else {}) | blocks
