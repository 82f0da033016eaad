"""A worker's child process. It imports no more than its session: CUDA's modules take half of an emulator's start."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from greenfast.spec.errors import GreenfastError, UnsupportedError


def serve(connection: Connection, make_session: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Report whether it started, then answer (method, args) until the pipe closes.

    Every message is ("ok", result), ("unsupported", message) after an UnsupportedError, or ("error", message). Kernels
    print to standard error: standard output is the caller's, who may write a record there.
    """
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts, and closes the pipe

    def attempt(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
        try:
            return "ok", function(*arguments)
        except UnsupportedError as e:
            return "unsupported", str(e)
        except Exception as e:
            return "error", f"{e}" if isinstance(e, GreenfastError) else f"{type(e).__name__}: {e}"

    status, session = attempt(make_session, args)
    connection.send((status, None if status == "ok" else session))
    while status == "ok":
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        reply = attempt(getattr(session, method), arguments)
        sys.stdout.flush()
        connection.send(reply)
