"""Worker with real processes: what a bad kernel does to its process is an error of that worker and no more."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from greenfast.device.worker import UnsupportedByDeviceError, Worker, WorkerError
from tests.device.processes import group_of, interrupt, is_alive, start, wait_until
from tests.device.sessions import (
    DEAF,
    EXECUTABLE,
    EXIT,
    LACK,
    PRINT,
    RAISE,
    SEGV,
    SLEEP,
    SYS_EXIT,
    BadSession,
    EchoSession,
    EmulatingSession,
    HangingStart,
    SlowStart,
    UnstartableSession,
    case,
)


def pid_of(worker: Worker) -> int:
    return int(worker.info().name.split()[-1])


def act(worker: Worker, what: int) -> dict[str, float]:
    return worker.phases(EXECUTABLE, case(), what)


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """A worker that is waited for in vain fails its test, and does not hang it."""

    def fail(*_: object) -> None:
        raise TimeoutError("the test took too long")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, 60, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def bad() -> Iterator[Worker]:
    with Worker(3, timeout_s=30, make_session=BadSession) as worker:
        yield worker


def test_a_worker_answers_from_another_process(bad: Worker) -> None:
    assert bad.info().name.startswith("device 3 in ")
    assert pid_of(bad) != os.getpid()
    result = bad.run(EXECUTABLE, case(), 5)
    assert result.violations == [f"entry {np.int32(3)!r} x5"]
    assert result.outputs["y"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_large_arrays_go_both_ways(bad: Worker) -> None:
    """64 MB, far more than a pipe holds."""
    large = case(2**24)
    result = bad.run(EXECUTABLE, large, 1)
    assert np.array_equal(result.outputs["y"], large.inputs["x"])


def test_leaving_a_worker_ends_its_process() -> None:
    with Worker(timeout_s=30, make_session=EchoSession) as worker:
        pid = pid_of(worker)
        assert is_alive(pid)
    assert not is_alive(pid)
    with pytest.raises(WorkerError):
        worker.info()


@pytest.mark.parametrize("what", [SLEEP, DEAF])
def test_a_hang_is_an_error_and_its_process_is_gone(what: int) -> None:
    with Worker(timeout_s=30, make_session=BadSession) as worker:
        pid = pid_of(worker)
        worker._timeout_s = 0.2
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"hang: phases did not end within 0\.2 s; its process was killed"):
            act(worker, what)
        assert time.monotonic() - start < 10
        assert not is_alive(pid)


def test_a_hang_while_the_device_is_opened_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting has a separate time-out, as it is not the kernel's fault."""
    monkeypatch.setattr("greenfast.device.worker.START_S", 1.0)
    with (
        Worker(timeout_s=600, make_session=HangingStart) as worker,
        pytest.raises(WorkerError, match="hang: start did not end within 1 s; its process was killed"),
    ):
        worker.info()


def test_a_slow_start_is_not_the_kernels_fault() -> None:
    with Worker(timeout_s=0.5, make_session=SlowStart) as worker:
        assert is_alive(pid_of(worker))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (EXIT, r"crash: the process ended during phases \(exit 7\)"),
        (SEGV, r"crash: the process ended during phases \(exit -11\)"),
        (SYS_EXIT, r"crash: the process ended during phases \(exit 0\)"),
        (RAISE, "phases: RuntimeError: cuda says no"),
    ],
)
def test_a_process_that_fails_is_an_error_and_the_other_goes_on(bad: Worker, what: int, said: str) -> None:
    with Worker(timeout_s=30, make_session=EchoSession) as other:
        pid = pid_of(bad)
        assert is_alive(pid_of(other))
        with pytest.raises(WorkerError, match=said):
            act(bad, what)
        assert not is_alive(pid)
        with pytest.raises(WorkerError):  # closed: never answers again
            bad.info()
        assert other.run(EXECUTABLE, case(), 1).outputs["y"].size == 4


def test_what_a_device_cannot_run_is_not_a_failure_and_its_process_goes_on(bad: Worker) -> None:
    pid = pid_of(bad)
    with pytest.raises(UnsupportedByDeviceError, match=r"^phases: no such instruction$") as found:
        act(bad, LACK)
    assert (found.value.ended, pid_of(bad)) == (False, pid)


@pytest.mark.parametrize(("what", "said"), [(EXIT, r"crash: .* \(exit 7\)"), (SLEEP, "hang: phases did not end")])
def test_an_emulator_that_ends_or_is_late_says_nothing_of_the_kernel(what: int, said: str) -> None:
    with Worker(timeout_s=30, make_session=EmulatingSession) as worker:
        worker.info()
        worker._timeout_s = 1
        with pytest.raises(UnsupportedByDeviceError, match=said) as found:
            act(worker, what)
        assert found.value.ended


def test_a_device_that_cannot_be_opened_says_why() -> None:
    with (
        Worker(99, timeout_s=30, make_session=UnstartableSession) as worker,
        pytest.raises(WorkerError, match="start: no CUDA device 99: the driver shows 0"),
    ):
        worker.info()


def test_what_a_kernel_prints_is_seen_when_its_call_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with Worker(timeout_s=30, make_session=BadSession) as worker:
        act(worker, PRINT)
        printed = capfd.readouterr()
        assert (printed.out, printed.err) == ("", "a kernel's printf\n")


@pytest.mark.parametrize("at", ["working", "starting"])
def test_the_parent_handles_an_interrupt_and_ends_the_worker(at: str) -> None:
    """Ctrl-C goes to both processes: the parent raises KeyboardInterrupt, the child says nothing and ends."""
    program = start([sys.executable, "-m", "tests.device.interrupted", at])
    assert program.stdout is not None
    pid = 0
    for line in program.stdout:
        if line == "ready\n":
            break
        pid = int(line)
    if at == "starting":
        # The program and the worker, which is then busy importing.
        assert wait_until(lambda: len(group_of(program.pid)) == 2)
        time.sleep(0.05)
    out, err = interrupt(program)
    assert (out, err, program.returncode) == ("interrupted\n", "", 130)
    assert at == "starting" or not is_alive(pid)
    assert wait_until(lambda: not group_of(program.pid))
