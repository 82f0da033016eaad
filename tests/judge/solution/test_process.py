"""A solution's code in its process: however it ends, there is no verdict; and what it cannot reach."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from greenfast.cli.main import main
from greenfast.judge.solution import client
from greenfast.judge.solution.client import RemoteFamily
from greenfast.judge.solution.messages import decode_program, encode_program
from greenfast.judge.solution.schema import SolutionConfig
from greenfast.spec.errors import SolutionError, UsageError
from greenfast.spec.kernel import KernelSource, Launch, Program, Step, Struct, TensorMap, Workspace
from tests.judge.small_task import FAMILY, config, write_task

DIMS = {"N": 5}
#: Writes to every pipe that the process has.
_TO_PIPES = """
import os
def say(data):
    for fd in range(3, 64):
        try:
            os.write(fd, data)
        except OSError:
            pass
"""


def started(folder: Path, code: str, *, answer_s: float = 60.0) -> RemoteFamily:
    folder.mkdir(exist_ok=True)
    (folder / "family.py").write_text(code)
    solution = SolutionConfig(name="mine", language="family", file="family.py")
    return RemoteFamily("the solution 'mine'", folder, solution, answer_s=answer_s)


def in_kernel(line: str) -> str:
    """The small family, whose ``kernel`` first does this."""
    return FAMILY.replace("    source = ", f"    {line}\n    source = ", 1)


ENDINGS = {
    "sys.exit(0)": ("import sys; sys.exit(0)", "it called sys.exit(0)\n  family.py, line 6, in kernel"),
    "os._exit(0)": ("import os; os._exit(0)", "its process ended with exit code 0"),
    "os._exit(3)": ("import os; os._exit(3)", "its process ended with exit code 3"),
    "crash": ("import os; os.kill(os.getpid(), 11)", "its process was ended by SIGSEGV"),
    "abort": ("import os; print('the last words', flush=True); os.abort()", "it printed: the last words"),
    "raise": ("raise KeyError('R')", "it raised KeyError: 'R'\n  family.py, line 6, in kernel: raise KeyError('R')"),
    "closes": ("import os; os.closerange(3, 64); import time; time.sleep(60)", "it closed its pipe"),
    "hang": ("import time; time.sleep(600)", "it did not answer within 2 s"),
    "garbage": (
        f"exec({_TO_PIPES!r}, globals()); say(b'\\x04\\0\\0\\0\\xc1abc')",
        "its answer is not what was asked for",
    ),
    "too much": (f"exec({_TO_PIPES!r}, globals()); say(b'\\xff\\xff\\xff\\x7f')", "it answered with 2147483647 bytes"),
    "memory": ("bytearray(1 << 40)", "it raised MemoryError"),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_code_that_ends_gives_no_verdict(tmp_path: Path, how: str) -> None:
    line, said = ENDINGS[how]
    family = started(tmp_path / "mine", in_kernel(line), answer_s=2.0 if how in ("hang", "closes") else 60.0)
    with pytest.raises(SolutionError) as found:
        family.program({"FAST": 1}, "float", DIMS)
    assert found.value.exit_code == 5
    assert str(found.value).startswith("the solution 'mine': the solution ended without a verdict: ")
    assert said in str(found.value)
    assert "greenfast/" not in str(found.value)


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("import os; os._exit(0)", SolutionError, "its process ended with exit code 0"),
        ("import sys; sys.exit(0)", SolutionError, "it called sys.exit(0)\n  family.py, line 1"),
        ("raise ValueError('no luck')", UsageError, "cannot be imported: ValueError: no luck\n  family.py, line 1"),
        ("import no_such", UsageError, "cannot be imported: ModuleNotFoundError: No module named 'no_such'"),
        ("def f(:", UsageError, "cannot be imported: SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported(tmp_path: Path, code: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as found:
        started(tmp_path / "mine", code)
    assert said in str(found.value)


def test_text_of_the_solution_cannot_act_on_a_terminal(tmp_path: Path) -> None:
    family = started(tmp_path / "mine", in_kernel("raise ValueError('\\x1b[2J\\rMERGE' + 'x' * 10000)"))
    with pytest.raises(SolutionError) as found:
        family.program({"FAST": 1}, "float", DIMS)
    assert "ValueError: ?[2J?MERGE" in str(found.value)
    assert len(str(found.value)) < 5000


def test_what_it_prints_is_not_an_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    family = started(tmp_path / "mine", "print('{}')\n" + in_kernel("import os; print('MERGE'); os.write(1, b'x')"))
    (step,) = family.program({"FAST": 1}, "float", DIMS).steps
    assert (step.kernel.entry, step.launch.args) == ("twice", ("x", "y", np.int32(5)))
    assert capfd.readouterr() == ("", "")


LIBRARY = """
from greenfast.spec.kernel import KernelSource, Launch, Program, Step

CODE = bytes(range(256)) * (96 << 10)

def program(toggles, fmt, dims, *, instrumented=False):
    of = lambda entry: KernelSource(
        entry, "", "library.cubin", (), (32, 1, 1), language="cubin", binary=bytes(bytearray(CODE))
    )
    return Program(tuple(Step(of(entry), Launch((1, 1, 1), ())) for entry in ("first", "second")))
"""


def test_the_code_of_a_library_is_read_in_time_and_held_once(tmp_path: Path) -> None:
    """48 MB: at one copy of all that has come so far per part, as pipes give it, 10 s of processor time."""
    family = started(tmp_path / "mine", LIBRARY)
    begin = time.process_time()
    first, second = (step.kernel.binary for step in family.program({}, "float", DIMS).steps)
    (again, _) = (step.kernel.binary for step in family.program({}, "float", DIMS).steps)
    assert time.process_time() - begin < 5
    assert first == bytes(range(256)) * (96 << 10)
    assert first is second is again


def test_a_refusal_is_the_users_to_read(tmp_path: Path) -> None:
    refusal = "from greenfast.spec.errors import UsageError; raise UsageError('N is odd')"
    family = started(tmp_path / "mine", in_kernel(refusal))
    with pytest.raises(UsageError, match=r"^N is odd$"):
        family.program({"FAST": 1}, "float", DIMS)
    with pytest.raises(UsageError, match=r"^N is odd$"):  # it is still there
        family.program({"FAST": 1}, "float", DIMS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((", (256, 1, 1))", ", (-1, 1, 1))"), "`int` >= 0"),
        (('("x", "y", np', '("x", open, np'), "cannot be an argument of a launch"),
        (('KernelSource("twice"', 'KernelSource("tw ice"'), "matching regex"),
    ],
)
def test_what_is_no_program_is_refused(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    family = started(tmp_path / "mine", FAMILY.replace(*change))
    with pytest.raises((UsageError, SolutionError)) as found:
        family.program({"FAST": 1}, "float", DIMS)
    assert said in str(found.value)


REACHES = {
    "no network": "import socket; socket.create_connection(('127.0.0.1', 80), 1)",
    "files by Landlock": "open('{outside}').read()",
    "system calls by seccomp": "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
    "    if libc.ptrace(16, {pid}, 0, 0) != 0: raise OSError(ctypes.get_errno(), 'refused')",
}


@pytest.mark.parametrize("mechanism", REACHES)
def test_what_it_cannot_reach(tmp_path: Path, mechanism: str) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    line = REACHES[mechanism].format(outside=outside, pid=os.getpid())
    family = started(tmp_path / "mine", in_kernel(line))
    if mechanism not in family.sandbox:
        pytest.skip(f"{mechanism}: not on this machine")
    with pytest.raises(SolutionError, match="Error"):
        family.program({"FAST": 1}, "float", DIMS)


def test_an_error_says_that_the_sandbox_may_be_why(tmp_path: Path) -> None:
    family = started(tmp_path / "mine", in_kernel("import os; os.chmod(__file__, 0o777)"))
    if "system calls by seccomp" not in family.sandbox:
        pytest.skip("no seccomp on this machine")
    with pytest.raises(SolutionError, match=r"Operation not permitted(.|\n)*The sandbox refuses some system calls"):
        family.program({"FAST": 1}, "float", DIMS)


EXCESSES = {
    "bytes": ("open('a', 'wb').write(bytes(3 << 20))", "holds 1 files of 3 MiB; at most 200000 of 2 MiB"),
    "files": ("for n in range(40): os.makedirs(f'{n}/{n}')", "files of "),
    "memory": ("kept.append(mmap.mmap(-1, 64 << 20)); kept[0].write(bytes(64 << 20))", "processes use "),
    "processes": ("for n in range(8): os.fork() or time.sleep(60)", "its 9 processes use "),
}


@pytest.mark.parametrize("kind", EXCESSES)
def test_what_all_of_it_uses_is_watched_while_it_computes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no control group can be made."""
    code, said = EXCESSES[kind]
    family = started(tmp_path / "mine", "import mmap, os, time\nkept = []\n" + in_kernel(f"{code}\n    time.sleep(60)"))
    family._process.sandbox.clear()
    limits = {"bytes": ("SCRATCH_BYTES", 2 << 20), "files": ("SCRATCH_FILES", 50), "memory": ("MEMORY_BYTES", 60 << 20),
              "processes": ("PROCESSES", 4)}  # fmt: skip
    monkeypatch.setattr(client, limits[kind][0], limits[kind][1])
    monkeypatch.setattr(client, "_LOOK_S", 0.1)
    with pytest.raises(SolutionError) as found:
        family.program({"FAST": 1}, "float", DIMS)
    assert said in str(found.value)


def test_a_process_that_it_starts_stays_in_the_judges_group(tmp_path: Path) -> None:
    """As ninja starts compilers, which takes the call for failed where it is refused."""
    line = "import os; child = os.posix_spawn('/bin/sh', ['sh', '-c', 'exit 7'], {}, setpgroup=0)\n"
    line += "    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
    line += "    group = os.getpgid(os.fork() or os.setpgid(0, 0) or os._exit(0))\n"
    line += "    raise ValueError(f'{ended} {group == os.getpgid(0)}')"
    family = started(tmp_path / "mine", in_kernel(line))
    if "system calls by seccomp" not in family.sandbox:
        pytest.skip("no seccomp on this machine")
    with pytest.raises(SolutionError, match="ValueError: 7 True"):
        family.program({"FAST": 1}, "float", DIMS)


def test_the_callers_current_folder_is_none_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m`` puts it on the path, which a solution's process may read: its digest would not cover that."""
    (tmp_path / "helper.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for entry in (str(tmp_path), ""):
        monkeypatch.syspath_prepend(entry)
        with pytest.raises(UsageError, match="No module named 'helper'"):
            started(tmp_path / "mine", "import helper\n" + FAMILY)
        family = started(tmp_path / "mine", in_kernel(f"open({str(tmp_path / 'helper.py')!r})"))
        if "files by Landlock" in family.sandbox:
            with pytest.raises(SolutionError, match="PermissionError"):
                family.program({"FAST": 1}, "float", DIMS)


def test_it_can_write_in_its_own_folder_only(tmp_path: Path) -> None:
    line = "import os; open('scratch.txt', 'w').write('x'); open(__file__, 'a').write('# changed')"
    family = started(tmp_path / "mine", in_kernel(line))
    if "files by Landlock" not in family.sandbox:
        pytest.skip("no Landlock on this machine")
    with pytest.raises(SolutionError, match=r"PermissionError.*family\.py"):
        family.program({"FAST": 1}, "float", DIMS)


def test_a_link_in_its_folder_leads_the_judge_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("kept")
    line = f"import os; os.symlink({str(outside)!r}, 'input0')"
    family = started(tmp_path / "mine", in_kernel(line))
    family.program({"FAST": 1}, "float", DIMS)
    assert (family._process.scratch / "input0").is_symlink()
    assert family._process.write("input0", b"data").read_bytes() == b"data"
    assert outside.read_text() == "kept"


def test_it_sees_nothing_of_the_callers_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    family = started(tmp_path / "mine", in_kernel("import os; raise KeyError(sorted(os.environ))"))
    with pytest.raises(SolutionError) as found:
        family.program({"FAST": 1}, "float", DIMS)
    assert "PATH" in str(found.value)
    assert "SOME_TOKEN" not in str(found.value)


def test_its_process_ends_with_it(tmp_path: Path) -> None:
    start = time.perf_counter()
    family = started(tmp_path / "mine", FAMILY)
    assert time.perf_counter() - start < 10  # 0.3 s on an idle machine
    process = family._process._child
    scratch = family._process.scratch
    assert scratch.is_dir()
    del family
    assert process.returncode is not None
    assert not scratch.exists()


def test_its_process_ends_with_a_judge_that_is_killed(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "mine")
    script = f"""
from pathlib import Path
from greenfast.judge.task import load_task
from greenfast.judge.task import load_family
family = load_family(load_task(Path({str(folder)!r})))
print(family._process._child.pid, flush=True)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    state = Path(f"/proc/{done.stdout.strip()}/status")
    deadline = time.monotonic() + 10
    while state.exists() and "Z (zombie)" not in state.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or "Z (zombie)" in state.read_text()


def test_every_kind_of_argument_comes_back() -> None:
    kernel = KernelSource("k", "", "k.cu", (Path("/here"),), (32, 2, 1), 16, ("a", "b"), "sm_90a", "cubin", b"\x7fELF")
    tile = TensorMap("x", "float16", (4, 8), (16, 2), (4, 8), 0)
    struct = Struct(("x", np.float32(1.5), np.arange(3, dtype=np.int16), Struct((np.uint8(1), tile))))
    arguments = ("x", np.int32(-1), np.bool_(True), np.float16(0.5), b"\1\2", struct, tile)
    program = Program((Step(kernel, Launch((1, 2, 3), arguments, True, (2, 1, 1))),), {"w": Workspace(8, True)})
    back = decode_program(encode_program(program))
    assert (back.workspaces, back.steps[0].kernel) == (program.workspaces, kernel)
    launch = back.steps[0].launch
    assert (launch.grid, launch.early, launch.cluster) == ((1, 2, 3), True, (2, 1, 1))
    pointer = {"x": 0x1000}.__getitem__
    assert isinstance(launch.args[5], Struct)
    assert launch.args[5].layout(pointer) == struct.layout(pointer)
    for a, b in zip(launch.args[:5], arguments[:5], strict=True):
        assert (a, type(a)) == (b, type(b))
    assert launch.args[6] == tile


# What was done against the pipeline, and went through

PATCH = """
import greenfast.judge.error_metrics, greenfast.judge.gates.correctness as gate
gate.worst_bound_ratio = lambda *_: 0.0
gate.error_stats = lambda actual, reference, bad: greenfast.judge.error_metrics.error_stats(reference, reference, bad)
"""


def validated(folder: Path, out: Path) -> int:
    return main(["judge", str(folder), "--device", "emulator", "--seeds", "0", "--out", str(out)])


def test_a_family_that_patches_the_judge_does_not_pass_with_a_wrong_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = FAMILY.replace('"2.0f"', '"3.0f"')
    folder = write_task(tmp_path / "mine", family=PATCH + wrong)
    assert validated(folder, tmp_path / "out") == 13
    assert "DEFER" in capsys.readouterr().out


@pytest.mark.parametrize("ends", ["import sys; sys.exit(0)", "import os; os._exit(0)"])
def test_a_family_that_exits_gives_no_verdict(tmp_path: Path, ends: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_task(tmp_path / "mine", family=FAMILY + ends)
    assert validated(folder, tmp_path / "out") == 5
    said = capsys.readouterr()
    assert "the solution ended without a verdict" in said.err
    assert said.out == ""


def test_a_dotted_family_of_another_author_is_confined_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_family.py").write_text("import os; os._exit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = write_task(tmp_path / "mine", family=None, text=json.dumps({**config(), "family": "their_family"}))
    assert validated(folder, tmp_path / "out") == 5
