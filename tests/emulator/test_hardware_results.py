"""Results of an H100 for operands that were wrong in the emulator, or that the ISA leaves ambiguous.

From a run of benchmarks/emulator_instructions.py on an H100 80GB HBM3 (driver 580.159.04, CUDA 13.0, sm_90a) on
2026-11-21: operands, then the hardware's result.
"""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.device.compiler import to_ptx
from greenfast.spec.arch import Target
from tests.emulator.instructions.case import BLOCK, emulate, kernel_source
from tests.emulator.instructions.catalog import CASES

BY_NAME = {case.name: case for case in CASES}
SEEN = {
    "positions and lengths of 64-bit fields are not cut to 8 bits": """
        bfi.b64: aaaaaaaaaaaaaaaa 20 15 80000000 -> 5555555555400020; ffffffffffffff80 0 100 80 -> 0
        bfi.b64: 0 ffffffffffffff00 101 a -> ffffffffffffff00; 10 100000000 16 100 -> 4000000
        bfe.u64: 2 80000000 21 -> 0; aaaaaaaaaaaaaaaa 13 80000000 -> 155555555555; 8000000000000001 100 ff -> 0
        bfe.s64: 8000000000000001 e 80000000 -> fffe000000000000; 4000000000000000 101 7f -> 0
        bfe.s64: ffffffffffffff80 100 1 -> ffffffffffffffff; 7fffffffffffffff 80000000 ffffffff -> 0""",
    "what is subnormal with all bits of the significand is flushed": """
        mul.rn.ftz.f32: 800000 3f7fffff -> 0; 800000 bf7fffff -> 80000000; ffffff 3f000000 -> 0
        mul.rm.ftz.f32: 800000 bf7fffff -> 80000000; mul.rp.ftz.f32: 800000 3f7fffff -> 0
        mul.rp.ftz.sat.f32: 80ffffff bf000000 -> 0
        mul.ftz.f16: 400 3bff -> 0; 400 bbff -> 8000; mul.ftz.sat.f16: 7ff 3800 -> 0
        mul.ftz.f16x2: 40083ff 3bfffc01 -> 7fff; mul.ftz.sat.f16x2: c018400 1bbff -> 0
        fma.rn.ftz.f32: bf7fffff 80800000 0 -> 0; fma.rn.ftz.sat.f32: 800001 b3000001 800000 -> 0
        fma.rm.ftz.f32: 800001 33800000 80800000 -> 80000000; fma.rp.ftz.sat.f32: 33800000 80800000 800000 -> 0
        fma.rn.ftz.f16: 87ff 3800 170 -> 8000; fma.rn.ftz.relu.f16: 400 bbff 7ff -> 0
        div.rn.ftz.f32: ffffff c0000000 -> 80000000; div.rm.ftz.f32: 1000000 c0000001 -> 80000000
        div.rp.ftz.f32: 800000 3f800001 -> 0""",
    "what such rounding makes a normal number is not": """
        fma.rn.ftz.f32: 80ffffff bf800001 80800001 -> 800000; 81000000 800001 800000 -> 800000
        fma.rm.ftz.f32: 80800000 b3000001 80800000 -> 80800000; fma.rp.ftz.f32: 33000001 80800001 800000 -> 800000
        fma.rn.ftz.f16: bc01 87ff 8401 -> 400; a00 8400 400 -> 400""",
    "a float64 NaN keeps its sign and the top of its payload, quiet": """
        cvt.rn.f32.f64: 7ff0000000000001 -> 7fc00000; fff8000000000000 -> ffc00000; ffffffffffffffff -> ffffffff
        cvt.rn.ftz.f32.f64: fff0000000000001 -> ffc00000
        cvt.rn.f16.f64: 7ff6d78580800000 -> 7fb5; fff19e3cb8fe0800 -> fe67; fff0000000000001 -> fe00
        cvt.rz.bf16.f64: 7ffb731d2b731000 -> 7fdb; fff0000000000001 -> ffc0; cvt.rn.bf16.f64: fffbdf0000000000 -> ffde
        cvt.f64.f32: ff800001 -> fff8000020000000; cvt.f64.f16: 7c01 -> 7ff8040000000000
        cvt.f64.bf16: ff81 -> fff8200000000000; cvt.rni.f64.f64: fff0000000000001 -> fff8000000000001
        cvt.ftz.f64.f32: ff800001 -> 7fffffffe0000000""",
    "TF32's NaN has zeros behind its bits; cvt.rna cuts NaN": """
        cvt.rn.tf32.f32: 7f800001 -> 7fffe000; ffdbd830 -> 7fffe000; cvt.rz.relu.tf32.f32: ffc00000 -> 7fffe000
        cvt.rna.tf32.f32: 7f800001 -> 7f800000; ffdf5800 -> ffdf4000
        cvt.rna.satfinite.tf32.f32: 7f800001 -> 7f7fe000; ffcb3000 -> ffcb0000""",
}


def entries(text: str) -> list[tuple[str, list[int], int]]:
    """Instruction, operands and result of each entry; one without an instruction is of that before it."""
    values, name = [], ""
    for entry in text.replace("\n", ";").split(";"):
        if "->" not in entry:
            continue
        name, numbers = entry.split(":") if ":" in entry else (name, entry)
        operands, result = numbers.split("->")
        values.append((name.strip(), [int(word, 16) for word in operands.split()], int(result, 16)))
    return values


@pytest.mark.parametrize("rule", SEEN)
def test_emulator_and_definition_give_what_the_hardware_gave(rule: str) -> None:
    seen = entries(SEEN[rule])
    assert len(seen) == SEEN[rule].count("->")
    cases = [BY_NAME[name] for name in dict.fromkeys(name for name, *_ in seen)]
    ptx = to_ptx(kernel_source(cases), Target("sm_90a"), assemble=False)
    for case in cases:
        rows = [(operands, result) for name, operands, result in seen if name == case.name]
        padded = rows + rows[:1] * (BLOCK - len(rows))
        columns = [np.array(column, np.uint64) for column in zip(*(operands for operands, _ in padded), strict=True)]
        expected = [result for _, result in padded]
        assert case.expected(columns)[0].tolist() == expected, case.name
        assert case.unpack(emulate(case, ptx, case.pack(columns)))[0].tolist() == expected, case.name
