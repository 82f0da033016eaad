"""A test case of one instruction: its text, operands, definition, and comparison of results.

A thread reads its operands from ``x`` (32-bit words, one row per thread), executes the instruction and stores the
results to its row of ``y``. The same source gives the PTX for the emulator and the machine code for a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.grid import run_grid
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import OutputSpec
from tests.emulator.instructions.operands import POOLS, columns

Words = NDArray[np.uint32]
#: (rows) of float64 that results may differ by: of the operands' columns of bit patterns, and the results as numbers.
Allowed = Callable[[list[NDArray[np.uint64]], NDArray[np.float64]], NDArray[np.float64]]

BLOCK = 128
WARP = 32
_C_TYPES = {16: "unsigned short", 32: "unsigned", 64: "unsigned long long"}
_CONSTRAINTS = {16: "h", 32: "r", 64: "l"}


@cache
def width(kind: str) -> int:
    """Bits of the register that holds an operand of a type, or of a pool of operands."""
    kind = POOLS[kind].kind if kind in POOLS else kind
    if kind.endswith("x2"):
        return 32
    return max(16, int(re.sub(r"\D", "", kind)))


@dataclass(frozen=True)
class Case:
    """One instruction with its modifiers.

    body: C++ that sets d0, d1, ... from a0, a1, ... (unsigned of 16, 32 or 64 bits). inputs: pools of operands.
    outputs: PTX types. meaning: result patterns from operand patterns, of one thread; with ``of_warp`` from the 32 rows
    of a warp to 32 rows. allowed: distance of results if the PTX ISA does not fix the bits. any_nan: the ISA does not
    fix the NaN. undefined: operands with undefined results.
    """

    name: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    meaning: Callable[..., Any]
    allowed: Allowed | None = None
    bound: str = "bits"
    any_nan: bool = False
    undefined: Callable[..., bool] | None = None
    of_warp: bool = False
    shared: int = 0

    @property
    def entry(self) -> str:
        """The kernel's name."""
        return "k_" + re.sub(r"\W", "_", self.name)

    def source(self) -> str:
        """Return the kernel."""
        words_in, words_out = (sum(max(1, width(k) // 32) for k in kinds) for kinds in (self.inputs, self.outputs))
        lines = [
            f'extern "C" __global__ void {self.entry}(const unsigned* x, unsigned* y) {{',
            f"  const unsigned row = blockIdx.x * {BLOCK} + threadIdx.x;",
            f"  x += row * {words_in}; y += row * {words_out};",
        ]
        if self.shared:
            lines.append(f"  __shared__ __align__(16) unsigned char s[{self.shared * BLOCK}];")
        index = 0
        for n, kind in enumerate(self.inputs):
            bits = width(kind)
            value = f"x[{index}]" if bits < 64 else f"x[{index}] | (unsigned long long)x[{index + 1}] << 32"
            lines.append(f"  {_C_TYPES[bits]} a{n} = {value};")
            index += max(1, bits // 32)
        lines += [f"  {_C_TYPES[width(kind)]} d{n} = 0;" for n, kind in enumerate(self.outputs)]
        lines.append("  " + self.body)
        index = 0
        for n, kind in enumerate(self.outputs):
            if width(kind) < 64:
                lines.append(f"  y[{index}] = d{n};")
                index += 1
                continue
            # A plain (unsigned)d becomes st.u32 of a 64-bit register. ptxas takes this for a conversion if the register
            # holds the result of a float64 instruction.
            halves = f'"=r"(y[{index}]), "=r"(y[{index + 1}])'
            lines.append(f'  asm volatile("mov.b64 {{%0, %1}}, %2;" : {halves} : "l"(d{n}));')
            index += 2
        return "\n".join([*lines, "}"])

    def operands(self, count: int, seed: int = 0) -> list[NDArray[np.uint64]]:
        """Return a column of bit patterns per operand: combinations of edges, then random ones; ``count`` rows."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        return columns(self.inputs, count, rng)

    def pack(self, operands: Sequence[NDArray[np.uint64]]) -> Words:
        """Return the rows of ``x``."""
        parts: list[Any] = []
        for kind, column in zip(self.inputs, operands, strict=True):
            parts.append(column.astype(np.uint32))
            if width(kind) == 64:
                parts.append((column >> np.uint64(32)).astype(np.uint32))
        return np.ascontiguousarray(np.stack(parts, axis=1))

    def unpack(self, words: Words) -> list[NDArray[np.uint64]]:
        """Return a column of bit patterns per result from the rows of ``y``."""
        result, index = [], 0
        for kind in self.outputs:
            column = words[:, index].astype(np.uint64)
            index += 1
            if width(kind) == 64:
                column = column | words[:, index].astype(np.uint64) << np.uint64(32)
                index += 1
            result.append(column & np.uint64(2 ** width(kind) - 1))
        return result

    def words_out(self) -> int:
        """Words per row of ``y``."""
        return sum(max(1, width(kind) // 32) for kind in self.outputs)

    def expected(self, operands: Sequence[NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
        """Compute the results by the definition."""
        rows = list(zip(*(map(int, column) for column in operands), strict=True))
        results: list[Any] = []
        if self.of_warp:
            for start in range(0, len(rows), WARP):
                results += self.meaning(rows[start : start + WARP])
        else:
            results = [self.meaning(*row) for row in rows]
        table = [r if isinstance(r, tuple) else (r,) for r in results]
        masks = [2 ** width(kind) - 1 for kind in self.outputs]
        return [np.array([row[n] & mask for row in table], np.uint64) for n, mask in enumerate(masks)]


def assembly(text: str, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """Return a statement that runs PTX text on d0, ... (%0, ...) and a0, ... (the following numbers)."""
    out = ", ".join(f'"=&{_CONSTRAINTS[width(k)]}"(d{n})' for n, k in enumerate(outputs))
    supplied = ", ".join(f'"{_CONSTRAINTS[width(k)]}"(a{n})' for n, k in enumerate(inputs))
    return f'asm volatile("{text}" : {out} : {supplied} : "memory");'


def instruction(name: str, inputs: str, outputs: str, meaning: Callable[..., Any], **options: Any) -> Case:
    """Return a case of an instruction with the opcode ``name``: results, then operands, in order."""
    ins, outs = tuple(inputs.split()), tuple(outputs.split())
    numbers = ", ".join(f"%{n}" for n in range(len(ins) + len(outs)))
    return Case(name, assembly(f"{name} {numbers};", ins, outs), ins, outs, meaning, **options)


def predicate(name: str, inputs: str, meaning: Callable[..., Any], text: str = "", **options: Any) -> Case:
    """A case of an instruction that gives a predicate p, stored as 1 or 0; ``text``: its statement, if not plain."""
    ins = tuple(inputs.split())
    plain = f"{name} p, {', '.join(f'%{n + 1}' for n in range(len(ins)))};"
    body = f"{{ .reg .pred p; {text or plain} selp.u32 %0, 1, 0, p; }}"
    return Case(name, assembly(body, ins, ("u32",)), ins, ("u32",), meaning, **options)


def kernel_source(cases: Sequence[Case]) -> KernelSource:
    """One translation unit that holds the kernels of some cases."""
    text = "\n".join(case.source() for case in cases)
    return KernelSource(cases[0].entry, text, "instructions.cu", (), (BLOCK, 1, 1))


def kernel_ptx(ptx: str, case: Case) -> str:
    """Return the part of a module that one kernel needs, which is faster to parse than all of it."""
    header = ptx[: ptx.index(".visible .entry")]
    start = ptx.index(f".visible .entry {case.entry}(")
    ends = [ptx.find(mark, start + 1) for mark in (".visible .entry", "\n\t.section", "\n.section")]
    return header + ptx[start : min((e for e in ends if e > 0), default=len(ptx))]


def launch(rows: int) -> Launch:
    """Return the launch that covers some rows, a multiple of the block's threads."""
    return Launch((rows // BLOCK, 1, 1), ("x", "y"))


def emulate(case: Case, ptx: str, x: Words) -> Words:
    """Return the rows of ``y`` after emulation."""
    outputs = {"y": OutputSpec((len(x), case.words_out()), "uint32")}
    result = run_grid(kernel_ptx(ptx, case), case.entry, (BLOCK, 1, 1), 0, launch(len(x)), {"x": x}, outputs)
    return result.outputs["y"]
