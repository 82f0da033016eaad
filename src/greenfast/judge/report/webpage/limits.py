"""The limits of a record's numbers, as sentences."""

from __future__ import annotations

from collections.abc import Iterator

from greenfast.judge.record_schema import PhaseRecord, Record, Run
from greenfast.judge.report import facts, formatting


def limits(record: Run) -> list[str]:
    """Return one sentence per limit, the most important first."""
    return [
        *_describe_source(record),
        *_describe_correctness(record),
        *_describe_timing(record),
        *_describe_method(record),
    ]


def _describe_source(record: Run) -> Iterator[str]:
    if record.git.dirty:
        yield (
            f"The source tree had changes that are not in commit {record.git.sha[:10]}: the hashes above identify the "
            "kernels, the commit does not."
        )
    for gate in record.gates:
        if gate.status == "PENDING":
            yield f"{gate.gate} was not decided: {gate.summary}"
        for check, _, actual, status in gate.checks:
            if status == "PENDING":
                yield f"{gate.gate}, not asked: {check} ({actual})"


def _describe_correctness(record: Run) -> Iterator[str]:
    rows = [row for _, side in record.sides() for row in side.correctness]
    if not rows:
        return
    shapes, seeds = {row.shape for row in rows}, {row.seed for row in rows}
    yield (
        f"Correct means: on {len(shapes)} shape{'s'[: len(shapes) > 1]} and {len(seeds)} "
        f"seed{'s'[: len(seeds) > 1]} of the problem's inputs. Other shapes and inputs were not run."
    )
    if isinstance(record, Record) and record.parity:
        same = sum(row.identical for row in record.parity)
        if same < len(record.parity):
            yield (
                f"The two sides' outputs have equal bits on {same} of {len(record.parity)} inputs; elsewhere each is "
                "held to the bounds alone."
            )


def _describe_timing(record: Run) -> Iterator[str]:
    if isinstance(record, PhaseRecord):
        return
    if isinstance(record, Record) and record.quoted is not None:
        yield (
            f"No time was measured in this run. The speedups are another run's, on {record.quoted.device.name}, of "
            "kernels with equal hashes."
        )
        return
    rows = [row for _, side in record.sides() for row in side.timing]
    if not rows:
        yield "Nothing was timed: this page says nothing about speed."
        return
    yield f"Times are of one {facts.device(record)}; another device, driver or clock gives others."
    if isinstance(record, Record):
        yield from _describe_speedups(record)
    discarded = sum(row.discarded_iters for row in rows)
    if discarded:
        yield f"{discarded} launches were discarded because the clock had fallen."
    if not any(row.block_mhz for row in rows):
        yield "Clocks and power were not sampled for each block, so a side that ran on a slower clock would not show."


def _describe_speedups(record: Record) -> Iterator[str]:
    gated = [row for row in record.speedups if row.gated]
    others = len(record.speedups) - len(gated)
    if gated and others:
        names = ", ".join(f"{row.shape} ({row.cache})" for row in gated)
        chance = formatting.percent(1 - record.speedups[0].confidence)
        yield (
            f"Only {names} decided. The other {others} speedups are shown and were not asked for; each interval misses "
            f"the true value with a chance of {chance}."
        )
    fewest = min((row.processes for row in record.speedups), default=0)
    if 0 < fewest < 3:
        yield f"Processes timed: {fewest}. So few cannot show how processes differ, and the interval is of these alone."


def _describe_method(record: Run) -> Iterator[str]:
    if any(side.counts for _, side in record.sides()):
        yield "Counts are of PTX, from which the assembler makes other machine code."
    yield "A file can be edited: what repeats the run below is the proof, this page is not."
