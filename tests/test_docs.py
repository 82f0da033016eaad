"""Every Python block of the documentation runs as printed, or names what it needs; JSON blocks are JSON."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import msgspec
import pytest
import torch

from greenfast.judge.solution.schema import SolutionConfig
from tests import snippets
from tests.snippets import MODEL, PAGES, SIZES, Block, blocks

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page, snippets.read(page)))]


def python_of(page: str) -> list[Block]:
    return [block for block in blocks(page, snippets.read(page)) if block.language == "python"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small model and its tokenizer."""
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    code = printed = ""
    with torch.random.fork_rng(devices=[]):
        for block in blocks(page, snippets.read(page)):
            if block.is_output:
                assert printed == block.text, block.where
            if block.language != "python" or block.excerpt is not None:
                continue
            code += block.text
            printed = ""
            if not all(snippets.is_available(need, code) for need in block.needs):
                continue
            if "generate_batch(" in block.text:
                quicken_batches(monkeypatch)
            small = request.getfixturevalue("model") if MODEL in block.text else ""
            capsys.readouterr()
            snippets.execute(block, snippets.runnable(block, small), names)
            printed = capsys.readouterr().out
    if page == "README.md":
        assert len(python_of(page)[0].text.splitlines()) <= 12
        assert re.match("(reference|hopper): ", printed)
    elif page == "docs/serving.md":
        assert names["out"].shape == (108, 8, 64)
        assert names["out"][:107].isfinite().all()
        assert [len(output.generated_tokens) for output in names["outputs"].values()] == [4, 4]
    elif page == "docs/operator.md":
        assert names["out"].isfinite().all()


def quicken_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare transformers' search for cycles after a run, and its question for the memory, which needs psutil."""
    cache: Any = importlib.import_module("transformers.generation.continuous_batching.cache")
    monkeypatch.setattr("gc.collect", lambda *_: 0)
    if not torch.cuda.is_available():
        memory = (torch.device("cpu"), 1 << 33, 0, 0)
        monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: memory)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_are_sound(page: str) -> None:
    found = blocks(page, snippets.read(page))
    assert [block.where for block in found if block.language not in snippets.LANGUAGES] == []
    hidden = r"\s*(import \w+|from [\w.]+ import |>>> |(async )?def \w+\()"
    assert [block.where for block in found if block.language in ("", "text") and re.match(hidden, block.text)] == []
    assert snippets.faults([block for block in found if block.language == "python"]) == []
    assert [name for name in snippets.prose_names(snippets.read(page)) if not snippets.exists(name)] == []
    for block in found:
        if block.language == "json":
            check_json(block.text)
        elif block.language == "cuda":
            assert block.excerpt, f"{block.where}: quote a file: <!-- excerpt: PATH -->"
            assert block.text in (snippets.ROOT / block.excerpt).read_text(encoding="utf-8"), block.where


def check_json(text: str) -> None:
    """Raise unless the text is JSON, or members of an object or list; a solution has the keys of its schema."""
    text = text.strip().removesuffix(",")
    value = json.loads(text if text[0] in "{[" else "{" + text + "}")
    if "launches" in value:
        msgspec.convert(value, SolutionConfig)


def test_each_size_that_is_shrunk_is_printed() -> None:
    for page, sizes in SIZES.items():
        code = "".join(block.text for block in python_of(page))
        assert [size for size in sizes if not re.search(rf"\b{re.escape(size)}\b", code)] == [], page


def test_no_other_page_has_python() -> None:
    rooms = ("benchmarks", "examples", "scripts", "src", "tasks", "tests")
    pages = [*snippets.ROOT.glob("*.md"), *(page for room in rooms for page in (snippets.ROOT / room).rglob("*.md"))]
    names = {page.relative_to(snippets.ROOT).as_posix(): page for page in pages}
    assert [name for name, page in names.items() if name not in PAGES and "```py" in page.read_text("utf-8")] == []


def test_blocks_for_several_processes_are_on_the_page_that_is_run_so() -> None:
    assert [page for page in PAGES if any("2 processes" in block.needs for block in python_of(page))] == [
        "docs/parallel.md"
    ]


# The test itself, on pages made up here.


def page_of(*parts: str) -> str:
    """A page of markers and Python blocks."""
    return "\n".join(part if part.startswith("<!--") else f"```python\n{part}\n```" for part in parts) + "\n"


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (["model(1)"], "model is not defined"),
        (["def f():\n    return torch.ones(1)"], "torch is not defined"),
        (["[x for x in batches]"], "batches is not defined"),
        (["class A:\n    b = c"], "c is not defined"),
        (["x = 1", "x = y"], "y is not defined"),
        (["x ="], "invalid syntax"),
        ([">>> 1 + 1"], "invalid syntax"),
        (["import greenfast\ngreenfast.sdqa()"], "there is no greenfast.sdqa"),
        (["<!-- needs: GPU -->", "x = 1"], "nothing in it names a CUDA device"),
        (["<!-- needs: GPU -->", f"import torch\ndevice = {snippets.ANY_DEVICE}"], "nothing in it names a CUDA device"),
        (["<!-- needs: 2 processes -->", "x = 1"], "number of processes"),
        (["<!-- needs: a downloaded model -->", "x = 1"], "nothing in it calls from_pretrained"),
        (["<!-- needs: flash_attn -->", "import torch"], "it imports torch; 'flash_attn' is no need that is known"),
        (["<!-- needs: time, patience -->", "import time"], "'patience' is no need"),
        (["<!-- excerpt: examples/row_softmax/family.py -->", "x = 1"], "no such lines"),
        (["<!-- excerpt: examples/none.py -->", "x = 1"], "no such lines"),
    ],
)
def test_a_block_that_cannot_run_is_named(parts: list[str], says: str) -> None:
    (fault,) = snippets.faults(blocks("page.md", page_of(*parts)))
    assert fault.startswith("page.md:")
    assert says in fault


@pytest.mark.parametrize(
    "parts",
    [
        ["x = 1", "def f(y):\n    return [x + z for z in y]", "f([1])"],
        ["<!-- needs: time -->", "import time"],
        ["<!-- needs: GPU -->", 'import torch\ntorch.ones(1, device="cuda")'],
        ["class A:\n    b = 1\n    c = b"],
    ],
)
def test_a_block_that_can_run_has_no_fault(parts: list[str]) -> None:
    assert snippets.faults(blocks("page.md", page_of(*parts))) == []


@pytest.mark.parametrize(
    "text",
    [
        "<!-- needs: GPU -->\n\ntext\n\n```python\nx = 1\n```\n",
        "<!-- need: GPU -->\n```python\nx = 1\n```\n",
        "<!-- excerpt -->\n```python\nx = 1\n```\n",
        "<!-- needs -->\n```python\nx = 1\n```\n",
        "<!-- outputs -->\n```text\n1\n```\n",
    ],
)
def test_a_marker_that_marks_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"1 markers, of which 0 are right before a block"):
        blocks("page.md", text)


def test_blocks_are_found_wherever_they_are() -> None:
    text = "- item\n\n  <!-- needs: time -->\n  ```python\n  import time\n  ```\n\n~~~python title\nx = 1\n~~~\n"
    first, second = blocks("page.md", text)
    assert (first.text, first.needs, first.line) == ("import time\n", ("time",), 5)
    assert second.language == "python title"  # which is none that is known: it is refused, not passed over


def test_names_of_the_running_text_are_looked_up() -> None:
    names = snippets.prose_names("`greenfast.sdpa(q)`, `greenfast.ops.warmup.kernels_for`, `x = greenfast.sdqa()`")
    assert [(name, snippets.exists(name)) for name in names] == [
        ("greenfast.ops.warmup.kernels_for", True), ("greenfast.sdpa", True), ("greenfast.sdqa", False)
    ]  # fmt: skip
    assert not snippets.exists("greenfast.operators.warmup")
    assert not snippets.exists("greenfast.ops.warmup.kernels_of")


def test_a_block_that_raises_names_its_line() -> None:
    (block,) = blocks("page.md", "text\n\n" + page_of("x = 1\nx / 0"))
    with pytest.raises(ZeroDivisionError) as error:
        snippets.execute(block, block.text, {})
    assert error.traceback[-1].lineno == 4  # counted from 0


@pytest.mark.parametrize("text", ['{"a": 1', "{'a': 1}", '"a": 1, "b"', '{"launches": [], "nome": "x"}'])
def test_json_that_is_none_is_refused(text: str) -> None:
    with pytest.raises((json.JSONDecodeError, msgspec.ValidationError)):
        check_json(text)
