"""docs/parallel.md: its picture and tables are those of today's model and records."""

from __future__ import annotations

from benchmarks import parallel_picture


def test_the_picture_and_the_tables_are_current() -> None:
    assert parallel_picture.PICTURE.read_text(encoding="utf-8") == parallel_picture.picture()
    assert parallel_picture.PAGE.read_text(encoding="utf-8") == parallel_picture.page()
