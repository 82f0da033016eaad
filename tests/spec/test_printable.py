"""Text from elsewhere, as a terminal, a CI log and a Markdown report get it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from greenfast.cli.main import main
from greenfast.judge.report import formatting
from greenfast.spec.printable import PrintableStream, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("::error title=MERGE::x", "\\::error title=MERGE::x"),
        ("a\n  \t::set-output name=x::y", "a\n  \t\\::set-output name=x::y"),
        ("k.cu(1): ##[error]no", "k.cu(1): #\\#[error]no"),
        ("##vso[task.complete]", "#\\#vso[task.complete]"),
        ("\x1b[2J\x1b]0;pwned\x07", "\\x1b[2J\\x1b]0;pwned\\x07"),
        ("right\r::error::wrong", "right\\x0d::error::wrong"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\x9b31m\x85::x\u2028::y", "\\x9b31m\\x85::x\\u2028::y"),
        ("std::sqrt(x) # 1\n\tg\u00fcn, 3 \u00b5s \u2192 4", "std::sqrt(x) # 1\n\tg\u00fcn, 3 \u00b5s \u2192 4"),
        ("", ""),
    ],
)
def test_what_a_log_would_act_on_becomes_text(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_stream_is_printable_however_it_is_written() -> None:
    for pieces in (["a\n::err", "or::x\n"], ["a\n", ":", ":error::x", "\n"], list("a\n::error::x\n")):
        out = io.StringIO()
        stream = PrintableStream(out)
        stream.writelines(pieces)
        stream.flush()
        assert out.getvalue() == "a\n\\::error::x\n"


@pytest.mark.parametrize("pieces", [("busy", "\n"), ("a", "b\n"), ("a", "\nb"), ("a\nb",)])
def test_an_interrupted_write_is_not_written_again(pieces: tuple[str, ...]) -> None:
    """An interrupt may come when the text is written, but the call has not returned. ``print`` writes its end apart."""

    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            super().write(text)
            raise KeyboardInterrupt

    out = Interrupted()
    stream = PrintableStream(out)
    *before, last = pieces
    stream.writelines(before)
    with pytest.raises(KeyboardInterrupt):
        stream.write(last)
    with contextlib.suppress(KeyboardInterrupt):
        stream.flush()
    assert out.getvalue() == "".join(pieces)


def test_a_compiler_s_message_gives_no_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = '#error ::notice::a <img src=x>\n#error \x1b[31m##[group]b\nstatic_assert(0, "\n::error::c\n");'
    (tmp_path / "k.cu").write_text(f"{text}\n__global__ void k(int* y) {{}}\n")
    launch = ("--kernel", "k", "--grid", "1", "--block", "1")
    assert main(["emulate", str(tmp_path / "k.cu"), *launch]) == 1
    for line in "".join(capsys.readouterr()).split("\n"):
        assert not line.lstrip().startswith("::")
        assert "##[" not in line
        assert line.isprintable() or set(line) <= {"\t", *filter(str.isprintable, line)}


@pytest.mark.parametrize("hostile", ["<img src=x onerror=alert(1)>", "</details><script>", "[x](javascript:alert(1))"])
def test_markdown_has_no_html_of_others(hostile: str) -> None:
    for text in (
        formatting.bullets([hostile]),
        formatting.table(("a",), [(hostile,)]),
        formatting.without_html(hostile),
    ):
        assert "\\" + ("<" if "<" in hostile else "(javascript") in text
        assert formatting.without_html(text.split("\n")[-1]).count("\\\\") == 0
    ticked = formatting.code(f"a`{hostile}")
    assert ticked.count("`") == 2
    assert formatting.without_html(ticked) == ticked
    assert "\\<b>" in formatting.without_html("`a` <b> `c`")
    assert "\\<b>" in formatting.without_html("one ` only <b>")
