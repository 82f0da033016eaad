"""A group of ranks: that their calls agree, what they exchange, and which of them is lost.

Tensors travel over the caller's process group (NCCL, or gloo for CPU tensors). What a call is travels over a second
group, of gloo on the host: before anything is launched every rank knows that all others make the same call, and one
that is gone is found there, without waiting for NCCL's time limit. The host is ahead of the GPU meanwhile.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

#: How long a rank may stay away from a call before the others end with an error, in seconds.
TIMEOUT = 600.0
_C10D: Any = distributed_c10d
_MAX_MESSAGE = 500  # characters of a call in an error
_CLOSED_MESSAGES = ("connection closed", "connection reset", "broken pipe")  # gloo's errors where another rank is gone
_GRACE_PERIOD = 5.0  # seconds by which ranks may begin a call, and so give it up, one after another


@dataclass(eq=False)
class RankGroup:
    """The ranks that share a sequence; ``rank`` counts in the mesh, 0 .. size - 1.

    name: what operators in a graph know it by. ranks: in the world, in the mesh's order, which the process group need
    not have.
    """

    name: str
    process_group: Any
    store: Any  # of the ranks, under a name of their own
    timeout: float  # seconds
    ranks: list[int]
    host: Any = None  # the group of gloo, None for one rank
    calls: int = 0  # that this rank has come to
    agreed: int = 0  # the last call that all ranks came to
    exchanges: int = 0  # that this rank has begun; ranks that are in step have begun as many
    failed: bool = False  # whether an exchange has raised an error

    def __post_init__(self) -> None:
        self.rank = self.ranks.index(dist.get_rank())
        self.since = time.monotonic()  # when this rank came to its last call
        positions = [dist.get_group_rank(self.process_group, rank) for rank in self.ranks]
        #: The place of each rank in the process group; empty where that has the mesh's order.
        self.places = [] if positions == list(range(len(positions))) else positions

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    def connect(self) -> None:
        """Make the group on the host. Raises RuntimeError, naming the rank, for one that does not come."""
        with self.watched():
            # Not new_group, for which ranks that are members of other groups would have to be in step.
            self.host = dist.ProcessGroupGloo(self.store, self.rank, self.size, timeout=self._limit)

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.timeout)

    def agree(self, call: str, fault: Exception | None = None) -> None:
        """Return when every rank of the group makes this call; all of them raise where one does not.

        call: all that must be equal on the ranks, in words. fault: the error of a call that this rank refuses, which is
        raised here after the others know of it.

        Raises ValueError for calls that differ, naming each, and RuntimeError, naming the rank, for one that is lost or
        that left the call before in the middle.
        """
        self.calls, self.since = self.calls + 1, time.monotonic()
        if self.host is None:
            if fault is not None:
                raise fault
            return
        digest = int.from_bytes(blake2b(call.encode(), digest_size=7).digest(), "big")
        both = torch.tensor([fault is not None, digest, -digest, self.exchanges, -self.exchanges], dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        options.timeout = self._limit
        with self.watched():
            self.host.allreduce([both], options).wait()
        refused, max_digest, least, begun, least_begun = both.tolist()
        if begun != -least_begun:
            self._name_behind(begun)
        self.agreed = self.calls
        if fault is None and not refused and max_digest == -least:
            return
        message = call if fault is None else str(fault)
        self.store.set(
            f"{self.calls}/call/{self.rank}",
            message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}...",
        )
        if fault is not None:
            raise fault
        with self.watched():
            others = [self.store.get(f"{self.calls}/call/{i}").decode() for i in range(self.size)]
        calls = "; ".join(f"rank {rank}: {text}" for rank, text in zip(self.ranks, others, strict=True))
        raise ValueError(f"context_parallel: the ranks of the group make different calls: {calls}")

    def _name_behind(self, begun: int) -> None:
        """Raise RuntimeError with the ranks that have begun fewer exchanges than others: theirs would not match."""
        self.store.set(f"{self.calls}/begun/{self.rank}", str(self.exchanges))
        with self.watched():
            counts = [int(self.store.get(f"{self.calls}/begun/{i}")) for i in range(self.size)]
        behind = [i for i, count in enumerate(counts) if count < begun]
        raise RuntimeError(self.left_early({i: self.raised().get(i, "") for i in behind}))

    def left_early(self, errors: dict[int, str]) -> str:
        """The message for ranks that left a call in the middle, with the errors that they raised, "" if unknown."""
        named = ", ".join(str(self.ranks[i]) for i in errors)
        texts = "; ".join(text for text in errors.values() if text)
        return (
            f"context_parallel: rank {named} of the ranks {self.ranks} left a call in the middle"
            f"{f', by an error that was caught there ({texts})' if texts else ''}; the others wait for what it would "
            "have sent. Start the job again"
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context for what a call computes and exchanges: it reports an error of this rank's own to the others."""
        try:
            yield
        except Exception as error:
            if self.host is not None and not self.failed:
                with suppress(RuntimeError):  # the store can be gone
                    self.store.set(
                        f"raised/{self.rank}", f"{self.calls} {type(error).__name__}: {error}"[:_MAX_MESSAGE]
                    )
            raise

    def raised(self) -> dict[int, str]:
        """The errors by which ranks left the last call that all came to; none if all ranks raised one, in step."""
        errors = {}
        for i in range(self.size):
            if self.store.check([f"raised/{i}"]):
                call, _, text = self.store.get(f"raised/{i}").decode().partition(" ")
                if int(call) == self.agreed:
                    errors[i] = text
        return errors if len(errors) < self.size else {}

    def watched(self) -> _ErrorContext:
        """A context in which the error of an exchange becomes one that names the ranks that are lost."""
        return _ErrorContext(self)

    @contextmanager
    def exchanging(self, send: Tensor, receive: Tensor) -> Iterator[None]:
        """Send a buffer to the next rank and receive one from the rank before, while what is inside is computed."""
        following, before = ((self.rank + step) % self.size for step in (1, -1))
        self.exchanges += 1
        sends = dist.P2POp(dist.isend, send, self.ranks[following], self.process_group)
        receives = dist.P2POp(dist.irecv, receive, self.ranks[before], self.process_group)
        with self.watched():
            works = dist.batch_isend_irecv([sends, receives])
        try:
            yield
        finally:  # after an error too: a buffer that is given up would leave the ranks out of step
            self.wait(receive, *works)

    def all_to_all(self, send: Tensor) -> tuple[Tensor, Any]:
        """Send part i of the first dimension to rank i: what comes back, once the work has been waited for."""
        if self.places:
            send = send[[self.places.index(i) for i in range(self.size)]]
        received = torch.empty_like(send)
        self.exchanges += 1
        with self.watched():
            work = dist.all_to_all_single(received, send, group=self.process_group, async_op=True)
        return received, work

    def gather(self, x: Tensor) -> list[Tensor]:
        """A contiguous tensor of each rank."""
        tensors = [torch.empty_like(x) for _ in range(self.size)]
        self.exchanges += 1
        with self.watched():
            work = dist.all_gather(tensors, x, group=self.process_group, async_op=True)
        self.wait(x, work)
        return [tensors[position] for position in self.places or range(self.size)]

    def wait(self, x: Tensor, *works: Any) -> None:
        """Wait for works that exchange tensors such as ``x``: with NCCL the current stream does, with gloo the host.

        NCCL's host would wait too if it were given a time limit; gloo's waits for half an hour without one.
        """
        by_host = self.process_group._get_backend(x.device).name() == "gloo"
        with self.watched():
            for work in works:
                work.wait(self._limit) if by_host else work.wait()

    def sum_of_bits(self, x: Tensor) -> Tensor:
        """The sum over the ranks of a 16-bit tensor of which each rank has some rows and zeros elsewhere, exactly.

        As integers: what is added to a zero keeps its bits, NaN and -0 too.
        """
        self.exchanges += 1
        with self.watched():
            work = dist.all_reduce(x.view(torch.int32), group=self.process_group, async_op=True)
        self.wait(x, work)
        return x

    def lost(self, closed: bool) -> list[int]:
        """Ranks of the world that do not answer a roll call until the time limit of the call, and a moment more.

        Every rank whose exchange failed comes here, the last of them when its own time is over. closed: whether an
        exchange failed as a rank has ended, which is the last one that has not answered.
        """
        self.store.set(f"here/{self.rank}", str(self.calls))
        until = max(self.since + self.timeout, time.monotonic()) + min(_GRACE_PERIOD, self.timeout / 2)
        missing = list(range(self.size))
        while len(missing) > closed and time.monotonic() < until:
            missing = [i for i in missing if not self._answered(f"here/{i}")]
            if len(missing) > closed:
                time.sleep(min(0.05, self.timeout / 20))
        return [self.ranks[i] for i in missing]

    def await_readers(self, lost: list[int]) -> None:
        """Wait a moment until the other ranks have read the store too: it can end with this process."""
        until = time.monotonic() + min(_GRACE_PERIOD, self.timeout / 2)
        reading = [i for i in range(self.size) if self.ranks[i] not in lost]
        with suppress(RuntimeError):  # the store has ended, after this rank has read it
            self.store.set(f"read/{self.rank}", str(self.calls))
            while reading and time.monotonic() < until:
                reading = [i for i in reading if not self._answered(f"read/{i}")]
                if reading:
                    time.sleep(min(0.05, self.timeout / 20))

    def _answered(self, key: str) -> bool:
        """Whether a rank has answered a roll call of this call, or of one before or after: they agree on each."""
        return bool(self.store.check([key])) and int(self.store.get(key)) >= self.calls - 1


class _ErrorContext:
    """See ``Group.watched``."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Raises RuntimeError in the place of one that an exchange raised."""
        group = self.group
        if not isinstance(error, RuntimeError):
            return
        group.failed = True
        closed = any(words in str(error).lower() for words in _CLOSED_MESSAGES)
        try:
            lost = group.lost(closed)
            raised = group.raised()
            group.await_readers(lost)
        except RuntimeError:  # the store is gone with the process that held it
            raise RuntimeError(
                f"context_parallel: rank {group.ranks[group.rank]} of the ranks {group.ranks} lost the store of the "
                f"process group, which rank 0 or the launcher holds: one of them has ended. Start the job again "
                f"({error})"
            ) from error
        if lost:
            named = ", ".join(map(str, lost))
            late = f"did not answer within {group.timeout:g} s; it has ended or hangs"
            raise RuntimeError(
                f"context_parallel: rank {named} of the ranks {group.ranks} "
                f"{'has ended' if closed and len(lost) == 1 else late}. Start the job again ({error})"
            ) from error
        if raised:
            raise RuntimeError(f"{group.left_early(raised)} ({error})") from error


_GROUPS: dict[str, RankGroup] = {}
_ALL_GROUPS: weakref.WeakSet[RankGroup] = weakref.WeakSet()  # these and those that they replaced
_GROUP_COUNTS: Counter[str] = Counter()  # groups by their ranks


def get_group(process_group: Any, order: Sequence[int] = (), timeout: float | None = None) -> RankGroup:
    """The group of a process group. The first call for it is made by all of its ranks, and waits for them.

    order: its ranks in the world, in a mesh's order; by default in its own. timeout: in seconds, of this call and those
    after it; TIMEOUT at first.
    """
    ranks = list(order) or dist.get_process_group_ranks(process_group)
    ranks_name = "-".join(map(str, ranks))
    name = f"{process_group.group_name}/{ranks_name}"
    group = _GROUPS.get(name)
    if group is None or group.process_group is not process_group:
        _GROUP_COUNTS[ranks_name] += 1
        store = _C10D.PrefixStore(f"greenfast/{ranks_name}/{_GROUP_COUNTS[ranks_name]}", _C10D._get_default_store())
        group = RankGroup(name, process_group, store, timeout or TIMEOUT, ranks)
        if len(ranks) > 1:
            group.connect()
        _GROUPS[name] = group
        _ALL_GROUPS.add(group)
    elif timeout:
        group.timeout = timeout
    return group


@atexit.register
def _close() -> None:
    """Ends gloo's threads, which must not outlive the interpreter."""
    for group in _ALL_GROUPS:
        group.host = None


def find_group(name: str) -> RankGroup:
    """The group of this name, or of the process group that has it in PyTorch. Raises ValueError where there is none."""
    group = _GROUPS.get(name)
    if group is not None:
        return group
    return get_group(_C10D._resolve_process_group(name))
