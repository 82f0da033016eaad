"""Hostile text in every field of a record: no writer passes on what a log, a terminal or a reader acts on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from markdown_it import MarkdownIt

from greenfast.judge.record_schema import Record
from greenfast.judge.report.junit import junit, junit_error
from greenfast.judge.report.markdown import report as render
from greenfast.judge.report.markdown import short_form
from greenfast.judge.report.webpage.run import run_page
from tests.judge.report.records import pending_record, quoting_record, record
from tests.judge.report.webpage.reading import read
from tests.judge.report.webpage.test_run import hostile, with_clocks

#: What a compiler quotes and a kernel prints: workflow commands, markup, ANSI escapes, and what no XML or UTF-8 holds.
HOSTILE = (
    "kernel says\n::error file=a::x\n##[error]y ##vso[task.complete] ##teamcity[a]\r::warning::z\n<img src=x "
    "onerror=alert(1)> <b> ]]> </failure> & \x00 \x07 \x08 \x1b[31m \x7f \x85 \u2028 \u202e \ud800 \ufffe | ` ``` \\"
)
FORBIDDEN = "\x00\x07\x08\x1b\x7f\x85\r\u2028\u202e\ud800\ufffe"
COMMAND = re.compile(r"^[^\S\n]*::(error|warning)|##(?=\[|vso\[|teamcity\[)", re.MULTILINE)
#: Of which a writer that splits code from text otherwise than Markdown does lets a tag or a link through.
MARKUP = [
    "a\n\n<img src=x>\n\n![x](http://e/y) [z](javascript:alert(1))",
    r"\\<img src=x> \\\\<b> \![x](http://e/y) [z]\\(http://e)",
    "`` ` <img src=x> ``` ` <b> ``",
    r"\`` a` <img src=x> ` \\``b` <b> `",
]
RECORDS = [record, quoting_record, pending_record, lambda: with_clocks(record())]
WRITERS: list[Callable[[Record], str]] = [
    lambda one: junit(one, 13),
    lambda one: junit_error(HOSTILE, HOSTILE, 3),
    render,
    short_form,
    lambda one: run_page(one),
]


def spoiled(one: Record, text: str = HOSTILE) -> Record:
    """The record with that text in the place of every text."""
    return msgspec.convert(hostile(msgspec.to_builtins(one), text=text), Record)


@pytest.mark.parametrize("make", RECORDS)
@pytest.mark.parametrize("write", WRITERS, ids=["junit", "no verdict", "report", "short form", "page"])
def test_no_writer_passes_on_what_is_acted_on(make: Callable[[], Any], write: Callable[[Record], str]) -> None:
    text = write(spoiled(make()))
    assert "kernel says" in text
    assert [character for character in FORBIDDEN if character in text] == []
    assert COMMAND.findall(text) == []
    assert text.encode().decode() == text


@pytest.mark.parametrize("make", RECORDS)
def test_junit_is_xml_with_the_text_in_it(make: Callable[[], Any]) -> None:
    whole = ElementTree.fromstring(junit(spoiled(make()), 13).encode())
    assert {element.tag for element in whole.iter()} <= {
        *("testsuites", "testsuite", "properties", "property", "testcase", "failure", "error", "skipped", "system-out")
    }
    assert "]]> </failure>" in "".join(whole.itertext())
    assert r"\x1b[31m" in "".join(whole.itertext())


@pytest.mark.parametrize("make", RECORDS)
@pytest.mark.parametrize("text", [HOSTILE, *MARKUP])
def test_markdown_has_no_markup_of_its_texts(make: Callable[[], Any], text: str) -> None:
    parser = MarkdownIt("gfm-like", {"html": True, "linkify": False})
    for written in (render(spoiled(make(), text)), short_form(spoiled(make(), text))):
        tokens = [inner.type for token in parser.parse(written) for inner in (token, *(token.children or ()))]
        assert "table_open" in tokens or "bullet_list_open" in tokens
        assert {"html_inline", "html_block", "image", "link_open"}.isdisjoint(tokens)


@pytest.mark.parametrize("make", RECORDS)
def test_a_page_shows_control_characters(make: Callable[[], Any]) -> None:
    text = read(run_page(spoiled(make()))).text  # allows no element that the page itself does not have
    assert r"\x1b[31m" in text
    assert r"\u202e" in text
