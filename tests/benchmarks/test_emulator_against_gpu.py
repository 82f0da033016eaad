"""The emulator's counts compared with Nsight Compute's: numbers in their columns, and what a record does not say."""

from __future__ import annotations

from typing import Any

from benchmarks.emulator_against_gpu import MATRIX_METRIC, counts_table

CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"


def record(emulated: dict[str, Any], hardware: dict[str, str]) -> dict[str, Any]:
    row = {"variant": "stage2", "shape": "mission", "emulated": emulated, "hardware": hardware}
    return {"device": {"name": "GPU"}, "rows": [{**row, "shape": "small", "hardware": {}}, row]}


def cells(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert rows[0] == ["variant", "shape", "count", "emulated", "GPU", "difference"]
    assert all(row[:2] == ["stage2", "mission"] for row in rows[2:])
    return {row[2]: row[3:] for row in rows[2:]}


def test_each_count_is_compared_with_its_metric() -> None:
    emulated = {
        "ptx_warp_instructions": 150,
        "matrix_flops": 10 * 4096,
        "global_load_sectors": 7,
        "global_store_sectors": 8,
        "shared_load_conflicts": 90,
        "shared_store_conflicts": 0,
        "bank_conflicts": {"a": 50, "b": 40},
    }
    hardware = {
        "smsp__inst_executed.sum": "100.000000",
        MATRIX_METRIC: "10",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "7.000000",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "16",
        f"{CONFLICTS}.sum": "1,000",
        f"{CONFLICTS}_op_ld.sum": "1,000",
        f"{CONFLICTS}_op_st.sum": "0",
    }
    text = counts_table(record(emulated, hardware))
    assert cells(text) == {
        "warp instructions: PTX, machine code": ["150", "100", "+50.0 %"],
        "products of 16x8x16": ["10", "10", "0"],
        "global sectors loaded": ["7", "7", "0"],
        "global sectors stored": ["8", "16", "-50.0 %"],
        "bank conflicts": ["90", "1000", "-91.0 %"],
        "bank conflicts of loads": ["90", "1000", "-91.0 %"],
        "bank conflicts of stores": ["0", "0", "0"],
    }
    assert "taken before" not in text


def test_what_an_older_record_does_not_say_is_left_open() -> None:
    text = counts_table(record({"bank_conflicts": {"a": 5}}, {f"{CONFLICTS}_op_st.sum": "3", f"{CONFLICTS}.sum": "0"}))
    found = cells(text)
    assert found["products of 16x8x16"] == ["-", "-", "-"]
    assert found["bank conflicts of stores"] == ["-", "3", "-"]
    assert found["bank conflicts"] == ["5", "0", "-"]
    assert "taken before the emulator counted bank conflicts of WMMA" in text


def test_without_a_profile_there_is_no_table() -> None:
    assert counts_table(record({}, {})) == ""
