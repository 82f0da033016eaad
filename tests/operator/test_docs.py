"""The examples of README.md and docs/operator.md run unchanged, on tensors that are quick on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "## Use it in PyTorch"), ("docs/operator.md", "# The operator")]
)
def test_the_example_runs(page: str, heading: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").split(heading, 1)[1]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    names: dict[str, object] = {}
    exec(found[1].replace("4096", "64"), names)
    assert "out" in names
    if page == "README.md":
        assert len(found[1].splitlines()) <= 12
        assert capsys.readouterr().out.startswith(("reference: ", "hopper: "))
