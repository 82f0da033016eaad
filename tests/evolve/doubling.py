"""A task for searches, y = 2 * x, whose toggles make good kernels, equal ones, and broken ones of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from greenfast.evolve.event_log import read_events
from greenfast.evolve.proposal import Candidate, Evaluation
from tests.judge.small_task import config, write_task

#: KIND -> where it must end.
KINDS = {
    0: "",
    1: "duplicate",  # of KIND 0: only a comment differs
    2: "CORRECTNESS",  # 3 * x
    3: "BUILD",  # no C++
    4: "CORRECTNESS",  # the last element is never written
    5: "RESOURCES",  # counts its launches in a variable
    6: "space",  # the family refuses it
}
FAMILY = '''
import numpy as np
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import KernelSource, Launch

BODIES = {
    0: "if (i < n) y[i] = x[i] * 2.0f;",
    1: "/* another kernel, one would think */ if (i < n) y[i] = x[i] * 2.0f;",
    2: "if (i < n) y[i] = x[i] * 3.0f;",
    3: "if (i < n) y[i] = x[i] * ;",
    4: "if (i < n - 1) y[i] = x[i] * 2.0f;",
    5: "if (i < n) { y[i] = x[i] * 2.0f; atomicAdd(&launches, 1); }",
}

def kernel(toggles, fmt, dims, *, instrumented=False):
    if toggles["KIND"] not in BODIES:
        raise UsageError(f"KIND={toggles['KIND']}: this family has no such kernel")
    state = "__device__ int launches;" if toggles["KIND"] == 5 else ""
    source = f"""{state}
extern "C" __global__ void twice(const float* x, float* y, int n) {{
  int i = blockIdx.x * {toggles["THREADS"]} + threadIdx.x;
  {BODIES[toggles["KIND"]]}
}}
"""
    return KernelSource("twice", source, "twice.cu", (), (toggles["THREADS"], 1, 1))

def launch(toggles, fmt, dims):
    return Launch((-(-dims["N"] // toggles["THREADS"]), 1, 1), ("x", "y", np.int32(dims["N"])))
'''
SPACE = {
    "name": "doubling",
    "parameters": {
        "KIND": {"values": list(KINDS), "help": "which body"},
        "THREADS": {"values": [32, 64, 128, 256], "default": 256},
    },
    "constraints": ["THREADS <= 128 if KIND == 1 else 1"],
}


def write_search_task(folder: Path) -> Path:
    """The task's folder, with its space; its baseline is one of 256 threads."""
    write_task(folder, family=FAMILY)
    budget = {"registers": 32, "smem_bytes": 0}
    changes = {
        "toggles": {
            "KIND": {"default": 0, "values": list(KINDS)},
            "THREADS": {"default": 256, "values": [32, 64, 128, 256]},
        },
        "rungs": [
            {"name": "plain", "title": "", "toggles": {"THREADS": 256}, "budget": budget},
            {"name": "fast", "title": "", "toggles": {"THREADS": 128}, "after": "plain", "budget": budget},
        ],
        "timing": {"processes": 3, "timed_iters": 60, "warmup_iters": 5, "blocks": 6},
    }
    (folder / "config_forward.json").write_text(json.dumps(config(**changes)))
    (folder / "space.json").write_text(json.dumps(SPACE))
    return folder


def candidate(kind: int, threads: int = 128) -> Candidate:
    """A setting of the space."""
    return Candidate(parameters={"KIND": kind, "THREADS": threads}, rationale=f"kind {kind}", prediction="none")


def evaluated(folder: Path) -> list[Evaluation]:
    """The evaluations of a run, in order."""
    data = [one for e in read_events(folder) if e.kind == "evaluated" for one in e.data]
    return [msgspec.convert(one, Evaluation) for one in data]
