"""Speedups as Markdown, measured in the run or quoted from another one."""

from __future__ import annotations

from collections.abc import Sequence

from greenfast.judge.record_schema import CachedTiming, SpeedupRow
from greenfast.judge.report import formatting


def speedup_table(speedups: Sequence[SpeedupRow]) -> str:
    """A row per shape and cache state."""
    rows = [
        (
            row.shape,
            row.cache,
            formatting.speedup(row.speedup),
            f"{formatting.interval(row.ci_low, row.ci_high)} at {100 * row.confidence:g} %",
            formatting.percent(row.noise_floor),
            formatting.requirement(row.required),
            row.verdict,
            formatting.yes(row.gated),
            f"{row.blocks} in {row.processes}",
        )
        for row in speedups
    ]
    header = ("shape", "cache", "speedup", "interval", "noise floor", "required", "verdict", "gated")
    return formatting.table((*header, "blocks in processes"), rows, right=("speedup", "interval", "noise floor"))


def speedup_line(rows: Sequence[SpeedupRow]) -> str:
    """The speedups that decide, in one line."""
    return "; ".join(
        f"{row.shape} ({row.cache}) {formatting.speedup(row.speedup)} {formatting.interval(row.ci_low, row.ci_high)}, "
        f"required {formatting.requirement(row.required)}: {row.verdict}"
        for row in rows
    )


def describe_source(quote: CachedTiming) -> str:
    """Device, day and commit of what is quoted."""
    sha = quote.git.sha if quote.git.sha == "unknown" else quote.git.sha[:10]
    return f"quoted from {quote.device.name}, {quote.created[:10]}, commit {sha}{' (dirty)' if quote.git.dirty else ''}"


def cached_section(quote: CachedTiming) -> str:
    """The speedups of another run, under a heading that says so."""
    return (
        f"### Not measured in this run: {formatting.without_html(describe_source(quote))}\n\n"
        "Nothing was timed here. These are the speedups of a kept record of the same kernels (equal hashes, compiler "
        "and options), on the same inputs, with the verdicts against what is required here:\n\n"
        f"{speedup_table(quote.speedups)}\n\n"
        + formatting.table(
            ("quoted", "value"),
            [
                ("record", quote.path),
                ("SHA-256 of the record", quote.sha256),
                ("created", quote.created),
                ("device", f"{quote.device.name}, driver {quote.device.driver}, CUDA {quote.device.cuda_version}"),
                ("git", f"{quote.git.sha} on {quote.git.branch}, {'dirty' if quote.git.dirty else 'clean'}"),
                ("command", quote.command),
            ],
        )
    )
