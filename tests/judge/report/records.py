"""Synthetic records for the report tests; every number in them is distinct, so that a swapped column shows."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from greenfast.judge.record_schema import (
    Build,
    CachedTiming,
    CorrectnessRow,
    ErrorStats,
    GateResult,
    GitState,
    ParityRow,
    Record,
    Side,
    SpeedupRow,
    TimingRow,
)
from greenfast.spec.facts import DeviceInfo, Resources

DIMS = {
    "small": {"B": 1, "H": 1, "S": 32, "D": 64},
    "mission": {"B": 1, "H": 8, "S": 512, "D": 64},
    "long": {"B": 1, "H": 8, "S": 2048, "D": 64},
}


def stats(scale: float) -> ErrorStats:
    return ErrorStats(
        max_abs_err=0.05 * scale,
        mean_abs_err=0.003 * scale,
        max_rel_err=0.4 * scale,
        relative_error=0.00071 * scale,
        pct_bad=0.25 * scale,
    )


def correctness_row(shape: str, seed: int, *, scale: float = 1.0, **changes: Any) -> CorrectnessRow:
    fields: dict[str, Any] = {
        "shape": shape,
        "dims": DIMS[shape],
        "seed": seed,
        "inputs_digest": f"digest-{shape}-{seed}",
        "error": stats(scale),
        "format_error": stats(0.8 * scale),
        "kernel_error": stats(0.5 * scale),
        "bound_ratio": 0.31 * scale,
        "gates": {"max_abs_err": True, "pct_bad": True},
    }
    return CorrectnessRow(**(fields | changes))


def timing_row(shape: str = "mission", seed: int = 0, p50_us: float = 100.0, **changes: Any) -> TimingRow:
    rng = np.random.default_rng(seed)
    blocks = p50_us * np.exp(0.002 * rng.standard_normal((3, 21)) + 0.002 * rng.standard_normal((3, 1)))
    fields: dict[str, Any] = {
        "shape": shape,
        "dims": DIMS[shape],
        "seed": seed,
        "method": "graph slope",
        "cache": "warm",
        "warmup_iters": 100,
        "timed_iters": 500,
        "discarded_iters": 7,
        "p50_us": p50_us,
        "p90_us": 1.02 * p50_us,
        "mean_us": 1.01 * p50_us,
        "std_us": 0.0202 * p50_us,
        "iters_per_sec": 1e6 / (1.01 * p50_us) if p50_us else 0.0,
        "block_medians_us": blocks.tolist(),
    }
    return TimingRow(**(fields | changes))


def speedup_row(shape: str = "mission", **changes: Any) -> SpeedupRow:
    fields: dict[str, Any] = {
        "shape": shape,
        "cache": "warm",
        "speedup": 1.8291,
        "ci_low": 1.8104,
        "ci_high": 1.8507,
        "confidence": 0.95,
        "noise_floor": 0.0061,
        "required": 1.15,
        "gated": True,
        "verdict": "FAST",
        "processes": 3,
        "blocks": 21,
    }
    return SpeedupRow(**(fields | changes))


def build(entry: str, registers: int, dynamic_smem: int, counters: dict[str, int], shape: str = "mission") -> Build:
    return Build(
        entry=entry,
        source=f"{entry}.cu",
        dims=DIMS[shape],
        arch="sm_90a",
        options=["-std=c++17", "--use_fast_math"],
        compiler="NVRTC 13.0.88",
        kernel_hash=f"hash-{entry}",
        code_hash=f"code-{entry}",
        compile_ms=812.0,
        from_cache=False,
        resources=Resources(
            registers=registers,
            static_smem_bytes=512,
            dynamic_smem_bytes=dynamic_smem,
            stack_bytes=16,
            spill_store_bytes=4,
            spill_load_bytes=8,
        ),
        machine_code=counters,
    )


def gates(correctness: str = "PASS", performance: str = "PASS") -> list[GateResult]:
    return [
        GateResult(
            gate="RESOURCES",
            status="PASS",
            summary="within budget",
            checks=[("registers", "<= 128", "84", "PASS"), ("SMEM", "<= 48 KB", "37.1 KB", "PASS")],
        ),
        GateResult(
            gate="CORRECTNESS",
            status=correctness,  # type: ignore[arg-type]
            summary="6 of 6 rows hold",
            checks=[("max_abs_err", "<= 0.06", "0.0517", "PASS")],
        ),
        GateResult(
            gate="PERFORMANCE",
            status=performance,  # type: ignore[arg-type]
            summary="mission is fast enough",
            checks=[("mission", ">= 1.15x", "1.829x", "PASS")],
        ),
        GateResult(gate="EVIDENCE", status="PASS", summary="hmma rose", checks=[("hmma", ">= 32", "64", "PASS")]),
    ]


def side(name: str, *, p50_us: float, registers: int, smem: int, scale: float, hmma: int, **changes: Any) -> Side:
    fields: dict[str, Any] = {
        "variant": name,
        "toggles": {"USE_CP_ASYNC": 1, "USE_WMMA_PV": int(name == "stage2")},
        "builds": [build(f"sdpa_{name}", registers, smem, {"hmma": hmma, "cp_async": 12})],
        "correctness": [correctness_row(s, k, scale=scale) for s in ("small", "mission") for k in range(3)],
        "timing": [timing_row("mission", k, p50_us + k) for k in range(3)],
    }
    return Side(**(fields | changes))


def record(**changes: Any) -> Record:
    """A complete, passing record of stage1 -> stage2 on an H100."""
    fields: dict[str, Any] = {
        "created": "2030-01-02T03:04:05Z",
        "task": "fp8_sdpa",
        "format": "int8",
        "arch": "sm_90a",
        "command": "greenfast judge fp8_sdpa --candidate stage2",
        "package_version": "0.1.0",
        "baseline": side("stage1", p50_us=1200.8, registers=88, smem=30413, scale=1.0, hmma=32),
        "candidate": side("stage2", p50_us=656.4, registers=84, smem=37478, scale=1.1, hmma=64),
        "gates": gates(),
        "parity": [
            ParityRow(shape="small", seed=0, identical=True, different_elements=0, max_abs_diff=0.0),
            ParityRow(shape="mission", seed=0, identical=False, different_elements=321, max_abs_diff=0.00049),
        ],
        "speedups": [speedup_row()],
        "decision": "MERGE",
        "reasons": ["mission is 1.829x as fast", "registers fell", "a third reason", "a fourth reason"],
        "git": GitState(sha="0123456789abcdef0123", branch="main", dirty=True),
        "device": DeviceInfo(
            kind="gpu",
            name="NVIDIA H100",
            compute_capability="9.0",
            cuda_version="13.0",
            driver="580.95",
            sm_count=132,
            sm_clock_mhz=1980,
            memory_bytes=80 * 2**30,
            l2_bytes=50 * 2**20,
        ),
        "environment": {"python": "3.11.9"},
        "clocks": {"sm_mhz_start": 1755.0},
    }
    return Record(**(fields | changes))


def quoting_record(**changes: Any) -> Record:
    """The same comparison on an emulator, which quotes what the H100 measured."""
    measured = record()
    assert measured.device is not None
    quoted = CachedTiming(
        path="evidence/h100/stage2/record.json",
        sha256="ab" * 32,
        created=measured.created,
        git=measured.git,
        device=measured.device,
        command=measured.command,
        speedups=measured.speedups,
    )
    fields: dict[str, Any] = {
        name: msgspec.structs.replace(getattr(measured, name), timing=[]) for name in ("baseline", "candidate")
    }
    emulator = DeviceInfo(kind="emulated", name="PTX emulator", compute_capability="", cuda_version="", driver="")
    fields |= {"created": "2031-01-01T00:00:00Z", "device": emulator, "speedups": [], "clocks": {}, "quoted": quoted}
    return record(**(fields | changes))


def pending_record(**changes: Any) -> Record:
    """The same comparison on a machine without a GPU: built and checked, nothing run."""
    no_gpu = "no GPU on this machine"
    found = [g for g in gates() if g.gate in ("RESOURCES", "EVIDENCE")]
    found += [GateResult(gate=name, status="PENDING", summary=no_gpu) for name in ("CORRECTNESS", "PERFORMANCE")]
    fields: dict[str, Any] = {
        "baseline": side("stage1", p50_us=1, registers=88, smem=30413, scale=1, hmma=32, correctness=[], timing=[]),
        "candidate": side("stage2", p50_us=1, registers=84, smem=37478, scale=1, hmma=64, correctness=[], timing=[]),
        "gates": found,
        "parity": [],
        "speedups": [],
        "decision": "PENDING",
        "reasons": ["CORRECTNESS is PENDING: " + no_gpu],
        "device": None,
        "clocks": {},
    }
    return record(**(fields | changes))
