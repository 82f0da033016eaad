"""Nsight Compute profiles, and the cycles of a kernel's phases by in-kernel clocks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from greenfast.device.python_process import environment, isolated, module_path
from greenfast.judge.implementation import CANDIDATE, Implementation, build_rung_implementation, build_side
from greenfast.judge.pipeline import GateRun
from greenfast.judge.record_io import RECORD, sealed_json
from greenfast.judge.record_schema import PhaseRecord
from greenfast.judge.request import NullListener, Request
from greenfast.judge.store import check_writable, new_run_folder
from greenfast.judge.task import Shape, Variant
from greenfast.spec.errors import MachineError
from greenfast.spec.facts import KernelCounts
from greenfast.spec.kernel import render_program

PROFILE_NAME = "profile.ncu-rep"
_NCU_TIMEOUT_S = 300
_CHILD = "import sys; *sys.path[:], job = sys.argv[1:]; from greenfast.judge.profile_target import main; main(job)"


def ncu() -> str | None:
    """Return the path of Nsight Compute's command line, or None if it is missing."""
    return shutil.which("ncu")


def take_profile(
    request: Request,
    implementation: Implementation,
    shape: Shape,
    seed: int,
    stamp: str,
    *,
    launches: int = 3,
    metrics: Sequence[str] = (),
) -> Path:
    """Profile the last of some launches; returns ``<results>/<stamp>-<shape>-ncu/profile.ncu-rep``.

    metrics: metrics beyond ncu's full set. The clocks are left as they are. Raises MachineError where
    there is no ncu, or it could not profile.
    """
    tool = ncu()
    if tool is None:
        raise MachineError("ncu is not on the PATH: install NVIDIA Nsight Compute, or add its folder to PATH")
    program = render_program(implementation.family, implementation.variant.values, request.format, shape.dims)
    solution = implementation.solution
    job = {
        "task": str(request.task.folder),
        "solution": str(solution.folder / solution.path.name) if solution else "",
        "toggles": implementation.variant.values,
        "shape": shape.name,
        "seed": seed,
        "format": request.format,
        "arch": request.target.name,
        "ordinal": request.gpu,
        "launches": launches,
    }
    with new_run_folder(request.results, f"{stamp}-{shape.name}-ncu") as (work, publish):
        command = [tool, "--set", "full", "--clock-control", "none", "--nvtx", "--import-source", "yes"]
        command += ["--metrics", ",".join(metrics)] if metrics else []
        command += [
            "--kernel-name",
            f"regex:^({'|'.join(re.escape(entry) for entry in {step.kernel.entry for step in program.steps})})$",
            "--launch-skip",
            str((launches - 1) * len(program.steps)),
            "--launch-count",
            str(len(program.steps)),
            "--export",
            str(work / PROFILE_NAME),
        ]
        command += isolated(_CHILD, *module_path(current_last=True), json.dumps(job))
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_NCU_TIMEOUT_S, env=environment(), check=False
            )
        except subprocess.TimeoutExpired as e:
            raise MachineError(f"ncu did not end within {_NCU_TIMEOUT_S} s") from e
        if done.returncode != 0 or not (work / PROFILE_NAME).is_file():
            said = (done.stdout + done.stderr).strip().splitlines()
            raise MachineError("ncu could not profile: " + " | ".join(said[-3:]))
        return publish() / PROFILE_NAME


def profile_candidate(request: Request, implementation: Implementation, stamp: str) -> tuple[list[str], str]:
    """Profile an implementation on the first gated shape. Return the files, and the reason if there are none."""
    gated = [s for s in request.shapes if s.name in request.task.config.timing.gate_shapes] or request.shapes
    try:
        path = take_profile(request, implementation, gated[0], request.seeds[0], stamp)
    except MachineError as e:
        return [], str(e)
    return [str(path.relative_to(request.out))], ""


def count_phases(request: Request, variant: Variant, *, repeats: int = 5) -> tuple[PhaseRecord, Path]:
    """Count the cycles of each phase of the instrumented build. Return the record and its folder.

    Thread 0 of each block counts. The wait at a barrier belongs to the phase that ends next. The counters cost time and
    prevent code motion across phases, so only the shares are meaningful, not the sum. The emulator has no cycles and
    counts executed instructions instead.
    Raises UsageError for a family without an instrumented build, MachineError or WorkerError if it cannot run.
    """
    reason = request.cannot_run()
    if reason or request.device is None:
        raise MachineError(f"phases cannot be counted; {reason}")
    check_writable(request.results)
    family, problem = request.task.family, request.task.problem
    run = GateRun(request, {CANDIDATE: build_rung_implementation(request.task, variant)}, NullListener())
    side = build_side(CANDIDATE, family, variant, request.format, request.shapes, request.target, instrumented=True)
    cycles: dict[str, dict[str, float]] = {}
    counts: dict[str, dict[str, KernelCounts]] = {}
    with request.make_worker() as worker:
        for shape in request.shapes:
            executable = side.executable(shape.name)
            case = problem.make_case(shape.dims, request.seeds[0], request.format)
            if request.device.kind == "gpu":
                cycles[shape.name] = worker.phases(executable, case, repeats)
            else:
                counts[shape.name] = worker.phase_counts(executable, case)
    run.sides = [side]
    record = PhaseRecord(**run.facts(), side=run.side(CANDIDATE), phase_cycles=cycles, phase_counts=counts)
    with new_run_folder(request.results, f"{run.stamp}-phases") as (work, publish):
        (work / RECORD).write_text(sealed_json(record), encoding="utf-8")
        return record, publish()
