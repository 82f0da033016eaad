"""Render a comparison as one HTML file."""

from __future__ import annotations

from benchmarks.plot import PLOT_WIDTH, draw_benchmark, plot_height
from benchmarks.ratios import headline
from benchmarks.record_schema import Benchmark
from benchmarks.report import clocks_line, reasons, sections, title
from greenfast.judge.report.webpage.charts import drawing
from greenfast.judge.report.webpage.limits import limits
from greenfast.judge.report.webpage.page import Section, bullets, figure, markdown, page
from greenfast.judge.report.webpage.run import details, gates, identity, repeat


def benchmark_page(record: Benchmark, sha256: str = "") -> str:
    """Render the page of a record. sha256: of its file."""
    (_, summary), *others = sections(record)
    picture = drawing(
        "throughput and times of all backends",
        plot_height(record),
        lambda figure: draw_benchmark(figure, record),
        width=PLOT_WIDTH,
    )
    missing = reasons(record)
    return page(
        title(record),
        [
            Section("Times", [figure(picture, clocks_line(record)), markdown(summary)]),
            *([Section("Gates", gates(record))] if record.gates else []),
            Section("Repeat it", repeat(record)),
            Section("Limits", [bullets([*missing, *limits(record)])]),
            Section("The whole record", details(others)),
        ],
        claims=[f"{said[:1].upper()}{said[1:]}." for said in (headline(record.rows, [v]) for v in record.versus)],
        facts=identity(record, sha256),
    )
