"""The answer whether a stored record still describes today's kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

CURRENT: Literal["current"] = "current"
STALE: Literal["stale"] = "stale"
CANNOT_TELL: Literal["cannot tell"] = "cannot tell"
_MAX_SHOWN = 3


@dataclass(frozen=True)
class Freshness:
    """An answer with its reasons.

    status: CURRENT: same machine code and same launches. STALE: something differs. CANNOT_TELL: another compiler is
    installed than the record's, or the record lacks data to compare. reasons: the differences or the missing data;
    empty for CURRENT. other_compiler: whether the compiler is the only reason for CANNOT_TELL.
    """

    status: Literal["current", "stale", "cannot tell"] = CURRENT
    reasons: tuple[str, ...] = ()
    other_compiler: bool = False

    def __str__(self) -> str:
        """Return the status with its first three reasons and the number of further ones."""
        more = len(self.reasons) - _MAX_SHOWN
        shown = [*self.reasons[:_MAX_SHOWN], *([f"and {more} more of the kind"] if more > 0 else [])]
        return f"{self.status}: {'; '.join(shown)}" if self.reasons else self.status


def worst(answers: Iterable[Freshness]) -> Freshness:
    """Return the worst status of the answers with its reasons: STALE, then CANNOT_TELL, then CURRENT."""
    answers = list(answers)
    for status in (STALE, CANNOT_TELL):
        matching = [answer for answer in answers if answer.status == status]
        if matching:
            reasons = dict.fromkeys(reason for answer in matching for reason in answer.reasons)
            return Freshness(status, tuple(reasons), all(answer.other_compiler for answer in matching))
    return Freshness()
