"""Records that were edited: each is a copy of a kept one, changed in a place or two."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from greenfast.judge.error_metrics import error_histogram
from greenfast.judge.record_io import DIGEST, compute_digest, read_content, read_record
from greenfast.spec.errors import UsageError
from tests.cheats.judging import Finding

Content: TypeAlias = dict[str, Any]
#: One that is DEFER, as the candidate was SHORT of what was asked.
_KEPT = Path(__file__).parents[2] / "evidence" / "h200" / "fp8_sdpa-e4m3-stage1"


def _merge(content: Content) -> None:
    content |= {"decision": "MERGE", "reasons": ["all five gates hold"]}


def _faster(content: Content) -> None:
    for row in content["speedups"]:
        row |= {"speedup": 9.0, "ci_low": 8.0, "ci_high": 9.5, "verdict": "FAST"}
    _merge(content)


def _verdict(content: Content) -> None:
    content["speedups"][0]["verdict"] = "FAST"


def _interval(content: Content) -> None:
    content["speedups"][0]["ci_low"] -= 0.1


def _noise(content: Content) -> None:
    content["speedups"][0]["noise_floor"] = 0.2


def _blocks(content: Content) -> None:
    for row in content["candidate"]["timing"]:
        row["block_medians_us"] = [[t / 2 for t in process] for process in row["block_medians_us"]]


def _gate(content: Content) -> None:
    content["gates"] = [gate for gate in content["gates"] if gate["gate"] != "PERFORMANCE"]


def _rows(content: Content) -> None:
    content["candidate"]["correctness"].pop()


def _budget(content: Content) -> None:
    (resources,) = [gate for gate in content["gates"] if gate["gate"] == "RESOURCES"]
    next(check for check in resources["checks"] if check[0].endswith("registers"))[2] = "1000"


def _fewer_registers(content: Content) -> None:
    for build in content["candidate"]["builds"]:
        build["resources"]["registers"] -= 8


def _no_budget(content: Content) -> None:
    (resources,) = [gate for gate in content["gates"] if gate["gate"] == "RESOURCES"]
    resources["checks"] = [check for check in resources["checks"] if not check[0].endswith("registers")]


def _counts(content: Content) -> None:
    for build in content["candidate"]["builds"]:
        build["machine_code"] = {name: n + 1 for name, n in build["machine_code"].items()}


def _nothing_drawn(content: Content) -> None:
    content["exam"] = {"seed": None, "drawn": {}, "complete": True, "missing": []}
    _drop_drawn(content)


def _seed_of_nothing(content: Content) -> None:
    content["exam"]["drawn"] = {}
    _drop_drawn(content)


def _drop_drawn(content: Content) -> None:
    for side in (content["baseline"], content["candidate"]):
        side["correctness"] = [row for row in side["correctness"] if not row["drawn"]]


def _errors(content: Content) -> None:
    for row in content["candidate"]["correctness"]:  # with the histogram that a new record has and a kept one has not
        largest = np.array([row["kernel_error"]["max_abs_err"]])
        row["error_histogram"] = msgspec.to_builtins(error_histogram(largest, np.zeros(1)))
        for name in row["kernel_error"]:
            row["kernel_error"][name] /= 1000


def _median(content: Content) -> None:
    content["candidate"]["timing"][0]["p50_us"] /= 2


def _twice(content: Content) -> None:
    content["gates"] = [*content["gates"], content["gates"][0]]
    _merge(content)


def _no_claim(content: Content) -> None:
    for row in content["speedups"]:
        row["gated"] = False


@dataclass(frozen=True)
class Edit:
    """What was changed, and what reading the record must say."""

    about: str
    change: Callable[[Content], None]
    says: str


RECORDS = {
    "decision": Edit("a decision of MERGE", _merge, "decision says MERGE, but recomputed"),
    "speedups": Edit("nine times the speedup, and MERGE", _faster, r"\.speedup says 9|\(PERFORMANCE\).* says"),
    "verdict": Edit("the verdict of a shape", _verdict, r"\.verdict says FAST, but recomputed"),
    "interval": Edit("the interval of a speedup", _interval, r"\.ci_low says"),
    "noise_floor": Edit("the noise floor", _noise, r"speedups\[0\] .* says"),
    "block_medians": Edit("all measured times of the candidate halved", _blocks, "p50_us is"),
    "gate_left_out": Edit("a gate left out", _gate, r"gates says \["),
    "rows_left_out": Edit("a case of CORRECTNESS left out", _rows, "unless its CORRECTNESS gate passed"),
    "over_budget": Edit("1000 registers", _budget, r"\(RESOURCES\)\.checks.* says 1000"),
    "fewer_registers": Edit("kernels of 8 registers less", _fewer_registers, r"\(RESOURCES\)\.checks.* says"),
    "no_budget": Edit("the rows of registers left out", _no_budget, r"\(RESOURCES\)\.status says PASS"),
    "machine_code": Edit("other counts of machine code", _counts, r"\(EVIDENCE\)\.status says"),
    "nothing_drawn": Edit("nothing was drawn, and the exam is the whole one", _nothing_drawn, r"exam\.complete says"),
    "seed_of_nothing": Edit("a drawn seed that no case has", _seed_of_nothing, r"reasons says"),
    "errors": Edit("errors a thousand times smaller", _errors, r"kernel_error\.max_abs_err is"),
    "median": Edit("half the median", _median, "p50_us is"),
    "gate_twice": Edit("a gate twice, and MERGE", _twice, r"gates says"),
    "nothing_claimed": Edit("no shape has to be faster", _no_claim, r"\.gated says|\(PERFORMANCE\).* says"),
}


def record(edit: Edit) -> Finding:
    """Read the kept record after the edit, with its digest made anew."""
    content: Content = read_content(_KEPT / "record.json")
    edit.change(content)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        path.write_text(json.dumps(content | {DIGEST: compute_digest(content)}))
        try:
            read_record(path)
        except UsageError as e:
            return Finding("rejected", "UsageError", str(e))
    return Finding("accepted")
