"""Verdicts on programs of published collections: comparison with references, classes, bounds, and the record."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from benchmarks.published_readers import PublishedProgram, file_name
from greenfast.judge.formats.converted import DEFAULT_TOLERANCE, TOLERANCES
from greenfast.judge.store import to_json

#: kernelbench.com's own tolerances, absolute and relative, by problem.
ABSOLUTE = {
    "01_fp8_gemm": 0.01, "02_kda_cutlass": 0.05, "03_paged_attention": 0.02, "05_topk_bitonic": 1e-4,
    "06_sonic_moe_swiglu": 0.02, "07_w4a16_gemm": 0.1,
}  # fmt: skip
VERDICTS = ("accepted", "refused", "undecided", "no kernel")
#: Classes of programs, known without the emulator.
_GROUPS = ("right", "wrong", "did not start", "fault of the test itself", "unknown")
#: Errors of Python's and of Triton's compiler.
NOT_PYTHON = ("SyntaxError", "IndentationError", "TabError")
NOT_COMPILED = ("CompilationError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct")


@dataclass(frozen=True)
class ProgramOutcome:
    """What a process stored: facts of its end, and its outputs by name."""

    facts: dict[str, Any]
    arrays: dict[str, NDArray[Any]]

    @property
    def failed(self) -> bool:
        """Whether the program did not reach its end."""
        return bool(self.facts.get("ended") or self.facts.get("error"))

    def kind(self, name: str) -> str:
        """Return the dtype of an output."""
        return str(self.facts["facts"].get(name, "")).split("[")[0]


def read_outcome(path: Path) -> ProgramOutcome | None:
    """Read the outcome of a process; None if it did not run."""
    facts_path, arrays_path = path.with_name(path.name + ".json"), path.with_name(path.name + ".npz")
    if not facts_path.is_file():
        return None
    facts = json.loads(facts_path.read_text(encoding="utf-8"))
    arrays = {}
    if arrays_path.is_file() and facts.get("names"):
        with np.load(arrays_path, allow_pickle=False) as content:
            arrays = {name: content[str(i)] for i, name in enumerate(facts["names"])}
    return ProgramOutcome(facts, arrays)


def find_difference(output: NDArray[Any], expected: NDArray[Any], tolerance: float) -> str:
    """Return how an output differs from the reference by more than the tolerance; empty if it does not."""
    if output.shape != expected.shape:
        return f"has shape {list(output.shape)}, expected {list(expected.shape)}"
    if not expected.size:
        return ""
    if output.dtype.kind in "biu" and expected.dtype.kind in "biu":
        wrong = output.astype(np.int64) != expected.astype(np.int64)
        return f"{int(wrong.sum())} of {wrong.size} integers differ" if wrong.any() else ""
    wide = np.complex128 if "c" in (output.dtype.kind, expected.dtype.kind) else np.float64
    output, expected = output.astype(wide), expected.astype(wide)
    finite = np.isfinite(expected)
    same = (output == expected) | (np.isnan(output) & np.isnan(expected))
    if (np.isfinite(output) != finite).any() or not same[~finite].all():
        return (
            f"{int((~same & ~(finite & np.isfinite(output))).sum())} of {same.size} elements are not finite on one side"
        )
    if not finite.any():
        return ""
    output, expected = output[finite], expected[finite]
    error = np.abs(output - expected)
    wrong = error > tolerance * (np.abs(expected) + np.sqrt(np.mean(np.abs(expected) ** 2))) + 1e-7
    worst = int(error.argmax())
    return (
        f"{int(wrong.sum())} of {wrong.size} differ, {output[worst]:.6g} for {expected[worst]:.6g}"
        if wrong.any()
        else ""
    )


def compare(outcome: ProgramOutcome, reference: ProgramOutcome, second: ProgramOutcome | None) -> str | None:
    """Return the first difference from the reference's outputs; empty if none, None if there is nothing to compare.

    second: the reference with other random numbers and other uninitialised memory. Elements that then differ are not
    compared.
    """
    compared = False
    for name, expected in reference.arrays.items():
        other = expected if second is None or second.failed else second.arrays.get(name)
        if other is None or other.shape != expected.shape:
            continue
        fixed = (other == expected) | ((other != other) & (expected != expected))
        if expected.size and not fixed.any():
            continue
        compared = True
        if name not in outcome.arrays:
            return f"{name}: missing"
        expected_kind, kind = reference.kind(name), outcome.kind(name)
        if kind != expected_kind and "float" not in (kind, expected_kind):
            return f"{name}: {kind}, expected {expected_kind}"
        output = outcome.arrays[name]
        if output.shape == expected.shape and not fixed.all():
            output, expected = output[fixed], expected[fixed]
        text = find_difference(output, expected, TOLERANCES.get(expected_kind, DEFAULT_TOLERANCE))
        if text:
            return f"{name}: {text}"
    return "" if compared else None


def compare_models(outcome: ProgramOutcome, problem: str) -> str | None:
    """Return how a solution of kernelbench.com differs from the reference, by the collection's own tolerances."""
    for name, expected in outcome.arrays.items():
        if " expected" not in name:
            continue
        output = outcome.arrays.get(name.replace(" expected", " got"))
        if output is None or output.shape != expected.shape:
            return f"{name}: another shape"
        limit, exact = ABSOLUTE[problem], expected.astype(np.float64)
        # As in the judge's own rule for stated tolerances: one that zeros meet is relative to the output's size.
        absolute = (
            limit if (np.abs(exact) > limit + limit * np.abs(exact)).any() else limit * np.sqrt(np.mean(exact**2))
        )
        wrong = ~(np.abs(output.astype(np.float64) - exact) <= absolute + limit * np.abs(exact))
        if problem == "05_topk_bitonic" and output.dtype.kind == "i":
            wrong &= False  # equal values may have other indices
        if wrong.any():
            return f"{name.split()[0]} call: {int(wrong.sum())} of {wrong.size} elements differ"
    return "" if outcome.arrays else None


def judge(outcome: ProgramOutcome, difference: Callable[[], str | None]) -> tuple[str, str]:
    """Return a verdict (accepted, refused, undecided, no kernel) and its reason."""
    facts = outcome.facts
    error, faults = facts.get("error", ""), facts.get("faults") or []
    if facts.get("ended"):
        return "undecided", "time limit" if facts["ended"] == "time" else f"process ended: {facts['ended']}"
    if error in NOT_PYTHON:
        return "refused", "not Python"
    if error in NOT_COMPILED:
        return "refused", "Triton does not compile it"
    if error == "CompileError" and "No such file" in facts["message"]:
        return "undecided", f"needs another library: {facts['message'].split('fatal error: ')[-1].splitlines()[0]}"
    if error == "RuntimeError" and "unsupported" in facts["message"].lower() and not faults:
        return "undecided", f"takes other shapes only: {facts['message'].splitlines()[0]}"
    if error in ("UnsupportedError", "MemoryError", "OutOfResources") or any("unsupported" in f[:20] for f in faults):
        return "undecided", f"not emulated: {(faults or [facts['message']])[0]}"
    if faults:
        return "refused", f"fault: {faults[0]}"
    if error:
        return "refused", f"Python error: {error}"
    if not facts["launches"]:
        return "no kernel", "launches no kernel"
    text = difference()
    if text is None:
        return "undecided", "no reference or only random outputs"
    return ("refused", f"wrong output: {text}") if text else ("accepted", "")


def clopper_pearson(errors: int, trials: int) -> tuple[float, float]:
    """Return the two-sided 95 % interval of a rate (Clopper and Pearson)."""
    low = betaincinv(errors, trials - errors + 1, 0.025) if errors else 0.0
    high = betaincinv(errors + 1, trials - errors, 0.975) if errors < trials else 1.0
    return float(low), float(high)


def find_independent(
    outcome: ProgramOutcome | None, verdict: str, reason: str, difference: Callable[[], str | None]
) -> str:
    """Return what Triton's interpreter, or its compiler, shows about a program.

    right, wrong, out of bounds, error (Python, Triton's compiler), crashed, or unknown. difference: of its outputs from
    the reference's.
    """
    if outcome is None:
        return "error" if verdict == "refused" and not reason.startswith(("fault", "wrong output")) else "unknown"
    facts = outcome.facts
    if facts.get("ended"):
        return "unknown" if facts["ended"] == "time" else "crashed"
    if facts.get("outside"):
        return "out of bounds"
    if facts.get("error"):
        return "error"
    text = difference()
    return "unknown" if text is None else "wrong" if text else "right"


def find_program_difference(
    program: PublishedProgram,
    reference: ProgramOutcome | None,
    second: ProgramOutcome | None,
    outcome: ProgramOutcome | None,
) -> str | None:
    """Return how the outputs of a program differ from its reference's; empty if they do not, None if unknown.

    second: the reference with other random numbers and other uninitialised memory.
    """
    if outcome is None:
        return None
    if not program.reference:
        return compare_models(outcome, program.problem)
    if reference is None or reference.failed:
        return None
    return compare(outcome, reference, second)


def _has_fault(path: Path) -> bool:
    """Return whether a reference has a fault in the emulator too: then the test's inputs are its cause."""
    outcome = read_outcome(path.with_name(f"{path.name}~1"))
    return outcome is not None and bool(outcome.facts.get("faults"))


def make_rows(programs: Sequence[PublishedProgram], results: Path) -> list[dict[str, str]]:
    """Return a row for each program that ran in the emulator, in the order of the sample."""
    rows = []
    for program in programs:
        name = file_name(program.identifier)
        emulated = read_outcome(results / "programs-emulator" / name)
        if emulated is None:
            continue
        interpreted = read_outcome(results / "programs-interpreter" / name)
        problem = results / f"references-{program.reference_mode}" / file_name(program.problem)
        reference, second = (read_outcome(problem.with_name(f"{problem.name}~{seed}")) for seed in (1, 2))

        difference = partial(find_program_difference, program, reference, second)
        verdict, reason = judge(emulated, partial(difference, emulated))
        independent = find_independent(interpreted, verdict, reason, partial(difference, interpreted))
        if reason.startswith("fault") and _has_fault(results / "references-emulator" / file_name(program.problem)):
            independent = "fault of the reference"
        row = {"identifier": program.identifier, "verdict": verdict, "reason": reason[:160]}
        rows.append(row | ({"label": program.label} if program.label else {"independent": independent}))
    return rows


def count_errors(rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return the false accepts and false refusals with their bounds. A row's ``inspected`` replaces ``independent``."""
    truth = [(row["verdict"], row.get("inspected", "").split(":")[0] or row["independent"]) for row in rows]
    wrong = [
        v for v, t in truth if t in ("wrong", "error", "crashed", "out of bounds") and v in ("accepted", "refused")
    ]
    right = [v for v, t in truth if t == "right" and v in ("accepted", "refused")]
    accepts, refusals = wrong.count("accepted"), right.count("refused")
    return {
        "false accepts": {"number": accepts, "of": len(wrong), "interval": clopper_pearson(accepts, len(wrong))},
        "false refusals": {"number": refusals, "of": len(right), "interval": clopper_pearson(refusals, len(right))},
    }


def make_record(
    collection: str, programs: Sequence[PublishedProgram], results: Path, seed: int, inspected: dict[str, str]
) -> dict[str, Any]:
    """Return the record of a collection: counts, bounds and a row for each program, without its code.

    inspected: by identifier, the truth of a program that a person read, and why: "right: ..." or "wrong: ...".
    """
    rows = make_rows(programs, results)
    for row in rows:
        if row["identifier"] in inspected:
            row["inspected"] = inspected[row["identifier"]]
    columns = sorted(
        {key for row in rows for key in row},
        key=["identifier", "label", "verdict", "reason", "independent", "inspected"].index,
    )
    return {
        "collection": collection,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "triton": version("triton"),
        **({} if "label" in columns else count_errors(rows)),
        "rows": {"table": columns, "rows": [[row.get(key, "") for key in columns] for row in rows]},
    }


def update_record(path: Path, collection: str, programs: Sequence[PublishedProgram], results: Path, seed: int) -> None:
    """Write a collection's part of the record. What was inspected by hand is kept from the record's earlier rows."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    inspected = {}
    if collection in record:
        columns, rows = record[collection]["rows"]["table"], record[collection]["rows"]["rows"]
        former = [dict(zip(columns, row, strict=True)) for row in rows]
        inspected = {row["identifier"]: row["inspected"] for row in former if row.get("inspected")}
    record[collection] = make_record(collection, programs, results, seed, inspected)
    path.write_text(to_json(record), encoding="utf-8")


def render_table(record: dict[str, Any]) -> str:
    """Render the counts of the record as Markdown."""
    lines = [
        "| TritonBench, a random sample of answers | accepted | refused | not decided | no kernel |",
        "|---|---:|---:|---:|---:|",
    ]
    rows = _read_rows(record["tritonbench"])
    groups: dict[str, list[dict[str, str]]] = {name: [] for name in _GROUPS}
    for row in rows:
        groups[_group(row)].append(row)
    for name, members in groups.items():
        counts = Counter(row["verdict"] for row in members)
        lines.append(f"| {name} | " + " | ".join(str(counts[v]) for v in VERDICTS) + " |")
    total = Counter(row["verdict"] for row in rows)
    lines.append(f"| all {len(rows)} | " + " | ".join(str(total[v]) for v in VERDICTS) + " |")
    return "\n".join(lines)


def render_extensions(record: dict[str, Any]) -> str:
    """Render the counts of kernelbench.com's solutions with an extension as Markdown."""
    lines = [
        "| CUDA C++, label | accepted | refused | not decided | no kernel |",
        "|---|---:|---:|---:|---:|",
    ]
    for label in ("clean", "reward_hack"):
        counts = Counter(row["verdict"] for row in _read_rows(record["kernelbench_com_cuda"]) if row["label"] == label)
        lines.append(f"| {label} | " + " | ".join(str(counts[v]) for v in VERDICTS) + " |")
    return "\n".join(lines)


def render_bounds(record: dict[str, Any]) -> str:
    """Render the error rates of the record as Markdown."""
    lines = ["| TritonBench | number | rate, 95 % interval |", "|---|---:|---:|"]
    errors = count_errors(_read_rows(record["tritonbench"]))
    ran = count_errors([row for row in _read_rows(record["tritonbench"]) if _group(row) != "did not start"])
    for name, counts in (
        ("false accepts, of wrong programs that launch kernels", ran["false accepts"]),
        ("false accepts, of all wrong programs", errors["false accepts"]),
        ("false refusals, of right programs", errors["false refusals"]),
    ):
        low, high = counts["interval"]
        lines.append(f"| {name} | {counts['number']} of {counts['of']} | {100 * low:.1f} % to {100 * high:.1f} % |")
    return "\n".join(lines)


def _read_rows(part: dict[str, Any]) -> list[dict[str, str]]:
    return [dict(zip(part["rows"]["table"], row, strict=True)) for row in part["rows"]["rows"]]


def _group(row: dict[str, str]) -> str:
    truth = row.get("inspected", "").split(":")[0] or row["independent"]
    started = row["verdict"] != "refused" or row["reason"].startswith(("fault", "wrong output"))
    if not started and truth == "error":
        return "did not start"
    return {"right": "right", "fault of the reference": "fault of the test itself"}.get(
        truth, "unknown" if truth == "unknown" else "wrong"
    )
