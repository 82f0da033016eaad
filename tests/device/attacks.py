"""Run attacks of a confined process, each in a process of its own: python attacks.py WORK, where WORK is JSON on stdin.

An attack is code that raises OSError where it is refused. Every one is run confined, and confined without the measures
that stop it: a measure that stops nothing would show there. Prints a list of [with, without], each "reached" or an
error. Without its measure an attack succeeds, as root too: it may aim at the victim and the test's files alone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

from greenfast.device import sandbox

#: What attacks use; a codec that is found before they are confined.
USED = errno, fcntl, resource, socket, struct, subprocess, time, "x".encode("idna")
LIBC = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: Any) -> int:
    """A system call by its number. Raises OSError."""
    result = LIBC.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def int_80(number: int) -> int:
    """A system call of 32-bit x86, by its own gate."""
    code = (
        b"\x53\xb8" + number.to_bytes(4, "little") + b"\xcd\x80\x48\x98\x5b\xc3"
    )  # push rbx; mov; int; cdqe; pop; ret
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    result: int = ctypes.CFUNCTYPE(ctypes.c_long)(address)()
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def run(attack: str, off: list[str], work: dict[str, Any]) -> str:
    """Confine a new process without some measures, and run the attack in it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with os.fdopen(reading) as answers:
            said = answers.read()
        _, status = os.waitpid(child, 0)
        sandbox.remove_cgroup(child)
        return said or f"ended by {os.waitstatus_to_exitcode(status)}"
    said = "reached"
    try:
        os.setpgid(0, 0)
        if work["user"]:
            os.setgroups([])
            os.setgid(work["user"])
            os.setuid(work["user"])
        for name in off:
            setattr(sandbox, name, lambda *_: None)
        vars(sandbox).update(work.get("constants", {}))
        sandbox._LIMITS.update({int(kind): value for kind, value in work.get("limits", {}).items()})
        held = sandbox.confine(work["readable"], work["scratch"], work.get("gpu", False))
        os.chdir(work["scratch"])
        exec(attack, {**globals(), **work, "held": held})
    except MemoryError:
        said = "MemoryError"
    except Exception as e:
        said = f"{type(e).__name__}: {e}"
    os.write(writing, said.encode())
    os._exit(0)


def main() -> None:
    """Run all of them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    work = json.load(sys.stdin)
    print(json.dumps([[run(a, [], work), run(a, off, work)] for a, off in work["attacks"]]))


if __name__ == "__main__":
    main()
