"""Derive the rules of ``greenfast.kernels.attention.heuristics`` from the T4 files of benchmarks/hopper_tilings.py."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from greenfast.judge.store import read_json
from greenfast.judge.timing.estimators import Interval, speedup_interval
from greenfast.kernels.attention import tuning_space
from greenfast.kernels.attention.config import AttentionConfig, read_dims

#: A rule replaces the planned tiles if the whole interval of the speedup is above this.
LEAST_GAIN = 1.01
#: Least number of processes that timed a tiling: fewer give no interval for other runs.
LEAST_PROCESSES = 3
#: Ratio of consecutive measured lengths.
REACH = 4


def derive_tiling_rules(folder: Path, root: Path) -> dict[str, Any]:
    """Derive tilings.json: a rule per file with a faster tiling, for its length up to REACH times as many keys.

    The rule of the longest length has no end. folder: T4 files; those without ``confirmed`` are ignored. root: the
    folder that the records' paths are relative to.
    """
    cells = []
    for file in sorted(folder.glob("*.json")):
        metadata = read_json(file, dict[str, Any], "T4 file")["metadata"]
        if "confirmed" in metadata:
            config, sizes = read_dims(metadata["shape"], metadata["format"])
            cells.append((config, sizes.kv_len, metadata, file))
    rules = []
    for config, length, metadata, file in cells:
        faster = find_fastest_tiling(metadata)
        if faster is None:
            continue
        toggles, interval = faster
        longest = length == max(n for other, n, _, _ in cells if other == config)
        rules.append(
            {
                "of": [
                    config.head_dim, config.causal, config.query_scales, config.key_scales, config.value_scales,
                    config.format,
                ],
                "keys": [length, None if longest else REACH * length],
                "instead_of": _tiles(metadata["shipped"], config),
                "tiles": _tiles(toggles, config),
                "faster": [round(interval.low, 3), round(interval.high, 3)],
                "record": file.relative_to(root).as_posix(),
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
        )  # fmt: skip
    return {"device": cells[0][2]["device"] if cells else "", "rules": rules}


def find_fastest_tiling(metadata: Mapping[str, Any]) -> tuple[dict[str, int], Interval] | None:
    """Return the tiling with the highest lower bound of its speedup, above LEAST_GAIN; None if there is none."""
    processes = metadata["confirmed"]
    best: tuple[dict[str, int], Interval] | None = None
    for toggles in (of["configuration"] for of in processes[0]["tilings"]):
        times = [(p, of["ms"]) for p in processes for of in p["tilings"] if of["configuration"] == toggles]
        if len(times) < LEAST_PROCESSES or toggles == metadata["shipped"]:
            continue
        planned = [_by_round(process["shipped_ms"], len(ms)) for process, ms in times]
        interval = speedup_interval(planned, [ms for _, ms in times])
        if interval.low > max(LEAST_GAIN, best[1].low if best else 0.0):
            best = toggles, interval
    return best


def _by_round(times: Sequence[float], rounds: int) -> list[float]:
    """Return the geometric mean of the samples of each round."""
    return [float(x) for x in np.exp(np.log(np.reshape(times, (rounds, -1))).mean(axis=1))]


def _tiles(toggles: Mapping[str, int], config: AttentionConfig) -> dict[str, Any]:
    return asdict(tuning_space.parse_tiles(toggles, config))
