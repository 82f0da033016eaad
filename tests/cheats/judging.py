"""The corpus's kernels through the gates: BUILD, RESOURCES, CORRECTNESS, EVIDENCE, and on a GPU the timed launches."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.kernel import bench
from greenfast.judge.check_plan import add_check_plan
from greenfast.judge.gates.evidence import check_promises
from greenfast.judge.gates.registry import GATES
from greenfast.judge.implementation import (
    CANDIDATE,
    Implementation,
    build_rung_implementation,
    build_side,
    build_solution_implementation,
)
from greenfast.judge.pipeline import GateRun
from greenfast.judge.record_schema import GateResult
from greenfast.judge.request import NullListener, Request, make_request
from greenfast.judge.solution.schema import find_solution
from greenfast.judge.task import LoadedTask, load
from greenfast.spec.errors import GreenfastError
from tests.fakes import EmulatorHere

FOLDER = Path(__file__).parent
#: Seconds; a kernel of the corpus takes microseconds.
TIMEOUT_S = 10.0
#: What drawn shapes and inputs come from.
SEED = 1


@dataclass(frozen=True)
class Finding:
    """What was said of a kernel: the first gate that fell short, or that was left open, and why.

    outcome: "rejected", "open" (a gate is PENDING that this device could ask) or "accepted". gate: a gate's name, or
    the error's for what never came to a gate.
    """

    outcome: str
    gate: str = ""
    message: str = ""


def emulated_here(asked: Request) -> Request:
    """A run on the emulator in this process: a process takes longer to start than a kernel of the corpus."""
    return replace(asked, start_worker=EmulatorHere)


@cache
def task_of(problem: str) -> LoadedTask:
    """A problem of the corpus, by the name of its folder."""
    inner = FOLDER / "problems" / problem
    return load(inner if inner.is_dir() else FOLDER / problem)


@cache
def request_of(problem: str, gpu: bool) -> Request:
    """A run on a problem's shapes, without a GPU the small ones, on all of its seeds, and on what SEED draws."""
    task = task_of(problem)
    names = [shape.name for shape in task.config.shapes if gpu or shape.dims.get("N", 0) <= 1024]
    asked = make_request(
        task, shapes=names, seeds=None, fmt=None, arch=None if gpu else "sm_90a",
        device="auto" if gpu else "emulator", warmup=None,
        iters=None, processes=1, timeout_s=TIMEOUT_S, out=Path(tempfile.gettempdir()) / "greenfast-corpus",
        command="the corpus",
    )  # fmt: skip
    if not gpu:
        asked = emulated_here(asked)
    return add_check_plan(asked, None, chosen=False, seed=SEED)


def solution(path: Path, problem: str, gpu: bool) -> Finding:
    """Judge a kernel in a file with a header."""
    request = request_of(problem, gpu)
    try:
        found = find_solution(path)
        return judged(request, build_solution_implementation(request.task, found, request.target))
    except GreenfastError as e:
        return Finding("rejected", type(e).__name__, str(e))


def rung(name: str, gpu: bool) -> Finding:
    """Judge a kernel of the doubling task."""
    request = request_of("doubling", gpu)
    return judged(request, build_rung_implementation(request.task, request.task.config.variant(name)))


def judged(request: Request, implementation: Implementation) -> Finding:
    """Take an implementation through the gates."""
    if request.device is not None and request.device.kind == "gpu":
        gates = bench(request, implementation, NullListener()).record.gates
        built = gates[0].status == "PASS"
        side = (
            build_side(
                CANDIDATE, implementation.family, implementation.variant, request.format, request.shapes, request.target
            )
            if built
            else None
        )
    else:
        run = GateRun(request, {CANDIDATE: implementation}, NullListener())
        run.run(gate for name, gate in GATES.items() if name not in ("PERFORMANCE", "EVIDENCE"))
        gates = run.gates
        side = run.built(CANDIDATE)
    # The first gate that fails is the finding. EVIDENCE checks promises of rungs and launches that begin early alone,
    # and a disassembler takes a third of a second to start.
    early = side is not None and any(
        step.launch.early for program in side.programs.values() for step in program.program.steps
    )
    checked = early or implementation.rung is not None
    if side is not None and checked and not any(gate.status == "FAIL" for gate in gates):
        gates.append(check_promises(side, implementation.rung, None))
    return finding_of(gates)


def finding_of(gates: list[GateResult]) -> Finding:
    """The first gate that fell short; where none did, the first that is open."""
    for status, outcome in (("FAIL", "rejected"), ("PENDING", "open")):
        for gate in gates:
            if gate.status == status:
                return Finding(outcome, gate.gate, gate.reasons[0] if gate.reasons else gate.summary)
    return Finding("accepted")
