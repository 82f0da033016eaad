"""A pool of processes on this machine for a search."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from greenfast.device.python_process import PythonProcess

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class ProcessPool:
    """Processes that call ``start(*arguments)`` and then the submitted functions, one call at a time per process.

    A process starts with its first call. The pool ends when one of its processes ends; each call without a result then
    raises BrokenProcessPool. The processes of ``concurrent.futures`` would import modules of the current folder.
    """

    def __init__(self, count: int, start: Callable[..., None], *arguments: object) -> None:
        self._start = start, arguments
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._open: set[Future[Any]] = set()
        self._processes: list[PythonProcess] = []
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._run_jobs, daemon=True).start()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Return the future of ``call(*arguments)`` in one of the processes. Raises BrokenProcessPool."""
        future: Future[T] = Future()
        with self._lock:
            if self._ended:
                raise BrokenProcessPool("a process of the pool has ended")
            self._open.add(future)
        self._jobs.put((future, call, arguments))
        return future

    def close(self) -> None:
        """End the processes, including running calls."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            for process in self._processes:
                process.close()
            for future in self._open:
                if not future.cancel() and not future.done():
                    future.set_exception(BrokenProcessPool("a process of the pool has ended"))
            self._open.clear()
        for _ in range(self._count):
            self._jobs.put(None)

    def _run_jobs(self) -> None:
        """Run in a thread of this process for each process of the pool."""
        process: PythonProcess | None = None
        while (job := self._jobs.get()) is not None:
            future, *call = job
            with self._lock:
                if self._ended:
                    return
                if not future.set_running_or_notify_cancel():
                    self._open.discard(future)
                    continue
                if process is None:
                    process = PythonProcess(_serve, *self._start, in_current_folder=True)
                    self._processes.append(process)
            try:
                process.connection.send(call)
                returned, value = process.connection.recv()
            except (EOFError, OSError):
                self.close()
                return
            except Exception as e:  # of pickle: the call, or what it raised, cannot be sent
                returned, value = False, e
            with self._lock:
                self._open.discard(future)
                if self._ended:
                    return
            if returned:
                future.set_result(value)
            else:
                future.set_exception(value)


def _serve(connection: Connection, start: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """Answer calls in a process of a pool until the pipe closes."""
    start(*arguments)
    while True:
        call, arguments = connection.recv()
        try:
            answer = True, call(*arguments)
        except Exception as e:
            answer = False, e
        connection.send(answer)
