"""A program with a worker that works for minutes; a test interrupts it. Prints its progress."""

from __future__ import annotations

import sys

from greenfast.device.worker import Worker
from tests.device.sessions import EXECUTABLE, SLEEP, BadSession, case


def main() -> None:
    with Worker(timeout_s=600, make_session=BadSession) as worker:
        if sys.argv[1] == "starting":
            print("ready", flush=True)
        print(worker.info().name.split()[-1], flush=True)
        if sys.argv[1] == "working":
            print("ready", flush=True)
        worker.phases(EXECUTABLE, case(), SLEEP)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
