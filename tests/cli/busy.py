"""Tasks that keep ``greenfast judge`` busy at a given point until they are interrupted."""

from __future__ import annotations

from pathlib import Path

from tests.judge.small_task import FAMILY, PROBLEM, write_task

_WAIT = """
def _wait(*_, **__):
    import time
    print("busy", flush=True)
    time.sleep(600)
"""
_WHILE_BUILDING = """
import greenfast.judge.implementation
greenfast.judge.implementation.compile_kernel = _wait
"""
_WHILE_SAVING = """
import greenfast.judge.validate
greenfast.judge.validate.report = _wait
"""

#: A family's process prints nowhere: what follows the first inputs is the wait for its answer.
_BUSY = """
import functools
_make_case, _print_once = make_case, functools.cache(functools.partial(print, "busy", flush=True))

def make_case(*arguments, **variant):
    _print_once()
    return _make_case(*arguments, **variant)
"""

#: Point -> (family, problem) of a task that waits there.
PLACES: dict[str, tuple[str, str]] = {
    "import": (FAMILY, PROBLEM + _WAIT + "_wait()\n"),
    "solution": (_WAIT + FAMILY.replace("    source =", "    _wait()\n    source ="), PROBLEM + _BUSY),
    "build": (FAMILY, PROBLEM + _WAIT + _WHILE_BUILDING),
    "save": (FAMILY, PROBLEM + _WAIT + _WHILE_SAVING),
}


def busy_task(folder: Path, place: str) -> Path:
    """Write the task that waits at this point."""
    family, problem = PLACES[place]
    return write_task(folder, family=family, problem=problem)
