"""Backends on one GPU: check each output, time all backends interleaved, measure the host time of eager calls.

Kernel time is the time of a captured CUDA graph of N calls, divided by N. A session runs in a separate process
(device/worker.py), because a library that breaks its CUDA context breaks it for all later backends of the process.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison import BenchCell, CheckResult, Facts, TimingResult
from benchmarks.records import HostRow
from benchmarks.registry import Backend, BoundCall, first_line
from benchmarks.sdpa_backends import BACKENDS
from benchmarks.sdpa_inputs import Inputs, make_inputs, reference
from benchmarks.timing import Captured, capture, interleave, time_graphs
from greenfast.device.bound_launch import BoundLaunch
from greenfast.device.gpu import Gpu
from greenfast.device.session import KernelImage
from greenfast.numerics.formats import transposed_values
from greenfast.spec.errors import MachineError
from greenfast.spec.kernel import Launch

#: Largest relative error of another library's output; a larger one means a wrong call.
_WRONG = 0.25
#: Largest relative change of another library's output in the timed launches; greenfast's output must not change.
_CHANGED = 1e-3
#: Host time: measured batches, warm-up batches, and calls per batch.
_BATCHES, _BATCH_WARMUP, _BATCH = 60, 5, 50


@dataclass(frozen=True)
class _Entry:
    """A backend to time: its graph, and the checked output (None if it has no output to check).

    ready: referenced here so that the memory that the graph reads is not freed.
    """

    ready: BoundCall
    captured: Captured
    checked: Tensor | None


class BenchSession:
    """Backends on one GPU, one cell at a time. Every method is called through a worker.

    Raises MachineError for a missing GPU, and for a torch that cannot use it.
    contenders: the supported backends, by name.
    """

    backends: Mapping[str, Backend] = BACKENDS

    def __init__(self, ordinal: int) -> None:
        if not torch.cuda.is_available():
            built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
            raise MachineError(
                f"torch {torch.__version__} is built {built} and shows no GPU; a comparison needs a CUDA build of "
                "torch that the driver can run (pip install torch --index-url https://download.pytorch.org/whl/cu130)"
            )
        self._gpu = Gpu(ordinal)
        torch.cuda.set_device(ordinal)
        # Not the default stream: it cannot be captured, and it synchronises with all other streams.
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        self._inputs: Any = None
        self._reference: Any = None
        self._kernel: tuple[KernelImage, Launch] | None = None
        self._entries: dict[str, _Entry] = {}

    def facts(self, names: Sequence[str]) -> Facts:
        """Describe these backends: their versions, or the reasons why they are missing."""
        backend: Any = torch.backends.cudnn
        versions = {"torch CUDA": str(torch.version.cuda), "cuDNN": str(backend.version())}
        return Facts([self.backends[name].describe() for name in names], versions)

    def open(self, cell: BenchCell, kernel: tuple[KernelImage, Launch] | None) -> None:
        """Draw the inputs of a cell and compute its references. kernel: the task's own kernel, if it is a backend."""
        self.close()
        self._inputs, self._reference = self._draw(cell)
        self._kernel = kernel

    def _draw(self, cell: BenchCell) -> tuple[Any, Any]:
        """Draw the inputs of a cell; return them and the reference (None if no output is checked)."""
        inputs = make_inputs(cell.shape.dims, cell.seed, cell.inputs, "cuda")
        codes = any(self.backends[name].same_codes for name in cell.backends)
        return inputs, reference(inputs, cell.sampled, codes=codes)

    def close(self) -> None:
        """Free the memory of a cell."""
        self._inputs = self._reference = self._kernel = None
        self._entries.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def add(self, name: str, timed: bool) -> CheckResult:
        """Bind a backend, check its output, and capture it for ``time`` if ``timed``.

        A library's exception before the capture, or a wrong output, becomes the reason in the result. Any other error
        ends this process, because its CUDA context may be broken.
        """
        backend = self.backends[name]
        try:
            ready = self._ready(name)
            out = ready.call()
            first = _as_float(out, copy=True) if backend.attention else None
        except Exception as e:  # whatever a library raises for a shape that it does not take
            reason = first_line(e)
            torch.cuda.synchronize()  # raises where the context is broken
            return CheckResult(reason=reason)
        result = CheckResult(finite=True)
        if first is not None:
            checked: CheckResult = self._reference.check(first * ready.unit, backend.same_codes)
            result = checked
            wrong = "" if backend.own else _describe_error(result, timed)
            if wrong:
                return replace(result, reason=f"its output is wrong: {wrong}")
        if timed:
            self._entries[name] = _Entry(ready, capture(ready.call, ready.copies), first)
        return result

    def time(self, rounds: int | None) -> TimingResult:
        """Replay every graph once per round. rounds: None chooses the number from the replays' durations."""
        for entry in self._entries.values():
            if entry.checked is not None:
                _poison(entry.captured.out)
        captured = {name: entry.captured for name, entry in self._entries.items()}
        clocks: dict[str, float] = {}
        samples = time_graphs(captured, rounds, while_busy=lambda: clocks.update(self._clocks()))
        calls = {name: c.calls for name, c in captured.items()}
        changed = [name for name, entry in self._entries.items() if _has_changed(entry, self.backends[name].own)]
        return TimingResult(samples, calls, changed, clocks)

    def host(self, cell: BenchCell) -> list[HostRow]:
        """Measure the host time of eager calls in interleaved batches, with a synchronisation after each batch.

        A library that does not support the cell has no row.
        """
        self.open(cell, None)
        ready = {name: bound for name in cell.backends if (bound := self._try_call(name))}
        batches = {name: partial(_time_batch, bound.call) for name, bound in ready.items()}
        times = interleave(batches, _BATCHES, _BATCH_WARMUP)
        self.close()
        return [
            HostRow(
                backend=name, dims=dict(cell.shape.dims), median_us=statistics.median(t), least_us=min(t),
                batches=_BATCHES, calls=_BATCH,
            )
            for name, t in times.items()
        ]  # fmt: skip

    def _try_call(self, name: str) -> BoundCall | None:
        """Bind a backend and call it once; None if a library does not support the cell."""
        try:
            ready = self._ready(name)
            ready.call()
        except Exception:  # whatever a library raises for a shape that it does not take
            if self.backends[name].own:
                raise
            torch.cuda.synchronize()  # raises where the context is broken
            return None
        return ready

    def _ready(self, name: str) -> BoundCall:
        """Bind a backend to the inputs of the cell."""
        assert self._inputs is not None
        backend = self.backends[name]
        return backend.bind(self._inputs) if backend.prepare else self._own(self._inputs)

    def _own(self, inputs: Inputs) -> BoundCall:
        """Bind the task's own kernel to torch's memory and stream."""
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

        # The default argument keeps the buffers alive as long as the function.
        def call(keep: Any = buffers) -> Tensor:
            stream = torch.cuda.current_stream().cuda_stream
            if stream not in launches:
                block, smem = image.block, image.dynamic_smem_bytes
                launches[stream] = BoundLaunch(kernel, block, smem, plan, pointers, stream, name=image.entry)
            launches[stream]()
            return shaped

        return BoundCall(call)

    def _clocks(self) -> dict[str, float]:
        """Return Gpu.clocks, with the board's power in watts if NVML reports it."""
        clocks = self._gpu.clocks()
        try:
            nvml = importlib.import_module("cuda.bindings.nvml")  # not in every 13.x
            handle = nvml.device_get_handle_by_uuid(self._gpu.device.to_system_device().uuid)
            clocks["power_w"] = nvml.device_get_power_usage(handle) / 1e3
        except Exception:  # any refusal of NVML; virtual machines often withhold the power
            pass
        return clocks


def _time_batch(call: Callable[[], Any]) -> float:
    """Return the host's microseconds per call of a batch, and wait for the GPU."""
    start = time.perf_counter()
    for _ in range(_BATCH):
        call()
    taken = (time.perf_counter() - start) / _BATCH * 1e6
    torch.cuda.synchronize()
    return taken


def _as_float(out: Tensor, *, copy: bool = False) -> Tensor:
    """Convert an output to float32 (heads, length, head_dim)."""
    return out.to(torch.float32, copy=copy).flatten(0, 1)


def _has_changed(entry: _Entry, own: bool) -> bool:
    """Return whether the output after the timed launches differs from the checked one. It was poisoned before them."""
    if entry.checked is None:
        return False
    out = _as_float(entry.captured.out)
    if own:
        return not torch.equal(out, entry.checked)
    return not bool((out - entry.checked).norm() <= _CHANGED * entry.checked.norm())  # NaN is not


def _describe_error(result: CheckResult, timed: bool) -> str:
    """Describe the fault of a library's output; empty for a usable one. In an untimed cell a large error is data."""
    if not result.finite:
        return "not every element is finite"
    return f"relative error {result.error:.3g}" if timed and not (result.error or 0.0) <= _WRONG else ""


def _poison(out: Tensor) -> None:
    """Overwrite an output with 0xFF: NaN in half, bfloat16 and E4M3."""
    out.view(torch.uint8).fill_(255)
