"""A task of an author's own, small enough to compile in no time: y = 2 * x."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from greenfast.judge.task import LoadedTask, load

FAMILY = '''
import numpy as np
from greenfast.spec.kernel import KernelSource, Launch

def kernel(toggles, fmt, dims, *, instrumented=False):
    source = """extern "C" __global__ void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = x[i] * FACTOR;
}
""".replace("FACTOR", "2.0f" if toggles["FAST"] else "4.0f * 0.5f")
    return KernelSource("twice", source, "twice.cu", (), (256, 1, 1))

def launch(toggles, fmt, dims):
    return Launch((-(-dims["N"] // 256), 1, 1), ("x", "y", np.int32(dims["N"])))
'''

PROBLEM = """
import numpy as np
from greenfast.spec.problem import Case, OutputSpec, References

def _x(dims, seed):
    return np.random.default_rng(seed).standard_normal(dims["N"], dtype=np.float32)

def make_case(dims, seed, fmt):
    return Case({"x": _x(dims, seed)}, {"y": OutputSpec((dims["N"],), "float32")})

def references(dims, seed, fmt):
    exact = 2.0 * _x(dims, seed).astype(np.float64)
    return References(full=exact, exact=exact, bound=np.full_like(exact, 1e-6))

def decode(outputs, fmt):
    return outputs["y"].astype(np.float64)
"""


def config(**changes: Any) -> dict[str, Any]:
    """Its config; ``changes`` replace top-level keys."""
    budget = {"registers": 32, "smem_bytes": 0}
    return {
        "name": "twice",
        "description": "y = 2 x",
        "family": "family.py",
        "problem": "problem.py",
        "shapes": [{"name": "tiny", "dims": {"N": 5}}, {"name": "page", "dims": {"N": 1024}}],
        "seeds": [0, 1],
        "formats": {
            "float": {
                "error": {"max_abs_err": 1e-6, "mean_abs_err": 1e-6, "pct_bad": 0, "bad_abs_err": 1e-6},
                "kernel_error": {"relative_error": 1e-6},
            }
        },
        "toggles": {"FAST": {"default": 1, "values": [0, 1]}},
        "rungs": [
            {"name": "plain", "title": "", "budget": budget},
            {"name": "fast", "title": "", "toggles": {"FAST": 1}, "after": "plain", "budget": budget},
        ],
        "defaults": {
            "baseline": "plain",
            "candidate": "fast",
            "shapes": ["tiny"],
            "format": "float",
            "arch": "sm_89",
            "results": "twice",
        },
        **changes,
    }


def write_task(
    folder: Path, *, family: str | None = FAMILY, problem: str | None = PROBLEM, text: str | None = None, **changes: Any
) -> Path:
    """Write the task to a folder; None leaves a module out, ``text`` stands in place of the config's JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config_forward.json").write_text(json.dumps(config(**changes)) if text is None else text)
    for name, code in (("family.py", family), ("problem.py", problem)):
        if code is not None:
            (folder / name).write_text(code)
    return folder


def loaded(folder: Path, **options: Any) -> LoadedTask:
    """The task, written to a folder and loaded."""
    return load(write_task(folder, **options))
