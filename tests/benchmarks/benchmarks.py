"""Synthetic records of comparisons; numbers in them are distinct, so that a swapped column shows."""

from __future__ import annotations

from typing import Any

from benchmarks.records import AccuracyRow, BackendFacts, Benchmark, HostRow, Row, SpeedupPair
from benchmarks.registry import KERNEL
from benchmarks.serving_cases import cases, flops
from greenfast.judge.record_schema import GateResult, Side, TimedKernel
from greenfast.spec.facts import LaunchFacts
from tests.judge.report.records import build, record

BACKENDS = [
    BackendFacts(name=KERNEL, label="greenfast FP8", precision="fp8", version="greenfast 0.1.0"),
    BackendFacts(name="fa3", label="FA3 FP8", precision="fp8", version="fa3-fwd 0.0.3"),
    BackendFacts(name="cudnn", label="cuDNN FP8", precision="fp8", missing="no module cudnn"),
    BackendFacts(name="torch_flash", label="torch flash bf16", precision="bf16", version="torch 2.11.0"),
]
VERSUS = SpeedupPair(own=KERNEL, baselines=["fa3", "cudnn"], title="greenfast / better FP8 peer")
GRID = {
    "d64_s1024": {"B": 16, "H": 32, "S": 1024, "D": 64},
    "d64_s1024_causal": {"B": 16, "H": 32, "S": 1024, "D": 64, "CAUSAL": 1},
}
SMALL = {"mission": {"B": 1, "H": 8, "S": 512, "D": 64}}


def row(shape: str, backend: str, us: float | None, **changes: Any) -> Row:
    dims = {**GRID, **SMALL}[shape]
    fields: dict[str, Any] = {
        "shape": shape,
        "dims": dims,
        "grid": shape in GRID,
        "backend": backend,
        "cache": "beyond L2" if shape in GRID else "warm",
        "error": 0.0531,
        "kernel_error": 0.0212 if backend == KERNEL else None,
    }
    if us is not None:
        fields |= {"median_us": us, "p25_us": 0.98 * us, "p75_us": 1.03 * us, "rounds": 31, "calls": 13,
                   "tflops": 1e5 / us, "clocks": {"sm_mhz": 1755.0}}  # fmt: skip
    return Row(**(fields | changes))


def rows() -> list[Row]:
    absent = {"reason": "no module cudnn", "error": None}
    return [
        row("d64_s1024", KERNEL, 100.0),
        row("d64_s1024", "fa3", 125.0),
        row("d64_s1024", "cudnn", None, **absent),
        row("d64_s1024", "torch_flash", 80.0),
        row("d64_s1024_causal", KERNEL, 200.0),
        row("d64_s1024_causal", "fa3", 160.0),
        row("d64_s1024_causal", "cudnn", None, **absent),
        row("d64_s1024_causal", "torch_flash", None, reason="RuntimeError: out of luck"),
        row("mission", KERNEL, 5.5),
        row("mission", "fa3", 11.0),
        row("mission", "cudnn", None, **absent),
        row("mission", "torch_flash", 9.9),
    ]


def accuracy() -> list[AccuracyRow]:
    found = []
    for n, kind in enumerate(("normal", "outliers")):
        for m, backend in enumerate((KERNEL, "fa3")):
            found.append(
                AccuracyRow(
                    series="inputs", inputs=kind, dims={"B": 1, "H": 8, "S": 2048, "D": 128}, backend=backend,
                    sampled=2048, error=0.051 + 0.001 * n + 0.0003 * m, kernel_error=0.02,
                )
            )  # fmt: skip
    for n, s in enumerate((2048, 131072)):
        for m, backend in enumerate((KERNEL, "fa3")):
            found.append(
                AccuracyRow(
                    series="length", inputs="normal", dims={"B": 1, "H": 1, "S": s, "D": 128}, backend=backend,
                    sampled=512, error=0.05, kernel_error=0.021 + 0.003 * n + 0.01 * m,
                )
            )  # fmt: skip
    return found


def peers_record(**changes: Any) -> Benchmark:
    base = record()
    fields: dict[str, Any] = {
        "created": base.created,
        "task": "fp8_attention",
        "format": "e4m3",
        "arch": "sm_90a",
        "command": "python -m benchmarks peers",
        "package_version": base.package_version,
        "gates": [GateResult(gate="CORRECTNESS", status="PASS", summary="all of them")],
        "git": base.git,
        "device": base.device,
        "side": Side(variant="hopper", toggles={"USE_WGMMA": 1}, builds=[build("fp8_attention", 168, 230000, {})]),
        "comparison": "peers",
        "what": "fp8_attention: hopper",
        "own": [KERNEL],
        "versus": [VERSUS],
        "backends": BACKENDS,
        "rows": rows(),
        "accuracy": accuracy(),
    }
    return Benchmark(**(fields | changes))


TIMED = TimedKernel(
    arch="sm_90a",
    options=["-std=c++17"],
    compiler="NVRTC 13.0.88",
    kernel_hash="hash-sdpa",
    code_hash="code-sdpa",
    launch=LaunchFacts(
        dims=GRID["d64_s1024"], grid=(132, 1, 1), block=(384, 1, 1), dynamic_smem_bytes=230000, cluster=(1, 1, 1),
        early=False, arguments="buffer 0; int32 1024",
    ),
)  # fmt: skip
OPERATOR = {
    "sdpa_fp8": 100.0, "sdpa_int8": 125.0, "quantize_fp8": 20.0, "copy": 15.0, "attention_fp8": 80.0,
    "torch_flash": 300.0, "torch_cudnn": 150.0,
}  # fmt: skip
OPERATOR_DIMS = {"B": 1, "H": 16, "S": 4096, "D": 128}


def operator_record(**clocks: float) -> Benchmark:
    baselines = ["torch_flash", "torch_cudnn"]
    shapes = {"d128_s4096": OPERATOR_DIMS, "d128_s4096_causal": {**OPERATOR_DIMS, "CAUSAL": 1}}
    return peers_record(
        comparison="operator",
        what="greenfast.sdpa",
        command="python -m benchmarks sdpa",
        own=["sdpa_fp8", "sdpa_int8"],
        versus=[
            SpeedupPair(own=f"sdpa_{x}", baselines=baselines, title=f"sdpa {x} / best bf16")
            for x in ("fp8", "int8")
        ],
        backends=[
            BackendFacts(name=name, label=name.replace("_", " "), precision="fp8") for name in [*OPERATOR, "fa3"]
        ],
        rows=[
            Row(
                shape=shape, dims=dims, grid=True, backend=name, cache="beyond L2", median_us=us, p25_us=us,
                p75_us=us, tflops=None if name in ("copy", "quantize_fp8") else 1e5 / us, rounds=9, calls=1,
            )
            for shape, dims in shapes.items()
            for name, us in OPERATOR.items()
        ],
        host=[HostRow(backend="torch_flash", dims=OPERATOR_DIMS, median_us=16.0, least_us=15.0, batches=2, calls=3)],
        accuracy=[
            AccuracyRow(
                series="inputs", inputs=kind, dims=OPERATOR_DIMS, backend="sdpa_fp8", sampled=4096, error=error
            )
            for kind, error in (("normal", 0.05), ("tiny", 0.06))
        ],
        inputs={"normal": "N(0, 1)", "tiny": "K and V times 1e-20"},
        clocks=clocks,
        side=None,
        kernels={"sdpa fp8": TIMED},
    )  # fmt: skip


SERVED = {KERNEL: 100.0, "vllm_fa3": 150.0, "vllm_fa3_bf16": 180.0}


def serving_record(**changes: Any) -> Benchmark:
    """A third of the cases: greenfast takes 100 us everywhere, FlashAttention-3 150, in bfloat16 180."""
    of_group: dict[str, dict[str, float]] = {
        "decode": SERVED | {"plan": 3.0}, "prefill": SERVED, "append": {"append": 10.0, "copy": 8.0},
        "read": {"read_sum": 250.0, "read_max": 300.0},
    }  # fmt: skip
    labels = {KERNEL: "greenfast FP8", "vllm_fa3": "FA3 FP8 (vLLM)", "vllm_fa3_bf16": "FA3 bf16 (vLLM)"}
    names = [*SERVED, "plan", "append", "copy", "read_sum", "read_max", "kvcache"]
    fields: dict[str, Any] = {
        "comparison": "serving",
        "what": "attention over a paged FP8 cache",
        "command": "python -m benchmarks serving --quick",
        "own": [KERNEL, "append"],
        "versus": [
            SpeedupPair(own=KERNEL, baselines=["vllm_fa3"], title=f"{g}: greenfast / FA3 FP8", group=f"{g}_")
            for g in ("decode", "prefill")
        ],
        "backends": [
            BackendFacts(name=n, label=labels.get(n, n), precision="bf16" if n.endswith("bf16") else "fp8")
            for n in names
        ] + [BackendFacts(name="fa3", label="FA3 FP8", precision="fp8", missing="no fa3-fwd")],
        "rows": [
            Row(
                shape=case.shape.name, dims=case.shape.dims, grid=case.group in ("decode", "prefill"), backend=name,
                cache="beyond L2", median_us=us, p25_us=us, p75_us=us, rounds=9, calls=3,
                tflops=None if name in ("plan", "copy", "read_sum", "read_max")
                else flops(case.shape.dims) / us / 1e6,
            )
            for case in cases(quick=True) for name, us in of_group[case.group].items()
        ] + [
            Row(
                shape="decode_32x8_d128_1x8192", dims=cases(quick=True)[0].shape.dims, grid=True, backend="fa3",
                cache="beyond L2", reason="no fa3-fwd",
            )
        ],
        "host": [HostRow(backend="kvcache", dims={"B": 8}, median_us=14.5, least_us=13.0, batches=60, calls=50)],
        "accuracy": [],
        "side": None,
    }  # fmt: skip
    return peers_record(**(fields | changes))
