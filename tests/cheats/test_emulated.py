"""The bad kernels on the emulator, through the gates: each is caught without a GPU, by which gate and with what words.

What is bad about a kernel's build alone is caught by BUILD, RESOURCES and EVIDENCE (test_kernels.py). What is slow is
not seen here: ``skips_written`` and ``memoizes`` are caught for what they read, not for the work that they leave out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.kernel import bench
from greenfast.judge.gates.registry import GATES
from greenfast.judge.implementation import CANDIDATE, build_rung_implementation
from greenfast.judge.pipeline import GateRun
from greenfast.judge.request import NullListener, make_request
from tests.cheats.cheats import CHEATS, FAILURES, doubling
from tests.cheats.judging import emulated_here

IN = r"block \(\d+, 0, 0\), thread \(\d+, 0, 0\) "
LEFT = rf"ran \(run: doubling: \d-byte read of what an earlier launch left: .* at NAME\.cuh?:\d+(\S*|, .*\]), {IN}"

#: By kernel: what a reason of CORRECTNESS must match; NAME is the file's.
CAUGHT = {
    "unwritten": r"memory, finite \(4096 bytes of 'y' were never written; ",
    "tail_unwritten": r"memory, finite \(928 bytes of 'y' were never written; ",
    "zeros": r"max_abs_err, .*kernel_bound \(y\[\d+\]: got 0, expected .* % of elements wrong\)$",
    "nan": r"finite \(1 of 1024 output elements are not finite",
    "infinity": r"finite \(1 of 1024 output elements are not finite",
    "input_overwritten": rf"memory \(doubling: a write to an input: .* at NAME\.cu:7, {IN}",
    "writes_in_front": rf"ran \(.* write out of bounds: 4 bytes in front of 'y' at NAME\.cu:7, {IN}",
    "writes_behind": rf"ran \(.* write out of bounds: 0 bytes past the end of 'y' .* at NAME\.cu:7, {IN}",
    "reads_behind": rf"ran \(.* read out of bounds: 0 bytes past the end of 'x' .* at NAME\.cu:6, {IN}",
    "remembers": LEFT,
    "later_wrong": LEFT.replace("NAME", "launch_number"),
    "later_idle": LEFT.replace("NAME", "launch_number"),
    "one_shape": r"one_shape tail seed 0: max_abs_err",
    "one_seed": r"one_seed even seed 1: max_abs_err",
    "cached_by_shape": LEFT,
    "order_dependent": r"repeat \(2 runs on the same input gave different bits",
    "hang": r"ran \(.* deadlock, .*: 32 threads of warp 0 wait at NAME\.cu:7 .* in a loop that nothing ends",
    "wild_pointer": rf"ran \(.* write out of bounds: in no allocation at NAME\.cu:6, {IN}",
    "trap": rf"ran \(.* trap was executed at NAME\.cu:7, {IN}",
    "skips_written": rf"ran \(.* read of an element that nothing has written: .* of 'y' .* at NAME\.cu:7, {IN}",
    "memoizes": LEFT,
    "stale_shared": r"ran \(.* read of an element that nothing has written: "
    r".* of shared memory \(.*\) at NAME\.cu:11, ",
    **dict.fromkeys(
        (
            "works_on_launches",
            "every_second_launch",
            "first_address",
            "previous_output",
            "cached_by_address",
            "input_restored",
            "guards_in_between",
        ),
        LEFT.replace("NAME", "counted"),
    ),
}
#: Where another shape or seed is needed than ``even`` and 0.
WHERE = {"tail_unwritten": (["tail"], [0]), "one_shape": (["even", "tail"], [0]), "one_seed": (["even"], [0, 1])}


def reasons(name: str, out: Path, *, here: bool = True) -> tuple[str, list[str]]:
    """The status of CORRECTNESS for a kernel, and why; here: in this process, as another one takes long to start."""
    shapes, seeds = WHERE.get(name, (["even"], [0]))
    request = make_request(
        doubling(), shapes=shapes, seeds=seeds, fmt=None, arch=None, device="emulator", warmup=None, iters=None,
        processes=1, timeout_s=60.0, out=out, command="the tests of the cheats",
    )  # fmt: skip
    variant = doubling().config.variant(name)
    if here:  # without EVIDENCE, as a disassembler takes a third of a second to start
        rung = build_rung_implementation(doubling(), variant)
        run = GateRun(emulated_here(request), {CANDIDATE: rung}, NullListener())
        run.run(gate for name, gate in GATES.items() if name not in ("PERFORMANCE", "EVIDENCE"))
        gates = run.gates
    else:
        gates = bench(request, variant, NullListener()).record.gates
    (gate,) = [g for g in gates if g.gate == "CORRECTNESS"]
    return gate.status, gate.reasons


def test_every_cheat_is_tried() -> None:
    static = {"too_much_smem", "too_many_registers"}
    timed = {cheat.name for cheat in CHEATS if cheat.gate == "PERFORMANCE"}
    assert {cheat.name for cheat in CHEATS} - timed | set(FAILURES) - static <= set(CAUGHT)


def test_the_good_kernel_passes(tmp_path: Path) -> None:
    assert reasons("good", tmp_path, here=False) == ("PASS", [])


def test_what_hangs_is_caught_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert reasons("hang", tmp_path, here=False) == reasons("hang", tmp_path)


#: Its long loop takes 10 s in the emulator.
LONG = {"stale_shared"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in CAUGHT]
)
def test_it_is_caught_without_a_gpu(name: str, tmp_path: Path) -> None:
    status, said = reasons(name, tmp_path)
    assert status == "FAIL"
    assert any(re.search(CAUGHT[name].replace("NAME", name), reason) for reason in said), said
