"""Findings of whole programs: counted once each, suppressed by a file, and written as SARIF."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenfast.emulator.findings import NOTE, UNSUPPORTED, Findings, read_suppressions, to_sarif
from greenfast.emulator.kernel_run import Fault
from greenfast.emulator.machine.observed import Line
from greenfast.spec.errors import UsageError

RACE = Fault(level="error", kind="data-race", message="a race of thread 3", file="sum.cu", line=7, thread=(3, 0, 0))
OTHER_LINE = Fault(level="formal", kind="barrier", message="a barrier", file="sum.cu", line=9)


def test_a_finding_is_listed_once_with_its_count() -> None:
    findings = Findings()
    assert findings.add("_Z3sumPf", RACE)
    assert not findings.add("_Z3sumPf", RACE)
    assert findings.add("_Z5otherPf", RACE)
    assert findings.add("_Z3sumPf", OTHER_LINE)
    assert [(f.kernel, f.line, f.count) for f in findings.all] == [
        ("_Z3sumPf", 7, 2),
        ("_Z5otherPf", 7, 1),
        ("_Z3sumPf", 9, 1),
    ]
    assert findings.describe()[0] == "error: a race of thread 3 (2 times)"


def test_findings_without_a_line_differ_by_their_message_without_numbers() -> None:
    findings = Findings()
    for message in ("cudaFree: 0x10 is free", "cudaFree: 0x20 is free", "cudaFree: a host pointer"):
        findings.add("cudaFree", Fault(level="error", kind="invalid-call", message=message))
    assert [f.count for f in findings.all] == [2, 1]


@pytest.mark.parametrize(
    ("levels", "formal", "code"),
    [
        ([], True, 0),
        ([NOTE], True, 0),
        (["formal"], False, 0),
        (["formal"], True, 1),
        ([UNSUPPORTED], True, 3),
        ([UNSUPPORTED, "error"], True, 1),
    ],
)
def test_the_exit_code_follows_the_worst_level(levels: list[str], formal: bool, code: int) -> None:
    findings = Findings()
    findings.extend("k", (Fault(level=level, kind=level, message=level) for level in levels))
    assert findings.exit_code(formal) == code


@pytest.mark.parametrize(
    ("line", "suppressed"),
    [
        ("kind=data-race", True),
        ("kind=data-race kernel=sum", True),
        ("kernel=_Z3sum* file=*.cu line=7", True),
        ("kind=data-race line=8", False),
        ("kernel=su", False),
    ],
)
def test_suppressions(line: str, suppressed: bool, tmp_path: Path) -> None:
    file = tmp_path / "known.txt"
    file.write_text(f"# a race that is known\n\n{line}\n")
    findings = Findings(read_suppressions(file))
    assert findings.add("_Z3sumPf", RACE) is not suppressed
    assert findings.exit_code() == (0 if suppressed else 1)
    assert ("suppression without a finding: " + line in findings.describe()) is not suppressed
    results = to_sarif(findings)["runs"][0]["results"]
    assert ("suppressions" in results[0]) is suppressed


@pytest.mark.parametrize("line", ["data-race", "sort=data-race", "kind="])
def test_a_wrong_suppression_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text(line)
    with pytest.raises(UsageError, match=r"line 1: .* give FIELD=PATTERN with the fields kind, kernel, file, line"):
        read_suppressions(tmp_path / "s.txt")


def test_sarif_names_files_below_the_root_relative_to_it(tmp_path: Path) -> None:
    findings = Findings()
    findings.files = {str(tmp_path / "src" / "sum.cu"), "/usr/include/a.cuh"}
    stack = [Line(file="a.cuh", line=2, function="load"), Line(file="sum.cu", line=7, function="sum")]
    findings.add("_Z3sumPf", Fault(level="error", kind="data-race", message="r", file="sum.cu", line=7, stack=stack))
    log = to_sarif(findings, tmp_path)
    (run,) = log["runs"]
    (result,) = run["results"]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "data-race"
    assert result["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "src/sum.cu", "uriBaseId": "SRCROOT"},
        "region": {"startLine": 7},
    }
    inner = result["stacks"][0]["frames"][0]["location"]["physicalLocation"]["artifactLocation"]
    assert inner == {"uri": "file:///usr/include/a.cuh"}
