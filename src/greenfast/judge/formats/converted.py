"""The folders that foreign problems and solutions are converted to, for all formats.

A converted problem is an ordinary task folder. So records refer to it, freshness checks and cached timings work, and
its author can extend it (shapes, bounds, ranges).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from greenfast.judge.store import write_files

#: The files of a converted problem's folder that decide which solutions it takes.
DEFINITION, WORKLOADS = "definition.json", "workloads.jsonl"
ORIGINAL, SETTINGS, TEST = "original.py", "settings.json", "test.py"
#: The reference or an answer of a problem that is given by a test.
PROGRAM = "program.py"
#: The folder of a converted problem's baseline.
REFERENCE = "reference"
#: The dimension that numbers the settings of a problem with a model, from 1.
SETTING = "problem"
#: The seed of both models' parameters.
SEED = 42
#: Allowed error of an element of a problem that is given by a test, by the dtype of the output. It is relative to the
#: sum of the element's size and the output's root mean square. TF32 products and other orders of sums stay below; a
#: wrong kernel is rarely within it.
TOLERANCES = {"float16": 4e-3, "bfloat16": 3e-2}
DEFAULT_TOLERANCE = 2e-3
#: The only number format of such a problem. Its tensors are not quantized.
FORMAT = "as_given"
#: A limit that never fails: only the tolerance decides.
_OPEN = 1e300
_NAME = re.compile(r"[^A-Za-z0-9_.+-]+")

#: The files of a converted solution's folder by name.
Files: TypeAlias = "dict[str, str | bytes]"


def safe_name(text: str) -> str:
    """Convert a text to a valid name of a task or solution."""
    return _NAME.sub("_", text)[:200].strip("_.+-") or "unnamed"


def render_problem_module(about: str, module: str, kind: str, arguments: str) -> str:
    """Return the problem.py of a converted problem: it makes a problem of a class in ``judge.formats``.

    about: the problem in words. arguments: of the class, as Python.
    """
    return f'''"""{about}; only a tolerance is known of its errors."""

from pathlib import Path

from greenfast.judge.formats.{module} import {kind}

_problem = {kind}({arguments})
make_case, references, decode = _problem.make_case, _problem.references, _problem.decode
'''


def write_problem(folder: Path, files: Mapping[str, str | bytes], reference: Mapping[str, str | bytes]) -> Path:
    """Write a converted problem and its baseline; return its folder.

    An earlier problem of the same name may have another format. Its files would decide which solutions are taken, so
    they are removed. Other files stay, such as kept records.
    """
    for name in (DEFINITION, WORKLOADS, ORIGINAL, SETTINGS, TEST):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / REFERENCE, ignore_errors=True)
    write_files(folder / REFERENCE, reference)
    return write_files(folder, files)


def task_config(
    name: str,
    description: str,
    shapes: Sequence[Mapping[str, Any]],
    defaults: int | None = None,
    left_out: Sequence[str] = (),
) -> str:
    """Return a task's config with three seeds, and gates that only apply the tolerance.

    defaults: how many of the shapes are judged by default (default: all). left_out: the parts of the problem that are
    not judged, with the reasons.
    """
    error = {"max_abs_err": _OPEN, "mean_abs_err": _OPEN, "pct_bad": 100.0, "bad_abs_err": _OPEN}
    names = [shape["name"] for shape in shapes[:defaults]]
    return _json(
        {
            "name": safe_name(name),
            "description": f"{description or name} (tolerance only: no bound is derived)",
            **({"left_out": list(left_out)} if left_out else {}),
            "problem": "problem.py",
            "shapes": list(shapes),
            "seeds": [0, 1, 2],
            "formats": {FORMAT: {"error": error, "kernel_error": {"relative_error": _OPEN, "bound_factor": 1.0}}},
            "defaults": {
                "baseline": REFERENCE,
                "shapes": names,
                "format": FORMAT,
                "arch": "sm_90a",
                "results": safe_name(name),
            },
        }
    )


def callable_config(name: str, file: str, author: str, launch: Mapping[str, Any]) -> str:
    """Return the solution.json of a Python function."""
    return _json({"name": name, "language": "callable", "file": file, "author": author, "launches": [launch]})


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"
