"""The figure that a function draws, to look into."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from matplotlib.figure import Figure


def drawn_by(draw: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The one figure that ``draw`` saves."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: object, **options: object) -> None:
        figures.append(self)
        save(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    draw()
    (figure,) = figures
    return figure
