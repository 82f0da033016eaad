"""The protocol of a language model: text in, text out, within limits."""

from __future__ import annotations

import hashlib
from typing import Protocol

import msgspec

#: Bytes of text that count as a token where nobody counted.
_BYTES = 4


class AnswerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one answer. tokens: of its text. seconds: until it has come; what is tried again starts anew."""

    tokens: int
    seconds: float

    @property
    def most_bytes(self) -> int:
        """What is read of an answer at most; a longer one is cut off and refused."""
        return 64 * 1024 + 32 * self.tokens


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came. tokens: of prompt and answer together, as the server counted them, else by ``estimated_tokens``."""

    text: str
    tokens: int


class Model(Protocol):
    """Whatever completes a prompt."""

    def complete(self, prompt: str, limits: AnswerLimits) -> ModelAnswer:
        """The answer. Raises ProposerError where none comes within the limits."""


def estimated_tokens(*texts: str) -> int:
    """A token for each four bytes begun: for budgets where no server counts."""
    return sum(-(-len(text.encode("utf-8", "replace")) // _BYTES) for text in texts)


def prompt_digest(prompt: str) -> str:
    """16 hexadecimal digits that name a prompt."""
    return hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:16]
