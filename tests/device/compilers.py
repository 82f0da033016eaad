"""Compiler processes that crash, that never answer, or that end at once, for tests of ``compiler_process``."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

from greenfast.device import nvrtc


def crash(connection: Connection) -> None:
    """Serve a compiler that crashes on every source that has the comment ``// crash``."""
    compiled = nvrtc.run

    def run(job: nvrtc.Job) -> nvrtc.CompilerOutput:
        if "// crash" in job.source:
            os.kill(os.getpid(), signal.SIGSEGV)
        return compiled(job)

    nvrtc.run = run
    nvrtc.serve(connection)


def interrupt(connection: Connection) -> None:
    """Serve a compiler that answers with the source. An empty job is interrupted as from a keyboard, and never ends."""

    def run(job: nvrtc.Job) -> nvrtc.CompilerOutput:
        if not job.source:
            os.killpg(0, signal.SIGINT)
            time.sleep(60)
        return nvrtc.CompilerOutput("NVRTC_SUCCESS", b"", "", job.source)

    nvrtc.run = run
    nvrtc.serve(connection)


def end(connection: Connection) -> None:
    """Serve nothing."""
