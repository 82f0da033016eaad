"""The documentation as a site: it builds without warnings, every page is in it, and notebooks and tutorials run.

python -m tests.test_site --write    (run the notebooks, and write their output into them)
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from greenfast.cli.main import main as greenfast
from tests import snippets
from tests.snippets import ROOT

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def pages_of_sections() -> list[str]:
    """Return every entry of the toctrees in docs/*.rst."""
    return [
        line.strip()
        for file in DOCS.glob("*.rst")
        for block in re.findall(r"\.\. toctree::\n(?:   :.*\n)*\n((?:   .*\n)+)", file.read_text(encoding="utf-8"))
        for line in block.splitlines()
    ]


def test_every_page_is_in_one_section() -> None:
    listed = sorted(pages_of_sections())
    assert listed == sorted(set(listed)), "a page is in two sections"
    notebooks = {f"generated/notebook-{file.stem}" for file in NOTEBOOKS}
    generated = {"generated/command-line", "generated/contributing", "generated/changelog"}
    pages = {file.stem for file in (*DOCS.glob("*.md"), *DOCS.glob("*.rst"))} - {"index"}
    assert set(listed) == pages | notebooks | generated, "name each page in a section: docs/how-to.rst and the like"


def test_the_page_of_the_api_names_every_export() -> None:
    """Also where Sphinx is not installed, so that a new name is missed at once and not in CI."""
    page = (DOCS / "api.rst").read_text(encoding="utf-8")
    names = set(importlib.import_module("greenfast")._PUBLIC)
    assert sorted(name for name in names if not re.search(rf"^\.\. auto\w+:: {name}$", page, re.MULTILINE)) == []


@pytest.mark.skipif(find_spec("sphinx") is None and "CI" not in os.environ, reason="needs the extra docs")
def test_the_site_builds_without_warnings_and_has_every_public_name(tmp_path: Path) -> None:
    """A warning is an error: a link that leads nowhere, a page in no section, a docstring that does not parse."""
    offline = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    # without the index of the search, a fifth of the time
    code = (
        "import sys; from sphinx.builders.html import StandaloneHTMLBuilder; from sphinx.cmd.build import main; "
        "StandaloneHTMLBuilder.search = False; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=offline)
    assert (done.returncode, done.stderr) == (0, "")
    inventory = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    documented = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines() if " py:" in line}
    sections = re.split(r"^# (.*)\n", (ROOT / "tests/public_api.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    by_name = dict(zip(sections[1::2], sections[2::2], strict=True))
    headings = ("greenfast", "greenfast.flash_attn", "Names that documents and examples import")
    listed = "".join(by_name[heading] for heading in headings)
    names = set(re.findall(r"^(greenfast(?:\.\w+)+)(?:\([^.]*|\(.*\))?$", listed, re.MULTILINE))
    assert len(names) > 150
    same = {name: name.replace("greenfast.flash_attn.", "greenfast.") for name in names}
    assert sorted(name for name in names if not {name, same[name]} & documented) == [], "docs/api.rst"
    remote = re.compile(r"""(?:src|href)=["'](?:https?:)?//[^"']+\.(?:js|css|woff2?)""")
    assert [page.name for page in tmp_path.rglob("*.html") if remote.search(page.read_text(encoding="utf-8"))] == []


def run_notebook(file: Path) -> list[str]:
    """Run the code cells of a notebook in order, in one namespace. Return the output of each."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    with torch.random.fork_rng(devices=[]):
        for number, cell in enumerate(json.loads(file.read_text(encoding="utf-8"))["cells"]):
            if cell["cell_type"] == "code":
                output = io.StringIO()
                with contextlib.redirect_stdout(output):
                    exec(compile("".join(cell["source"]), f"{file.name}, cell {number}", "exec"), names)
                printed.append(output.getvalue())
    return printed


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_prints_what_it_shows(file: Path) -> None:
    cells = [cell for cell in json.loads(file.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    shown = ["".join(text for output in cell["outputs"] for text in output["text"]) for cell in cells]
    assert run_notebook(file) == shown, "python -m tests.test_site --write"


@pytest.mark.usefixtures("no_gpu_here")
def test_the_tutorial_with_two_outputs_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = snippets.blocks("tutorial", (DOCS / "tutorial-two-outputs.md").read_text(encoding="utf-8"))
    config = next(block.text for block in found if block.language == "json")
    assert config == (ROOT / "examples/row_range/config_forward.json").read_text(encoding="utf-8")
    shutil.copytree(ROOT / "examples/row_range", tmp_path / "problem")
    shutil.copy(ROOT / "examples/solutions/row_range.cu", tmp_path / "kernel.cu")
    monkeypatch.chdir(tmp_path)
    assert greenfast(["judge", "kernel.cu", "--problem", "problem", "--device", "emulator"]) == 4
    expected, wrong = (block.text for block in found if block.language == "text")
    printed = capsys.readouterr().out
    registers = re.compile(r"\d+ registers|emulated odd.*")  # another compiler has other numbers
    assert registers.sub("", expected) in registers.sub("", printed)
    kernel = tmp_path / "kernel.cu"
    old, new = re.findall(r"`(high\[row\] = \w+;)`", (DOCS / "tutorial-two-outputs.md").read_text(encoding="utf-8"))
    assert old in kernel.read_text()
    kernel.write_text(kernel.read_text().replace(old, new))
    assert greenfast(["judge", "kernel.cu", "--problem", "problem", "--shapes", "odd", "--device", "emulator"]) == 13
    assert "(high[0]: got " in wrong
    assert "(high[0]: got " in capsys.readouterr().out


@pytest.fixture
def no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the emulator in this process, and draw no picture."""
    monkeypatch.setattr("greenfast.judge.validate.save_plot", lambda record, path: path.touch())


def main() -> None:
    """Run the notebooks and write their outputs."""
    options = argparse.ArgumentParser(description="Run the notebooks of docs/notebooks.")
    options.add_argument("--write", action="store_true", required=True, help="write their output into them")
    options.parse_args()
    for file in NOTEBOOKS:
        content = json.loads(file.read_text(encoding="utf-8"))
        cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        for number, (cell, text) in enumerate(zip(cells, run_notebook(file), strict=True), 1):
            lines = text.splitlines(keepends=True)
            cell["execution_count"] = number
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if text else []
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
