"""Records that were edited: each is a copy of a kept one, changed in a place or two."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from greenfast.judge.digest import FIELD, digest_of
from greenfast.judge.records import read_record
from greenfast.spec.errors import UsageError
from tests.cheats.judging import Finding

Content: TypeAlias = dict[str, Any]
_KEPT = Path(__file__).parents[2] / "evidence" / "h100" / "fp8_sdpa-e4m3-stage3a"


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
    "speedups": Edit("nine times the speedup, and MERGE", _faster, r"speedups\[0\] .*\.speedup says 9"),
    "verdict": Edit("the verdict of a shape", _verdict, r"\.verdict says FAST, but recomputed"),
    "interval": Edit("the interval of a speedup", _interval, r"\.ci_low says"),
    "noise_floor": Edit("the noise floor", _noise, r"speedups\[0\] .* says"),
    "block_medians": Edit("all measured times of the candidate halved", _blocks, r"\.speedup says"),
    "gate_left_out": Edit("a gate left out", _gate, "gates says no PERFORMANCE, but recomputed"),
    "rows_left_out": Edit("a case of CORRECTNESS left out", _rows, r"gates\.CORRECTNESS"),
    "over_budget": Edit("1000 registers", _budget, r"\(RESOURCES\), .* registers says PASS, but recomputed"),
    "nothing_claimed": Edit("no shape has to be faster", _no_claim, r"speedups\.gated says"),
}


def record(edit: Edit) -> Finding:
    """Read the kept record after the edit, with its digest made anew."""
    content: Content = json.loads((_KEPT / "record.json").read_bytes())
    edit.change(content)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        path.write_text(json.dumps(content | {FIELD: digest_of(content)}))
        try:
            read_record(path)
        except UsageError as e:
            return Finding("rejected", "UsageError", str(e))
    return Finding("accepted")
