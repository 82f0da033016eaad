"""Every command in README.md, CONTRIBUTING.md and docs/ is valid, and every path exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from greenfast.bench.attention import operator, peers
from greenfast.cli.main import parser, spelled
from greenfast.cli.options import VERBS
from greenfast.judge.tasks import find_task
from greenfast.spec.errors import UsageError
from tests.cli.command_line import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: The task's runner passes its arguments to this command line.
RUNNER = ["python", "-m", "tasks.fp8_sdpa_stage_c_wmma.runner"]
#: Placeholders for the reader's names.
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]+\b(?!=)")


TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def fenced(text: str) -> list[str]:
    """The commands in fenced blocks with no language, text or shell; continued lines are joined."""
    blocks = re.findall(r"^```(?:text|sh|bash|console)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        line.strip().removeprefix("$ ")
        for line in lines
        if re.match(r"\s*(\$ |greenfast |make |python |[A-Z_]+=|scripts/|pip )", line)
    ]


def inline(text: str) -> list[str]:
    """Complete commands in the running text: with a verb, something after it, and no omission."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    verbs = "|".join(VERBS)
    return [
        c
        for c in re.findall(rf"`(greenfast (?:{verbs}) [^`]+)`", prose.replace("\n", " "))
        if not PLACEHOLDER.search(c)
    ]


CASES = [
    pytest.param(command, id=f"{page.name}: {command}"[:100])
    for page in PAGES
    for command in dict.fromkeys([*fenced(page.read_text(encoding="utf-8")), *inline(page.read_text(encoding="utf-8"))])
]


def test_there_are_commands() -> None:
    assert len(CASES) > 30


@pytest.mark.parametrize("command", CASES)
def test_the_command_is_valid(command: str) -> None:
    words = shlex.split(command, comments=True)
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables of the environment
        del words[0]
    if words[: len(RUNNER)] == RUNNER:
        words = ["greenfast", "bench", "fp8_sdpa", *words[len(RUNNER) :]]
    if words[0] == "greenfast":
        check_greenfast(words[1:])
    elif words[0] == "make":
        assert set(words[1:]) <= TARGETS
    elif words[:3] == ["python", "-m", "pytest"]:
        paths = [word for word in words[3:] if "/" in word]
        assert [path for path in paths if not (ROOT / path).exists()] == []
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file()
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    elif words[0].startswith("scripts/"):
        assert (ROOT / words[0]).is_file()
    else:
        assert re.fullmatch(r"pip install \.|pip install '?\.\[(\w+)\]'?", command), command
        extras = re.findall(r"\[(\w+)\]", command)
        assert [name for name in extras if not re.search(rf"^{name} = \[", PYPROJECT, re.MULTILINE)] == []


def check_greenfast(words: list[str]) -> None:
    """Raises unless the words parse and name an existing task, variants, shapes and formats."""
    try:
        args = parser().parse_args(spelled(words))
    except SystemExit:
        pytest.fail(f"greenfast {shlex.join(words)} is no command")
    if getattr(args, "what", None) in ("peers", "operator"):
        comparison = peers() if args.what == "peers" else operator()
        assert set(args.shapes or []) <= {cell.shape.name for cell in comparison.timed}
        return
    task = getattr(args, "task", None)
    if task is None or PLACEHOLDER.fullmatch(task):
        return
    config = find_task(str(ROOT / task) if "/" in task else task).config
    variants = [getattr(args, name, None) for name in ("baseline", "candidate", "variant")]
    for variant in (*variants, *(getattr(args, "variants", None) or [])):
        if variant not in (None, "auto") and not PLACEHOLDER.fullmatch(variant):
            config.variant(variant)
    for shape in args.shapes or []:
        config.shape(shape)
    if getattr(args, "format", None):
        config.gates(args.format)


@pytest.mark.parametrize(
    "words", [["validat"], ["validate", "fp8_sdpa", "--shape-s", "small"], ["emulate", "kernel.cu"]]
)
def test_an_invalid_command_fails(words: list[str]) -> None:
    with pytest.raises(pytest.fail.Exception):
        check_greenfast(words)


@pytest.mark.parametrize("words", [["--candidate", "stage9"], ["--shapes", "big"], ["--format", "fp4"]])
def test_unknown_names_fail(words: list[str]) -> None:
    with pytest.raises(UsageError):
        check_greenfast(["validate", "fp8_sdpa", *words])


def test_the_public_ci_calls_the_same_make_targets() -> None:
    steps = re.findall(r"run: (.*)", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    local = re.findall(r"^make .*", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert [step.split()[0] for step in steps] == ["make"] * len(steps)
    public = {target for step in steps for target in step.split()[1:]}
    assert public <= TARGETS
    assert public <= {word for line in local for word in line.split()}


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "reference.md"], ids=lambda p: p.name)
def test_every_path_in_the_text_exists(page: Path) -> None:
    rooms = "src|tests|tasks|docs|scripts|benchmarks|evidence|examples"
    paths = re.findall(rf"`((?:{rooms})/[\w./-]+)`", page.read_text(encoding="utf-8"))
    assert [path for path in paths if not PLACEHOLDER.search(path) and not (ROOT / path).exists()] == []
