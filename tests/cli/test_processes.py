"""The command as a process: interrupts, closed pipes, and how little --help loads."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from greenfast.cli.options import VERBS
from tests.cli.busy import PLACES, busy_task
from tests.cli.command_line import environment, files_below, run_command
from tests.device.processes import interrupt, start

pytestmark = pytest.mark.usefixtures("machine")

GREENFAST = (sys.executable, "-m", "greenfast")
#: Where another process runs a solution's code, and where files are written.
QUICK = ("solution", "save")


@pytest.mark.parametrize("place", [pytest.param(p, marks=[] if p in QUICK else [pytest.mark.slow]) for p in PLACES])
def test_an_interrupt_leaves_nothing_half_written(tmp_path: Path, place: str) -> None:
    """Ctrl-C, which goes to the whole process group."""
    task, out = busy_task(tmp_path / "mine", place), tmp_path / "out"
    program = start([*GREENFAST, "judge", task, "--out", out, "--json"], environment())
    assert program.stdout is not None
    assert program.stdout.readline() == "busy\n"
    if place == "save":
        assert any(name.endswith("record.json") for name in files_below(out))
    stdout, stderr = interrupt(program)
    assert program.returncode == 130
    assert stderr.splitlines()[-1] == "greenfast: interrupted; nothing half-written was kept"
    assert "Traceback" not in stderr
    assert stdout == ""
    assert files_below(out) == []


def test_a_usage_error_is_2_for_the_shell_too() -> None:
    ran = run_command(*GREENFAST, "list", "fp9")
    assert (ran.code, ran.out) == (2, "")
    known = "fp8_attention, fp8_quantize, fp8_sdpa, sdpa_backward, serving_attention"
    assert ran.err == f"greenfast: unknown task 'fp9'; allowed: {known}, or a task's folder\n"


PTX = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry f() { ret; }\n"
CLOSED = "greenfast: standard output was closed before the result; there is no verdict\n"
FULL = "greenfast: the output cannot be written (No space left on device)\n"


@pytest.mark.parametrize(
    ("output", "command", "unbuffered", "code", "said"),
    [
        # As in ``greenfast list --schema | true``; the output of --json would fit into the pipe's buffer.
        ("closed", ("list", "--schema"), "", 0, ""),
        ("closed", ("list", "--json"), "", 0, ""),
        # As in ``greenfast judge my_kernel | head -1`` under ``pipefail``, where 0 would pass for a correct kernel.
        ("closed", ("emulate", "mine.ptx", "--grid", "1", "--block", "32"), "1", 3, CLOSED),
        ("full", ("list", "--schema"), "", 3, FULL),
        ("full", ("list", "fp8_sdpa"), "", 3, FULL),
    ],
)
def test_a_closed_pipe_and_a_full_disk_behind_standard_output(
    tmp_path: Path, output: str, command: tuple[str, ...], unbuffered: str, code: int, said: str
) -> None:
    (tmp_path / "mine.ptx").write_text(PTX)
    if output == "closed":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(
        [*GREENFAST, *command], cwd=tmp_path, env=environment(PYTHONUNBUFFERED=unbuffered), stdout=write,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (code, said)


HEAVY = ("torch", "cuda", "numpy", "rich", "matplotlib", "msgspec", "nvtx", "multiprocessing")
LOADED_BY_HELP = f"""
import json, sys, time
from greenfast.cli.main import main
loaded = {{}}
start = time.process_time()
for verb in sys.argv[1:]:
    try:
        main([*verb.split(), "--help"])
    except SystemExit as e:
        assert e.code == 0
    loaded[verb] = [name for name in {HEAVY} if name in sys.modules]
print(json.dumps([loaded, time.process_time() - start]), file=sys.stderr)
"""


def test_help_loads_nothing_heavy() -> None:
    """All verbs' help together takes 0.1 s; the limit is for a busy machine."""
    verbs = ["", *VERBS]
    ran = run_command("python", "-c", LOADED_BY_HELP, *verbs)
    assert ran.code == 0
    loaded, seconds = json.loads(ran.err)
    assert loaded == {verb: [] for verb in verbs}
    assert seconds < 1.0
    for verb in VERBS:
        assert f"usage: greenfast {verb} " in ran.out


def test_every_verb_can_be_imported() -> None:
    for verb in (*VERBS, "library"):
        assert callable(importlib.import_module(f"greenfast.cli.{verb}").run)


def test_torch_is_not_loaded_by_verbs_that_need_no_inputs() -> None:
    code = """
import sys
from greenfast.cli.main import main
codes = [main(words.split()) for words in sys.argv[1:]]
print(codes, "torch" in sys.modules, file=sys.stderr)
"""
    ran = run_command("python", "-c", code, "list", "list fp8_sdpa", "list --schema")
    assert ran.err == "[0, 0, 0] False\n"
