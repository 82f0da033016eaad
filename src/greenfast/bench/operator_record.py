"""The operator beside PyTorch's own: what ``greenfast bench --operator`` records."""

from __future__ import annotations

import msgspec

from greenfast.judge.record import GitState, TimedKernel
from greenfast.spec.facts import DeviceInfo


class _Data(msgspec.Struct, frozen=True, kw_only=True):
    pass


class SpeedRow(_Data, frozen=True, kw_only=True):
    """One call on one shape, in a replayed graph.

    call: "sdpa fp8" and "sdpa int8", quantization included; "attention fp8", on codes; "quantize fp8", the codes
    alone; "copy", of as many bytes; "torch flash" and "torch cudnn", PyTorch's bfloat16 backends. clocks: right after,
    those of ``runtime.device.Gpu.clocks``. median_us, p25_us, p75_us: per call, over
    ``rounds`` replays of graphs of ``calls`` calls, everyone in turns.
    """

    call: str
    dims: dict[str, int]
    median_us: float
    p25_us: float
    p75_us: float
    rounds: int
    calls: int
    clocks: dict[str, float] = {}


class HostRow(_Data, frozen=True, kw_only=True):
    """Host time of one eager call in microseconds: median and least of ``batches`` batches of ``calls`` calls."""

    call: str
    dims: dict[str, int]
    median_us: float
    least_us: float
    batches: int
    calls: int


#: Inputs that errors are stated for, and how they differ from N(0, 1).
INPUTS = {
    "normal": "N(0, 1)",
    "uniform": "all of Q, K and V from 0 to 1",
    "outliers": "with N(0, 100) added to one number in a thousand",
    "realistic": "of rank 16 with noise, and a bias in 5 % of the channels",
    "biased keys": "with N(0, 100) for each channel added to all keys",
    "constant queries": "with 10 added to all of Q",
    "logits 4": "Q and K times 2, so that scores have a deviation of 4",
    "logits 8": "Q and K times 2.8, so that scores have a deviation of 8",
    "loud key": "with the first key times 100",
    "tiny": "K and V times 1e-20, Q times 1e20",
}


class ErrorRow(_Data, frozen=True, kw_only=True):
    """Relative (Frobenius) error of an output against float64 attention on the inputs before any rounding.

    inputs: a key of INPUTS. reason: why there is no error, such as a library that is not installed.
    """

    call: str
    inputs: str
    dims: dict[str, int]
    error: float | None = None
    reason: str = ""


class OperatorRecord(_Data, frozen=True, kw_only=True):
    """A run on one GPU.

    kernels: each kernel that was timed, by what it is for; see ``operator.measure.timed_kernels``.
    """

    created: str
    command: str
    package_version: str
    git: GitState
    device: DeviceInfo
    environment: dict[str, str]
    kernels: dict[str, TimedKernel]
    speed: list[SpeedRow]
    host: list[HostRow]
    errors: list[ErrorRow]
