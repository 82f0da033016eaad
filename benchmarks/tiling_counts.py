"""Add the estimate from the emulator's counts to the T4 files of ``hopper_tilings``, for ``tuning_cache``.

    python -m benchmarks tiling_counts FILE [FILE ...]

Needs no GPU. Tilings that differ in their stages alone execute the same work, so one of each is counted, on one head
of 512 queries and keys; with a mask and without. The estimate is ``greenfast.evolve.stages.estimate``'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import make_parser
from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import run_grid
from greenfast.evolve.stages import estimate
from greenfast.evolve.t4 import ESTIMATE, PIPE
from greenfast.judge.store import read_json, to_json, write_whole
from greenfast.kernels.attention import hopper, tuning_space
from tasks.fp8_attention import problem as attention

_LENGTH = 512
_SAME = "STAGES"  # changes no count but those of waits
Key = tuple[tuple[str, int], ...]


def estimate_tiling(toggles: Mapping[str, int], head_dim: int, causal: bool) -> tuple[float, str]:
    """Estimate the seconds of one launch; return them with the busiest pipe."""
    dims = {"B": 1, "H": 1, "S": _LENGTH, "D": head_dim, **({"CAUSAL": 1} if causal else {})}
    source, launch = tuning_space.kernel(toggles, "e4m3", dims), tuning_space.launch(toggles, "e4m3", dims)
    case = attention.make_case(dims, 0, "e4m3")
    ptx = to_ptx(source, hopper.TARGET, assemble=False)
    result = run_grid(ptx, source.entry, source.block, source.dynamic_smem_bytes, launch, case.inputs, case.outputs)
    return estimate({"small": result.counts.record()}, hopper.TARGET, "e4m3")


def key_of(toggles: Mapping[str, int]) -> Key:
    """Return the part of a tiling that decides its counts."""
    return tuple(sorted((name, value) for name, value in toggles.items() if name != _SAME))


def add_estimates(path: Path, known: dict[tuple[int, bool, Key], tuple[float, str]]) -> None:
    """Write the estimates of all correct tilings into a file. known: cache of estimates."""
    content = read_json(path, dict[str, Any], "T4 file")
    shape = content["metadata"]["shape"]
    head_dim, causal = shape["D"], bool(shape.get("CAUSAL"))
    for row in content["results"]:
        if row["invalidity"] != "correct":
            continue
        key = (head_dim, causal, key_of(row["configuration"]))
        if key not in known:
            start = time.perf_counter()
            known[key] = estimate_tiling(row["configuration"], head_dim, causal)
            print(f"{len(known)}: {dict(key[2])}: {known[key]}, {time.perf_counter() - start:.1f} s", flush=True)
        kept = [m for m in row["measurements"] if m["name"] not in (ESTIMATE, PIPE)]
        values = zip((ESTIMATE, PIPE), known[key], strict=True)
        row["measurements"] = [*kept, *({"name": n, "value": v, "unit": ""} for n, v in values)]
    write_whole(path, to_json(content))


def main(argv: Sequence[str] | None = None) -> None:
    """Add estimates to every file."""
    parser = make_parser("tiling_counts", __doc__)
    parser.add_argument("files", type=Path, nargs="+")
    known: dict[tuple[int, bool, Key], tuple[float, str]] = {}
    for path in parser.parse_args(argv).files:
        add_estimates(path, known)
