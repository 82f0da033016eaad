"""The operator beside PyTorch's own: what ``greenfast bench --operator`` records."""

from __future__ import annotations

import msgspec

from greenfast.spec.record import DeviceInfo, GitState


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


class ErrorRow(_Data, frozen=True, kw_only=True):
    """Relative (Frobenius) error of an output against float64 attention on the inputs before any rounding.

    inputs: "normal", "outliers" or "realistic", as ``families.contenders.make_inputs`` draws them. reason: why there
    is no error, such as a library that is not installed.
    """

    call: str
    inputs: str
    dims: dict[str, int]
    error: float | None = None
    reason: str = ""


class OperatorRecord(_Data, frozen=True, kw_only=True):
    """A run on one GPU.

    kernels: hash of each kernel that was timed, by what it is for; see ``operator.measure.kernel_hashes``.
    """

    created: str
    command: str
    package_version: str
    git: GitState
    device: DeviceInfo
    environment: dict[str, str]
    kernels: dict[str, str]
    speed: list[SpeedRow]
    host: list[HostRow]
    errors: list[ErrorRow]
