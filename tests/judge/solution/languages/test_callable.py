"""Python functions as solutions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from greenfast.judge.solution.languages.callable import _capture
from greenfast.judge.solution.recording import Recording
from greenfast.judge.solution.schema import find_solution
from greenfast.spec.errors import UsageError


class Refusing(Recording):
    """A recording that refuses every function."""

    def record(self, *_: Any, **__: Any) -> Any:
        raise UsageError("it launched nothing on the GPU while it was captured")


def test_a_refusal_names_the_solution_and_its_function(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text('GREENFAST = {"name": "idle", "language": "callable"}\ndef run(): pass\n')
    refused = pytest.raises(UsageError, match=r"^idle: run: it launched nothing on the GPU")
    with Refusing("sm_90a") as recording, refused:
        _capture(find_solution(tmp_path / "idle.py"), {}, {}, recording)
