"""Processes of this machine that a search hands work to, and that end with it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from greenfast.device.worker import interrupts_blocked

T = TypeVar("T")


def make_pool(count: int, start: Callable[..., None], *arguments: object) -> ProcessPoolExecutor:
    """Processes that call ``start(*arguments)`` first. They leave interrupts to this one, and end when it does."""
    context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
    return ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(start, arguments))


def submit(pool: ProcessPoolExecutor, call: Callable[..., T], *arguments: Any) -> Future[T]:
    """As the pool's own, which may start a process for it. Raises BrokenProcessPool."""
    with interrupts_blocked():
        return pool.submit(call, *arguments)


def end_pool(pool: ProcessPoolExecutor) -> None:
    """End the processes, whatever they are doing; the process of a kernel ends with its pipe."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def _begin(start: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """In a new process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start(*arguments)


def _end_with_parent() -> None:
    """A pool's process holds both ends of its queues, so it would wait for work forever once its parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
