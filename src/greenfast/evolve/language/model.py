"""The protocol of a language model: text in, text out, within limits."""

from __future__ import annotations

import hashlib
from typing import Protocol

import msgspec

#: Assumed bytes per token if the server does not count tokens.
_BYTES_PER_TOKEN = 4


class AnswerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one answer. tokens: of its text. seconds: per attempt."""

    tokens: int
    seconds: float

    @property
    def max_bytes(self) -> int:
        """Most bytes to read; a longer answer is refused."""
        return 64 * 1024 + 32 * self.tokens


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer. tokens: of prompt and answer together, from the server, else by ``estimate_tokens``."""

    text: str
    tokens: int


class Model(Protocol):
    """The interface of a model."""

    def complete(self, prompt: str, limits: AnswerLimits) -> ModelAnswer:
        """Return the answer to a prompt. Raises ProposerError if there is none within the limits."""


def estimate_tokens(*texts: str) -> int:
    """Estimate tokens as bytes / 4, rounded up per text."""
    return sum(-(-len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN) for text in texts)


def prompt_digest(prompt: str) -> str:
    """Return 16 hexadecimal digits that identify a prompt."""
    return hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:16]
