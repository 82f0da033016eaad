"""The log of a run: a chain of events, from which a run resumes and all other files can be made again.

Each line of ``events.jsonl`` is one event. Its digest covers the previous event, so an edit or a loss is detected. An
event holds a decision or a result, and nothing that differs between repeated runs; times are in ``costs.jsonl``. With
deterministic evaluation, as on the emulator, the same settings give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from greenfast.judge.store import decode
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.files import read_file

#: Identifies an event of its kind, such as (batch, index in the batch).
EventKey = tuple[int, ...]
EVENTS, COSTS = "events.jsonl", "costs.jsonl"
_START = "0" * 16


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event. The JSON keys of ``kind`` and ``key`` are "what" and "at"."""

    n: int
    kind: str = msgspec.field(name="what")
    key: EventKey = msgspec.field(name="at", default=())
    data: Any = None
    digest: str = ""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of an event. gpu_seconds: the part of ``seconds`` on a GPU. written: seconds since 1970."""

    n: int
    seconds: float
    gpu_seconds: float = 0.0
    written: float = 0.0


class Log:
    """The events of a run. A new object reads the existing events, and ``replay_or_run`` returns them before new ones.

    Raises UsageError for a broken chain, and MachineError if a line cannot be written. The file then ends with the last
    complete event, and the run can resume.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._costs_path = folder / EVENTS, folder / COSTS
        self.events, good = _read_event_file(self._path)
        costs = _read_whole_lines(self._costs_path)
        self.costs: dict[int, Cost]
        try:
            self.costs = {cost.n: cost for cost in (decode(line, Cost) for line in costs)}
        except msgspec.DecodeError as e:
            raise UsageError(f"{self._costs_path}: {e}; it can be deleted: times are then not known") from None
        self._numbers = {(event.kind, event.key): event.n for event in self.events}
        self._next = 0
        self._events_file = _open_for_append(self._path, good)
        self._costs = _open_for_append(self._costs_path, sum(map(len, costs)))

    def close(self) -> None:
        """Close the files."""
        self._events_file.close()
        self._costs.close()

    @property
    def replaying(self) -> bool:
        """True while the next event comes from the file."""
        return self._next < len(self.events)

    def is_next(self, kind: str, key: EventKey) -> bool:
        """Return whether this event is the next one in the file. A GPU's run can be replayed without a GPU."""
        return self.replaying and (self.events[self._next].kind, self.events[self._next].key) == (kind, key)

    def count_pending(self, kind: str, keys: Sequence[EventKey]) -> int:
        """Count the first events of a list that are next in the file."""
        events = 0
        for event, key in zip(self.events[self._next :], keys, strict=False):
            if (event.kind, event.key) != (kind, key):
                break
            events += 1
        return events

    def replay_or_run(
        self, kind: str, key: EventKey, make: Callable[[], Any], *, on_gpu: bool | Callable[[], float] = False
    ) -> Any:
        """Return the data of an event from the file, or add an event with the data of ``make``; decoded from JSON.

        on_gpu: whether the time of ``make`` counts as GPU time. A function returns the GPU seconds, for jobs that run
        at the same time as others. Raises UsageError if the file's next event is a different one.
        """
        if self.replaying:
            event = self.events[self._next]
            if (event.kind, event.key) != (kind, key):
                raise UsageError(
                    f"{self._path}: event {event.n} is {event.kind} {event.key}, this run comes to {kind} {key}: it "
                    "was made by other settings, or by another version of greenfast"
                )
            self._next += 1
            return event.data
        start = time.perf_counter()
        data = make()
        seconds = time.perf_counter() - start
        return self.add(kind, key, data, seconds, on_gpu() if callable(on_gpu) else seconds if on_gpu else 0.0)

    def add(self, kind: str, key: EventKey, data: Any, seconds: float, gpu_seconds: float) -> Any:
        """Add an event; return its data, decoded from JSON."""
        before = self.events[-1].digest if self.events else _START
        event = add_digest(Event(n=len(self.events), kind=kind, key=key, data=data), before)
        line = msgspec.json.encode(event)
        # The cost first: an event without a cost would be free after a resume.
        cost = Cost(n=event.n, seconds=round(seconds, 3), gpu_seconds=round(gpu_seconds, 3), written=time.time())
        _append(self._costs, msgspec.json.encode(cost), self._costs_path)
        _append(self._events_file, line, self._path)
        self.costs[event.n] = cost
        read = msgspec.json.decode(line, type=Event)
        self.events.append(read)
        self._numbers[kind, key] = read.n
        self._next = len(self.events)
        return read.data

    def get_digest(self, kind: str, key: EventKey) -> str:
        """Return the digest of an event; empty if there is no such event."""
        n = self._numbers.get((kind, key), -1)
        return self.events[n].digest if n >= 0 else ""

    def get_cost(self, kind: str, key: EventKey) -> Cost:
        """Return the cost of an event; zero if unknown."""
        n = self._numbers.get((kind, key), -1)
        return self.costs.get(n, Cost(n=n, seconds=0.0))

    @property
    def gpu_seconds(self) -> float:
        """GPU seconds of all events before the next one."""
        return sum(cost.gpu_seconds for n, cost in self.costs.items() if n < self._next)

    @property
    def seconds(self) -> float:
        """Seconds of all events before the next one."""
        return sum(cost.seconds for n, cost in self.costs.items() if n < self._next)


def add_digest(event: Event, before: str) -> Event:
    """Return the event with a digest over its content and the previous digest."""
    content = msgspec.json.encode(msgspec.structs.replace(event, digest=before))
    return msgspec.structs.replace(event, digest=hashlib.sha256(content).hexdigest()[:16])


def read_events(folder: Path) -> list[Event]:
    """Read the complete events of a run, without a line cut off by a kill. Raises UsageError for a broken chain."""
    return _read_event_file(folder / EVENTS)[0]


def has_ended(folder: Path) -> bool:
    """Return whether a run has ended and evaluates nothing more. Raises as ``read_events``."""
    return any(event.kind == "ended" for event in read_events(folder)[-1:])


def _read_event_file(path: Path) -> tuple[list[Event], int]:
    """Return the complete events of a file, and their length in bytes."""
    events: list[Event] = []
    before, good = _START, 0
    for number, line in enumerate(_read_whole_lines(path), start=1):
        try:
            event = decode(line, Event)
        except msgspec.DecodeError as e:
            raise UsageError(
                f"{path}: line {number} is not an event: {e}; keep its first {number - 1} lines to resume from there"
            ) from None
        if event.n != len(events) or add_digest(event, before) != event:
            raise UsageError(
                f"{path}: line {number} does not follow from the one before: the file was edited or damaged; keep its "
                f"first {number - 1} lines to resume from there"
            )
        events.append(event)
        before = event.digest
        good += len(line)
    return events, good


def _read_whole_lines(path: Path) -> list[bytes]:
    """Read the complete lines of a file."""
    try:
        data = read_file(path) if path.exists() else b""
    except OSError as e:
        raise MachineError(f"{path} cannot be read ({e.strerror})") from e
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def _open_for_append(path: Path, good: int) -> BinaryIO:
    """Open a file for appending after its first ``good`` bytes; the rest is a line cut off by a kill."""
    try:
        file = path.open("r+b" if path.exists() else "x+b", buffering=0)
        file.truncate(good)
        file.seek(good)
        return file
    except OSError as e:
        raise MachineError(f"{path} cannot be written ({e.strerror})") from e


def _append(file: BinaryIO, line: bytes, path: Path) -> None:
    """Write a line and sync it to disk. On an error, restore the file and raise MachineError."""
    start, data = file.tell(), memoryview(line + b"\n")
    try:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())
    except OSError as e:
        file.truncate(start)
        file.seek(start)
        raise MachineError(
            f"{path} cannot be written ({e.strerror}); all events before are kept: free space, then --resume"
        ) from e
