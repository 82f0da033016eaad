"""Atomic writes of results, and reading of JSON files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from greenfast.judge.strict_json import decode
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.files import read_file

# A line end follows the bracket, which no JSON string holds: texts stay as they are.
_NUMBERS = re.compile(r"\[\n([-+.\deE,\s]+)\]")


def to_json(value: object) -> str:
    """Indented JSON of a record or of plain data, lists of plain numbers on one line each."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    return _NUMBERS.sub(lambda match: "[" + " ".join(match[1].split()) + "]", text) + "\n"


def check_writable(folder: Path, option: str = "--out") -> None:
    """Create ``folder`` if it is missing. Raise MachineError, with the option's name, if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise MachineError(
            f"results folder {folder} cannot be written ({e.strerror}); choose another with {option}"
        ) from e


@contextlib.contextmanager
def new_run_folder(parent: Path, stamp: str) -> Iterator[tuple[Path, Callable[[], Path]]]:
    """Yield a temporary folder, and a function that renames it to ``parent/<stamp>`` in one step.

    A second run in the same second gets the suffix -2, and so on. A folder that is not published, because of an error
    or an interrupt, is removed. Raises MachineError if the folder or a file in it cannot be written.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=parent))
    except OSError as e:
        raise MachineError(f"results folder {parent} cannot be written ({e.strerror})") from e

    def publish() -> Path:
        for attempt in range(1, 1000):
            final = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
            try:
                os.rename(work, final)  # Fails if the folder exists, because published folders are not empty.
            except OSError:
                if not final.exists():
                    raise
                continue
            return final
        raise MachineError(f"{parent}: a thousand runs of the second {stamp}")

    try:
        work.chmod(0o755)
        yield work, publish
    except OSError as e:
        raise MachineError(f"the run could not be saved in {parent}: {e}") from e
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the content of a file in one step. Raises MachineError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as e:
        raise MachineError(f"{path} cannot be written ({e.strerror})") from e


def read_json(path: Path, kind: Any, name: str) -> Any:
    """Read a file of this kind of data. Raises UsageError that names the file and what is wrong with it."""
    try:
        content = decode(read_file(path))
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise _other(path, name, e) from e
    return convert_json(content, kind, path, name)


def convert_json(content: Any, kind: Any, path: Path, name: str) -> Any:
    """Convert decoded JSON to this type. Raises as ``read_json`` does."""
    try:
        return msgspec.convert(content, kind)
    except (ValueError, RecursionError) as e:  # msgspec's ValidationError is one
        raise _other(path, name, e) from e


def _other(path: Path, name: str, why: Exception) -> UsageError:
    return UsageError(f"{path}: not a {name} as greenfast writes it: {why}")
