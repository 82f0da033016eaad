"""Conversion of a record to JUnit XML. CI services show it as tests.

``xml.etree`` is enough for the format's six elements. Characters that XML 1.0 forbids are replaced, because compilers
print them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

from greenfast.judge.record_schema import CorrectnessRow, GateResult, Record
from greenfast.judge.report import facts, formatting
from greenfast.spec.printable import printable

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
#: Length limit of the message attribute, because services show it in a list. The element's content is the whole text.
_MESSAGE_CHARACTERS = 300


def junit(record: Record, exit_code: int) -> str:
    """Return one test suite: a test per gate, per case of CORRECTNESS and implementation, and the test ``verdict``.

    A FAIL is a failure. PENDING and skipped cases are skipped tests. Each has its reasons. The test ``verdict`` passes
    if the exit code is 0. It is a failure if a gate failed, and an error if something was not judged.
    """
    name = f"{record.task}.{record.candidate.variant}"
    suite = ElementTree.Element("testsuite", name=name, timestamp=record.created.removesuffix("Z"))
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in _properties(record, exit_code):
        ElementTree.SubElement(properties, "property", name=key, value=value)
    for gate in record.gates:
        _gate(_test(suite, name, gate.gate), gate)
    for role, side in record.sides():
        for row in side.correctness:
            _row(_test(suite, f"{name}.CORRECTNESS", f"{role} {row.case}"), row)
    verdict = _test(suite, name, "verdict")
    if exit_code:
        failed = any(gate.status == "FAIL" for gate in record.gates)
        reasons = [f"exit code {exit_code}", *record.reasons]
        _add_result(verdict, "failure" if failed else "error", record.decision, reasons)
    return _document(suite)


def junit_error(name: str, error: str, exit_code: int) -> str:
    """Return a suite with the test ``verdict`` for a run that ended with an error."""
    suite = ElementTree.Element("testsuite", name=name)
    _add_result(_test(suite, name, "verdict"), "error", "no verdict", [error, f"exit code {exit_code}"])
    return _document(suite)


def _properties(record: Record, exit_code: int) -> list[tuple[str, str]]:
    return [
        ("decision", record.decision),
        ("exit code", str(exit_code)),
        ("candidate", record.candidate.variant),
        ("baseline", record.baseline.variant),
        ("format", record.format),
        ("target", record.arch),
        ("device", facts.device(record)),
        ("commit", record.git.short),
        ("command", record.command),
        ("greenfast", record.package_version),
    ]


def _gate(test: ElementTree.Element, gate: GateResult) -> None:
    lines = [gate.summary, *gate.reasons]
    if gate.status == "FAIL":
        _add_result(test, "failure", gate.gate, gate.reasons or lines, lines)
    elif gate.status == "PENDING":
        _add_result(test, "skipped", gate.gate, lines)
    else:
        ElementTree.SubElement(test, "system-out").text = "\n".join(lines)


def _row(test: ElementTree.Element, row: CorrectnessRow) -> None:
    missed = [name.removesuffix("_pass") for name, held in row.gates.items() if not held]
    status = facts.row_status(row)
    if row.is_skipped:
        _add_result(test, "skipped", "CORRECTNESS", [facts.SKIPPED])
    elif status == "FAIL":
        _add_result(test, "failure", "CORRECTNESS", [*missed, *row.notes], [*missed, *row.notes, *_errors(row)])
    elif status == "PENDING":
        _add_result(test, "skipped", "CORRECTNESS", row.notes or ["no gate was applied"])


def _errors(row: CorrectnessRow) -> list[str]:
    lines = [f"dims: {formatting.dims(row.dims)}"]
    if row.error is not None:
        lines.append(
            f"max error: {formatting.error(row.error.max_abs_err)}, mean: {formatting.error(row.error.mean_abs_err)}"
        )
    if row.kernel_error is not None:
        lines.append(f"relative kernel error: {formatting.error(row.kernel_error.relative_error)}")
    if row.bound_ratio is not None:
        lines.append(f"worst kernel error over what rounding explains: {formatting.error(row.bound_ratio)}")
    return lines


def _test(suite: ElementTree.Element, classname: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=classname, name=name)


def _add_result(
    test: ElementTree.Element, tag: str, kind: str, reasons: Iterable[str], text: Sequence[str] | None = None
) -> None:
    reasons = list(reasons)
    message = formatting.short(formatting.one_line("; ".join(reasons)), _MESSAGE_CHARACTERS)
    element = ElementTree.SubElement(test, tag, type=kind, message=message)
    element.text = "\n".join(text or reasons)


def _document(suite: ElementTree.Element) -> str:
    """Return the whole file, with the counts of tests. All texts are printable."""
    root = ElementTree.Element("testsuites", name="greenfast")
    root.append(suite)
    counts = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for element in (root, suite):
        for name, tag in counts.items():
            element.set(name, str(sum(1 for _ in suite.iter(tag))))
    for element in root.iter():
        element.text = _clean(element.text) if element.text else element.text
        for name, value in element.items():
            element.set(name, _clean(value))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _clean(text: str) -> str:
    """Remove control characters and commands of CI services from a text."""
    return _FORBIDDEN.sub("\ufffd", printable(text))
