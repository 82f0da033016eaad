"""``greenfast build``."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from greenfast.cli.console import show, table
from greenfast.cli.options import words
from greenfast.cli.progress import ProgressLine
from greenfast.device.identity import code_hash
from greenfast.device.machine_code import count_instructions, disassemble
from greenfast.judge.implementation import BuiltSide, build_side
from greenfast.judge.store import write_whole
from greenfast.judge.task import find_task, load_family
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError

#: The options of ``greenfast build --library``: cli/library.py.
_OF_LIBRARY = ("head_dims", "dtypes", "precisions", "causal", "log_sum_exp", "backward", "lengths")
_COUNTERS = ("cp_async", "ldsm", "hmma", "imma", "qmma", "hgmma", "qgmma", "mufu_ex2", "local_memory", "bar_sync")


def run(args: argparse.Namespace) -> int:
    """Compile variants for targets; one row per distinct kernel."""
    for option in _OF_LIBRARY:
        if getattr(args, option):
            raise UsageError(f"--{option.replace('_', '-')} is for --library")
    if args.task is None:
        raise UsageError("name a task, or --library for the kernels of calls in PyTorch")
    task = find_task(args.task)
    config, family = task.config, load_family(task)
    names = [rung.name for rung in config.rungs]
    if args.variants:  # names may also be separated by commas; a TOGGLE=VALUE setting contains commas itself
        names = [name for text in args.variants for name in ([text] if "=" in text else words(text))]
    formats = args.formats or [config.defaults.format]
    for fmt in formats:
        config.gates(fmt)
    shapes = [config.shape(name) for name in (args.shapes or config.defaults.shapes)]
    targets = [Target.parse(name) for name in (args.arch or [config.defaults.arch])]
    rows = []
    with ProgressLine("compiling") as progress:
        for target, fmt, name in itertools.product(targets, formats, names):
            progress.step = f"compiling {name}, {fmt}, {target.name}"
            side = build_side("built", family, config.variant(name), fmt, shapes, target)
            rows += _rows(side, target, fmt, args.sass)
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    used = [c for c in _COUNTERS if any(row["machine_code"][c] for row in rows)]
    header = ("variant", "format", "target", "shape", "registers", "SMEM", "stack", "spills", *used, "ms")
    cells = [
        (
            *(str(row[key]) for key in ("variant", "format", "target", "shape", "registers", "smem_bytes")),
            *(str(row[key]) for key in ("stack_bytes", "spill_bytes")),
            *(str(row["machine_code"][c]) for c in used),
            f"{row['compile_ms']:.0f}{' cached' if row['from_cache'] else ''}",
        )
        for row in rows
    ]
    show(table(header, cells))
    return 0


def _rows(side: BuiltSide, target: Target, fmt: str, sass_folder: Path | None) -> list[dict[str, Any]]:
    """Return a row per distinct kernel of a side, and write its machine code to ``sass_folder``, if given."""
    rows: list[dict[str, Any]] = []
    for shape, kernel in side.distinct:
        sass = disassemble(kernel.cubin, kernel.source.entry)
        if sass_folder is not None:
            write_whole(sass_folder / f"{side.variant.name}-{fmt}-{shape}-{target.name}.sass", sass)
        r = kernel.resources
        rows.append(
            {
                "variant": side.variant.name,
                "format": fmt,
                "target": target.name,
                "shape": shape,
                "registers": r.registers,
                "smem_bytes": r.smem_bytes,
                "stack_bytes": r.stack_bytes,
                "spill_bytes": r.spill_bytes,
                "machine_code": count_instructions(sass),
                "compile_ms": round(kernel.compile_ms, 1),
                "from_cache": kernel.from_cache,
                "kernel_hash": kernel.kernel_hash,
                "code_hash": code_hash(kernel),
            }
        )
    return rows
