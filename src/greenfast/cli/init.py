"""``greenfast init``."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from greenfast.spec.errors import MachineError, UsageError

_SCAFFOLD = Path(__file__).parent / "scaffold"


def run(args: argparse.Namespace) -> int:
    """Copy the problem and a solution in the language into a new folder, and print the next steps."""
    folder: Path = args.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: exists and is not an empty folder; name a new one")
    try:
        _copy(_SCAFFOLD / "problem", folder / "problem")
        _copy(_SCAFFOLD / args.language, folder / "solution")
    except OSError as e:
        raise MachineError(f"{folder}: cannot be written ({e.strerror})") from e
    command = f"greenfast judge {shlex.quote(str(folder))}"
    if args.json:
        made = {"problem": str(folder / "problem"), "solution": str(folder / "solution"), "judge": command}
        print(json.dumps(made, indent=2))
        return 0
    print(f"""{folder / "problem"}: shapes, inputs, reference, error bound, and a kernel to compare with
{folder / "solution"}: your kernel

Judge it, with or without a GPU:

  {command}

Without a GPU, PERFORMANCE is PENDING and the exit code 4; a CI job that asks for the other gates adds
--require build,resources,correctness,evidence. Then change the kernel, and the problem to yours: docs/judging.md.""")
    return 0


def _copy(source: Path, folder: Path) -> None:
    """Copy the files of a folder of the package. Its subfolders are Python's caches."""
    folder.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
