"""Processes that are ranks of a gloo group on the CPU: forked from one that has imported PyTorch."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from greenfast.parallel.group import RankGroup

#: Meshes that the ranks make, by name: the ranks in order.
MESHES = {"1": (0,), "2": (0, 1), "3": (0, 1, 2), "4": (0, 1, 2, 3), "2 turned": (1, 0), "4 mixed": (2, 0, 3, 1)}
_PRELOADED = ["torch", "torch.distributed.tensor", "greenfast.parallel.context", "tests.parallel.cases"]


class Ranks:
    """The processes. A call runs a function of ``tests.parallel.cases`` on the ranks of a mesh, its first argument."""

    def __init__(self, count: int, folder: Path, meshes: Sequence[str], device: str = "cpu") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, count, str(folder / "store"), tuple(meshes), device, there)
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def __call__(
        self, mesh: str, function: str, *args: Any, lost: Sequence[int] = (), seconds: float = 60.0
    ) -> list[Any]:
        """Return the result of the function on each rank of the mesh, in the mesh's order; an exception as itself.

        lost: ranks without a result. Raises TimeoutError if another rank takes longer.
        """
        ranks = MESHES[mesh]
        for rank in ranks:
            self.pipes[rank].send((mesh, function, args))
        result: dict[int, Any] = dict.fromkeys(ranks)
        waiting: dict[Any, int] = {self.pipes[rank]: rank for rank in ranks if rank not in lost}
        while waiting:
            ready: list[Any] = wait(list(waiting), timeout=seconds)
            if not ready:
                raise TimeoutError(f"{function}: ranks {sorted(waiting.values())} took more than {seconds} s")
            for pipe in ready:
                result[waiting.pop(pipe)] = pipe.recv()
        return [result[rank] for rank in ranks]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            process.kill()


@contextmanager
def running(count: int, folder: Path, meshes: Sequence[str], device: str = "cpu") -> Iterator[Ranks]:
    """Start ranks on gloo, or with device "cuda" on NCCL, each on its GPU. With fewer GPUs they share the first one."""
    ranks = Ranks(count, folder, meshes, device)
    try:
        yield ranks
    finally:
        ranks.close()


def _share_a_gpu() -> None:
    """NCCL has one rank for each GPU. Gloo exchanges a GPU's tensors too, but a ring's blocks only through the host."""
    exchanging = RankGroup.exchange

    @contextmanager
    def through_host(group: RankGroup, send: Tensor, receive: Tensor) -> Iterator[None]:
        there = torch.empty_like(receive, device="cpu")
        with exchanging(group, send.cpu(), there):
            yield
        receive.copy_(there)

    RankGroup.exchange = through_host  # type: ignore[method-assign, assignment]


def _serve(rank: int, count: int, store: str, meshes: tuple[str, ...], device: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    made = torch._C._distributed_c10d.FileStore(store, count)
    backend = "gloo"
    if device == "cuda":
        own = torch.cuda.device_count() >= count
        torch.cuda.set_device(rank if own else 0)
        if own:
            backend = "nccl"
        else:
            _share_a_gpu()
    dist.init_process_group(backend, store=made, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    dist.barrier()  # a rank may be connected before others are: if it ended then, they would fail to start
    actual = {name: DeviceMesh(device, list(MESHES[name])) for name in meshes}
    cases = importlib.import_module("tests.parallel.cases")
    while True:
        try:
            mesh, function, args = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(cases, function)(actual[mesh], *args)
        except Exception as error:
            result = error
        pipe.send(result)
