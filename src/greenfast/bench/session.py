"""Contenders on one GPU: each output is checked, then all are timed interleaved; host time of eager calls.

Kernel time is the time of a captured CUDA graph of N calls, divided by N. A session lives in a separate process
(device/worker.py), because a library that breaks its CUDA context breaks it for every later contender there.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from greenfast.bench.backends import BACKENDS, Backend, Ready, first_line
from greenfast.bench.comparison import BenchCell, CheckResult, Facts, TimingResult
from greenfast.bench.graphs import Captured, call_us, capture, order, queue_interleaved, rounds_for
from greenfast.bench.inputs import Inputs, make_inputs
from greenfast.bench.record_schema import HostRow
from greenfast.bench.references import reference
from greenfast.device.bound_launch import BoundLaunch
from greenfast.device.executable import KernelImage
from greenfast.device.gpu import Gpu
from greenfast.numerics.codes import transposed_values
from greenfast.spec.errors import MachineError
from greenfast.spec.kernel import Launch

#: An output of another library that is further off than this is not attention but a call that went wrong.
_WRONG = 0.25
#: How far the output of its timed launches may be from what was checked, relative; greenfast's must be the same.
_CHANGED = 1e-3
#: Host time: batches that are kept, batches before them, and calls in each.
_BATCHES, _BATCH_WARMUP, _BATCH = 60, 5, 50


@dataclass(frozen=True)
class _Entry:
    """A contender to be timed: its graph, and the output that was checked, None where none was.

    ready: kept, because the graph reads memory that would otherwise be given to others.
    """

    ready: Ready
    captured: Captured
    checked: Tensor | None


class BenchSession:
    """Contenders on one GPU, a cell at a time. Every method is called through a worker.

    Raises MachineError for a GPU that is not there, and for a torch that cannot use it.
    contenders: by name, those that it knows.
    """

    contenders: Mapping[str, Backend] = BACKENDS

    def __init__(self, ordinal: int) -> None:
        if not torch.cuda.is_available():
            built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
            raise MachineError(
                f"torch {torch.__version__} is built {built} and shows no GPU; a comparison needs a CUDA build of "
                "torch that the driver can run (pip install torch --index-url https://download.pytorch.org/whl/cu130)"
            )
        self._gpu = Gpu(ordinal)
        torch.cuda.set_device(ordinal)
        # Not the default stream: no graph can be captured from it, and it waits for all others.
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        self._inputs: Any = None
        self._reference: Any = None
        self._kernel: tuple[KernelImage, Launch] | None = None
        self._entries: dict[str, _Entry] = {}

    def facts(self, names: Sequence[str]) -> Facts:
        """These contenders with their versions or the reasons why they are missing."""
        backend: Any = torch.backends.cudnn
        versions = {"torch CUDA": str(torch.version.cuda), "cuDNN": str(backend.version())}
        return Facts([self.contenders[name].describe() for name in names], versions)

    def open(self, cell: BenchCell, kernel: tuple[KernelImage, Launch] | None) -> None:
        """Draw the inputs of a cell and compute its references. kernel: the task's own, where it takes part."""
        self.close()
        self._inputs, self._reference = self._draw(cell)
        self._kernel = kernel

    def _draw(self, cell: BenchCell) -> tuple[Any, Any]:
        """The inputs of a cell, and what checks an output; None where none is checked."""
        inputs = make_inputs(cell.shape.dims, cell.seed, cell.inputs, "cuda")
        codes = any(self.contenders[name].same_codes for name in cell.contenders)
        return inputs, reference(inputs, cell.sampled, codes=codes)

    def close(self) -> None:
        """Give back the memory of a cell."""
        self._inputs = self._reference = self._kernel = None
        self._entries.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def add(self, name: str, timed: bool) -> CheckResult:
        """Bind a contender, check its output, and capture it for ``time`` where it is to be timed.

        What a library raises before the capture, and a wrong output of it, is a reason in the result. Any other error
        leaves this process in doubt and ends it.
        """
        contender = self.contenders[name]
        try:
            ready = self._ready(name)
            out = ready.call()
            first = _as_float(out, copy=True) if contender.attention else None
        except Exception as e:  # whatever a library raises for a shape that it does not take
            reason = first_line(e)
            torch.cuda.synchronize()  # raises where the context is broken
            return CheckResult(reason=reason)
        found = CheckResult(finite=True)
        if first is not None:
            found = self._checked(first * ready.unit, contender)
            wrong = "" if contender.own else _how_wrong(found, timed)
            if wrong:
                return replace(found, reason=f"its output is wrong: {wrong}")
        if timed:
            self._entries[name] = _Entry(ready, capture(ready.call, ready.copies), first)
        return found

    def _checked(self, out: Tensor, contender: Backend) -> CheckResult:
        found: CheckResult = self._reference.check(out, contender.same_codes)
        return found

    def time(self, rounds: int | None) -> TimingResult:
        """Replay every graph once per round; None takes as many rounds as the replays' durations ask for."""
        captured = {name: entry.captured for name, entry in self._entries.items()}
        count = rounds or rounds_for([c.replay_us for c in captured.values()])
        for entry in self._entries.values():
            if entry.checked is not None:
                _poison(entry.captured.out)
        marks = queue_interleaved({name: c.graph for name, c in captured.items()}, count)
        clocks = self._clocks()  # while the GPU is still at it
        torch.cuda.synchronize()
        calls = {name: c.calls for name, c in captured.items()}
        changed = [name for name, entry in self._entries.items() if _has_changed(entry, self.contenders[name].own)]
        return TimingResult(call_us(marks, calls), calls, changed, clocks)

    def host(self, cell: BenchCell) -> list[HostRow]:
        """Host time of eager calls, in batches that are interleaved; the GPU is waited for between them.

        A library that refuses the cell has no row.
        """
        self.open(cell, None)
        ready = {name: found for name in cell.contenders if (found := self._called(name))}
        times: dict[str, list[float]] = {name: [] for name in ready}
        for turn in range(-_BATCH_WARMUP, _BATCHES):
            for name in order(tuple(ready), turn):
                call = ready[name].call
                start = time.perf_counter()
                for _ in range(_BATCH):
                    call()
                taken = (time.perf_counter() - start) / _BATCH * 1e6
                torch.cuda.synchronize()
                if turn >= 0:
                    times[name].append(taken)
        self.close()
        return [
            HostRow(
                contender=name, dims=dict(cell.shape.dims), median_us=statistics.median(t), least_us=min(t),
                batches=_BATCHES, calls=_BATCH,
            )
            for name, t in times.items()
        ]  # fmt: skip

    def _called(self, name: str) -> Ready | None:
        """A contender after its first call; None where a library refuses the cell."""
        try:
            ready = self._ready(name)
            ready.call()
        except Exception:  # whatever a library raises for a shape that it does not take
            if self.contenders[name].own:
                raise
            torch.cuda.synchronize()  # raises where the context is broken
            return None
        return ready

    def _ready(self, name: str) -> Ready:
        """A contender bound to the inputs of the cell."""
        assert self._inputs is not None
        prepare = self.contenders[name].prepare
        return prepare(self._inputs) if prepare else self._own(self._inputs)

    def _own(self, inputs: Inputs) -> Ready:
        """The task's own kernel on torch's memory and stream."""
        assert self._kernel is not None
        image, plan = self._kernel
        kernel = self._gpu.load(image)
        buffers = {**inputs.codes, **{f"{name}_scale": s for name, s in inputs.scales.items()}}
        buffers["v_t"] = transposed_values(inputs.codes["v"])
        out = torch.empty(inputs.codes["q"].shape, dtype=torch.float16, device="cuda")
        buffers["out"] = out
        _poison(out)

        pointers = {name: x.data_ptr() for name, x in buffers.items()}
        launches: dict[int, BoundLaunch] = {}  # by stream: a graph is captured on another
        torch.cuda.synchronize()
        shaped = inputs.by_batch(out)

        # The buffers are an argument so that they live as long as the call.
        def call(keep: Any = buffers) -> Tensor:
            stream = torch.cuda.current_stream().cuda_stream
            if stream not in launches:
                block, smem = image.block, image.dynamic_smem_bytes
                launches[stream] = BoundLaunch(kernel, block, smem, plan, pointers, stream, name=image.entry)
            launches[stream]()
            return shaped

        return Ready(call)

    def _clocks(self) -> dict[str, float]:
        """What Gpu.clocks tells, and the board's power in watts where NVML tells it."""
        found = self._gpu.clocks()
        try:
            nvml = importlib.import_module("cuda.bindings.nvml")  # not in every 13.x
            handle = nvml.device_get_handle_by_uuid(self._gpu.device.to_system_device().uuid)
            found["power_w"] = nvml.device_get_power_usage(handle) / 1e3
        except Exception:  # any refusal of NVML; virtual machines often withhold the power
            pass
        return found


def _as_float(out: Tensor, *, copy: bool = False) -> Tensor:
    """An output as float32 (heads, length, head_dim)."""
    return out.to(torch.float32, copy=copy).flatten(0, 1)


def _has_changed(entry: _Entry, own: bool) -> bool:
    """Whether the timed launches left another output than the one checked; it was poisoned before them."""
    if entry.checked is None:
        return False
    found = _as_float(entry.captured.out)
    if own:
        return not torch.equal(found, entry.checked)
    return not bool((found - entry.checked).norm() <= _CHANGED * entry.checked.norm())  # NaN is not


def _how_wrong(found: CheckResult, timed: bool) -> str:
    """What is wrong with a library's output; empty where nothing is. An error is a finding where it is not timed."""
    if not found.finite:
        return "not every element is finite"
    return f"relative error {found.error:.3g}" if timed and not (found.error or 0.0) <= _WRONG else ""


def _poison(out: Tensor) -> None:
    """Overwrite an output with 0xFF: NaN in half, bfloat16 and E4M3."""
    out.view(torch.uint8).fill_(255)
