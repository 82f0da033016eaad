"""Small sessions for Worker's processes: one that works, and one that breaks its process as a bad kernel does."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from greenfast.device.session import Executable, KernelImage, RunResult
from greenfast.spec.errors import MachineError, UnsupportedError
from greenfast.spec.facts import DeviceInfo
from greenfast.spec.kernel import Launch
from greenfast.spec.problem import Case, OutputSpec

IMAGE = KernelImage(b"cubin", "entry", (32, 1, 1), 0)
PLAN = Launch((1, 1, 1), ("x", "y", np.int32(3)))
EXECUTABLE = Executable.single(IMAGE, PLAN)


def case(size: int = 4) -> Case:
    return Case({"x": np.arange(size, dtype=np.float32)}, {"y": OutputSpec((size,), "float32")})


class EchoSession:
    """Returns the input as the output; its device's name is the ordinal and the process."""

    def __init__(self, ordinal: int) -> None:
        self._name = f"device {ordinal} in {os.getpid()}"

    def info(self) -> DeviceInfo:
        return DeviceInfo(kind="gpu", name=self._name, compute_capability="8.9", cuda_version="13.0", driver="1")

    def run(self, executable: Executable, case: Case, repeats: int) -> RunResult:
        ((image, plan),) = executable.steps
        return RunResult({"y": case.inputs["x"]}, [f"{image.entry} {plan.args[2]!r} x{repeats}"])


class BadSession(EchoSession):
    """``phases`` does what its last argument, an index into ACTS, selects."""

    def phases(self, executable: Executable, case: Case, repeats: int) -> Any:
        return ACTS[repeats]()


class EmulatingSession(BadSession):
    emulates = True


class UnstartableSession:
    def __init__(self, ordinal: int) -> None:
        raise MachineError(f"no CUDA device {ordinal}: the driver shows 0")


class HangingStart(EchoSession):
    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        time.sleep(600)


class SlowStart(EchoSession):
    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        time.sleep(1)


def _prints() -> dict[str, float]:
    print("a kernel's printf")
    return {}


def _raises() -> None:
    raise RuntimeError("cuda says no")


def _sleeps() -> None:
    time.sleep(600)


def _deaf() -> None:
    """Hangs and cannot be asked to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def _segv() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _lacks() -> None:
    raise UnsupportedError("no such instruction")


ACTS = [
    _sleeps,
    lambda: os._exit(7),
    lambda: os.kill(os.getpid(), signal.SIGSEGV),
    sys.exit,
    _raises,
    _deaf,
    _prints,
    _lacks,
]
SLEEP, EXIT, SEGV, SYS_EXIT, RAISE, DEAF, PRINT, LACK = range(len(ACTS))
