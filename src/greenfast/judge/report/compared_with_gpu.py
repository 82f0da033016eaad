"""The emulator's counts compared with Nsight Compute's, from the record of benchmarks/emulator_against_gpu.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from greenfast.judge.report import formatting

#: Operations of the machine's matrix instruction on halves, HMMA.16816.
_HMMA_FLOPS = 2 * 16 * 8 * 16
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op"

#: Metric of Nsight Compute that says how many matrix instructions ran; its full set has only shares of it.
MATRIX_METRIC = "sm__inst_executed_pipe_tensor_op_hmma.sum"


def counts_table(record: Mapping[str, Any]) -> str:
    """A row per variant and count, of those kernels that were profiled; "-" where a record does not say."""
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
    """By how much the emulator's count is larger: "0", +2.5 %; "-" where there is no share of nothing."""
    if here is None or there is None:
        return formatting.NONE
    if here == there:
        return "0"
    return f"{100 * (here / there - 1):+.1f} %" if there else formatting.NONE
