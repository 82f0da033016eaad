"""Every command in README.md, CONTRIBUTING.md and docs/ is valid, and every path exists."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from greenfast import __version__
from greenfast.cli.main import parser
from greenfast.cli.options import EXAMPLES, VERBS
from greenfast.judge.task import find_task
from greenfast.spec.errors import UsageError
from tests import snippets
from tests.cli.command_line import ROOT

PAGES = [page for page in snippets.PAGES if page != "CHANGELOG.md"]  # it names commands of their time
#: The task's runner passes its arguments to this command line.
RUNNER = ["python", "-m", "tasks.fp8_sdpa_stage_c_wmma.runner"]
#: Placeholders for the reader's names.
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]+\b(?!=)")


TARGETS = set(" ".join(re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)).split())
VLLM = (ROOT / "src" / "greenfast" / "vllm.py").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def fenced(page: str, text: str) -> list[str]:
    """The commands in fenced blocks with no language, text or console; continued lines are joined."""
    shell = [block.text for block in snippets.blocks(page, text) if block.language in ("", "text", "console")]
    return [
        line.strip().removeprefix("$ ")
        for line in "\n".join(shell).replace("\\\n", " ").splitlines()
        if re.match(r"\s*(\$ |greenfast |make |python |torchrun |vllm |[A-Z_]+=|scripts/|pip )", line)
    ]


def inline(text: str) -> list[str]:
    """Complete commands in the running text: with a verb, something after it, and no omission."""
    prose = snippets.without_blocks(text)
    verbs = "|".join(VERBS)
    return [
        c
        for c in re.findall(rf"`((?:greenfast (?:{verbs})|python -m benchmarks) [^`]+)`", prose.replace("\n", " "))
        if not PLACEHOLDER.search(c)
    ]


def commands(page: str, text: str) -> list[str]:
    """The commands of a page, each once."""
    return list(dict.fromkeys([*fenced(page, text), *inline(text)]))


CASES = [
    pytest.param(command, id=f"{Path(page).name}: {command}"[:100])
    for page in PAGES
    for command in commands(page, snippets.read(page))
]


def test_each_verb_has_examples_that_are_valid() -> None:
    assert set(EXAMPLES) == set(VERBS)
    for verb, examples in EXAMPLES.items():
        for command in examples:
            words = shlex.split(command.partition(" > ")[0])
            assert words[:2] == ["greenfast", verb]
            check_greenfast(words[1:])


def test_there_are_commands() -> None:
    assert len(CASES) > 80


def test_commands_after_blocks_of_other_languages_are_found() -> None:
    text = "```python\nx = 1\n```\n\n`greenfast list --json`\n\n- item\n\n  ```\n  greenfast doctor\n  ```\n"
    assert commands("page.md", text) == ["greenfast doctor", "greenfast list --json"]


@pytest.mark.parametrize("command", CASES)
def test_the_command_is_valid(command: str) -> None:
    words = shlex.split(command, comments=True)
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables of the environment
        del words[0]
    if words[: len(RUNNER)] == RUNNER:
        words = ["python", "-m", "benchmarks", "kernel", "fp8_sdpa", *words[len(RUNNER) :]]
    if words[0] == "greenfast":
        check_greenfast(words[1:])
    elif words[0] == "make":
        assert set(words[1:]) <= TARGETS
    elif words[:3] == ["python", "-m", "pytest"]:
        paths = [word for word in words[3:] if "/" in word]
        assert [path for path in paths if not (ROOT / path).exists()] == []
    elif words[0] == "torchrun":
        check_benchmark(words[words.index("-m") :])
    elif words[:3] == ["vllm", "serve", "MODEL"]:
        for option in ("--attention-backend", "--kv-cache-dtype"):
            assert f'"{words[words.index(option) + 1]}"' in VLLM
    elif words[:3] == ["python", "-m", "benchmarks"]:
        check_benchmark(words[1:])
    elif words[:2] == ["python", "-m"]:
        assert find_spec(words[2])
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    elif words[0].startswith("scripts/"):
        assert (ROOT / words[0]).is_file()
    else:
        assert words[:2] == ["pip", "install"]
        wheel = re.escape(f"greenfast-{__version__}-py3-none-any.whl")
        assert re.fullmatch(rf"vllm|\.(\[\w+\])?|{wheel}", " ".join(words[2:])), command
        extras = re.findall(r"\[(\w+)\]", words[2])
        assert [name for name in extras if not re.search(rf"^{name} = \[", PYPROJECT, re.MULTILINE)] == []


def check_benchmark(words: list[str]) -> None:
    """Raises unless the words name a benchmark; tests/benchmarks checks the options."""
    assert words[:2] == ["-m", "benchmarks"]
    assert words[2] in (*BENCHMARKS, "--help")


def check_greenfast(words: list[str]) -> None:
    """Raises unless the words parse and name an existing task, variants, shapes and formats."""
    try:
        args = parser().parse_args(words)
    except SystemExit as ended:
        if ended.code:
            pytest.fail(f"greenfast {shlex.join(words)} is no command")
        return  # --help
    task = args.subject if args.verb == "judge" and not args.problem else getattr(args, "task", None)
    made_by_init = task == "my_kernel"  # tests/cli/test_judge.py runs these
    if task is None or made_by_init or task.endswith(".py") or PLACEHOLDER.fullmatch(task):
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


@pytest.mark.parametrize("words", [["judg"], ["judge", "fp8_sdpa", "--shape-s", "small"], ["emulate", "kernel.cu"]])
def test_an_invalid_command_fails(words: list[str]) -> None:
    with pytest.raises(pytest.fail.Exception):
        check_greenfast(words)


@pytest.mark.parametrize("words", [["--candidate", "stage9"], ["--shapes", "big"], ["--format", "fp4"]])
def test_unknown_names_fail(words: list[str]) -> None:
    with pytest.raises(UsageError):
        check_greenfast(["judge", "fp8_sdpa", *words])


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
