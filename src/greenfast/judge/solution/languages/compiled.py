"""What the compilers of Python kernels (Triton, CuTe DSL) share: the file's module, and PTX that they hand back."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import ModuleType

from greenfast.judge.solution.languages.family import import_family
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.extras import require

#: A file of line numbers: its folder, and its name, with Triton's package where it is Triton's.
_FILE = re.compile(r'^(\s*\.file\s+\d+\s+")[^"\n]*?((?:triton/language/)?[^/"\n]+")', re.MULTILINE)
_DEBUG_SECTION = re.compile(r"^\t\.section\t\.debug_(?!str\b)\w+\s*\{.*?^\t\}\n", re.MULTILINE | re.DOTALL)
_PARAMETERS = re.compile(r"\.entry\s+[\w$]+\s*\((.*?)\)", re.DOTALL)


@functools.cache
def import_solution_module(folder: Path, file: str) -> ModuleType:
    """A solution's file, imported once for all shapes."""
    return import_family(folder, file, "")


def require_extra(name: str, extra: str) -> None:
    """Raise UsageError, naming the extra, if the language of the solution with this name is not installed."""
    try:
        require(f"{name}, a solution in {extra},", extra)
    except MachineError as e:
        raise UsageError(str(e)) from None


def without_folders(ptx: str) -> str:
    """The PTX without what depends on where the solution lies: folders of files, and sections for debuggers.

    The names of inlined functions, .debug_str, stay: lines refer to them.
    """
    return _FILE.sub(r"\1\2", _DEBUG_SECTION.sub("", ptx))


def parse_parameters(ptx: str) -> list[str]:
    """The declarations of the parameters of a PTX text's only kernel."""
    found = _PARAMETERS.search(ptx)
    return [text.strip() for text in found[1].split(",") if ".param" in text] if found else []


def parse_exclusive_target(ptx: str) -> str:
    """The one target that a PTX text is for, such as "sm_90a"; empty if newer ones have its instructions too."""
    found = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    return found[1] if found and found[1].endswith("a") else ""
