"""Run one kernel a few times in this process, for a profiler to watch: python -m greenfast.judge.profile_target JOB.

JOB is the JSON that greenfast.judge.profiling makes. The host's phases are NVTX ranges.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nvtx

from greenfast.device.gpu import Gpu
from greenfast.judge.implementation import build_rung_implementation, build_side, build_solution_implementation
from greenfast.judge.solution.schema import find_solution
from greenfast.judge.task import load
from greenfast.spec.arch import Target


def main(text: str) -> None:
    """Build, upload, launch and download, each in a separate NVTX range."""
    job = json.loads(text)
    task = load(Path(job["task"]))
    shape = task.config.shape(job["shape"])
    target = Target.parse(job["arch"])
    if job["solution"]:
        resolved = find_solution(Path(job["solution"]))
        implementation = build_solution_implementation(task, resolved, target, job["ordinal"])
    else:
        implementation = build_rung_implementation(task, task.config.toggle_variant(job["toggles"]))
    with nvtx.annotate("build"):
        side = build_side("profiled", implementation.family, implementation.variant, job["format"], [shape], target)
    with nvtx.annotate("inputs"):
        case = task.problem.make_case(shape.dims, job["seed"], job["format"])
    with nvtx.annotate("upload"):
        gpu = Gpu(job["ordinal"])
        bound = gpu.bind(side.executable(shape.name), case)
    with nvtx.annotate("launches"):
        for _ in range(job["launches"]):
            bound.launch()
        gpu.stream.sync()
    with nvtx.annotate("download"):
        bound.outputs()


if __name__ == "__main__":
    main(sys.argv[1])
