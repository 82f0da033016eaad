"""The log of a run: events in a chain of digests, from which the run resumes and everything else can be made again.

Each line of ``events.jsonl`` is one event; its digest covers the line before, so that an edit or a loss shows. An event
says what was decided or found, and nothing that differs when the run is repeated (times are in ``costs.jsonl``): where
all that is evaluated is deterministic, as on the emulator, the same settings make the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from greenfast.judge.strict_json import decode
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.files import read_file

EVENTS, COSTS = "events.jsonl", "costs.jsonl"
_START = "0" * 16


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event. what: its kind. at: which one of its kind, such as the batch and the place in it."""

    n: int
    what: str
    at: tuple[int, ...] = ()
    data: Any = None
    digest: str = ""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What an event took: seconds of the machine, of them on a GPU, and when it was written (seconds since 1970)."""

    n: int
    seconds: float
    gpu_seconds: float = 0.0
    written: float = 0.0


class Log:
    """The events of a run. A new object reads what is there; ``once`` hands it out again before anything new is added.

    Raises UsageError for a chain that does not hold, and MachineError where a line cannot be written: the file then
    ends with the last whole event, and the run can resume.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._costs_path = folder / EVENTS, folder / COSTS
        self.events, good = _read(self._path)
        costs = _lines(self._costs_path)
        self.costs = {cost.n: cost for cost in _costs(costs, self._costs_path)}
        self._places = {(event.what, event.at): event.n for event in self.events}
        self._next = 0
        self._file = _opened(self._path, good)
        self._costs = _opened(self._costs_path, sum(map(len, costs)))

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._costs.close()

    @property
    def replaying(self) -> bool:
        """Whether the next event is one that was read."""
        return self._next < len(self.events)

    def next_is(self, what: str, at: tuple[int, ...]) -> bool:
        """Whether this event was read and comes next: a run of a GPU can be walked through where there is none."""
        return self.replaying and (self.events[self._next].what, self.events[self._next].at) == (what, at)

    def pending(self, what: str, places: Sequence[tuple[int, ...]]) -> int:
        """How many of these events, from the first on, were read and come next."""
        found = 0
        for event, at in zip(self.events[self._next :], places, strict=False):
            if (event.what, event.at) != (what, at):
                break
            found += 1
        return found

    def once(
        self, what: str, at: tuple[int, ...], make: Callable[[], Any], *, on_gpu: bool | Callable[[], float] = False
    ) -> Any:
        """The data of an event, as JSON reads it: of the one that was read, else what ``make`` gives, which is added.

        on_gpu: whether its time counts as a GPU's; a function says how many seconds do, where ``make`` only waits for
        what runs beside others. Raises UsageError where the event that was read is another one.
        """
        if self.replaying:
            event = self.events[self._next]
            if (event.what, event.at) != (what, at):
                raise UsageError(
                    f"{self._path}: event {event.n} is {event.what} {event.at}, and this run comes to {what} {at}: it "
                    "was made by other settings, or by another version of greenfast"
                )
            self._next += 1
            return event.data
        start = time.perf_counter()
        data = make()
        seconds = time.perf_counter() - start
        return self.add(what, at, data, seconds, on_gpu() if callable(on_gpu) else seconds if on_gpu else 0.0)

    def add(self, what: str, at: tuple[int, ...], data: Any, seconds: float, gpu_seconds: float) -> Any:
        """Add an event; gives its data as JSON reads it."""
        before = self.events[-1].digest if self.events else _START
        event = chained(Event(n=len(self.events), what=what, at=at, data=data), before)
        line = msgspec.json.encode(event)
        # the cost first: an event without one would cost nothing when the run resumes
        cost = Cost(n=event.n, seconds=round(seconds, 3), gpu_seconds=round(gpu_seconds, 3), written=time.time())
        _append(self._costs, msgspec.json.encode(cost), self._costs_path)
        _append(self._file, line, self._path)
        self.costs[event.n] = cost
        read = msgspec.json.decode(line, type=Event)
        self.events.append(read)
        self._places[what, at] = read.n
        self._next = len(self.events)
        return read.data

    def digest_of(self, what: str, at: tuple[int, ...]) -> str:
        """The digest of an event; empty where there is none."""
        n = self._places.get((what, at), -1)
        return self.events[n].digest if n >= 0 else ""

    def cost_of(self, what: str, at: tuple[int, ...]) -> Cost:
        """What an event took; nothing where it is not known."""
        n = self._places.get((what, at), -1)
        return self.costs.get(n, Cost(n=n, seconds=0.0))

    @property
    def written(self) -> dict[tuple[str, tuple[int, ...]], float]:
        """When each event was written, seconds since 1970; 0 where it is not known."""
        return {place: self.costs[n].written if n in self.costs else 0.0 for place, n in self._places.items()}

    @property
    def gpu_seconds(self) -> float:
        """All that GPUs were used, up to the event that comes next."""
        return sum(cost.gpu_seconds for n, cost in self.costs.items() if n < self._next)

    @property
    def seconds(self) -> float:
        """The same of the machine."""
        return sum(cost.seconds for n, cost in self.costs.items() if n < self._next)


def chained(event: Event, before: str) -> Event:
    """The event with its digest, over its content and the digest of the one before."""
    content = msgspec.json.encode(msgspec.structs.replace(event, digest=before))
    return msgspec.structs.replace(event, digest=hashlib.sha256(content).hexdigest()[:16])


def read_events(folder: Path) -> list[Event]:
    """The whole events of a run, without what a kill cut short. Raises UsageError for a chain that does not hold."""
    return _read(folder / EVENTS)[0]


def ended(folder: Path) -> bool:
    """Whether a run came to its end, so that nothing is evaluated any more. Raises as ``read_events`` does."""
    return any(event.what == "ended" for event in read_events(folder)[-1:])


def _read(path: Path) -> tuple[list[Event], int]:
    """The events of a file, and how many of its bytes they are."""
    found: list[Event] = []
    before, good = _START, 0
    for number, line in enumerate(_lines(path), start=1):
        try:
            event = decode(line, Event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise UsageError(
                f"{path}: line {number} is not an event: {e}; keep its first {number - 1} lines to resume from there"
            ) from None
        if event.n != len(found) or chained(event, before) != event:
            raise UsageError(
                f"{path}: line {number} does not follow from the one before: the file was edited or damaged; keep its "
                f"first {number - 1} lines to resume from there"
            )
        found.append(event)
        before = event.digest
        good += len(line)
    return found, good


def _costs(lines: Sequence[bytes], path: Path) -> Iterator[Cost]:
    for line in lines:
        try:
            yield decode(line, Cost)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise UsageError(f"{path}: {e}; it can be deleted: times are then not known") from None


def _lines(path: Path) -> list[bytes]:
    """The whole lines of a file."""
    try:
        data = read_file(path) if path.exists() else b""
    except OSError as e:
        raise MachineError(f"{path} cannot be read ({e.strerror})") from e
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def _opened(path: Path, good: int) -> BinaryIO:
    """A file to append to, without what follows its first ``good`` bytes: a line that a kill cut short."""
    try:
        file = path.open("r+b" if path.exists() else "x+b", buffering=0)
        file.truncate(good)
        file.seek(good)
        return file
    except OSError as e:
        raise MachineError(f"{path} cannot be written ({e.strerror})") from e


def _append(file: BinaryIO, line: bytes, path: Path) -> None:
    """Write a line and wait until it is on the disk. Raises MachineError, with the file as it was, where it cannot."""
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
