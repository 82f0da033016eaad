"""What README.md and docs/ say agrees with the records under evidence/ and with the code."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from greenfast.cli.options import VERBS
from greenfast.device.compiler import kernel_hash
from greenfast.judge.record import AnyRecord, PeersRecord, Record
from greenfast.judge.records import is_stale, read_record
from greenfast.judge.report.markdown import report
from greenfast.judge.report.peers import readme_section
from greenfast.judge.store import to_json
from greenfast.judge.tasks import find_task, load_family
from greenfast.spec.arch import TARGETS
from greenfast.spec.errors import UsageError
from scripts import update_readme
from scripts.update_readme import blocks, evidence, fill, generated
from tests.judge.report.peer_records import peers_record
from tests.judge.report.records import record, side

ROOT = Path(__file__).parents[1]
FOLDERS = [file.parent.relative_to(ROOT).as_posix() for file in sorted((ROOT / "evidence").glob("*/*/record.json"))]
EACH_RECORD = pytest.mark.parametrize(
    "folder",
    FOLDERS or [pytest.param("", marks=pytest.mark.skip(reason="evidence/ holds no records yet"))],
)


def quoted(text: str) -> set[str]:
    """The folders of the records that a text quotes: a line that links one quotes it, unless it says it is stale."""
    lines = [line for line in text.splitlines() if not re.search(r"\bstale\b", line)]
    return {found for line in lines for found in re.findall(r"evidence/[\w.-]+/[\w-][\w.-]*[\w-]", line)}


def all_quoted() -> set[str]:
    return {found for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) for found in quoted(page.read_text())}


@cache
def expected() -> dict[Path, str]:
    """Path -> content of every generated file of this repository."""
    return generated(ROOT)


def test_pages_are_those_that_the_records_make() -> None:
    for page in (ROOT / "README.md", ROOT / update_readme.EMULATOR_PAGE, ROOT / update_readme.OPERATOR_PAGE):
        assert page.read_text(encoding="utf-8") == expected()[page], "run python scripts/update_readme.py"


def test_every_quoted_record_is_there() -> None:
    assert all_quoted() <= set(FOLDERS)


@EACH_RECORD
def test_a_quoted_record_is_not_stale(folder: str) -> None:
    stale = is_stale(read_record(ROOT / folder))
    assert not (stale and folder in all_quoted()), "its kernel has changed: measure it again, or quote it no more"


@EACH_RECORD
def test_a_record_with_timings_is_correct(folder: str) -> None:
    one = read_record(ROOT / folder)
    sides = [one.baseline, one.candidate] if isinstance(one, Record) else [one.side]
    if any(s.timing for s in sides):
        assert one.gate_status("CORRECTNESS") == "PASS"
        for s in sides:
            checked = {(row.shape, row.seed) for row in s.correctness if row.passed}
            assert {(row.shape, row.seed) for row in s.timing} <= checked


@EACH_RECORD
def test_a_record_says_what_is_needed_to_repeat_it(folder: str) -> None:
    one = read_record(ROOT / folder)
    assert one.command.startswith("greenfast ")
    assert one.git.sha != "unknown"
    assert one.device is None or one.device.kind == "gpu"


@EACH_RECORD
def test_the_report_is_the_one_that_the_record_makes(folder: str) -> None:
    path = ROOT / folder / "VALIDATION_REPORT.md"
    assert path.read_text(encoding="utf-8") == expected()[path], "run python scripts/update_readme.py"


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("verbs", [f"`greenfast {verb}" for verb in VERBS]),
        ("targets", [f"`{target}`" for target in TARGETS]),
        ("toggles", [f"`{name}`" for name in find_task("fp8_sdpa").config.toggles]),
        (
            "variables",
            ["`GREENFAST_CACHE_DIR`", "`GREENFAST_TASKS`", "`GREENFAST_GIT_SHA`", "`TORCH_CUDA_ARCH_LIST`"],
        ),
    ],
)
def test_readme_names_them_all(what: str, names: list[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in names if name not in text] == []


def test_readme_names_every_variable_that_the_package_reads() -> None:
    found = {
        name
        for file in (ROOT / "src").rglob("*.py")
        for name in re.findall(r'"((?:GREENFAST|CUDA|TORCH|XDG)_[A-Z_]+)"', file.read_text(encoding="utf-8"))
        if not name.startswith("CUDA_ERROR")
    }
    assert "GREENFAST_CACHE_DIR" in found
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(found) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_every_link_to_a_file_leads_to_one(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_the_comparison_of_emulator_and_gpu_is_of_todays_kernels() -> None:
    rows = json.loads((ROOT / "evidence" / "emulator-h100.json").read_text())["rows"]
    task = find_task("fp8_sdpa")
    family = load_family(task)
    rungs = {rung.name for rung in task.config.rungs}
    later = {"stage3b", "stage3b_pipe3", "stage3b_specialized", "stage3b_persistent"}
    assert {row["variant"] for row in rows} == rungs - later, "these are not measured so yet"
    for row in rows:
        toggles = task.config.variant(row["variant"]).values
        source = family.kernel(toggles, row["format"], task.config.shape(row["shape"]).dims)
        assert kernel_hash(source) == row["kernel_hash"], "measure it again with benchmarks/emulator_against_gpu.py"


def test_every_rung_has_a_section_in_the_ladder() -> None:
    text = (ROOT / "docs" / "ladder.md").read_text(encoding="utf-8")
    for rung in find_task("fp8_sdpa").config.rungs:
        assert re.search(rf"^## .*`{rung.name}`", text, re.MULTILINE), rung.name


# The script itself, on records made up here.


def tree(root: Path, *records: tuple[str, AnyRecord]) -> Path:
    for folder, one in records:
        (root / "evidence" / folder).mkdir(parents=True)
        (root / "evidence" / folder / "record.json").write_text(to_json(one))
    readme = "".join(
        f"{name}\n<!-- {name}:begin -->\n<!-- {name}:end -->\n" for name in ("verdicts", "peers", "example")
    )
    (root / "README.md").write_text(readme)
    return root


def rung(candidate: str, baseline: str, fmt: str = "e4m3", task: str = "fp8_sdpa") -> Record:
    def one(name: str) -> Record:
        return record(candidate=side(name, p50_us=1, registers=1, smem=1, scale=1, hmma=1))

    return record(candidate=one(candidate).candidate, baseline=one(baseline).candidate, format=fmt, task=task)


def test_records_stand_by_task_format_and_rung(tmp_path: Path) -> None:
    made = tree(
        tmp_path,
        ("h100/a", rung("stage3a", "stage2")),
        ("h100/b", rung("stage2", "scalar")),
        ("h100/c", rung("USE_CP_ASYNC=1", "stage2")),
        ("h100/d", rung("stage2", "stage1", "int8")),
        ("h100/e", rung("stage2", "stage1")),
        ("h100/f", rung("quantize_vector", "quantize_scalar", task="fp8_quantize")),
        ("h100/g", rung("some", "thing", task="no_more")),
        ("a100/h", rung("stage3a", "stage2")),
    )
    assert [folder[-1] for folder, _ in evidence(made)] == ["h", "e", "b", "a", "c", "d", "f", "g"]


def test_a_stale_record_is_shown_without_a_number_and_is_no_example(tmp_path: Path) -> None:
    made = blocks(evidence(tree(tmp_path, ("h100/stage2-e4m3", rung("stage2", "stage1")))))
    (line,) = [line for line in made["verdicts"].splitlines() if "stage2-e4m3" in line]
    assert re.findall(r"\d\.\d", line) == []
    assert "| stale |" in line
    assert quoted(made["verdicts"]) == set()
    assert made["example"] == ""


def test_a_current_record_is_shown_quoted_and_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_readme, "stale_records", lambda records: set())
    made = blocks(evidence(tree(tmp_path, ("h100/stage2-e4m3", rung("stage2", "stage1")))))
    assert "[stage2-e4m3](evidence/h100/stage2-e4m3)" in made["verdicts"]
    assert quoted(made["verdicts"]) == {"evidence/h100/stage2-e4m3"}
    assert made["example"].startswith("```text\n$ greenfast validate")


def test_the_comparison_with_peers_is_a_section_once_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path, ("h100/peers", peers_record()))
    assert "stale" in blocks(evidence(root))["peers"]  # its kernel never was
    assert quoted(blocks(evidence(root))["peers"]) == set()
    monkeypatch.setattr(update_readme, "is_stale", lambda record: False)
    ((_, read),) = evidence(root)
    made = blocks([("evidence/h100/peers", read)])
    assert isinstance(read, PeersRecord)
    assert made["peers"] == readme_section("evidence/h100/peers", read, stale=False)
    assert quoted(made["peers"]) == {"evidence/h100/peers"}
    assert (made["verdicts"], made["example"]) == ("", "")
    files = generated(root)
    assert made["peers"] in files[root / "README.md"]
    assert files[root / "evidence/h100/peers/VALIDATION_REPORT.md"] == report(read)


def test_the_page_of_the_emulator_gets_the_table_of_its_record(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / "docs").mkdir()
    page, measured = root / update_readme.EMULATOR_PAGE, root / update_readme.EMULATOR_RECORD
    page.write_text("before <!-- counts:begin --> <!-- counts:end --> after")
    assert page not in generated(root)
    measured.parent.mkdir()
    row = {"variant": "v", "shape": "s", "emulated": {}, "hardware": {"smsp__inst_executed.sum": "7"}}
    measured.write_text(json.dumps({"device": {"name": "GPU"}, "rows": [row]}))
    assert "| v | s | warp instructions: PTX, machine code | - | 7 | - |" in generated(root)[page]
    page.write_text("")
    with pytest.raises(UsageError, match=r"docs/emulator\.md: .*must stand in it once"):
        generated(root)


def test_no_records_leave_the_blocks_empty(tmp_path: Path) -> None:
    root = tree(tmp_path)
    assert generated(root) == {root / "README.md": (root / "README.md").read_text()}


def test_check_changes_nothing_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path, ("h100/one", rung("stage2", "stage1")))
    monkeypatch.setattr(update_readme, "ROOT", root)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["update_readme.py", *arguments])
        return update_readme.main()

    before = (root / "README.md").read_text()
    assert run("--check") == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["README.md", "evidence/h100/one/VALIDATION_REPORT.md"]
    assert (root / "README.md").read_text() == before
    assert run() == 0
    assert "| stage2 | stage1 |" in (root / "README.md").read_text()
    assert (root / "evidence/h100/one/VALIDATION_REPORT.md").read_text().startswith("# fp8_sdpa: stage1 -> stage2")
    assert run("--check") == 0
    (root / "evidence/h100/one/record.json").write_text("{}")
    assert run("--check") == 2
    assert "record.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "<!-- a:begin -->", "<!-- a:end --><!-- a:begin -->", "<!-- a:begin --><!-- a:begin --><!-- a:end -->"],
)
def test_markers_that_do_not_stand_there_once_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must stand in it once"):
        fill(text, "a", "b")


def test_filling_twice_is_filling_once() -> None:
    once = fill("x <!-- a:begin --> old <!-- a:end --> y", "a", "new")
    assert once == "x <!-- a:begin -->\n\nnew\n\n<!-- a:end --> y"
    assert fill(once, "a", "new") == once
