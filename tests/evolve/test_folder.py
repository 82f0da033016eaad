"""Who works in a run's folder: one search at a time, whatever ended the last one, and processes that end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from greenfast import __version__
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.run_folder import describe_version_change, lock_run_folder
from greenfast.evolve.space import Parameter, Space
from greenfast.judge.request import git_state
from greenfast.spec.errors import MachineError, UsageError
from tests.device.processes import is_alive

IN_IT = """
import sys, time
from pathlib import Path
from greenfast.evolve.run_folder import lock_run_folder
with lock_run_folder(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(60)
"""
IN_A_POOL = """
import os, time
from greenfast.evolve.workers import ProcessPool
print(ProcessPool([os.getpid]).start(0, int)(), flush=True)
time.sleep(60)
"""

INTERRUPTED = """
import signal
import time
from functools import partial
from greenfast.evolve.workers import ProcessPool
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
pool = ProcessPool([partial(int, 30)] * 2)
for slot in range(2):
    pool.start(slot, time.sleep)
try:
    print("in", flush=True)
    for _ in range(600):
        time.sleep(0.1)  # a signal just before a sleep does not cut it short
except KeyboardInterrupt:
    pool.close()
"""


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return next(line.strip() for line in process.stdout if line.strip())


def test_a_second_search_is_refused_until_the_first_one_ends(tmp_path: Path) -> None:
    first = started(IN_IT, tmp_path)
    assert first_line(first) == "in"
    with pytest.raises(UsageError, match=f"process {first.pid} is running it"), lock_run_folder(tmp_path):
        pass
    first.kill()
    first.wait()
    with lock_run_folder(tmp_path):
        pass


def test_a_file_of_a_search_that_was_killed_does_not_lock(tmp_path: Path) -> None:
    """Its number may be another process's now, as in a container that was started again."""
    (tmp_path / ".running").write_text(str(os.getppid()))
    with lock_run_folder(tmp_path):
        assert (tmp_path / ".running").read_text() == str(os.getpid())
    assert (tmp_path / ".running").read_text() == ""


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(MachineError, match="cannot be written"), lock_run_folder(Path("/proc")):
        pass


def test_a_pools_processes_end_when_their_parent_is_killed() -> None:
    parent = started(IN_A_POOL)
    child = int(first_line(parent))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(child)


def test_an_interrupt_while_a_pool_starts_is_the_parents_alone() -> None:
    """A terminal sends it to all; a process that was still importing printed a traceback."""
    parent = started(INTERRUPTED)
    assert first_line(parent) == "in"
    os.killpg(parent.pid, signal.SIGINT)
    _, said = parent.communicate(timeout=30)
    assert (parent.returncode, said) == (0, "")


def test_a_run_of_another_version_says_so() -> None:
    here = Manifest(
        created="", task="t", space=Space(name="s", parameters={"X": Parameter(values=(1,))}), space_folder="",
        proposer="random", package_version="0.0.1",
    )  # fmt: skip
    assert "begun by greenfast 0.0.1, and goes on with " in describe_version_change(here)
    same = msgspec.structs.replace(here, package_version=__version__, git=git_state())
    assert describe_version_change(same) == ""
    assert same.git is not None
    other = msgspec.structs.replace(same, git=msgspec.structs.replace(same.git, sha="0123456789abcdef"))
    assert "of commit 01234567, and goes on" in describe_version_change(other)
