"""The answer whether a stored record still describes today's kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

CURRENT: Literal["current"] = "current"
STALE: Literal["stale"] = "stale"
CANNOT_TELL: Literal["cannot tell"] = "cannot tell"
_MOST_SAID = 3


@dataclass(frozen=True)
class Freshness:
    """An answer with its reasons.

    status: "current": same machine code and same launches. "stale": something differs. "cannot tell": another compiler
    is installed than the record's, or the record lacks data to compare. reasons: the differences or the missing data;
    empty for "current". other_compiler: whether the compiler is the only reason for "cannot tell".
    """

    status: Literal["current", "stale", "cannot tell"] = CURRENT
    reasons: tuple[str, ...] = ()
    other_compiler: bool = False

    def __str__(self) -> str:
        """The status with its reasons, of many the first three and how many more there are."""
        more = len(self.reasons) - _MOST_SAID
        said = [*self.reasons[:_MOST_SAID], *([f"and {more} more of the kind"] if more > 0 else [])]
        return f"{self.status}: {'; '.join(said)}" if self.reasons else self.status


def worst(answers: Iterable[Freshness]) -> Freshness:
    """Return "stale" if any answer is, else "cannot tell" if any is, else "current", with the reasons."""
    found = list(answers)
    for status in (STALE, CANNOT_TELL):
        said = [answer for answer in found if answer.status == status]
        if said:
            reasons = dict.fromkeys(reason for answer in said for reason in answer.reasons)
            return Freshness(status, tuple(reasons), all(answer.other_compiler for answer in said))
    return Freshness()
