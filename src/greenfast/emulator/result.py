"""The result of running launches on the emulator."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.counts import Counts
from greenfast.emulator.machine.observed import Observed, Recorder
from greenfast.spec.facts import Finding
from greenfast.spec.problem import Array


@dataclass
class GridResult:
    """The outputs of a grid, or of a chain of launches, with counts and findings.

    unwritten: for each output, the number of bytes that were never written. input_writes: for each input that is no
    output, its first write, also if that write changed no value. phases: the counts by phase if phases are counted;
    they add up to ``counts``. later: results of further runs in the same memory. changed: by launch and name, module
    variables that no longer hold their initial value. notes: dependences on values that PTX does not define, and how
    they were explored. differences: faults and different outputs when such values change. findings: findings that do
    not end the run. unwritten_bytes: for inputs that were unwritten at first, a mask of the bytes that still are.
    observer: the recorder of the first run, if there was one.
    """

    outputs: dict[str, Array]
    unwritten: dict[str, int]
    input_writes: dict[str, str]
    counts: Counts
    printed: str = ""
    phases: dict[str, Counts] = field(default_factory=dict)
    later: list[GridResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    changed: dict[tuple[int, str], bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    unwritten_bytes: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    observer: Recorder | None = None

    @property
    def observed(self) -> Observed | None:
        """The observations of the recorder, if there is one."""
        return self.observer.observed() if self.observer is not None else None
