"""Compare the emulator with a GPU: the same kernels on both, outputs bit by bit, counts next to Nsight Compute's.

python -m benchmarks emulator_against_gpu --json FILE [--shapes small,mission] [--variants stage2,...]

Needs a GPU; counts need ncu. The emulator counts PTX instructions, the hardware machine instructions: only matrix work,
memory sectors and bank conflicts are comparable. scripts/update_results.py makes a table from the record.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from greenfast.cli.console import show, table
from greenfast.cli.options import words
from greenfast.device.gpu import Gpu
from greenfast.device.identity import code_hash
from greenfast.emulator.grid import run_grid
from greenfast.judge.implementation import build_rung_implementation, build_side
from greenfast.judge.profiling import ncu, take_profile
from greenfast.judge.report import formatting
from greenfast.judge.request import make_request
from greenfast.judge.task import load

#: Operations of the machine's matrix instruction on halves, HMMA.16816.
_HMMA_FLOPS = 2 * 16 * 8 * 16
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op"

#: Metric of Nsight Compute that says how many matrix instructions ran; its full set has only shares of it.
MATRIX_METRIC = "sm__inst_executed_pipe_tensor_op_hmma.sum"
#: The metrics kept from a profile: sums with names that contain one of these.
_KEPT = ("inst_executed.sum", "bank_conflicts", MATRIX_METRIC, "t_sectors_pipe_lsu_mem_global", "lts__t_sectors_op")


def profile_counts(request: Any, variant: Any, shape: Any, folder: Path) -> dict[str, str]:
    """Profile one launch and return the comparable metrics; empty without ncu."""
    if ncu() is None:
        return {}
    implementation = build_rung_implementation(request.task, variant)
    profile = take_profile(request, implementation, shape, 0, f"{variant.name}-{shape.name}", metrics=[MATRIX_METRIC])
    command = [str(ncu()), "--import", str(profile), "--page", "raw", "--csv"]
    rows = list(csv.reader(io.StringIO(subprocess.run(command, capture_output=True, text=True, check=True).stdout)))
    names, values = rows[0], rows[-1]
    return {
        name: value
        for name, value in zip(names, values, strict=True)
        if name.endswith(".sum") and any(k in name for k in _KEPT)
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and write the record."""
    parser = make_parser("emulator_against_gpu", __doc__)
    parser.add_argument("--shapes", type=words, default=["small", "mission"])
    parser.add_argument("--variants", type=words, default=None)
    parser.add_argument("--formats", type=words, default=["e4m3"])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    task = load("fp8_sdpa")
    gpu = Gpu(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for fmt in args.formats:
            request = make_request(
                task, shapes=args.shapes, seeds=[0], fmt=fmt, arch=None, device="0", warmup=None, iters=None,
                processes=None, timeout_s=60, out=Path(folder), command="emulator_against_gpu",
            )  # fmt: skip
            for name in args.variants or [rung.name for rung in task.config.rungs]:
                variant = task.config.variant(name)
                side = build_side("compared", task.family, variant, fmt, request.shapes, request.target)
                for shape in request.shapes:
                    case = task.problem.make_case(shape.dims, 0, fmt)
                    executable, (kernel,) = side.executable(shape.name), side.programs[shape.name].kernels
                    ((image, plan),) = executable.steps
                    bound = gpu.bind(executable, case)
                    there = bound.run()["out"]
                    bound.free()
                    here = run_grid(
                        image.ptx, image.entry, image.block, image.dynamic_smem_bytes, plan, case.inputs, case.outputs
                    )
                    difference = np.abs(there.astype(np.float64) - here.outputs["out"].astype(np.float64))
                    c = here.counts.record()
                    row = {
                        "variant": name,
                        "shape": shape.name,
                        "format": fmt,
                        "kernel_hash": kernel.kernel_hash,
                        "code_hash": code_hash(kernel),
                        "compiler": kernel.compiler,
                        "elements": there.size,
                        "different": int((there.view(np.uint16) != here.outputs["out"].view(np.uint16)).sum()),
                        "max_abs_diff": float(difference.max()),
                        "emulated": {
                            "ptx_warp_instructions": c.warp_instructions,
                            "conflicts": c.conflicts,
                            **msgspec.to_builtins(c),
                        },
                        "hardware": profile_counts(request, variant, shape, Path(folder))
                        if "mission" in shape.aliases
                        else {},
                    }
                    rows.append(row)
                    print(
                        name, shape.name, fmt, row["different"], "of", row["elements"], row["max_abs_diff"], flush=True
                    )
    write_measurements(args.json, "emulator_against_gpu", gpu.info(), rows=rows)
    cells = [
        (
            str(r["variant"]),
            str(r["shape"]),
            str(r["format"]),
            f"{r['different']} of {r['elements']}",
            f"{r['max_abs_diff']:.2g}",
        )
        for r in rows
    ]
    show(table(("variant", "shape", "format", "different elements", "largest difference"), cells))
    show(counts_table(json.loads(args.json.read_bytes())))


def counts_table(record: Mapping[str, Any]) -> str:
    """Return a row per variant and count of the profiled kernels; "-" if a record lacks the count."""
    rows = [cells for row in record["rows"] if row["hardware"] for cells in _rows(row)]
    if not rows:
        return ""
    numbers = ("emulated", record["device"]["name"], "difference")
    text = formatting.table(("variant", "shape", "count", *numbers), rows, right=numbers)
    if any("shared_store_conflicts" not in row["emulated"] for row in record["rows"]):
        text += "\n\nThis record was taken before the emulator counted bank conflicts of WMMA's accesses."
    return text


def _rows(row: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    emulated, hardware = row["emulated"], row["hardware"]
    flops = emulated.get("matrix_flops")
    lines = emulated.get("bank_conflicts")
    for title, here, metric in (
        ("warp instructions: PTX, machine code", emulated.get("ptx_warp_instructions"), "smsp__inst_executed.sum"),
        ("products of 16x8x16", None if flops is None else flops // _HMMA_FLOPS, MATRIX_METRIC),
        ("global sectors loaded", emulated.get("global_load_sectors"), f"{_SECTORS}_ld.sum"),
        ("global sectors stored", emulated.get("global_store_sectors"), f"{_SECTORS}_st.sum"),
        ("bank conflicts", None if lines is None else sum(lines.values()), f"{_CONFLICTS}.sum"),
        ("bank conflicts of loads", emulated.get("shared_load_conflicts"), f"{_CONFLICTS}_op_ld.sum"),
        ("bank conflicts of stores", emulated.get("shared_store_conflicts"), f"{_CONFLICTS}_op_st.sum"),
    ):
        text = hardware.get(metric)
        there = None if text is None else round(float(text.replace(",", "")))
        cells = [formatting.NONE if n is None else str(n) for n in (here, there)]
        yield row["variant"], row["shape"], title, *cells, _difference(here, there)


def _difference(here: int | None, there: int | None) -> str:
    """Return the excess of the emulator's count, such as "0" or "+2.5 %"; "-" if the GPU counted 0."""
    if here is None or there is None:
        return formatting.NONE
    if here == there:
        return "0"
    return f"{100 * (here / there - 1):+.1f} %" if there else formatting.NONE
