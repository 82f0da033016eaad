"""A kernel family: a Python module with the functions of ``greenfast.spec.kernel.Family``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_family(folder: Path, file: str, module: str) -> ModuleType:
    """Import an importable module by name, or a file of the folder, which goes in front of the search path."""
    if module:
        return importlib.import_module(module)
    path = folder / file
    sys.path.insert(0, str(path.parent))
    name = f"greenfast_solution_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made
