"""The prompts of EvoEngineer's strategies (arXiv 2510.03760). They differ in how much a model is given.

Free: the task and the best so far. Insight: also the insights. Full: also the archive and the history.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from greenfast.evolve.proposal import Candidate, Context, Descriptor, Evaluation
from greenfast.evolve.space import Space

#: Strategy -> the sections that it adds to the task and the best so far.
STRATEGIES: dict[str, tuple[str, ...]] = {
    "free": (),
    "insight": ("insights",),
    "full": ("insights", "elites", "history"),
}
#: Most entries of history, archive and insights in a prompt; characters of a feedback.
_HISTORY, _ELITES, _INSIGHTS, _FEEDBACK = 40, 12, 60, 400
_FORM = """Answer with one JSON object in a ```json fence:
{"candidates": [{"parameters": {NAME: VALUE}, "edits": [{"region": NAME, "text": TEXT}], "rationale": TEXT, \
"prediction": TEXT}]}
`parameters`: those that differ from the defaults. `edits`: the whole new text of a region; left out where none are.
`rationale`: why it should be faster. `prediction`: by how much."""


def prompt(context: Context, strategy: str, faults: Sequence[str] = ()) -> str:
    """Write the prompt of a strategy. faults: of earlier answers to this prompt."""
    sections = [f"# Task\n\n{context.task}", *_space(context.space)]
    if context.baseline is not None:
        sections.append(f"# To beat\n\n{_line(context.baseline)}")
    if context.best is not None:
        sections.append(f"# Best so far\n\n{_line(context.best)}{_edits(context.best.candidate)}")
    for name in STRATEGIES[strategy]:
        lines = list(_SECTIONS[name](context))
        if lines:
            sections.append(f"# {_TITLES[name]}\n\n" + "\n".join(lines))
    if faults:
        sections.append("# Refused in your answers so far\n\n" + "\n".join(f"- {fault}" for fault in faults))
    many = "One candidate" if context.wanted == 1 else f"Up to {context.wanted} candidates"
    sections.append(f"# Answer\n\n{many} that the history does not hold.\n{_FORM}")
    return "\n\n".join(sections) + "\n"


def _space(space: Space) -> Iterator[str]:
    if space.parameters:
        rows = (
            f"- {name}: {', '.join(map(str, p.values))} (default {p.start}){f'; {p.help}' if p.help else ''}"
            for name, p in space.parameters.items()
        )
        yield "# Parameters\n\n" + "\n".join(rows)
    if space.constraints:
        yield "# Constraints, none of which may be 0\n\n" + "\n".join(f"- {c}" for c in space.constraints)
    for name, region in space.regions.items():
        about = f": {region.help}" if region.help else ""
        yield f"# Region {name} of {region.file}{about}\n\n```text\n{region.text}\n```"


def _insights(context: Context) -> Iterator[str]:
    """Yield the insights with a record: only those were measured."""
    measured = [insight for insight in context.insights if insight.record]
    for i in measured[-_INSIGHTS:]:
        yield f"- {i.change}. Predicted: {i.prediction or 'nothing'}. Came: {i.outcome}"


def _elites(context: Context) -> Iterator[str]:
    for e in context.archive[:_ELITES]:
        yield f"- {_line(e)}"


def _history(context: Context) -> Iterator[str]:
    for e in context.history[-_HISTORY:]:
        yield f"- {_line(e)}"


_SECTIONS = {"insights": _insights, "elites": _elites, "history": _history}
_TITLES = {
    "insights": "Insights, each of them measured",
    "elites": "The best of each kind of behaviour",
    "history": "Evaluated so far, the latest last",
}


def _line(e: Evaluation) -> str:
    """Describe an evaluation in one line: settings, stage or time, behaviour, feedback."""
    parts = [json.dumps(e.candidate.parameters, ensure_ascii=False)]
    if e.candidate.edits:
        parts.append("edits of " + ", ".join(edit.region for edit in e.candidate.edits))
    parts.append(_fitness(e) if e.valid else f"failed at {e.stage}")
    if e.behaviour is not None:
        parts.append(_behaviour(e.behaviour))
    feedback = " ".join(e.feedback.split())[:_FEEDBACK]
    return "; ".join([*parts, feedback] if feedback else parts)


def _fitness(e: Evaluation) -> str:
    if e.fitness is None:
        return f"passed {e.stage}"
    return f"{e.fitness * 1e6:.4g} µs" if e.fitness_kind == "seconds" else f"estimated {e.fitness:.4g}, not measured"


def _behaviour(b: Descriptor) -> str:
    busiest = f"{b.pipe} busiest, " if b.pipe else ""
    return f"{busiest}{b.registers} registers, {b.smem_bytes} bytes of shared memory"


def _edits(candidate: Candidate) -> str:
    return "".join(f"\n\nIts region {edit.region}:\n\n```text\n{edit.text}\n```" for edit in candidate.edits)
