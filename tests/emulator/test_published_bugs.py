"""The emulator finds the forms of bugs that docs/published-bugs.md lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenfast import emulator
from greenfast.emulator import In, Out

SOURCE = Path(__file__).with_name("published_bugs.cu")
TEXT = SOURCE.read_text()
PAGE = (Path(__file__).parents[2] / "docs" / "published-bugs.md").read_text()


def floats(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(count).normal(size=count).astype(np.float32)


#: Kernel -> grid, block, arguments, the kind of the finding and its words.
FORMS: dict[str, tuple[int, int, list[Any], str, str]] = {
    "off_by_one": (2, 32, [Out(floats(40)), 40], "out-of-bounds", "write out of bounds: 0 bytes past the end"),
    "whole_last_tile": (1, 32, [In(floats(40)), Out(floats(32)), 40], "out-of-bounds", "read out of bounds: 0 bytes"),
    "unmasked_load": (1, 32, [In(floats(24)), Out(floats(1)), 24], "out-of-bounds", "read out of bounds: 0 bytes"),
    "unwritten_accumulator": (1, 32, [In(floats(3)), Out(floats(32)), 3], "uninitialized-read", "nothing has written"),
    "partial_slab": (2, 32, [In(floats(128)), Out(floats(128)), 64], "output-unwritten", "256 of 512 bytes"),
    "reused_without_barrier": (1, 128, [In(floats(4)), Out(floats(128))], "data-race", "shared memory"),
    "tiles_without_second_barrier": (1, 64, [In(floats(128)), Out(floats(64)), 128], "data-race", "shared memory"),
    "left_before_load": (1, 64, [In(floats(64)), floats(64), 48], "uninitialized-read", "byte 192 of 256"),
    "collective_in_branch": (1, 128, [In(floats(128)), floats(128), 96], "uninitialized-read", "shared memory"),
    "last_block_without_fence": (
        4, 64, [In(floats(256)), Out(floats(256)), np.zeros(1, np.uint32), Out(floats(64))],
        "data-race", r"nothing orders this read and the write at published_bugs\.cu:\d+",
    ),
    "warp_without_sync": (1, 32, [In(floats(1)), Out(floats(32))], "data-race", "shared memory"),
    "warp_through_global": (1, 32, [In(floats(32)), floats(1), Out(floats(32))], "data-race", r"args\[1\]"),
    "lockstep_reduction": (
        1, 32, [In(np.arange(32, dtype=np.int32)), Out(np.zeros(1, np.int32))], "depends-on-order", "differs between",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kernel", FORMS)
def test_the_form_is_found(kernel: str) -> None:
    grid, block, args, kind, words = FORMS[kernel]
    report = emulator.run(SOURCE, kernel, grid=grid, block=block, args=args, orders=6, check=False)
    assert report.faults
    fault = report.faults[0]
    assert fault.kind == kind, fault.message
    assert re.search(words, fault.message)


#: Kernels that one barrier or fence repairs.
REPAIRED = [
    name for name, body in re.findall(r"void (\w+)\((.*?)^}", TEXT, re.DOTALL | re.MULTILINE) if "missing" in body
]


@pytest.mark.parametrize("kernel", REPAIRED)
def test_the_missing_line_repairs_it(kernel: str) -> None:
    grid, block, args, _, _ = FORMS[kernel]
    text = re.sub(r"// missing: (__\w+\(\);)", r"\1", TEXT)
    assert emulator.run(text, kernel, grid=grid, block=block, args=args, orders=3).faults == []


def test_the_page_lists_each_form() -> None:
    assert [name for name in FORMS if f"`{name}`" not in PAGE] == []
