"""The process that runs a solution's Python code: it is confined first, and answers in data only.

``process.SolutionProcess`` starts it with the ends of two pipes, folders that it may read, and one that it may write.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from greenfast.device.sandbox import confine


def main(questions: int, answers: int, readable: Sequence[str], writable: str, gpu: bool, current: str) -> None:
    """Confine this process, then answer questions until their pipe closes.

    current: a folder that modules may be imported from once the process is confined, after all others; empty for none.
    """
    held = confine(readable, writable, gpu)
    sys.path += [current] if current else []
    # Only now: NumPy may start threads, and some confinement is of the calling thread and what it starts.
    importlib.import_module("greenfast.judge.solution.server").serve(questions, answers, held)
