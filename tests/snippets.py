"""The fenced blocks of README.md, CONTRIBUTING.md, CHANGELOG.md and docs/*.md, and the markers before them.

A Python block runs as printed on a CPU, after the blocks before it on its page and in their namespace, or a comment on
the line before it says what it needs or quotes::

    <!-- needs: transformers, a downloaded model -->
    <!-- needs: GPU -->
    <!-- needs: 2 processes -->
    <!-- excerpt: examples/row_softmax/family.py -->

``<!-- output -->`` is before a block of text that the Python block before it prints.
A block that needs more runs all the same where all of it is there.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md"))),
]
LANGUAGES = {"", "console", "cuda", "json", "python", "text", "yaml"}
#: The model of the pages' examples. Tests put the folder of a small one in its place.
MODEL = "Qwen/Qwen3-0.6B"
#: Page -> its numbers that are too large for a CPU, and the ones that tests run instead.
SIZES = {
    "README.md": {"4096": "64"},
    "docs/operator.md": {"4096, 128, device=device": "64, 128, device=device", "4096, 256": "64, 256"},
    "docs/parallel.md": {"4096": "64", "400_000": "256", "96_000": "64", "1_048_576": "512"},
    "docs/serving.md": {"max_new_tokens=128": "max_new_tokens=4"},
}
ANY_DEVICE = '"cuda" if torch.cuda.is_available() else "cpu"'

_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<kind>needs|excerpt|output)(?:: (?P<marker>[^\n]+?))? -->\n\n?)?"
    r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_MARKER = re.compile(r"<!-- *(?:needs?|excerpts?|outputs?|prints)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` is the number of its first line on the page."""

    page: str
    line: int
    language: str
    text: str
    needs: tuple[str, ...] = ()
    excerpt: str | None = None
    is_output: bool = False

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page. Raises ValueError for a marker that precedes no block."""
    found = []
    for match in _BLOCK.finditer(text):
        marker = match["marker"] or ""
        parts = tuple(part.strip() for part in marker.split(",") if part.strip())
        found.append(
            Block(
                page, text.count("\n", 0, match.start("text")) + 1, match["language"].strip(),
                textwrap.dedent(match["text"]),
                needs=parts if match["kind"] == "needs" else (),
                excerpt=marker if match["kind"] == "excerpt" else None,
                is_output=match["kind"] == "output",
            )
        )  # fmt: skip
    marked = sum(bool(block.needs or block.excerpt or block.is_output) for block in found)
    if marked != len(_MARKER.findall(text)):
        raise ValueError(f"{page}: {len(_MARKER.findall(text))} markers, of which {marked} are right before a block")
    return found


def without_blocks(text: str) -> str:
    """A page without its fenced blocks."""
    return _BLOCK.sub("", text)


def runnable(block: Block, model: str) -> str:
    """A block's code in the sizes of tests; ``model`` is the folder of the small model."""
    text = block.text.replace(MODEL, model)
    for printed, small in SIZES.get(block.page, {}).items():
        text = re.sub(rf"\b{re.escape(printed)}\b", small, text)
    return text


def execute(block: Block, text: str, names: dict[str, Any]) -> None:
    """Run a block's code; a traceback gives the lines of the page."""
    exec(compile("\n" * (block.line - 1) + text, block.page, "exec"), names)


def is_available(need: str, code: str) -> bool:
    """Whether a test without the network has what a marker names; ``code`` is the page's up to the block's end."""
    if need == "GPU":
        return torch.cuda.is_available()
    if need == "2 processes":
        return False  # tests/parallel runs these
    if need == "a downloaded model":
        return MODEL in code
    return importlib.util.find_spec(need) is not None


def unfounded(need: str, code: str) -> str | None:
    """Why a marker does not fit the code up to the end of its block; None if it does."""
    if need == "GPU":
        return None if "cuda" in code.replace(ANY_DEVICE, "") else "nothing in it names a CUDA device"
    if need == "2 processes":
        return None if "WORLD_SIZE" in code else "nothing in it asks for the number of processes"
    if need == "a downloaded model":
        return None if "from_pretrained(" in code else "nothing in it calls from_pretrained"
    imported = {name.split(".")[0] for name in _imports(ast.parse(code))}
    return None if need in imported else f"it imports {', '.join(sorted(imported))}; {need!r} is no need that is known"


def faults(python: list[Block]) -> list[str]:
    """What is wrong with a page's Python blocks, as far as it can be seen without running them."""
    found, code, names = [], "", set(dir(builtins)) | {"__file__", "__name__"}
    for block in python:
        if block.excerpt is not None:
            path = ROOT / block.excerpt
            if not path.is_file() or block.text not in _dedented(path.read_text(encoding="utf-8"), block.text):
                found.append(f"{block.where}: {block.excerpt} has no such lines")
            continue
        code += block.text
        try:
            tree = ast.parse(block.text)
        except SyntaxError as error:
            found.append(f"{block.where}: {error}")
            continue
        found += [f"{block.where}: needs {need}: {why}" for need in block.needs if (why := unfounded(need, code))]
        stored, loaded = _names(compile(tree, block.page, "exec"))
        found += [f"{block.where}: {name} is not defined" for name in sorted(loaded - stored - names)]
        names |= stored
        greenfast = importlib.import_module("greenfast")
        found += [
            f"{block.where}: there is no greenfast.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "greenfast"
            if not hasattr(greenfast, node.attr)
        ]
    return found


def _dedented(file: str, text: str) -> str:
    """A file's text, indented less by as much as the block is."""
    first = text.split("\n", 1)[0]
    indents = re.findall(rf"^( *){re.escape(first)}$", file, re.MULTILINE)
    return "\n".join(re.sub(rf"^{indent}", "", file, flags=re.MULTILINE) for indent in {"", *indents})


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """The module's names that code assigns, and those that it reads, with the functions and classes in it."""
    stored: set[str] = set()
    loaded: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_NAME", "STORE_GLOBAL"):
            stored.add(step.argval)
        elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
            loaded.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            deeper, read_there = _names(inner)
            if inner.co_flags & inspect.CO_NEWLOCALS:  # a function: what it stores is global
                stored |= deeper
                loaded |= read_there
            else:  # the body of a class
                loaded |= read_there - deeper
    return stored, loaded


def exists(name: str) -> bool:
    """Whether a dotted name is a module of greenfast, one of its objects, or one of its operators in torch.ops."""
    importlib.import_module("greenfast.flash_attn")  # registers the operators
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        # greenfast.vllm is a module too, although only vLLM can import it
        return (ROOT / "src" / name.replace(".", "/")).with_suffix(".py").is_file()
    return True


def prose_names(text: str) -> list[str]:
    """The names in greenfast that a page's inline code gives."""
    names = re.findall(r"`[^`\n]*?(?<!/)\b((?:torch\.ops\.)?greenfast(?:\.[A-Za-z_]\w*)+)", without_blocks(text))
    return sorted(set(names))
