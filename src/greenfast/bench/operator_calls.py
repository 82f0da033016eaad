"""The operator measured on a GPU: device time beside PyTorch's own backends, host time, and errors."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from greenfast.bench.contenders import CONTENDERS, first_line, make_inputs, torch_call
from greenfast.bench.graphs import call_us, capture, queue_in_turns, rounds_for
from greenfast.bench.operator_record import ErrorRow, HostRow, SpeedRow
from greenfast.bench.peer_session import SMALL, grid_shape
from greenfast.bench.peer_session import library_versions as library_versions
from greenfast.device.identity import launch_facts
from greenfast.numerics.attention import attention as exact_attention
from greenfast.operator import cuda
from greenfast.operator.sdpa import attention, quantize, sdpa
from greenfast.spec.arch import Target
from greenfast.spec.errors import MachineError, WrongResultError
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.kernel import KernelSource

HEAD_DIMS, LENGTHS = (64, 128, 256), (512, 1024, 2048, 4096, 16384)
MISSION = next(dict(shape.dims) for shape in SMALL if shape.name == "mission")
_ERROR_DIMS = tuple({"B": 1, "H": 8, "S": 2048, "D": d} for d in (64, 128))
#: An output that is further from exact attention is wrong, not rounded: no times of it are recorded.
_WRONG = 0.2
_BATCHES, _BATCH = 60, 50
#: What the operator is timed on.
TARGET = Target("sm_90a")

Call = Callable[[], Any]


def shapes() -> Iterator[dict[str, int]]:
    """Dimensions of every shape that is timed; CAUSAL=1 with a mask."""
    for head_dim in HEAD_DIMS:
        for length in LENGTHS:
            yield from (dict(grid_shape(head_dim, length, causal).dims) for causal in (False, True))


def require_gpu() -> None:
    """Raise MachineError unless PyTorch shows a GPU that the operator has kernels for."""
    if not torch.cuda.is_available():
        raise MachineError(f"torch {torch.__version__} shows no GPU, which timing the operator needs")
    if cuda.target_of(torch.cuda.current_device()).name != TARGET.name:
        raise MachineError(f"{torch.cuda.get_device_name()}: the operator is timed on Hopper GPUs alone")


def timed_kernels() -> dict[str, tuple[KernelSource, LaunchFacts]]:
    """Every kernel that ``speed`` times with its launch, by its step and shape. Needs no GPU."""
    found: dict[str, tuple[KernelSource, LaunchFacts]] = {}
    for dims in shapes():
        x = torch.empty(dims["B"], dims["H"], dims["S"], dims["D"], dtype=torch.bfloat16, device="meta")
        name = ", ".join(f"{key}={value}" for key, value in dims.items())
        for precision in ("fp8", "int8"):
            config = cuda.sdpa_config(TARGET, x.shape[3], x.dtype, precision, dims.get("CAUSAL", 0))
            kept = replace(config, quantizes_queries=False)
            steps = {
                "quantize": cuda.quantize_step(x, x, x, kept),
                "attention": cuda.attention_step(kept, cuda.sizes_of(x.shape, x.shape), 1.0, TARGET),
                "sdpa": cuda.sdpa_steps(x, x, x, config, 1.0, TARGET)[1],
            }
            found |= {
                f"{step} {precision}, {name}": (s.source, launch_facts(s.source, s.launch, dims))
                for step, s in steps.items()
            }
    return found


def _tensors(dims: Mapping[str, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (dims["B"], dims["H"], dims["S"], dims["D"])
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in "qkv")
    return q, k, v


def speed(dims: Mapping[str, int]) -> list[SpeedRow]:
    """Everyone on one shape, in turns. Raises WrongResultError where greenfast's output is not right."""
    q, k, v = _tensors(dims)
    causal = bool(dims.get("CAUSAL", 0))
    codes = quantize(q, k, v)
    moved = torch.empty(3 * 3 * q.numel(), dtype=torch.uint8, device="cuda")
    half, other_half = moved[: len(moved) // 2], moved[len(moved) - len(moved) // 2 :]
    calls: dict[str, Call] = {
        "sdpa fp8": lambda: sdpa(q, k, v, is_causal=causal),
        "sdpa int8": lambda: sdpa(q, k, v, is_causal=causal, precision="int8"),
        "attention fp8": lambda: attention(codes, is_causal=causal),
        "quantize fp8": lambda: quantize(q, k, v),
        "copy": lambda: half.copy_(other_half),
        "torch flash": torch_call(SDPBackend.FLASH_ATTENTION, q, k, v, causal),
        "torch cudnn": torch_call(SDPBackend.CUDNN_ATTENTION, q, k, v, causal),
    }
    wanted = calls["torch flash"]().float()
    for name in ("sdpa fp8", "sdpa int8", "attention fp8"):
        error = float((calls[name]().float() - wanted).norm() / wanted.norm())
        if not error < _WRONG:
            raise WrongResultError(
                f"{name} on {dict(dims)}: error {error:.3g} beside torch's bfloat16; nothing is timed"
            )
    captured = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        captured[name] = capture(call)
    rounds = rounds_for([c.replay_us for c in captured.values()])
    marks = queue_in_turns({name: c.graph for name, c in captured.items()}, rounds)
    torch.cuda.synchronize()
    rows = []
    for name, per_call in call_us(marks, {name: c.calls for name, c in captured.items()}).items():
        p25, p50, p75 = statistics.quantiles(per_call, n=4)
        rows.append(
            SpeedRow(
                call=name, dims=dict(dims), median_us=p50, p25_us=p25, p75_us=p75, rounds=len(per_call),
                calls=captured[name].calls,
            )
        )  # fmt: skip
    del captured
    torch.cuda.empty_cache()
    return rows


def host() -> list[HostRow]:
    """Eager calls on mission, one kind after the other in each round; the GPU is waited for between batches."""
    q, k, v = _tensors(MISSION)
    codes = quantize(q, k, v)
    calls: dict[str, Call] = {
        "sdpa fp8": lambda: sdpa(q, k, v),
        "attention fp8": lambda: attention(codes),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-5, _BATCHES):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(_BATCH):
                call()
            taken = (time.perf_counter() - start) / _BATCH * 1e6
            torch.cuda.synchronize()
            if turn >= 0:
                times[name].append(taken)
    return [
        HostRow(
            call=name, dims=MISSION, median_us=statistics.median(t), least_us=min(t), batches=_BATCHES, calls=_BATCH
        )
        for name, t in times.items()
    ]  # fmt: skip


def errors(kind: str) -> list[ErrorRow]:
    """Everyone's error on inputs of a kind: greenfast's precisions, with what they do against outliers and without."""
    return [row for dims in _ERROR_DIMS for row in _errors_on(dims, kind)]


def _errors_on(dims: Mapping[str, int], kind: str) -> Iterator[ErrorRow]:
    inputs = make_inputs(dims, 1, kind, "cuda")
    values = [inputs.values[name].double() for name in "qkv"]
    exact = inputs.by_batch(exact_attention(values[0], values[1], values[2], 1.0 / math.sqrt(dims["D"]), None))
    q, k, v = (inputs.by_batch(inputs.values[name].bfloat16()) for name in "qkv")
    plain = {"subtract_key_mean": False, "rotate": False}

    def on_codes(**choices: Any) -> Call:
        return lambda: attention(quantize(q, k, v, **choices))

    own: dict[str, Call] = {
        "sdpa fp8": lambda: sdpa(q, k, v),
        "sdpa int8": lambda: sdpa(q, k, v, precision="int8"),
        "fp8, a scale for each channel of V": on_codes(value_scales="channel"),
        "fp8, not rotated, no mean": on_codes(**plain),
        "int8, not rotated, no mean": on_codes(precision="int8", **plain),
    }
    others = {c.label: _contender_call(c, inputs) for c in CONTENDERS.values() if c.prepare is not None}
    for name, call in (own | others).items():
        error, reason = None, ""
        try:
            error = float((call().double() - exact).norm() / exact.norm())
        except Exception as e:  # whatever a library raises that is not installed or does not take the shape
            if name in own:
                raise
            reason = first_line(e)
        yield ErrorRow(call=name, inputs=kind, dims=dict(dims), error=error, reason=reason)


def _contender_call(contender: Any, inputs: Any) -> Call:
    def call() -> Tensor:
        ready = contender.prepare(inputs)
        found: Tensor = ready.call().float() * ready.unit
        return found

    return call
