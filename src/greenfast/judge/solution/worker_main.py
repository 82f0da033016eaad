"""Entry point of the process that runs a solution's Python code. It enters the sandbox before it imports the code.

``client.SolutionProcess`` starts it with two pipes, the readable folders and one writable folder.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from greenfast.device.sandbox import confine


def main(questions: int, answers: int, readable: Sequence[str], writable: str, gpu: bool, current: str) -> None:
    """Confine this process, then answer requests until their pipe closes.

    current: a folder appended to the module search path after the process is confined; empty for none.
    """
    restrictions = confine(readable, writable, gpu)
    sys.path += [current] if current else []
    # Import the server last: NumPy may start threads, and some restrictions cover only the calling thread.
    importlib.import_module("greenfast.judge.solution.server").serve(questions, answers, restrictions)
