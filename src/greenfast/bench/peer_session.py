"""The Hopper kernel beside its peers on one GPU: the shapes, the check of every output, and interleaved timing.

Kernel time is that of a captured CUDA graph of N calls, divided by N. A session lives in a process of its own
(device/worker.py), because a library that breaks its CUDA context breaks it for everybody there.
"""

from __future__ import annotations

import gc
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from cuda.core import LaunchConfig, Stream, launch
from torch import Tensor

from greenfast.bench.contenders import CONTENDERS, Inputs, Ready, first_line, make_inputs
from greenfast.bench.graphs import call_us, capture, queue_in_turns, rounds_for
from greenfast.device.gpu import Gpu, KernelImage, tensor_map
from greenfast.judge.peers import OWN, AccuracyCell, Checked, PeerContender, Timed
from greenfast.judge.task import Shape
from greenfast.kernels.attention.config import VALUE_FORMAT, read_dims
from greenfast.numerics.attention import E4M3_POLYNOMIAL_WEIGHTS, attention, attention_rounding_bound
from greenfast.numerics.codes import transposed_values
from greenfast.numerics.formats import dequantize
from greenfast.spec.errors import MachineError
from greenfast.spec.kernel import Launch, TensorMap

_TOKENS, _HIDDEN = 16384, 2048
#: A peer's output that is further off than this is not attention in FP8 but a call that went wrong.
_WRONG = 0.25
#: How far the output of a peer's timed launches may be from what was checked, relative; greenfast's must be the same.
_CHANGED = 1e-3


def grid_shape(head_dim: int, length: int, causal: bool) -> Shape:
    """16,384 tokens and a hidden size of 2048, as the FlashAttention papers measure."""
    dims = {"B": _TOKENS // length, "H": _HIDDEN // head_dim, "S": length, "D": head_dim}
    name = f"d{head_dim}_s{length}{'_causal' if causal else ''}"
    return Shape(name=name, dims={**dims, "CAUSAL": 1} if causal else dims)


def _shape(name: str, b: int, h: int, s: int, d: int) -> Shape:
    return Shape(name=name, dims={"B": b, "H": h, "S": s, "D": d})


#: The shapes that count for the mean.
GRID = tuple(grid_shape(d, s, c) for d in (64, 128, 256) for s in (1024, 4096, 16384) for c in (False, True))
SMALL = (
    _shape("small", 1, 1, 32, 64),
    _shape("mission", 1, 8, 512, 64),
    _shape("mission_b2", 2, 8, 256, 64),
    _shape("long", 1, 8, 2048, 64),
)
#: Errors by head dim and inputs, and by length for those who read the same codes.
ACCURACY = (
    *(
        AccuracyCell(_shape(f"accuracy_d{d}_{kind}", 1, 8, 2048, d), "inputs", kind, 2048)
        for d in (64, 128)
        for kind in ("normal", "outliers")
    ),
    *(
        AccuracyCell(
            _shape(f"accuracy_s{s}", 1, 1, s, 128), "length", "normal", 512,
            tuple(c.name for c in CONTENDERS.values() if c.same_codes),
        )
        for s in (2048, 8192, 32768, 131072)
    ),
)  # fmt: skip


def flops(dims: Mapping[str, int]) -> float:
    """Operations that a shape counts as: 4 B H S^2 D, half of it with a mask, as the FlashAttention papers count."""
    config, sizes = read_dims(dims, VALUE_FORMAT)
    full = 4.0 * sizes.batch * sizes.heads * sizes.q_len * sizes.kv_len * config.head_dim
    return full / 2 if config.causal else full


def input_bytes(dims: Mapping[str, int]) -> int:
    """Bytes of q, k and v as codes and of an output in half."""
    config, sizes = read_dims(dims, VALUE_FORMAT)
    return 5 * sizes.batch * sizes.heads * sizes.q_len * config.head_dim


@dataclass(frozen=True)
class Sample:
    """Some query rows of every head, and what attention is there; float64 (heads, rows, head_dim).

    rows: (heads, rows). full: on the unquantized values. exact: on what the codes stand for. bound: how far roundings
    can take a kernel with weights in E4M3 from ``exact``.
    """

    rows: Tensor
    full: Tensor
    exact: Tensor
    bound: Tensor

    def check(self, out: Tensor, same_codes: bool) -> Checked:
        """Errors of a whole output, float32 (heads, length, head_dim)."""
        heads = torch.arange(len(self.rows), device=out.device).unsqueeze(1)
        found = out[heads, self.rows].double()
        off = (found - self.exact).abs()
        return Checked(
            error=float((found - self.full).norm() / self.full.norm()),
            kernel_error=float(off.norm() / self.exact.norm()) if same_codes else None,
            bound_ratio=float((off / self.bound).max()) if same_codes else None,
            finite=bool(torch.isfinite(out).all()),
        )


def sample(inputs: Inputs, count: int) -> Sample:
    """References for up to ``count`` rows of each head, other ones in each; the first and the last are among them."""
    config, sizes = inputs.config, inputs.sizes
    scale, device = 1.0 / math.sqrt(config.head_dim), inputs.values["q"].device
    generator = torch.Generator().manual_seed(sizes.q_len)
    keys = torch.arange(sizes.kv_len, device=device)
    rows, full, exact, bound = [], [], [], []
    for head in range(sizes.batch * sizes.heads):
        if count < sizes.q_len:
            drawn = torch.randperm(sizes.q_len, generator=generator)[:count]
            drawn[0], drawn[-1] = 0, sizes.q_len - 1
        else:
            drawn = torch.arange(sizes.q_len)
        chosen = drawn.to(device)
        mask = keys <= chosen.unsqueeze(1) if config.causal else None
        q, k, v = (inputs.values[name][head : head + 1] for name in "qkv")
        full.append(attention(q[:, chosen], k, v, scale, mask))
        one = slice(head, head + 1)
        q, k, v = (dequantize(inputs.codes[name][one], inputs.scales[name][one], "e4m3") for name in "qkv")
        exact.append(attention(q[:, chosen], k, v, scale, mask))
        bound.append(attention_rounding_bound(q[:, chosen], k, v, scale, mask, E4M3_POLYNOMIAL_WEIGHTS))
        rows.append(chosen)
    return Sample(torch.stack(rows), torch.cat(full), torch.cat(exact), torch.cat(bound))


@dataclass
class _Entry:
    """A contender that passed its check: its graph, what the graph writes, and what the check saw.

    ready: kept, because the graph reads memory that would otherwise be given to others.
    """

    ready: Ready
    graph: Any
    out: Tensor
    checked: Tensor
    calls: int
    replay_us: float


def library_versions() -> dict[str, str]:
    """What the times of torch's attention depend on beside torch's own version."""
    backend: Any = torch.backends.cudnn
    return {"torch CUDA": str(torch.version.cuda), "cuDNN": str(backend.version())}


class PeerSession:
    """Contenders on one GPU, a shape at a time. Every method is called through a worker.

    Raises MachineError for a GPU that is not there, and for a torch that cannot use it.
    """

    def __init__(self, ordinal: int) -> None:
        if not torch.cuda.is_available():
            built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
            raise MachineError(
                f"torch {torch.__version__} is built {built} and shows no GPU; the peers need a CUDA build of torch "
                "that the driver can run (pip install torch --index-url https://download.pytorch.org/whl/cu130)"
            )
        self._gpu = Gpu(ordinal)
        torch.cuda.set_device(ordinal)
        # Not the default stream: no graph can be captured from it, and it waits for all others.
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        self._inputs: Inputs | None = None
        self._sample: Sample | None = None
        self._entries: dict[str, _Entry] = {}

    def contenders(self) -> list[PeerContender]:
        """Everyone, with the version or the reason why it is missing; greenfast first."""
        return [c.describe() for c in CONTENDERS.values()]

    def versions(self) -> dict[str, str]:
        """What else the peers' times depend on."""
        return library_versions()

    def open(self, dims: Mapping[str, int], seed: int, kind: str, sampled: int) -> None:
        """Draw the inputs of a shape (contenders.make_inputs), and compute ``sampled`` reference rows of each head."""
        self.close()
        self._inputs = make_inputs(dims, seed, kind, "cuda")
        self._sample = sample(self._inputs, sampled)

    def close(self) -> None:
        """Give back the memory of a shape."""
        self._inputs = self._sample = None
        self._entries.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def add(self, name: str, image: KernelImage, plan: Launch, timed: bool) -> Checked:
        """Bind a contender, check its output, and capture it for ``time``. image, plan: greenfast's own kernel.

        What a library raises before the capture, and a wrong output of it, is a reason in the result. Any other error
        leaves this process in doubt and ends it.
        """
        assert self._inputs is not None
        assert self._sample is not None
        contender = CONTENDERS[name]
        try:
            ready = contender.prepare(self._inputs) if contender.prepare else self._own(image, plan)
            first = self._output(ready.call(), copy=True)
        except Exception as e:  # whatever a library raises for a shape that it does not take
            reason = first_line(e)
            torch.cuda.synchronize()  # raises where the context is broken
            return Checked(reason=reason)
        found = self._sample.check(first * ready.unit, contender.same_codes)
        if name != OWN and not (found.finite and found.error is not None and found.error <= _WRONG):
            return Checked(found.error, finite=found.finite, reason=f"its output is wrong: {_how_wrong(found)}")
        if timed:
            self._entries[name] = self._capture(ready, first)
        return found

    def time(self, rounds: int | None) -> Timed:
        """Replay everyone's graph once per round; None takes as many rounds as the replays' durations ask for."""
        count = rounds or rounds_for([e.replay_us for e in self._entries.values()])
        for entry in self._entries.values():
            _poison(entry.out)
        marks = queue_in_turns({name: entry.graph for name, entry in self._entries.items()}, count)
        clocks = self._clocks()  # while the GPU is still at it
        torch.cuda.synchronize()
        calls = {name: entry.calls for name, entry in self._entries.items()}
        changed = [name for name in self._entries if not self._unchanged(name)]
        return Timed(call_us(marks, calls), calls, changed, clocks)

    def _own(self, image: KernelImage, plan: Launch) -> Ready:
        """greenfast's kernel on torch's memory and stream."""
        assert self._inputs is not None
        inputs, kernel = self._inputs, self._gpu.load(image)
        buffers = {**inputs.codes, **{f"{name}_scale": s for name, s in inputs.scales.items()}}
        buffers["v_t"] = transposed_values(inputs.codes["v"])
        out = torch.empty(inputs.codes["q"].shape, dtype=torch.float16, device="cuda")
        buffers["out"] = out
        _poison(out)

        def argument(a: Any) -> Any:
            if isinstance(a, TensorMap):
                return tensor_map(a, buffers[a.buffer].data_ptr())
            return buffers[a].data_ptr() if isinstance(a, str) else a

        torch.cuda.synchronize()
        arguments = [argument(a) for a in plan.args]
        config = LaunchConfig(grid=plan.grid, block=image.block, shmem_size=image.dynamic_smem_bytes)
        shaped = inputs.by_batch(out)

        # The buffers are an argument so that they live as long as the call.
        def call(keep: Any = buffers) -> Tensor:
            stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
            launch(stream, config, kernel, *arguments)
            return shaped

        return Ready(call)

    def _output(self, out: Tensor, *, copy: bool = False) -> Tensor:
        """An output as float32 (heads, length, head_dim)."""
        return out.to(torch.float32, copy=copy).flatten(0, 1)

    def _capture(self, ready: Ready, checked: Tensor) -> _Entry:
        found = capture(ready.call)
        return _Entry(ready, found.graph, found.out, checked, found.calls, found.replay_us)

    def _unchanged(self, name: str) -> bool:
        """Whether the timed launches left what was checked; the outputs were poisoned before them."""
        entry = self._entries[name]
        found = self._output(entry.out)
        if name == OWN:
            return torch.equal(found, entry.checked)
        return bool((found - entry.checked).norm() <= _CHANGED * entry.checked.norm())  # NaN is not

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


def _how_wrong(found: Checked) -> str:
    return "not every element is finite" if not found.finite else f"relative error {found.error:.3g}"


def _poison(out: Tensor) -> None:
    """Overwrite an output with 0xFF: NaN in half, bfloat16 and E4M3."""
    out.view(torch.uint8).fill_(255)
