"""Cheats in the code of a solution: Python that renders an honest or a wrong kernel, and does something else too."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from greenfast.judge.implementation import build_solution_implementation
from greenfast.judge.solution.client import RemoteFamily
from greenfast.judge.solution.schema import find_solution
from greenfast.spec.errors import GreenfastError
from tests.cheats.judging import Finding, judged, request_of

_FAMILY = '''GREENFAST = {"name": "mine", "language": "family"}
import numpy as np
from greenfast.spec.kernel import KernelSource, Launch
TOP
SOURCE = """extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = FACTOR * x[i];
}
"""

def kernel(toggles, fmt, dims, *, instrumented=False):
    IN_KERNEL
    return KernelSource("doubling", SOURCE, "mine.cu", (), (256, 1, 1))

def launch(toggles, fmt, dims):
    IN_LAUNCH
    return Launch((-(-dims["N"] // 256), 1, 1), ("x", "y", np.int32(dims["N"])))
'''


@dataclass(frozen=True)
class HostCheat:
    """What a solution's code does at its import, in kernel and in launch; the kernel's factor is 2 in an honest one.

    gate: the gate that must fail, or the error in place of a verdict. answer_s: seconds that it is waited for.
    """

    about: str
    gate: str
    says: str
    top: str = ""
    in_kernel: str = "pass"
    in_launch: str = "pass"
    factor: str = "2.0f"
    answer_s: float = 60.0

    @property
    def text(self) -> str:
        """The solution's file."""
        parts = {"TOP": self.top, "IN_KERNEL": self.in_kernel, "IN_LAUNCH": self.in_launch, "FACTOR": self.factor}
        text = _FAMILY
        for name, code in parts.items():
            text = text.replace(name, code)
        return text


_ENDED = r"the solution ended without a verdict: "
_PATCH = """
import greenfast.judge.error_metrics, greenfast.judge.gates.correctness as gate
gate.worst_bound_ratio = lambda *_, **__: 0.0
gate.error_stats = lambda actual, reference, bad: greenfast.judge.error_metrics.error_stats(reference, reference, bad)
"""
_NUMPY = """
np.isfinite = lambda *_: np.array(True)
np.abs = lambda array: array * 0
"""
HOST = {
    "exits_at_import": HostCheat("sys.exit(0) at its import", "SolutionError", _ENDED, top="import sys; sys.exit(0)"),
    "exits_in_kernel": HostCheat(
        "os._exit(0) when asked for its kernel", "SolutionError", _ENDED, in_kernel="import os; os._exit(0)"
    ),
    "crashes": HostCheat(
        "ends by a signal", "SolutionError", "SIGSEGV", in_kernel="import os; os.kill(os.getpid(), 11)"
    ),
    "raises": HostCheat("raises", "SolutionError", "it raised KeyError", in_launch="raise KeyError('N')"),
    "hangs": HostCheat(
        "sleeps", "SolutionError", "did not answer within 3 s", in_kernel="import time; time.sleep(600)", answer_s=3.0
    ),
    "uses_up_memory": HostCheat(
        "asks for a terabyte", "SolutionError", "it raised MemoryError", in_kernel="bytearray(1 << 40)"
    ),
    "prints_a_verdict": HostCheat(
        "prints a verdict of its own and exits",
        "SolutionError",
        _ENDED,
        in_kernel="""import os; os.write(1, b'{"decision": "MERGE", "gates": []}\\n'); os._exit(0)""",
    ),
    "answers_garbage": HostCheat(
        "writes to the pipe that its answers go through",
        "SolutionError",
        _ENDED,
        in_kernel="import os\n    for fd in os.listdir('/proc/self/fd'):\n        try:\n            "
        "int(fd) > 2 and os.write(int(fd), b'\\x04\\0\\0\\0\\xc1abc')\n        except OSError:\n            pass",
    ),
    "answers_an_object": HostCheat(
        "hands back what is no argument of a launch",
        "UsageError",
        "cannot be an argument of a launch",
        in_launch='return Launch((1, 1, 1), ("x", open, np.int32(1)))',
    ),
    "patches_the_judge": HostCheat(
        "patches the gates, and its kernel is wrong", "CORRECTNESS", "kernel_bound", top=_PATCH, factor="3.0f"
    ),
    "patches_numpy": HostCheat(
        "patches NumPy, and its kernel is wrong", "CORRECTNESS", "kernel_bound", top=_NUMPY, factor="1.5f"
    ),
    "claims_other_dimensions": HostCheat(
        "changes the dimensions that it is given, and computes half",
        "CORRECTNESS",
        "were never written",
        in_launch='dims = {"N": -(-dims["N"] // 2)}',
    ),
    "writes_a_record": HostCheat(
        "writes a record next to its source",
        "SolutionError",
        "(Permission|FileNotFound)Error|Read-only",
        in_kernel='open(__file__ + ".json", "w").write("{}")',
    ),
    "reads_the_environment": HostCheat(
        "reads the environment of the judge, where a token may be",
        "SolutionError",
        "it raised PermissionError",
        in_kernel='import os; open(f"/proc/{os.getppid()}/environ").read()',
    ),
    "calls_home": HostCheat(
        "opens a connection",
        "SolutionError",
        "it raised (PermissionError|OSError|ConnectionRefusedError)",
        in_kernel="import socket; socket.create_connection(('127.0.0.1', 9), 1)",
    ),
    "starts_a_process": HostCheat(
        "leaves a process running, and its kernel is wrong",
        "CORRECTNESS|SolutionError",
        "kernel_bound|raised",
        in_kernel="import os, time\n    if os.fork() == 0:\n        time.sleep(5)\n        os._exit(0)",
        factor="1.0f",
    ),
    "other_kernel_for_the_second_answer": HostCheat(
        "renders a right kernel when asked first, and a wrong one later",
        "CORRECTNESS",
        "kernel_bound",
        in_kernel='global SOURCE\n    SOURCE = SOURCE.replace("2.0f", "1.0f") if "asked" in globals() else SOURCE\n'
        '    globals()["asked"] = True',
    ),
    "wide_block": HostCheat(
        "asks for a block of 4096 threads",
        "BUILD",
        "4096 threads",
        in_kernel='return KernelSource("doubling", SOURCE, "mine.cu", (), (64, 64, 1))',
    ),
}


def host(cheat: HostCheat, gpu: bool) -> Finding:
    """Judge a solution that brings code."""
    request = request_of("doubling", gpu)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.py"
        path.write_text(cheat.text)
        try:
            found = find_solution(path)
            implementation = build_solution_implementation(request.task, found, request.target)
            if cheat.answer_s < 60:
                family = RemoteFamily("mine", found.folder, found.config, answer_s=cheat.answer_s)
                implementation = replace(implementation, family=family)
            return judged(request, implementation)
        except GreenfastError as e:
            return Finding("rejected", type(e).__name__, str(e))
