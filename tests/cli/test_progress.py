"""The progress line of commands: on a terminal, after a delay, and gone at the end."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time

import pytest

from greenfast.cli.progress import ProgressLine
from tests.cli.command_line import ROOT, environment

CODE = """
import sys, time
from greenfast.cli.progress import ProgressLine
with ProgressLine("compiling stage2", after_s=float(sys.argv[1]), every_s=0.05) as progress:
    time.sleep(0.2)
    progress.step = "emulating stage2"
    time.sleep(0.2)
"""


def run_on_terminal(code: str, *args: str, **variables: str) -> str:
    """Return the output of a Python process on a terminal."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", code, *args]
    with subprocess.Popen(command, cwd=ROOT, env=environment(**variables), stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        written = b""
        while process.poll() is None or written == b"":
            try:
                written += os.read(controller, 65536)
            except OSError:  # the other side is closed
                break
    os.close(controller)
    return written.decode()


def test_a_step_is_shown_on_a_terminal_and_removed() -> None:
    written = run_on_terminal(CODE, "0.05")
    assert written.startswith("\r\x1b[K     0 s  compiling stage2")
    assert "emulating stage2" in written
    assert written.endswith("\r\x1b[K")


def test_a_short_step_writes_nothing() -> None:
    assert run_on_terminal(CODE, "60") == ""


def test_a_file_receives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with ProgressLine("compiling", after_s=0, every_s=0.01):
        time.sleep(0.05)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("variables", "has_colour"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_only_on_a_terminal_without_no_color(
    variables: dict[str, str], has_colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    code = "from greenfast.cli.console import show, status; show(status('PASS'))"
    terminal = {"TERM": "xterm-256color", **variables}
    assert ("\x1b[32m" in run_on_terminal(code, **terminal)) is has_colour
    in_file = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment(**terminal), text=True)
    assert in_file == "PASS\n"
