"""docs/ci.md: its workflow, run on scaffolds; the files that CI services read; the fields that scripts rely on."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml  # type: ignore[import-untyped]

from greenfast.cli.main import main, parser
from greenfast.judge.record_io import read_record, sealed_json
from tests.cli.command_line import ROOT, change, run_here

pytestmark = pytest.mark.usefixtures("emulator_here")

PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "record.schema.json").read_text(encoding="utf-8"))
#: The fields in the first column of the page's last table.
FIELDS = [
    field
    for cell in re.findall(r"^\| (`.*?) \|", PAGE.split("## Scripts")[1], re.MULTILINE)
    for field in re.findall(r"`(.+?)`", cell)
]
STATIC = "build,resources,correctness,evidence"


def steps() -> list[dict[str, Any]]:
    """The steps of the page's workflow."""
    _, text = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    found: list[dict[str, Any]] = yaml.safe_load(text)["jobs"]["judge"]["steps"]
    return found


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An author's repository with a scaffold, on a runner of GitHub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "runner" / "summary.md"))
    assert main(["init", "my_kernel"]) == 0
    return tmp_path


def judge_as_on_the_page() -> int:
    """Run the command of the workflow's step ``Judge``."""
    (command,) = [step["run"] for step in steps() if step.get("name") == "Judge"]
    program, *words = shlex.split(os.path.expandvars(command))
    assert program == "greenfast"
    return main(words)


def test_the_action_judges_as_the_workflow_of_the_page() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    inputs = {name: value["default"] for name, value in action["inputs"].items() if "default" in value}
    (command,) = [step["run"] for step in action["runs"]["steps"] if step.get("name") == "Judge"]
    (on_page,) = [step["run"] for step in steps() if step.get("name") == "Judge"]
    typed = command.replace('"$KERNEL"', "my_kernel").replace(' ${PROBLEM:+--problem "$PROBLEM"}', "")
    assert shlex.split(typed.replace('"$REQUIRE"', inputs["require"])) == shlex.split(on_page)
    uses = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
    assert set(yaml.safe_load(uses)[1]["with"]) == {"kernel"} == set(action["inputs"]) - set(inputs)


def test_workflows_and_forms_are_valid() -> None:
    folder = ROOT / ".github"
    release = yaml.safe_load((folder / "workflows/release.yml").read_text(encoding="utf-8"))
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}, "trusted publishing: no token is stored"
    assert "vars.PUBLISH == 'true'" in publish["if"]
    for form in folder.glob("ISSUE_TEMPLATE/*.yml"):
        content = yaml.safe_load(form.read_text(encoding="utf-8"))
        if form.name == "config.yml":
            continue
        assert {"name", "description", "body"} <= set(content)
        ids = [field["id"] for field in content["body"]]
        assert len(ids) == len(set(ids))
        assert {field["type"] for field in content["body"]} <= {"dropdown", "textarea", "input"}


def scripts(file: Path) -> list[str]:
    """Return the shell scripts of a workflow, of the action, or of the Dockerfile with the commands of its comment."""
    text = file.read_text(encoding="utf-8")
    if file.name == "Dockerfile":
        comment, instructions = text.split("FROM ")
        usage = re.findall(
            r"^ +docker (.*)", re.sub(r"^#", "", comment, flags=re.MULTILINE).replace("\\\n", ""), re.MULTILINE
        )
        runs = re.findall(r"^RUN (.*)", instructions.replace("\\\n", ""), re.MULTILINE)
        (verb,) = re.findall(r'^CMD \["(.*)"\]', instructions, re.MULTILINE)
        return [*runs, f"greenfast {verb}", *(command.partition('/work" ')[2] or "true" for command in usage)]
    content = yaml.safe_load(text)
    jobs = list(content["jobs"].values()) if "jobs" in content else [content["runs"]]
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def programs(script: str) -> list[list[str]]:
    """Return the words of each simple command. Optional parts (``${X:+WORDS}``) are there; other variables are "x"."""
    script = re.sub(r'\$\{(?!\{)\w+:\+((?:"[^"]*"|[^}])*)\}', r"\1", script)
    script = re.sub(r"\$\{\{ github\.action_path \}\}|(?<=\")/src", ".", script)
    script = re.sub(r"\$\{?[A-Z_]+\}?", "x", script)
    script = re.sub(r'export \w+=|"\$\(|\$\(|<\(|\)"?|&&|"v', "\n", script)
    return [shlex.split(line) for line in script.splitlines() if line.strip()]


PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TARGETS = set(" ".join(re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)).split())
#: What a step may call besides make, greenfast and pip.
TOOLS = {"cd", "diff", "git", "hatchling", "rm", "sha256sum", "test", "true", "twine"}


def check_program(words: list[str]) -> None:
    """Raise unless the target, the verb with its options, or the package exists."""
    if words[0] == "make":
        assert set(words[1:]) <= TARGETS, words
    elif words[0] == "greenfast":
        parser().parse_args(words[1:])
    elif words[0] == "pip":
        assert words[1] == "install"
        for name in words[2:]:
            extras = re.fullmatch(r"\.\[(.*)\]", name)
            assert not extras or extras[1] == "x" or re.search(rf"^{extras[1]} = \[", PYPROJECT, re.MULTILINE), name
            assert extras or name.startswith(("--", "torch", "twine", "x")) or f'"{name}"' in PYPROJECT, name
    else:
        assert words[0] in TOOLS, words


@pytest.mark.parametrize(
    "file",
    [*(ROOT / ".github/workflows").glob("*.yml"), ROOT / "action.yml", ROOT / "Dockerfile"],
    ids=lambda f: f.name,
)
def test_what_a_workflow_runs_exists(file: Path) -> None:
    found = scripts(file)
    assert found
    for script in found:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        for words in programs(script):
            check_program(words)


@pytest.mark.parametrize(
    "words", [["make", "tset"], ["pip", "install", ".[jugde]"], ["pip", "install", "hatchling>=99"], ["curl"]]
)
def test_what_does_not_exist_is_refused(words: list[str]) -> None:
    with pytest.raises(AssertionError):
        check_program(words)


def test_the_inputs_of_the_action_are_declared_and_used() -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    action = yaml.safe_load(text)
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(action["inputs"])
    for step in action["runs"]["steps"]:
        assert {"shell", "run"} <= set(step) or "uses" in step
        assert {
            name for name in re.findall(r"\$\{?([A-Z_]+)", step.get("run", "")) if name != "GITHUB_STEP_SUMMARY"
        } == set(step.get("env", {}))
    (judge,) = [step["run"] for step in action["runs"]["steps"] if step.get("name") == "Judge"]
    (kept,) = [
        step["with"]["path"].split() for step in action["runs"]["steps"] if step.get("name") == "Keep the report"
    ]
    assert {"results", *re.findall(r"--(?:junit|html) (\S+)", judge)} == set(kept)


def outcomes(file: Path) -> dict[str, str]:
    """Each test of a JUnit file with its outcome: passed, failure, error or skipped. Checks the file's counts."""
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    cases = list(root.iter("testcase"))
    found = {}
    for case in cases:
        tags = [child.tag for child in case if child.tag != "system-out"]
        found[f"{case.get('classname')}.{case.get('name')}"] = tags[0] if tags else "passed"
        assert len(tags) <= 1
    assert len(found) == len(cases), "two tests of one name"
    for element in (root, *root.iter("testsuite")):
        counts = {name: int(element.get(name, "")) for name in ("tests", "failures", "errors", "skipped")}
        ended = list(found.values())
        assert counts == {
            "tests": len(ended),
            "failures": ended.count("failure"),
            "errors": ended.count("error"),
            "skipped": ended.count("skipped"),
        }
    return found


def test_the_workflow_accepts_a_right_kernel(repository: Path) -> None:
    assert judge_as_on_the_page() == 0
    found = outcomes(repository / "verdict.xml")
    name = "vector_add.four_at_a_time"
    assert found.pop(f"{name}.PERFORMANCE") == "skipped"
    assert set(found.values()) == {"passed"}
    assert {f"{name}.{test}" for test in ("BUILD", "RESOURCES", "CORRECTNESS", "EVIDENCE", "verdict")} < set(found)
    for case in ("candidate tail", "baseline one"):
        assert sum(name_of.startswith(f"{name}.CORRECTNESS.{case} seed ") for name_of in found) >= 3
    summary = (repository / "runner/summary.md").read_text()
    assert "`baseline` -> `four_at_a_time`" in summary
    assert summary.endswith("- Exit code: 0\n\n")
    kept = [path for step in steps() if "upload" in step.get("uses", "") for path in step["with"]["path"].split()]
    assert kept
    assert [path for path in kept if not (repository / path).exists()] == []


def test_the_workflow_fails_on_a_wrong_kernel(repository: Path) -> None:
    change(repository / "my_kernel/solution/kernel.cu", "a.values[k] + ", "1.5f * a.values[k] + ")
    assert judge_as_on_the_page() == 13
    found = outcomes(repository / "verdict.xml")
    failed = {name.removeprefix("vector_add.four_at_a_time.") for name, how in found.items() if how == "failure"}
    assert failed >= {"CORRECTNESS", "verdict"}
    for shape in ("one", "tail", "even"):
        assert sum(name.startswith(f"CORRECTNESS.candidate {shape} seed ") for name in failed) >= 3
    assert not [name for name in failed if "baseline" in name]
    assert "kernel_bound" in (repository / "verdict.xml").read_text()
    assert "exit code 13" in (repository / "verdict.xml").read_text()
    assert (repository / "runner/summary.md").read_text().startswith("**DEFER**")


def test_the_workflow_fails_on_code_that_exits(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "other").mkdir()
    monkeypatch.chdir(repository / "other")
    assert main(["init", "my_kernel", "--language", "family"]) == 0
    (code,) = Path("my_kernel/solution").glob("*.py")
    code.write_text(f"{code.read_text()}\nimport os\nos._exit(0)\n")
    Path("verdict.xml").write_text("of an earlier run")
    assert judge_as_on_the_page() == 5
    assert outcomes(Path("verdict.xml")) == {"my_kernel.verdict": "error"}
    assert "ended without a verdict" in Path("verdict.xml").read_text()
    assert "**no verdict**: `my_kernel`" in (repository / "runner/summary.md").read_text()
    assert "ended without a verdict" in capsys.readouterr().err


def test_what_a_compiler_prints_is_neither_xml_nor_markdown(repository: Path) -> None:
    """Quotations of the source, here with a control character, stay text."""
    quoted = "// </failure> **x** `y` [a](b) "
    change(repository / "my_kernel/solution/kernel.cu", "z[i] = sum;", f"z[i] = som; {quoted}\x1b[31m")
    assert judge_as_on_the_page() == 11
    assert outcomes(repository / "verdict.xml")["vector_add.four_at_a_time.BUILD"] == "failure"
    said = "".join(ElementTree.fromstring((repository / "verdict.xml").read_text()).itertext())
    assert f"{quoted}?[31m" in said
    assert r"\</failure> \*\*x\*\* \`y\` [a]\(b)" in (repository / "runner/summary.md").read_text()


def test_what_was_required_and_not_decided_is_no_green_file(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("judge", "my_kernel/solution", "--problem", "my_kernel/problem", "--shapes", "tail", "--seeds", "0")
    assert run_here(capsys, *asked, "--junit", "verdict.xml", "--summary", "").code == 4
    found = outcomes(repository / "verdict.xml")
    assert found["vector_add.four_at_a_time.PERFORMANCE"] == "skipped"
    assert found["vector_add.four_at_a_time.verdict"] == "error"


@pytest.mark.parametrize("option", ["--junit", "--summary"])
def test_a_file_that_cannot_be_written_is_said_before_the_run(
    repository: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    for name, code in ((".", 2), ("file/x", 3)):
        ran = run_here(capsys, "judge", "my_kernel/solution", "--problem", "my_kernel/problem", option, name)
        assert (ran.code, ran.out) == (code, "")
        assert option in ran.err
        assert ran.err.count("\n") == 1
    assert not (repository / "results").exists()


def test_a_page_that_cannot_be_written_is_an_error_in_the_junit_file(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("judge", "my_kernel/solution", "--problem", "my_kernel/problem", "--html", ".", "--junit", "verdict.xml")
    assert run_here(capsys, *asked).code == 2
    assert outcomes(Path("verdict.xml")) == {"my_kernel/solution.verdict": "error"}


def values(content: Any, field: str) -> list[Any]:
    """What a field such as ``gates[].status`` names; fails where a name on the way is missing."""
    found = [content]
    for part in field.split("."):
        name = part.removesuffix("[]")
        found = [one[name] for one in found]
        if part.endswith("[]"):
            found = [item for one in found for item in one]
    return found


def described(field: str) -> bool:
    """Whether the schema of a comparison's record has a field."""
    schema = SCHEMA["$defs"]["Record"]
    for part in field.split("."):
        schema = schema["properties"].get(part.removesuffix("[]"))
        if schema is None:
            return False
        schema = schema["items"] if part.endswith("[]") else schema
        schema = next((one for one in schema.get("anyOf", []) if one.get("type") != "null"), schema)
        if "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    return True


def test_the_fields_that_scripts_rely_on_are_there(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(FIELDS) > 25
    assert [field for field in FIELDS if not described(field)] == []
    assert not described("gates[].verdict")
    options = ("--problem", "my_kernel/problem", "--shapes", "tail", "--seeds", "0", "--require", STATIC, "--json")
    ran = run_here(capsys, "judge", "my_kernel/solution", *options)
    assert ran.code == 4  # part of the exam
    record = json.loads(ran.out)
    for field in FIELDS:
        assert values(record, field) or field.startswith("speedups[]"), field
    assert (record["schema_version"], record["kind"]) == (3, "comparison")
    (kept,) = (repository / "results").rglob("record.json")
    assert sealed_json(read_record(kept), conclusions=True) == ran.out
    assert json.loads(kept.read_text()).keys() == record.keys() - {"decision", "reasons", "speedups"}
