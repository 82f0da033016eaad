"""Compare every instruction of the emulator with a GPU: the same PTX on both, results compared bit by bit.

python -m benchmarks emulator_instructions --json FILE [--device 0] [--rows 8192] [--only TEXT]

Run it from the root of the checkout. Results may differ within the bounds that the PTX ISA gives (ex2.approx, ...).
If it leaves a result open (a division by zero, the bits of a NaN), differences are shown but not counted as wrong.
--device emulator compares with the definitions that the tests use instead. Exit code 1: something is wrong.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from greenfast.cli.console import show, table
from greenfast.device.compiler import compile_kernel
from greenfast.device.session import Executable, KernelImage
from greenfast.device.worker import Worker, WorkerError
from greenfast.judge.request import choose_device, device_info
from greenfast.spec.arch import Target
from greenfast.spec.errors import GreenfastError
from greenfast.spec.problem import Case as Problem
from greenfast.spec.problem import OutputSpec
from tests.emulator.instructions.case import BLOCK, Case, Words, emulate, kernel_source, launch
from tests.emulator.instructions.catalog import CASES, units
from tests.emulator.instructions.compare import compare, row_text

#: Seconds that one kernel may take, and the number of consecutive failures after which the device is given up.
TIMEOUT_S = 20.0
MAX_FAILURES = 20
#: The number of differing rows per instruction that are printed, and that go into the record.
PRINTED, RECORDED = 3, 64


class Device:
    """A GPU in a separate process, restarted after a kernel broke it."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._worker: Worker | None = None
        self.failures = 0

    def run(self, image: KernelImage, case: Case, x: Words) -> Words:
        """Return the rows of ``y``. Raises WorkerError if the kernel failed, or too many did before it."""
        if self.failures >= MAX_FAILURES:
            raise WorkerError(f"not run: {MAX_FAILURES} kernels failed one after the other")
        if self._worker is None:
            self._worker = Worker(self._ordinal, timeout_s=TIMEOUT_S)
        problem = Problem({"x": x}, {"y": OutputSpec((len(x), case.words_out()), "uint32")})
        try:
            # The PTX is for the emulator only, so do not send it.
            executable = Executable.single(replace(image, ptx=""), launch(len(x)))
            result = self._worker.run(executable, problem, 1)
        except WorkerError:
            self._worker, self.failures = None, self.failures + 1
            raise
        self.failures = 0
        if result.violations:
            raise WorkerError("; ".join(result.violations))
        return np.asarray(result.outputs["y"])

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()


def build_images(unit: Sequence[Case], target: Target) -> Iterator[tuple[Case, KernelImage | str]]:
    """Yield each case with its kernel, or with the compiler's message if it does not compile."""
    try:
        compiled = compile_kernel(kernel_source(unit), target)
    except GreenfastError as e:
        if len(unit) == 1:
            yield unit[0], str(e)
            return
        for half in (unit[: len(unit) // 2], unit[len(unit) // 2 :]):
            yield from build_images(half, target)
        return
    for case in unit:
        yield case, KernelImage(compiled.cubin, case.entry, (BLOCK, 1, 1), 0, ptx=compiled.ptx)


def try_case(case: Case, image: KernelImage | str, device: Device | None, rows: int) -> dict[str, Any]:
    """Return one row of the record, with any error. Without a device the definition is the reference."""
    row: dict[str, Any] = {"instruction": case.name, "allowed": case.bound, "operands": rows}
    if isinstance(image, str):
        return {**row, "error": f"does not compile: {image}"}
    operands = case.operands(rows)
    x = case.pack(operands)
    try:
        there = case.unpack(device.run(image, case, x)) if device else case.expected(operands)
    except Exception as e:
        return {**row, "error": f"device: {e}"}
    try:
        here = case.unpack(emulate(case, image.ptx, x))
    except Exception as e:  # whatever it is, go on with the other instructions
        return {**row, "error": f"emulator: {type(e).__name__}: {e}"}
    comparison = compare(case, operands, there, here)
    differ = ~comparison.same
    row |= {
        "identical": int(comparison.same.sum()),
        "wrong": int(comparison.wrong.sum()),
        "wrong_nan_bits": int((comparison.wrong & comparison.nan_bits).sum()),
        "other_nan": int((differ & comparison.other_nan).sum()),
        "undefined_and_different": int((differ & comparison.undefined).sum()),
        "max_ulp": comparison.max_ulp,
    }

    def texts(mask: Any, most: int) -> list[str]:
        return [row_text(case, int(n), operands, here, there) for n in np.flatnonzero(mask)[:most]]

    return row | {
        "examples_wrong": texts(comparison.wrong, RECORDED),
        "examples_other_nan": texts(differ & comparison.other_nan, PRINTED),
        "examples_undefined": texts(differ & comparison.undefined, RECORDED // 4),
    }


def print_report(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table by opcode, then the instructions with different bits."""
    opcodes = defaultdict(list)
    for row in rows:
        opcodes[row["instruction"].split(".")[0].split()[0]].append(row)

    def total(group: Sequence[dict[str, Any]], key: str) -> int:
        return sum(row.get(key, 0) for row in group)

    cells = [
        (
            opcode, str(len(group)), str(total(group, "operands")), str(total(group, "identical")),
            str(max(row.get("max_ulp", 0) for row in group)), str(total(group, "wrong")),
            str(sum("error" in row for row in group)),
        )
        for opcode, group in opcodes.items()
    ]  # fmt: skip
    show(table(("opcode", "instructions", "operands", "identical", "max ulp", "wrong", "errors"), cells))
    differing = [
        (
            row["instruction"], str(row["operands"]), str(row["identical"]), str(row["max_ulp"]), row["allowed"],
            f"{row['wrong']} ({row['wrong_nan_bits']})", str(row["other_nan"]), str(row["undefined_and_different"]),
        )
        for row in rows
        if "error" not in row and row["identical"] < row["operands"]
    ]  # fmt: skip
    header = (
        "instruction",
        "operands",
        "identical",
        "max ulp",
        "allowed",
        "wrong (NaN bits)",
        "other NaN",
        "undefined",
    )
    if differing:
        show(table(header, differing, title="not the same bits everywhere"))
    for row in rows:
        if "error" in row:
            print(f"{row['instruction']}: {' '.join(row['error'].split())[:200]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print and write the record; return 1 if something is wrong."""
    parser = make_parser("emulator_instructions", __doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="0", help='a GPU\'s number, or "emulator" for the definitions')
    parser.add_argument("--rows", type=int, default=8192, help="operands per instruction, a multiple of 128")
    parser.add_argument("--only", default="", help="instructions whose name holds this text")
    args = parser.parse_args(argv)
    if args.rows < BLOCK or args.rows % BLOCK:
        parser.error(f"--rows {args.rows}: must be a positive multiple of {BLOCK}")
    try:
        chosen = choose_device(args.device)
        info = device_info(chosen, TIMEOUT_S)
    except GreenfastError as e:
        print(f"{e}\nno comparison without a GPU; --device emulator compares the emulator with the definitions")
        return e.exit_code
    device = Device(chosen) if isinstance(chosen, int) else None
    target = Target("sm_90a")
    if device is not None and info is not None:
        major, minor = info.compute_capability.split(".")
        target = Target.of_device((int(major), int(minor)))
    start = time.perf_counter()
    rows = []
    try:
        for unit in units(tuple(case for case in CASES if args.only in case.name)):
            for case, image in build_images(unit, target):
                rows.append(try_case(case, image, device, args.rows))
                for example in rows[-1].get("examples_wrong", [])[:PRINTED]:
                    print(f"{case.name}: {example}   (operands -> emulator | reference)", flush=True)
    finally:
        if device is not None:
            device.close()
    seconds = time.perf_counter() - start
    reference = "GPU" if device else "definitions"
    write_measurements(
        args.json, "emulator_instructions", info, reference=reference, target=target.name, seconds=seconds, rows=rows
    )
    print_report(rows)
    wrong, errors = sum(bool(row.get("wrong")) for row in rows), sum("error" in row for row in rows)
    same = sum(row.get("identical") == row["operands"] for row in rows)
    print(
        f"{len(rows)} instructions in {seconds:.0f} s: {same} bit-identical, {wrong} wrong, {errors} could not "
        f"be compared ({target.name}, {args.json})"
    )
    return int(bool(wrong or errors))
