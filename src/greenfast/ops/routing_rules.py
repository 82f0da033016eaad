"""Rules for calls of attention that are faster here than in 16 bits, from measurements.

scripts/update_results.py writes routing_rules.json from the records of the benchmarks ``routing`` and ``sdpa``. A rule
holds for one baseline, head dim, mask and precision. It has three minima: the reuse of a key (queries times heads of a
group), the number of keys, and the work (4 B H S KV D operations, half of that with a mask). greenfast computes calls
that reach all three. No measured shape with at least half of each is slower with greenfast.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

#: The precision; the minimum reuse, keys and operations; and the measurement in words. It is not a class, because
#: torch.compile must keep it as a constant.
Rule: TypeAlias = "tuple[str, int, int, float, str]"

#: The baselines: PyTorch's attention, or the faster of the two if FlashAttention-3 is active in PyTorch.
TORCH, FA3 = "PyTorch's attention", "PyTorch's attention and FlashAttention-3"
#: The measured target. Calls without a measurement need this number of queries and of keys.
TARGET = "sm_90a"
UNMEASURED_LENGTH = 4096
_AUTO = ("fp8", "int8")


@cache
def load_data() -> dict[str, Any]:
    """Return the contents of routing_rules.json, with ``rules`` as ``benchmarks.routing.rules`` writes them."""
    contents: dict[str, Any] = json.loads(files(__package__).joinpath("routing_rules.json").read_text(encoding="utf-8"))
    return contents


@cache
def find_rules(head_dim: int, causal: bool, precision: str, against: str) -> tuple[Rule, ...] | None:
    """Return the rules to try, in order.

    They belong to the precision, or for "auto" to fp8 and int8, with the larger gain first.

    head_dim: one of HEAD_DIMS. against: TORCH or FA3. None if this was not measured, empty if no call gains.
    """
    precisions = _AUTO if precision == "auto" else (precision,)
    matches = [
        rule
        for rule in load_data()["rules"]
        if (rule["head_dim"], rule["causal"], rule["against"]) == (head_dim, causal, against)
        and rule["precision"] in precisions
    ]
    if not matches:
        return None
    return tuple(_parse_rule(rule) for rule in sorted(matches, key=lambda rule: -rule.get("mean", 0)) if rule["least"])


def _parse_rule(rule: dict[str, Any]) -> Rule:
    reuse, keys, gflop = rule["least"]
    quote = (
        f"{rule['slowest']:.2f} to {rule['fastest']:.2f} times as fast as {rule['against']} on the {rule['shapes']} "
        f"of {rule['of']} measured shapes with at least {reuse} queries to a key, {keys} keys and {gflop:.3g} GFLOP "
        f"({rule['device']}, {rule['record']})"
    )
    return rule["precision"], reuse, keys, gflop * 1e9, quote
