"""Which calls of attention are faster here than by PyTorch, by rules that a measurement gave.

measured.json comes from a record of ``greenfast bench routing`` by scripts/update_results.py: for each head dim, mask
and precision the least reuse of a key (queries times heads of a group), number of keys, and work (4 B H S KV D
operations, half of it with a mask) of calls that are taken. On no measured shape that a rule takes is greenfast slower.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

#: The precision; the least reuse, keys and operations of calls that are taken; and the measurement in words. Not a
#: class, as torch.compile has to keep it as a constant.
Rule: TypeAlias = "tuple[str, int, int, float, str]"

HEAD_DIMS = (64, 128, 256)
#: The target whose GPU was measured. On others, and with other head dims, a call needs so many queries and keys.
TARGET = "sm_90a"
UNMEASURED_LENGTH = 4096


@cache
def data() -> dict[str, Any]:
    """measured.json: its ``device``, ``record`` and ``rules``, as ``greenfast.bench.routing.rules`` makes them."""
    found: dict[str, Any] = json.loads(files(__package__).joinpath("measured.json").read_text(encoding="utf-8"))
    return found


@cache
def rules(head_dim: int, causal: bool, precision: str) -> tuple[Rule, ...]:
    """The rules to try in turn: the precision's own, or with "auto" those of both, the one that gains more first.

    head_dim: one of HEAD_DIMS. Empty where PyTorch was faster on every shape.
    """
    found = [
        rule
        for rule in data()["rules"]
        if (rule["head_dim"], rule["causal"]) == (head_dim, causal) and precision in (rule["precision"], "auto")
    ]
    return tuple(_rule(rule) for rule in sorted(found, key=lambda rule: -rule["mean"]))


def _rule(rule: dict[str, Any]) -> Rule:
    reuse, keys, gflop = rule["least"]
    quote = (
        f"{rule['slowest']:.2f} to {rule['fastest']:.2f} times as fast as PyTorch's attention on the {rule['shapes']} "
        f"of {rule['of']} measured shapes with at least {reuse} queries to a key, {keys} keys and {gflop:.3g} GFLOP "
        f"({data()['device']}, {data()['record']})"
    )
    return rule["precision"], reuse, keys, gflop * 1e9, quote
