"""Run a compiler's tool (ptxas, nvdisasm) on third-party input: confined, with limits of memory, time and output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from greenfast.device import sandbox
from greenfast.device.python_process import describe_exit

#: Bytes that a tool may write to a file, and print.
OUTPUT_BYTES = 256 << 20
#: Bytes of memory for a small input, for each byte of input, and at most.
LEAST_MEMORY, MEMORY_FOR_BYTE, MOST_MEMORY = 1 << 30, 1024, 8 << 30
#: The tools' messages after a failed allocation.
_OUT_OF_MEMORY = ("out of memory", "emory allocation", "bad_alloc")
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME")


class ToolError(Exception):
    """A tool was ended, crashed, or exceeded a limit; the message has the tool's name and the cause."""


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a tool."""

    exit_code: int
    output: str
    errors: str


def memory_for(input_bytes: int) -> int:
    """Return the bytes of memory that a tool may use for an input."""
    return min(LEAST_MEMORY + MEMORY_FOR_BYTE * input_bytes, MOST_MEMORY)


def run_tool(
    tool: Path, arguments: Sequence[str], folder: Path, *, name: str, memory_bytes: int, seconds: int
) -> Ended:
    """Run a tool in ``folder``, its only writable folder. name: of the tool in its own messages.

    Raises ToolError if it crashes or exceeds its limits of time, memory or output.
    """
    tools = [str(tool.parent), str(tool.resolve().parent), str(tool.resolve().parent.parent)]
    job = {
        "readable": [*tools, str(folder)],
        "folder": str(folder),
        "memory": memory_bytes,
        "output": OUTPUT_BYTES,
        "seconds": seconds,
        "tool": str(tool.absolute()),
        "arguments": [name, *arguments],
    }
    environment = {key: os.environ[key] for key in _KEPT if key in os.environ}
    # The module is run as a file, without packages: it starts in a few hundredths of a second.
    command = [sys.executable or "python3", "-I", "-S", sandbox.__file__, json.dumps(job)]
    output_file, error_file = folder / "stdout", folder / "stderr"
    with output_file.open("wb") as output, error_file.open("wb") as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env={**environment, "TMPDIR": str(folder), "HOME": str(folder)},
            start_new_session=True,
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ToolError(f"did not end within {seconds} s") from None
        finally:  # its children too, and on an interrupt
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    ended = Ended(code, _text(output_file), _text(error_file))
    lacks = any(words in ended.errors + ended.output[-2000:] for words in _OUT_OF_MEMORY)
    if code != 0 and lacks:
        raise ToolError(f"needs more than the {memory_bytes >> 20} MiB of memory that it may use for this input")
    if code == -signal.SIGXFSZ:
        raise ToolError(f"writes more than {OUTPUT_BYTES >> 20} MiB")
    if code == -signal.SIGXCPU:
        raise ToolError(f"used more than {seconds} s of processor time")
    if code < 0:
        allowed = f"it may use {memory_bytes >> 20} MiB of memory for this input"
        raise ToolError(f"crashed ({describe_exit(code)}); {allowed}")
    return ended


def _text(file: Path) -> str:
    with file.open("rb") as stream:
        return stream.read(OUTPUT_BYTES).decode(errors="replace")
