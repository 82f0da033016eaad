"""A variant: one setting of a kernel family's toggles."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """A named, complete setting of toggles; equal settings under two names differ only in ``name``."""

    name: str
    toggles: tuple[tuple[str, int], ...]

    @property
    def values(self) -> dict[str, int]:
        """Toggle name -> value."""
        return dict(self.toggles)
