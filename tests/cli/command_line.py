"""Run command lines: in this process, and as a shell does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from greenfast.cli.main import main

ROOT = Path(__file__).parents[2]
#: Environment variables that change what greenfast does.
MACHINE_VARIABLES = ("GREENFAST_TASKS", "GREENFAST_GIT_SHA", "TORCH_CUDA_ARCH_LIST")


@dataclass(frozen=True)
class Ran:
    """The result of a command."""

    code: int
    out: str
    err: str


def run_here(capsys: pytest.CaptureFixture[str], *args: str | Path, run: Callable[[Sequence[str]], int] = main) -> Ran:
    """Run ``greenfast ARGS`` in this process, or another command line."""
    capsys.readouterr()
    try:
        code = run([str(arg) for arg in args])
    except SystemExit as e:  # argparse
        code = int(e.code or 0)
    captured = capsys.readouterr()
    return Ran(code, captured.out, captured.err)


def environment(**variables: str) -> dict[str, str]:
    """This process's environment with greenfast importable from the sources, and more variables."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}


def run_command(*command: str | Path, **variables: str) -> Ran:
    """Run a command from the repository's root; "python" is this one."""
    words = [sys.executable if word == "python" else str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=120)
    return Ran(done.returncode, done.stdout, done.stderr)


def files_below(folder: Path) -> list[str]:
    """All files, including hidden folders."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() or p.name.startswith("."))


def assert_said(ran: Ran, code: int, said: str) -> None:
    """The exit code, and one message that is on standard error only."""
    assert ran.code == code, ran
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
