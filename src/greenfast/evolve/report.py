"""Write the report of a run as one HTML file, and its results in the T4 format."""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path

import msgspec
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from greenfast.evolve import t4
from greenfast.evolve.loop import State
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.proposal import Descriptor, Evaluation, build_archive, describe, select_best
from greenfast.judge.report.formatting import Section
from greenfast.judge.report.plots import BASELINE, CANDIDATE, render_svg
from greenfast.judge.report.webpage.page import bullets, figure, page, paragraph, table
from greenfast.judge.store import to_json, write_whole
from greenfast.spec.errors import UsageError

REPORT, RESULTS = "report.html", "t4.json"
#: The stages at which candidates end, in order, with their explanation in the report.
_ENDS = {
    "space": "not in the space, or refused by the family",
    "duplicate": "the same machine code and launches as another",
    "BUILD": "did not compile, or cannot be launched",
    "RESOURCES": "beyond the budget of registers, shared memory, spills or state",
    "CORRECTNESS": "wrong, or a fault on the emulator or the GPU",
    "screen": "cut by the counts; not measured",
    "race": "failed in the race",
    "left": "left at the end",
}
_MAX_ROWS = 60


def write_report(folder: Path, manifest: Manifest, state: State) -> None:
    """Write ``report.html`` and ``t4.json`` into a run's folder. Raises MachineError if they cannot be written."""
    write_whole(folder / REPORT, report(manifest, state))
    evaluations = [_with_all_parameters(manifest, e) for e in state.history if not e.candidate.edits]
    metadata = {
        "tool": f"greenfast {manifest.package_version}",
        "space": manifest.space.name,
        "shapes": manifest.shapes,
        "format": manifest.format,
        "target": manifest.arch,
        "created": manifest.created,
        "baseline": manifest.baseline,
        "baseline_us": state.baseline_us,
    }
    write_whole(folder / RESULTS, to_json(t4.build_results(evaluations, metadata)))


def _with_all_parameters(manifest: Manifest, e: Evaluation) -> Evaluation:
    """Add the default parameters that readers of the T4 format expect. Return it unchanged outside the space."""
    try:
        complete = manifest.space.complete(e.candidate.parameters)
    except UsageError:
        return e
    return msgspec.structs.replace(e, candidate=msgspec.structs.replace(e.candidate, parameters=complete))


def report(manifest: Manifest, state: State) -> str:
    """Render the page."""
    values = "Times of races" if _kind(state) == "seconds" else "Estimates by counts, not speeds"
    caption = f"{values}, by the order of evaluation; the line is the best so far, the dashed one the baseline."
    sections = [
        Section("Result", _result(manifest, state)),
        Section("Fitness over time", [figure(_draw_fitness(state), caption)]),
        Section("Where candidates ended", [_stage_table(state)]),
        Section("Archive", _archive(manifest, state)),
        Section("Lineage", _lineage(manifest, state)),
        Section("Candidates", _candidates(manifest, state)),
        Section("How to repeat it", _settings(manifest)),
    ]
    winner = state.winner
    word = winner[1].decision if winner else "DEFER" if state.verdicts else "PENDING"
    facts = [
        ("candidates", str(len(state.history))),
        ("kernels built", str(state.evaluations)),
        ("GPU", f"{state.gpu_seconds:.0f} s" + (f" on {len(state.gpus)} GPUs" if len(state.gpus) > 1 else "")),
        ("machine", f"{state.seconds:.0f} s"),
        ("proposer", manifest.proposer),
        ("baseline", manifest.baseline),
        ("shapes", ", ".join(manifest.shapes)),
        ("target", f"{manifest.arch}, {manifest.format}"),
    ]
    title = f"Search of {manifest.space.name}"
    return page(title, sections, word=word, claims=[_describe_claim(state)], facts=facts)


def _describe_claim(state: State) -> str:
    if state.winner is not None:
        _, v = state.winner
        return (
            f"{v.speedup:.3f}x the baseline's speed at {v.shape}, interval {v.low:.3f} to {v.high:.3f} "
            f"({100 * v.confidence:.1f} %, corrected for {len(state.verdicts)} finalists), by the whole validation"
            f"{f' {v.where}; of that machine and day, not of others' if v.where else ''}."
        )
    if state.verdicts:
        return f"None of {len(state.verdicts)} finalists passed the whole validation."
    best = select_best(state.history)
    if best is None:
        return "No candidate passed the gates of the search."
    if best.fitness_kind == "estimate":
        return "No GPU: candidates are ordered by estimates from counts. They are no speeds, and no claim is made."
    return "No candidate was validated, so no claim is made."


def _result(manifest: Manifest, state: State) -> list[Markup]:
    parts = [paragraph(f"The search ended: {state.ended or 'it has not'}.")]
    if manifest.untimed:
        parts.append(paragraph(f"{manifest.untimed[0].upper()}{manifest.untimed[1:]}."))
    if len(state.gpus) > 1:
        names = ", ".join(gpu.name for gpu in state.gpus)
        parts.append(
            paragraph(
                f"Races were spread over GPU {names}, each an {state.gpus[0].kind}. Each candidate is ranked by its "
                "speedup over the baseline on the same GPU, and a final between the GPUs' winners puts the speedups of "
                "a batch on one scale. GPUs of one kind differ by some per cent in time, less in the ratio of two "
                "kernels' times: such a small difference between candidates of two GPUs is not significant. "
                "Finalists were validated on one GPU."
            )
        )
    if state.verdicts:
        rows = [
            (
                str(n + 1),
                describe(manifest.space, e.candidate),
                v.decision,
                f"{v.speedup:.3f}x [{v.low:.3f}, {v.high:.3f}]" if v.speedup else "",
                f"{state.baseline_us / e.fitness / 1e6:.3f}x" if e.fitness else "",
                "; ".join([*v.reasons, v.record]),
            )
            for n, (e, v) in enumerate(state.verdicts)
        ]
        parts.append(table(("finalist", "settings", "verdict", "validated", "in its race", "reasons, record"), rows))
        parts.append(paragraph("The best of many looks better in its race than it is; only the validation counts."))
    best = select_best(state.history)
    if best is not None and state.baseline is not None:
        mine, theirs = best.behaviour or Descriptor(), state.baseline.behaviour or Descriptor()
        baseline_us = f"{state.baseline_us:.2f}" if state.baseline_us else _format_fitness(state.baseline)
        compared = [
            ("µs", baseline_us, _format_fitness(best)),
            ("registers", str(theirs.registers), str(mine.registers)),
            ("shared memory, bytes", str(theirs.smem_bytes), str(mine.smem_bytes)),
            ("busiest pipe", theirs.pipe, mine.pipe),
            ("settings", manifest.baseline, describe(manifest.space, best.candidate)),
        ]
        parts.append(table(("", "baseline", "best of the search"), compared))
    return parts


def _format_fitness(e: Evaluation) -> str:
    """Format the microseconds of an evaluation; an estimate is marked."""
    if not e.fitness:
        return ""
    return f"{e.fitness * 1e6:.2f}" if e.fitness_kind == "seconds" else f"{e.fitness * 1e6:.3g} (estimate, no speed)"


def _kind(state: State) -> str:
    return "seconds" if any(e.fitness_kind == "seconds" for e in state.history) else "estimate"


def _draw_fitness(state: State) -> Markup:
    kind = _kind(state)
    points = [(n, e.fitness * 1e6) for n, e in enumerate(state.history) if e.fitness_kind == kind and e.fitness]
    numbers, us = [n for n, _ in points], [us for _, us in points]
    baseline = state.baseline_us
    if kind == "estimate" and state.baseline and state.baseline.fitness:
        baseline = state.baseline.fitness * 1e6

    def draw(one: Figure) -> None:
        axes: Axes = one.add_subplot()
        axes.plot(numbers, us, ".", color=BASELINE[0], label="candidates")
        axes.step(numbers, list(accumulate(us, min)), where="post", color=CANDIDATE[0], label="best so far")
        if baseline:
            axes.axhline(baseline, color="0.3", linestyle="--", linewidth=1, label="baseline")
        axes.set_xlabel("candidate", fontsize=10)
        axes.set_ylabel("µs" if kind == "seconds" else "estimate, µs", fontsize=10)
        axes.set_xlim(-0.5, len(state.history) - 0.5)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=10, frameon=False)

    return render_svg("fitness of the candidates over time", 3.0, draw)


def _stage_table(state: State) -> Markup:
    total = len(state.history) or 1
    rows = []
    for stage, why in _ENDS.items():
        ended = [e.cost_seconds for e in state.history if _final_stage(e) == stage]
        if ended:
            rows.append((stage, why, str(len(ended)), f"{100 * len(ended) / total:.0f} %", f"{sum(ended):.1f}"))
    header = ("ended at", "because", "candidates", "share", "seconds spent on them")
    return table(header, rows, right=header[2:])


def _final_stage(e: Evaluation) -> str:
    return e.stage if not e.valid or e.stage in ("duplicate", "screen") else "left"


def _archive(manifest: Manifest, state: State) -> list[Markup]:
    rows = []
    for e in build_archive(state.history):
        b = e.behaviour or Descriptor()
        settings = describe(manifest.space, e.candidate)
        rows.append((b.pipe, str(b.smem_bytes), str(b.registers), _format_fitness(e), settings))
    if not rows:
        return [paragraph("Empty: no candidate is right and has a fitness.")]
    header = ("busiest pipe", "shared memory", "registers", "µs", "settings")
    caption = "The best of each cell: busiest pipe, shared memory by 32 KiB, registers by 32."
    return [paragraph(caption), table(header, rows, right=header[1:4])]


def _lineage(manifest: Manifest, state: State) -> list[Markup]:
    """List the ancestors of the best candidate, nearest first."""
    by_key = {e.candidate.key: e.candidate for e in state.history}
    best = state.winner[0] if state.winner else select_best(state.history)
    ancestors = [best.candidate] if best is not None else []
    for c in ancestors:  # it grows
        ancestors += [by_key[key] for key in c.parents if key in by_key and by_key[key] not in ancestors]
    if len(ancestors) < 2:
        return [paragraph("The best was made from no other candidate.")]
    lines = [
        f"{describe(manifest.space, c)} [{c.origin or 'proposed'}]{f': {c.rationale}' if c.rationale else ''}"
        for c in ancestors[:_MAX_ROWS]
    ]
    return [paragraph("The best and its ancestors, the nearest first."), bullets(lines)]


def _candidates(manifest: Manifest, state: State) -> list[Markup]:
    ranked = sorted(
        (e for e in state.history if e.stage != "duplicate"),
        key=lambda e: (not e.valid, e.fitness_kind != "seconds", e.fitness or math.inf),
    )
    rows = [
        (
            e.hash[:8] or "-",
            describe(manifest.space, e.candidate),
            _final_stage(e),
            _format_fitness(e),
            e.feedback[:300],
        )
        for e in ranked[:_MAX_ROWS]
    ]
    parts = [table(("hash", "settings", "ended", "µs", "feedback"), rows, right=("µs",))]
    if len(ranked) > _MAX_ROWS:
        parts.append(paragraph(f"{len(ranked) - _MAX_ROWS} more are in index.sqlite."))
    return parts


def _settings(manifest: Manifest) -> list[Markup]:
    content = msgspec.to_builtins(manifest)
    names = "command created package_version proposer options budget batch screen finalists confidence seed seeds small"
    rows = [(name, str(content[name])) for name in names.split()]
    if manifest.git:
        rows.append(("commit", f"{manifest.git.sha}{' with changes' if manifest.git.dirty else ''}"))
    space = manifest.space
    values = [(name, ", ".join(map(str, p.values)), p.help) for name, p in space.parameters.items()]
    return [
        table(("setting", "value"), rows),
        table(("parameter", "values", ""), values),
        bullets([f"constraint: {c}" for c in space.constraints] or ["no constraints"]),
    ]
