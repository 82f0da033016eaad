"""The findings of a whole program: each once with a count, suppressions, and a log in SARIF for CI.

A program launches kernels many times, so that one defect is found again and again. Findings of one kind at one line of
one kernel are one finding.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from greenfast import __version__
from greenfast.emulator.kernel_run import Fault
from greenfast.emulator.ptx.names import demangle
from greenfast.spec.errors import UsageError
from greenfast.spec.facts import ERROR, FORMAL
from greenfast.spec.files import read_file

#: The level of findings that are not wrong by themselves, such as a call that does nothing here.
NOTE = "note"
#: The level of a limit of the emulator (kernel_run.Fault).
UNSUPPORTED = "unsupported"
_SARIF_LEVELS = {ERROR: "error", UNSUPPORTED: "error", FORMAL: "warning", NOTE: "note"}
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
#: Fields that a suppression can name.
_FIELDS = ("kind", "kernel", "file", "line")


class CountedFault(Fault, frozen=True, kw_only=True):
    """A finding: its first occurrence, and the number of all.

    kernel: the kernel's name; for a finding outside of a kernel, the called function. suppressed: whether a line of the
    suppression file matches it.
    """

    kernel: str
    count: int = 1
    suppressed: bool = False


@dataclass(frozen=True)
class Suppression:
    """A line of a suppression file: patterns (as of file names) by field. text: the line itself."""

    text: str
    patterns: tuple[tuple[str, str], ...]

    def matches(self, kernel: str, fault: Fault) -> bool:
        """Return whether every pattern matches. A file matches by its name or by its path."""
        values = {"kind": (fault.kind,), "kernel": (kernel, demangle(kernel)), "line": (str(fault.line),)}
        values["file"] = (fault.file or "", Path(fault.file or "").name)
        return all(any(fnmatch.fnmatchcase(value, p) for value in values[field]) for field, p in self.patterns)


def read_suppressions(path: Path) -> list[Suppression]:
    """Read a suppression file. Raises UsageError for a file that cannot be read, and for an unknown field.

    A line is fields with patterns: ``kind=data-race kernel=*reduce* file=reduce.cu line=12``. Every field may be left
    out. Empty lines and lines that begin with # are ignored.
    """
    try:
        lines = read_file(path).decode().splitlines()
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "not a text"
        raise UsageError(f"--suppressions {path}: cannot be read ({why})") from e
    result = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        words = [word.partition("=") for word in line.split()]
        for field, _, pattern in words:
            if field not in _FIELDS or not pattern:
                raise UsageError(
                    f"--suppressions {path}: line {number}: {line!r}: give FIELD=PATTERN with the fields "
                    f"{', '.join(_FIELDS)}, such as: kind=data-race kernel=*reduce* file=reduce.cu line=12"
                )
        result.append(Suppression(line, tuple((field, pattern) for field, _, pattern in words)))
    return result


class Findings:
    """The findings of a program's run. files: paths of source files, as findings omit folders."""

    def __init__(self, suppressions: Sequence[Suppression] = ()) -> None:
        self.suppressions = suppressions
        self.files: set[str] = set()
        self._used: set[Suppression] = set()
        self._faults: dict[tuple[object, ...], CountedFault] = {}

    def add(self, kernel: str, fault: Fault) -> bool:
        """Add an occurrence of a finding. Return whether it is the first one and not suppressed."""
        place = (fault.file, fault.line, fault.function) if fault.line else re.sub(r"\d+", "", fault.message)
        key = (fault.level, fault.kind, kernel, place)
        earlier = self._faults.get(key)
        if earlier is not None:
            self._faults[key] = msgspec.structs.replace(earlier, count=earlier.count + 1)
            return False
        matching = [s for s in self.suppressions if s.matches(kernel, fault)]
        self._used.update(matching)
        self._faults[key] = CountedFault(**msgspec.structs.asdict(fault), kernel=kernel, suppressed=bool(matching))
        return not matching

    def extend(self, kernel: str, faults: Iterable[Fault]) -> None:
        """Add several findings of one kernel."""
        for fault in faults:
            self.add(kernel, fault)

    @property
    def all(self) -> list[CountedFault]:
        """All findings, in the order of their first occurrence, suppressed ones included."""
        return list(self._faults.values())

    def failures(self, formal: bool = True) -> list[CountedFault]:
        """Return the findings that fail a run: errors, limits of the emulator, and formal ones if ``formal``."""
        levels = {ERROR, UNSUPPORTED, *([FORMAL] if formal else [])}
        return [f for f in self.all if not f.suppressed and f.level in levels]

    def exit_code(self, formal: bool = True) -> int:
        """Return the exit code of a run: 0, 1 for an error or a formal finding, 3 if the emulator has a limit alone."""
        levels = {f.level for f in self.failures(formal)}
        return (3 if levels == {UNSUPPORTED} else 1) if levels else 0

    def describe(self) -> list[str]:
        """Return one line per finding that is not suppressed, then one per suppression that matched nothing."""
        shown = [f for f in self.all if not f.suppressed]
        hidden = sum(f.count for f in self.all if f.suppressed)
        lines = [f"{f.level}: {f.message}" + (f" ({f.count} times)" if f.count > 1 else "") for f in shown]
        lines += [f"{hidden} findings suppressed"] if hidden else []
        return lines + [f"suppression without a finding: {s.text}" for s in self.suppressions if s not in self._used]


def to_sarif(findings: Findings, root: Path | None = None) -> dict[str, Any]:
    """Return findings as a SARIF 2.1.0 log. CI systems show it next to the source lines.

    root: the folder that file names are relative to (default: the current one). Suppressed findings are marked so.
    """
    root = root or Path.cwd()
    kinds = sorted({f.kind for f in findings.all})
    names = Counter(Path(file).name for file in findings.files)
    places = _Places(root, {Path(file).name: file for file in findings.files if names[Path(file).name] == 1})
    rules = [{"id": kind, "shortDescription": {"text": kind.replace("-", " ")}} for kind in kinds]
    return {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "greenfast", "version": __version__, "rules": rules}},
                "columnKind": "unicodeCodePoints",
                "originalUriBaseIds": {"SRCROOT": {"uri": f"{root.absolute().as_uri()}/"}},
                "results": [_sarif_result(f, kinds.index(f.kind), places) for f in findings.all],
            }
        ],
    }


def _sarif_result(fault: CountedFault, rule: int, places: _Places) -> dict[str, Any]:
    logical = [{"fullyQualifiedName": demangle(fault.kernel), "kind": "function"}] if fault.kernel else []
    location: dict[str, Any] = {"logicalLocations": logical} if logical else {}
    if fault.file:
        location["physicalLocation"] = places.locate(fault.file, fault.line)
    result: dict[str, Any] = {
        "ruleId": fault.kind,
        "ruleIndex": rule,
        "level": _SARIF_LEVELS.get(fault.level, "error"),
        "message": {"text": fault.message},
        "occurrenceCount": fault.count,
        "properties": {"level": fault.level},
    }
    if location:
        result["locations"] = [location]
    if len(fault.stack) > 1:
        frames = [
            {"location": {"physicalLocation": places.locate(line.file, line.line), "message": {"text": line.function}}}
            for line in fault.stack
        ]
        result["stacks"] = [{"message": {"text": "inlined from"}, "frames": frames}]
    if fault.block is not None:
        result["properties"] |= {"block": list(fault.block), "thread": list(fault.thread or ())}
    if fault.suppressed:
        result["suppressions"] = [{"kind": "external"}]
    return result


@dataclass(frozen=True)
class _Places:
    """Source files of a SARIF log. paths: by name, the files that findings name without folder."""

    root: Path
    paths: Mapping[str, str]

    def locate(self, file: str, line: int | None) -> dict[str, Any]:
        """Return a line of a file as a physical location."""
        path = Path(self.paths.get(file, file))
        relative = os.path.relpath(path, self.root) if path.is_absolute() else str(path)
        inside = not relative.startswith("..")
        artifact = {"uri": Path(relative).as_posix(), "uriBaseId": "SRCROOT"} if inside else {"uri": path.as_uri()}
        return {"artifactLocation": artifact, **({"region": {"startLine": line}} if line else {})}
