"""A workspace in the place of a buffer of the problem: an output would begin with what the solution says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cheats.judging import solution
from tests.cheats.kernels import KERNELS


@pytest.mark.parametrize("name", ["y", "x"])
def test_a_workspace_with_a_buffers_name_is_refused(tmp_path: Path, name: str) -> None:
    text = KERNELS["memory"]["atomics_without_zeros"].text
    space = json.dumps({name: {"bytes": "4 * N", "zeros": True}})
    path = tmp_path / "mine.cu"
    path.write_text(text.replace('"launches"', f'"workspaces": {space}, "launches"'))
    found = solution(path, "doubling", gpu=False)
    assert (found.outcome, found.gate) == ("rejected", "UsageError")
    assert f"atomics_without_zeros: workspaces: {name}: the problem has buffers of this name" in found.message
