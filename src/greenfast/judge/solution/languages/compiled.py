"""Import of a solution's or family's Python, and PTX handling that the compilers of Python kernels share."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.extras import require
from greenfast.spec.kernel import KernelSource

#: A .file directive: its folder, and its name, with Triton's package for Triton's own files.
_FILE = re.compile(r'^(\s*\.file\s+\d+\s+")[^"\n]*?((?:triton/language/)?[^/"\n]+")', re.MULTILINE)
_DEBUG_SECTION = re.compile(r"^\t\.section\t\.debug_(?!str\b)\w+\s*\{.*?^\t\}\n", re.MULTILINE | re.DOTALL)
_PARAMETERS = re.compile(r"\.entry\s+[\w$]+\s*\((.*?)\)", re.DOTALL)


@functools.cache
def import_solution_module(folder: Path, file: str) -> ModuleType:
    """Import a solution's file, once for all shapes."""
    return import_family(folder, file, "")


def require_extra(name: str, extra: str) -> None:
    """Raise UsageError, naming the extra, if the language of the solution with this name is not installed."""
    try:
        require(f"{name}, a solution in {extra},", extra)
    except MachineError as e:
        raise UsageError(str(e)) from None


def without_folders(ptx: str) -> str:
    """Remove the parts of PTX that depend on the solution's folder: folders of files, and debug sections.

    .debug_str stays, because line directives refer to its names of inlined functions.
    """
    return _FILE.sub(r"\1\2", _DEBUG_SECTION.sub("", ptx))


def parse_parameters(ptx: str) -> list[str]:
    """Return the declarations of the parameters of the only kernel in a PTX text."""
    entry = _PARAMETERS.search(ptx)
    return [text.strip() for text in entry[1].split(",") if ".param" in text] if entry else []


def _parse_exclusive_target(ptx: str) -> str:
    """Return the only target of a PTX text, such as "sm_90a"; empty if newer targets support its instructions too."""
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    return target[1] if target and target[1].endswith("a") else ""


def build_ptx_kernel(
    name: str, entry: str, ptx: str, block: tuple[int, int, int], dynamic_smem_bytes: int
) -> KernelSource:
    """Return a compiled kernel. name: of its source, for messages. ptx: without folders."""
    return KernelSource(
        entry=entry,
        source=ptx,
        name=name,
        include_dirs=(),
        block=block,
        dynamic_smem_bytes=dynamic_smem_bytes,
        requires=_parse_exclusive_target(ptx),
        language="ptx",
    )


def import_family(folder: Path, file: str, module: str) -> ModuleType:
    """Import an importable module by name, or a file of the folder. The folder goes in front of the search path."""
    if module:
        return importlib.import_module(module)
    path = folder / file
    sys.path.insert(0, str(path.parent))
    name = f"greenfast_solution_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    imported = importlib.util.module_from_spec(spec)
    sys.modules[name] = imported
    spec.loader.exec_module(imported)
    return imported
