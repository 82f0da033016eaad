"""Run ``python -m benchmarks`` in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from tests.cli.command_line import Ran, run_here


def run_benchmark(capsys: pytest.CaptureFixture[str], *args: str | Path) -> Ran:
    """Run ``python -m benchmarks ARGS``."""
    return run_here(capsys, *args, run=main)
