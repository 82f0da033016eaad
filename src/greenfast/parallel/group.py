"""A group of ranks: agreement on calls, exchanges, and detection of lost ranks.

Tensors are exchanged over the caller's process group (NCCL, or gloo for CPU tensors). Descriptions of calls are
exchanged over a second group, of gloo on the host. Before anything is launched, every rank knows that all others make
the same call. A lost rank is detected there, without NCCL's time limit. Meanwhile the host is ahead of the GPU.
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

#: Seconds until a call fails on the other ranks if one rank does not make it.
TIMEOUT = 600.0
_C10D: Any = distributed_c10d
_MAX_MESSAGE = 500  # characters of a call in an error
_CLOSED_MESSAGES = ("connection closed", "connection reset", "broken pipe")  # gloo's errors if another rank has ended
_GRACE_PERIOD = 5.0  # seconds between the first and the last rank that begins, and so gives up, a call


@dataclass(eq=False)
class RankGroup:
    """The ranks that share a sequence; ``rank`` counts in the mesh, 0 .. size - 1.

    name: the name for operators in a graph. ranks: ranks in the world, in the order of the mesh. The process group may
    have another order.
    """

    name: str
    process_group: Any
    store: Any  # the ranks' store, with its own prefix
    timeout: float  # seconds
    ranks: list[int]
    host: Any = None  # the gloo group, None for one rank
    calls: int = 0  # calls of this rank
    agreed: int = 0  # the last call of all ranks
    exchanges: int = 0  # exchanges of this rank; equal on ranks that are in step
    failed: bool = False  # an exchange has raised an error

    def __post_init__(self) -> None:
        self.rank = self.ranks.index(dist.get_rank())
        self.since = time.monotonic()  # time of this rank's last call
        positions = [dist.get_group_rank(self.process_group, rank) for rank in self.ranks]
        #: The index of each rank in the process group; empty if that has the mesh's order.
        self.places = [] if positions == list(range(len(positions))) else positions

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def connect(self) -> None:
        """Make the group on the host. Raises RuntimeError, naming the rank, if a rank does not connect."""
        with self.error_context():
            # new_group would need other groups' ranks to be in step.
            self.host = dist.ProcessGroupGloo(self.store, self.rank, self.size, timeout=self._limit)

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.timeout)

    def agree(self, call: str, fault: Exception | None = None) -> None:
        """Return when every rank of the group makes this call. If calls differ, all ranks raise an error.

        call: everything that must be equal on the ranks, as text. fault: the error of a call that this rank refuses. It
        is raised here after the others have received it.

        Raises ValueError for calls that differ, naming each, and RuntimeError, naming the rank, for a rank that is lost
        or left the call before in the middle.
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
        with self.error_context():
            self.host.allreduce([both], options).wait()
        refused, max_digest, least, begun, least_begun = both.tolist()
        if begun != -least_begun:
            self._raise_behind(begun)
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
        with self.error_context():
            others = [self.store.get(f"{self.calls}/call/{i}").decode() for i in range(self.size)]
        calls = "; ".join(f"rank {rank}: {text}" for rank, text in zip(self.ranks, others, strict=True))
        raise ValueError(f"context_parallel: the ranks of the group make different calls: {calls}")

    def _raise_behind(self, begun: int) -> None:
        """Raise RuntimeError, naming the ranks that began fewer exchanges than others: these would not match."""
        self.store.set(f"{self.calls}/begun/{self.rank}", str(self.exchanges))
        with self.error_context():
            counts = [int(self.store.get(f"{self.calls}/begun/{i}")) for i in range(self.size)]
        late = [i for i, count in enumerate(counts) if count < begun]
        raise RuntimeError(self.format_left_early({i: self.read_errors().get(i, "") for i in late}))

    def format_left_early(self, errors: dict[int, str]) -> str:
        """Format the error for ranks that left a call in the middle.

        errors: the errors that they raised, "" if unknown.
        """
        named = ", ".join(str(self.ranks[i]) for i in errors)
        texts = "; ".join(text for text in errors.values() if text)
        return (
            f"context_parallel: rank {named} of the ranks {self.ranks} left a call in the middle"
            f"{f', by an error that was caught there ({texts})' if texts else ''}; the others wait for its "
            "data. Start the job again"
        )

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Return a context for the work of a call. It reports errors of this rank to the others."""
        try:
            yield
        except Exception as error:
            if self.host is not None and not self.failed:
                with suppress(RuntimeError):  # the store can be gone
                    self.store.set(
                        f"raised/{self.rank}", f"{self.calls} {type(error).__name__}: {error}"[:_MAX_MESSAGE]
                    )
            raise

    def read_errors(self) -> dict[int, str]:
        """Return the errors by which ranks left the last agreed call; none if all ranks raised one."""
        errors = {}
        for i in range(self.size):
            if self.store.check([f"raised/{i}"]):
                call, _, text = self.store.get(f"raised/{i}").decode().partition(" ")
                if int(call) == self.agreed:
                    errors[i] = text
        return errors if len(errors) < self.size else {}

    def error_context(self) -> _ErrorContext:
        """Return a context that replaces the error of an exchange by one that names the lost ranks."""
        return _ErrorContext(self)

    @contextmanager
    def exchange(self, send: Tensor, receive: Tensor) -> Iterator[None]:
        """Send a buffer to the next rank and receive one from the previous rank, while the body of the context runs."""
        following, before = ((self.rank + step) % self.size for step in (1, -1))
        self.exchanges += 1
        sends = dist.P2POp(dist.isend, send, self.ranks[following], self.process_group)
        receives = dist.P2POp(dist.irecv, receive, self.ranks[before], self.process_group)
        with self.error_context():
            works = dist.batch_isend_irecv([sends, receives])
        try:
            yield
        finally:  # after an error too, to keep the ranks in step
            self.wait(receive, *works)

    def all_to_all(self, send: Tensor) -> tuple[Tensor, Any]:
        """Send part i of the first dimension to rank i. Return the received tensor and the work to wait for."""
        if self.places:
            send = send[[self.places.index(i) for i in range(self.size)]]
        received = torch.empty_like(send)
        self.exchanges += 1
        with self.error_context():
            work = dist.all_to_all_single(received, send, group=self.process_group, async_op=True)
        return received, work

    def gather(self, x: Tensor) -> list[Tensor]:
        """Gather a contiguous tensor from each rank."""
        tensors = [torch.empty_like(x) for _ in range(self.size)]
        self.exchanges += 1
        with self.error_context():
            work = dist.all_gather(tensors, x, group=self.process_group, async_op=True)
        self.wait(x, work)
        return [tensors[position] for position in self.places or range(self.size)]

    def wait(self, x: Tensor, *works: Any) -> None:
        """Wait for works on tensors such as ``x``: with NCCL on the current stream, with gloo on the host.

        A time limit would make NCCL wait on the host; without one gloo waits for half an hour.
        """
        by_host = self.process_group._get_backend(x.device).name() == "gloo"
        with self.error_context():
            for work in works:
                work.wait(self._limit) if by_host else work.wait()

    def all_reduce_bits(self, x: Tensor) -> Tensor:
        """Sum a 16-bit tensor over the ranks exactly. Each row is nonzero on one rank only.

        The sum is of integers, so that NaN and -0 keep their bits.
        """
        self.exchanges += 1
        with self.error_context():
            work = dist.all_reduce(x.view(torch.int32), group=self.process_group, async_op=True)
        self.wait(x, work)
        return x

    def find_lost(self, closed: bool) -> list[int]:
        """Return the ranks of the world that do not answer a roll call in time.

        The time is the time limit of the call plus a grace period. Every rank with a failed exchange comes here, the
        last one after its own time limit. closed: an exchange failed because a rank has ended; that is the last one
        that has not answered.
        """
        self.store.set(f"here/{self.rank}", str(self.calls))
        until = max(self.since + self.timeout, time.monotonic()) + min(_GRACE_PERIOD, self.timeout / 2)
        missing = list(range(self.size))
        while len(missing) > closed and time.monotonic() < until:
            missing = [i for i in missing if not self._has_answered(f"here/{i}")]
            if len(missing) > closed:
                time.sleep(min(0.05, self.timeout / 20))
        return [self.ranks[i] for i in missing]

    def wait_for_readers(self, lost: list[int]) -> None:
        """Wait a moment until the other ranks have read the store too: it can end with this process."""
        until = time.monotonic() + min(_GRACE_PERIOD, self.timeout / 2)
        reading = [i for i in range(self.size) if self.ranks[i] not in lost]
        with suppress(RuntimeError):  # the store has ended, after this rank has read it
            self.store.set(f"read/{self.rank}", str(self.calls))
            while reading and time.monotonic() < until:
                reading = [i for i in reading if not self._has_answered(f"read/{i}")]
                if reading:
                    time.sleep(min(0.05, self.timeout / 20))

    def _has_answered(self, key: str) -> bool:
        """Return whether a rank has answered a roll call of this call or of its neighbours.

        Ranks agree on each call.
        """
        return bool(self.store.check([key])) and int(self.store.get(key)) >= self.calls - 1


class _ErrorContext:
    """The context of ``RankGroup.error_context``."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Raise RuntimeError in place of the RuntimeError of an exchange."""
        group = self.group
        if not isinstance(error, RuntimeError):
            return
        group.failed = True
        closed = any(words in str(error).lower() for words in _CLOSED_MESSAGES)
        try:
            lost = group.find_lost(closed)
            raised = group.read_errors()
            group.wait_for_readers(lost)
        except RuntimeError:  # the process with the store has ended
            raise RuntimeError(
                f"context_parallel: rank {group.ranks[group.rank]} of the ranks {group.ranks} lost the store of the "
                f"process group. Rank 0 or the launcher holds it: one of them has ended. Start the job again "
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
            raise RuntimeError(f"{group.format_left_early(raised)} ({error})") from error


_GROUPS: dict[str, RankGroup] = {}
_ALL_GROUPS: weakref.WeakSet[RankGroup] = weakref.WeakSet()  # current and replaced groups
_GROUP_COUNTS: Counter[str] = Counter()  # number of groups per list of ranks


def get_group(process_group: Any, order: Sequence[int] = (), timeout: float | None = None) -> RankGroup:
    """Return the group of a process group. The first call for it is collective, and waits for all ranks.

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
    """End gloo's threads before the interpreter ends."""
    for group in _ALL_GROUPS:
        group.host = None


def find_group(name: str) -> RankGroup:
    """Return the group of this name, or of the process group with this name in PyTorch.

    Raises ValueError if none exists.
    """
    group = _GROUPS.get(name)
    if group is not None:
        return group
    return get_group(_C10D._resolve_process_group(name))
