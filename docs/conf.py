"""Sphinx configuration of the documentation: `make docs` builds docs/ into site/, without network.

Sphinx with the PyData theme is what the documentation of PyTorch, NumPy and SciPy is built with. Pages are Markdown
(MyST). Links to files outside docs/ lead into the repository if GREENFAST_REPOSITORY_URL
is set, else they are plain text.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes

from greenfast import __version__
from greenfast.cli.main import parser

DOCS = Path(__file__).parent
ROOT = DOCS.parent
#: Pages that are made here: from the parser, the notebooks, and the pages of the repository's root.
GENERATED = DOCS / "generated"
REPOSITORY_URL = os.environ.get("GREENFAST_REPOSITORY_URL", "").rstrip("/")

project = "greenfast"
copyright = "the greenfast authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["record.schema.json"]
myst_enable_extensions = ["attrs_block"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # pages are read in the repository too, where a level may be left out
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_mock_imports = ["vllm"]
add_module_names = False
highlight_language = "text"  # blocks without a language are commands and outputs
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = f"greenfast {__version__}"
html_static_path = ["_static"]
html_css_files = ["greenfast.css"]
html_show_sourcelink = False
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_prev_next": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "logo": {"text": "greenfast"},
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}


def link_to_repository(text: str, page: Path) -> str:
    """Return Markdown without links out of docs/: into the repository if its address is known, else only their text.

    A link to README.md, CONTRIBUTING.md or CHANGELOG.md becomes one to the page of the site.
    """

    def replace(match: re.Match[str]) -> str:
        words, target, anchor = match["words"], match["target"], match["anchor"] or ""
        if "://" in target or not target:
            return match[0]
        file = (page.parent / target).resolve()
        if file in PAGES:
            return f"{words}({os.path.relpath(PAGES[file], page_in_docs.parent)}{anchor})"
        if file.is_relative_to(DOCS) and file.suffix in (".md", ".rst", ".svg", ".png"):
            named_by_file = words == f"[{file.name}]"  # the site has the title of the page or section instead
            return f"{'[]' if named_by_file else words}({os.path.relpath(file, page_in_docs.parent)}{anchor})"
        if REPOSITORY_URL and not words.startswith("!"):
            return f"{words}({REPOSITORY_URL}/blob/main/{file.relative_to(ROOT)}{anchor})"
        return words[1:-1]

    page_in_docs = PAGES.get(page, page)
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    link = re.compile(r"(?P<words>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)#\s]*)(?P<anchor>#[^)]*)?\)")
    return "".join(part if part.startswith("```") else link.sub(replace, part) for part in parts)


#: Pages of the repository's root -> their place in the site.
PAGES = {
    ROOT / "README.md": DOCS / "index.rst",
    ROOT / "CONTRIBUTING.md": GENERATED / "contributing.md",
    ROOT / "CHANGELOG.md": GENERATED / "changelog.md",
}


def command_line_page(options: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of a page with the help of every verb."""
    os.environ["COLUMNS"] = "100"
    yield "# Command line\n\nMade from `greenfast VERB --help`. Exit codes and environment variables: "
    yield "[reference](../reference.md).\n"
    yield f"```text\n{options.format_help()}```\n"
    for action in options._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, of_verb in action.choices.items():
                yield f"## greenfast {verb}\n\n```text\n{of_verb.format_help()}```\n"


def notebook_page(file: Path) -> Iterator[str]:
    """Yield the lines of a page with the cells of a notebook and their text outputs."""
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield f"{source}\n"
            continue
        yield f"```python\n{source}\n```\n"
        printed = "".join(text for output in cell["outputs"] for text in output.get("text", []))
        if printed:
            yield f"```text\n{printed}```\n"


def generate() -> None:
    """Write the pages of GENERATED; a page that did not change keeps its time."""
    pages = {page.name: link_to_repository(file.read_text(encoding="utf-8"), file) for file, page in PAGES.items()}
    del pages["index.rst"]
    pages["command-line.md"] = "\n".join(command_line_page(parser()))
    for file in sorted((DOCS / "notebooks").glob("*.ipynb")):
        pages[f"notebook-{file.stem}.md"] = "\n".join(notebook_page(file))
    GENERATED.mkdir(exist_ok=True)
    for name, text in pages.items():
        page = GENERATED / name
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


generate()


def format_docstring(app: Any, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Make a field of each parameter that a docstring describes as ``name: text``, and one of ``Raises``."""
    if not any(lines):
        return
    try:
        parameters = set(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        parameters = set()
    if isinstance(value, type):
        parameters |= set(getattr(value, "__annotations__", ())) | set(vars(value))
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))
    start = re.compile(
        rf"(?:(?<=[.;:)] )|^)((?:(?:{'|'.join(map(re.escape, sorted(parameters)))})(?:, | and |(?=:)))+):(?=\s)"
    )
    formatted: list[str] = []
    for paragraph in paragraphs:
        if all(line.startswith("    ") for line in paragraph.splitlines()):  # code
            formatted += ["::", "", *paragraph.splitlines(), ""]
            continue
        if re.search(r"\A *[-*] |^( {2,}|\.\. |.*::$)", paragraph, re.MULTILINE):  # a list
            formatted += [*textwrap.dedent(paragraph).splitlines(), ""]
            continue
        text = " ".join(paragraph.split())
        text = re.sub(r"(``.*?``)|\|", lambda match: match[1] or r"\|", text)
        text = re.sub(r"\bdocs/([\w-]+)\.md\b", r":doc:`\1`", text)
        pieces = start.split(text) if parameters else [text]
        before = pieces[0].strip()
        if before.startswith(("Raises ", "Returns ")):
            formatted += [f"**{before.split()[0]}** {before.split(' ', 1)[1]}", ""]
        elif before:
            formatted += [before, ""]
        for names, description in zip(pieces[1::2], pieces[2::2], strict=True):
            formatted += [f"* **{names}**: {description.strip()}"]
        formatted += [""]
    lines[:] = formatted


def format_signature(
    app: Any, kind: str, name: str, value: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Leave private parameters, and defaults that are functions, out of a signature."""
    if signature:
        signature = re.sub(r", _\w+=<factory>", "", signature)
        signature = re.sub(r"<factory>|<function <lambda>>", "...", signature)
    return signature, returned


def setup(app: Any) -> None:
    """Connect the hooks."""
    app.connect("autodoc-process-docstring", format_docstring)
    app.connect("autodoc-process-signature", format_signature)

    def read(app: Any, name: str, source: list[str]) -> None:
        page = DOCS / f"{name}.md"
        if page.is_file() and page.parent == DOCS:
            source[0] = link_to_repository(source[0], page)

    def mark_layout(app: Any, doctree: nodes.document) -> None:
        """Mark what the style sheet lays out: tables by their columns, long cells, and code that must not break."""
        for table in doctree.findall(nodes.table):
            columns = len(list(table.findall(nodes.colspec)))
            table["classes"] += ["two-columns"] * (columns == 2) + ["many-columns"] * (columns > 7)
            table["classes"] += ["most-columns"] * (columns > 11)
        for cell in doctree.findall(nodes.entry):
            if len(cell.astext()) > 60:
                cell["classes"].append("long")
        for code in doctree.findall(nodes.literal):
            if max(map(len, code.astext().split()), default=0) <= 20:
                code["classes"].append("short")

    app.connect("source-read", read)
    app.connect("doctree-read", mark_layout)
