"""A synthetic record of a kernel beside its peers; every number in it is distinct, so that a swapped column shows."""

from __future__ import annotations

from typing import Any

from greenfast.judge.peers import OWN, PeerAccuracyRow, PeerContender, PeerRow
from greenfast.judge.record import GateResult, PeersRecord, Side
from tests.judge.report.records import build, record

CONTENDERS = [
    PeerContender(name=OWN, label="greenfast FP8", precision="fp8", version="greenfast 0.1.0"),
    PeerContender(name="fa3", label="FA3 FP8", precision="fp8", version="fa3-fwd 0.0.3"),
    PeerContender(name="cudnn", label="cuDNN FP8", precision="fp8", missing="no module cudnn"),
    PeerContender(name="torch_flash", label="torch flash bf16", precision="bf16", version="torch 2.11.0"),
]
GRID = {
    "d64_s1024": {"B": 16, "H": 32, "S": 1024, "D": 64},
    "d64_s1024_causal": {"B": 16, "H": 32, "S": 1024, "D": 64, "CAUSAL": 1},
}
SMALL = {"mission": {"B": 1, "H": 8, "S": 512, "D": 64}}


def row(shape: str, contender: str, us: float | None, **changes: Any) -> PeerRow:
    dims = {**GRID, **SMALL}[shape]
    fields: dict[str, Any] = {
        "shape": shape,
        "dims": dims,
        "grid": shape in GRID,
        "contender": contender,
        "cache": "beyond L2" if shape in GRID else "warm",
        "error": 0.0531,
        "kernel_error": 0.0212 if contender == OWN else None,
    }
    if us is not None:
        fields |= {"median_us": us, "p25_us": 0.98 * us, "p75_us": 1.03 * us, "rounds": 31, "calls": 13,
                   "tflops": 1e5 / us, "clocks": {"sm_mhz": 1755.0}}  # fmt: skip
    return PeerRow(**(fields | changes))


def rows() -> list[PeerRow]:
    absent = {"reason": "no module cudnn", "error": None}
    return [
        row("d64_s1024", OWN, 100.0),
        row("d64_s1024", "fa3", 125.0),
        row("d64_s1024", "cudnn", None, **absent),
        row("d64_s1024", "torch_flash", 80.0),
        row("d64_s1024_causal", OWN, 200.0),
        row("d64_s1024_causal", "fa3", 160.0),
        row("d64_s1024_causal", "cudnn", None, **absent),
        row("d64_s1024_causal", "torch_flash", None, reason="RuntimeError: out of luck"),
        row("mission", OWN, 5.5),
        row("mission", "fa3", 11.0),
        row("mission", "cudnn", None, **absent),
        row("mission", "torch_flash", 9.9),
    ]


def accuracy() -> list[PeerAccuracyRow]:
    found = []
    for n, kind in enumerate(("normal", "outliers")):
        for m, contender in enumerate((OWN, "fa3")):
            found.append(
                PeerAccuracyRow(
                    series="inputs", inputs=kind, dims={"B": 1, "H": 8, "S": 2048, "D": 128}, contender=contender,
                    sampled=2048, error=0.051 + 0.001 * n + 0.0003 * m, kernel_error=0.02,
                )
            )  # fmt: skip
    for n, s in enumerate((2048, 131072)):
        for m, contender in enumerate((OWN, "fa3")):
            found.append(
                PeerAccuracyRow(
                    series="length", inputs="normal", dims={"B": 1, "H": 1, "S": s, "D": 128}, contender=contender,
                    sampled=512, error=0.05, kernel_error=0.021 + 0.003 * n + 0.01 * m,
                )
            )  # fmt: skip
    return found


def peers_record(**changes: Any) -> PeersRecord:
    base = record()
    fields: dict[str, Any] = {
        "created": base.created,
        "task": "fp8_attention",
        "format": "e4m3",
        "arch": "sm_90a",
        "command": "greenfast bench fp8_attention --peers",
        "package_version": base.package_version,
        "gates": [GateResult(gate="CORRECTNESS", status="PASS", summary="all of them")],
        "git": base.git,
        "device": base.device,
        "side": Side(variant="hopper", toggles={"USE_WGMMA": 1}, builds=[build("fp8_attention", 168, 230000, {})]),
        "contenders": CONTENDERS,
        "rows": rows(),
        "accuracy": accuracy(),
    }
    return PeersRecord(**(fields | changes))
