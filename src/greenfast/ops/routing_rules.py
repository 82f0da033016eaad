"""Rules for calls of attention that are faster here than in 16 bits, from measurements.

scripts/update_results.py writes routing_rules.json from the records of ``bench routing`` and ``bench operator``. A rule
holds for one rival, head dim, mask and precision. It has three minima: the reuse of a key (queries times heads of a
group), the number of keys, and the work (4 B H S KV D operations, half of that with a mask). greenfast takes calls that
reach all three. No measured shape with at least half of each is slower with greenfast.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

#: The precision; the least reuse, keys and operations of calls that are taken; and the measurement in words. Not a
#: class, as torch.compile has to keep it as a constant.
Rule: TypeAlias = "tuple[str, int, int, float, str]"

#: What computes a call otherwise: PyTorch's attention, or with FlashAttention-3 active in it the faster of the two.
TORCH, FA3 = "PyTorch's attention", "PyTorch's attention and FlashAttention-3"
HEAD_DIMS = (64, 128, 256)
#: The target whose GPU was measured. What was not measured needs this number of queries and of keys.
TARGET = "sm_90a"
UNMEASURED_LENGTH = 4096
_AUTO = ("fp8", "int8")


@cache
def load_data() -> dict[str, Any]:
    """routing_rules.json: its ``find_rules``, as ``greenfast.bench.routing.find_rules`` makes them."""
    found: dict[str, Any] = json.loads(files(__package__).joinpath("routing_rules.json").read_text(encoding="utf-8"))
    return found


@cache
def find_rules(head_dim: int, causal: bool, precision: str, against: str) -> tuple[Rule, ...] | None:
    """The rules to try in turn: the precision's own, or with "auto" those of fp8 and int8, that gaining more first.

    head_dim: one of HEAD_DIMS. against: TORCH or FA3. None where this was not measured, empty where nothing gains.
    """
    wanted = _AUTO if precision == "auto" else (precision,)
    found = [
        rule
        for rule in load_data()["rules"]
        if (rule["head_dim"], rule["causal"], rule["against"]) == (head_dim, causal, against)
        and rule["precision"] in wanted
    ]
    if not found:
        return None
    return tuple(_parse_rule(rule) for rule in sorted(found, key=lambda rule: -rule.get("mean", 0)) if rule["least"])


def _parse_rule(rule: dict[str, Any]) -> Rule:
    reuse, keys, gflop = rule["least"]
    quote = (
        f"{rule['slowest']:.2f} to {rule['fastest']:.2f} times as fast as {rule['against']} on the {rule['shapes']} "
        f"of {rule['of']} measured shapes with at least {reuse} queries to a key, {keys} keys and {gflop:.3g} GFLOP "
        f"({rule['device']}, {rule['record']})"
    )
    return rule["precision"], reuse, keys, gflop * 1e9, quote
