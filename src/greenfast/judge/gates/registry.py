"""The gates of ``greenfast judge`` by name, in the order of execution.

Every module of this package that defines ``GATE`` is found here, so a new gate is a new module and its tests.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from greenfast.judge import gates as package
from greenfast.judge.pipeline import Gate


def order_gates(gates: Iterable[Gate]) -> dict[str, Gate]:
    """Return gates by name, each directly after the one that its ``after`` names. That one has a lower exit code."""
    ordered: list[Gate] = []
    for gate in sorted(gates, key=lambda gate: gate.exit_code):
        names = ["", *(other.name for other in ordered)]
        ordered.insert(names.index(gate.after), gate)
    return {gate.name: gate for gate in ordered}


_NAMES = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
GATES = order_gates(module.GATE for module in map(importlib.import_module, _NAMES) if hasattr(module, "GATE"))
