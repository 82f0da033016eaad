"""Compare proposers on caches: how many evaluations each needs for 99 % of the best speed. Needs no GPU.

    python -m benchmarks proposers FILE [FILE ...] --json evidence/proposers.json

FILE: T4, such as those of ``hopper_tilings``. Random draws are not simulated: their median is known exactly. For
files with the estimates of ``tiling_counts``, the recall of a screen by them is added.
"""

from __future__ import annotations

import functools
import importlib.metadata
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.options import make_parser
from benchmarks.tuning_cache import Cache, count_evaluations, measure_recall, median_of_random_draws
from greenfast.evolve.proposers import make_proposer
from greenfast.evolve.t4 import read_t4
from greenfast.judge.store import to_json, write_whole
from greenfast.spec.errors import UsageError

#: Column -> proposer and its options.
PROPOSERS: dict[str, tuple[str, dict[str, str]]] = {
    "tpe": ("tpe", {}),
    "evolutionary": ("evolutionary", {}),
    "four islands": ("evolutionary", {"islands": "4"}),
}
SHARE = 0.99
#: Sizes of a batch that is screened.
BATCHES = (8, 16)


def compare_on_cache(path: Path, seeds: int) -> dict[str, Any]:
    """Compare the proposers on one cache; return its row."""
    results = read_t4(path)
    cache = Cache(results, path.stem)
    chance = median_of_random_draws(cache, SHARE)
    row: dict[str, Any] = {
        "cache": path.as_posix(),
        "settings": len(cache.evaluations),
        "reach_the_share": len(cache.near(SHARE)),
        "random_median": chance,
        "needed": {},
        "of_random": {},
    }
    for name, made in PROPOSERS.items():
        evaluations = count_evaluations(functools.partial(make_proposer, *made), cache, range(seeds), SHARE)
        row["needed"][name] = evaluations
        row["of_random"][name] = round(statistics.median(evaluations) / chance, 3)
    try:
        row["screen"] = {str(batch): msgspec.to_builtins(measure_recall(results, batch=batch)) for batch in BATCHES}
    except UsageError:
        row["screen"] = None
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the proposers on every file; print and write the rows."""
    parser = make_parser("proposers", __doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = []
    for path in args.files:
        rows.append(row := compare_on_cache(path, args.seeds))
        print(f"{path.stem}: random {row['random_median']}, {row['of_random']}, screen {row['screen']}", flush=True)
    if args.json:
        record = {
            "what": "needed: evaluations until the share of the best speed, by seed; of_random: median over random's",
            "share": SHARE,
            "seeds": args.seeds,
            "optuna": importlib.metadata.version("optuna"),
            "rows": rows,
        }
        write_whole(args.json, to_json(record))
