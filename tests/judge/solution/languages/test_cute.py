"""CuTe DSL solutions: pointers, scalars and tensors of static layout, and errors that name file, key and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenfast.emulator.grid import KernelLaunch as Launched
from greenfast.emulator.grid import run_chain
from greenfast.judge.solution.languages.cute import program
from greenfast.judge.solution.messages import Buffer
from greenfast.judge.solution.schema import find_solution
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, UsageError
from greenfast.spec.kernel import Program, Struct
from greenfast.spec.problem import OutputSpec

needs_cute = pytest.mark.usefixtures("cute_is_installed")
HEADER = "import cutlass\nfrom cutlass import cute\n\n\n"
KERNEL = """@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, p: cute.Pointer, STEP: cutlass.Constexpr):
    lane, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    shift = cute.make_tensor(p, cute.make_layout((4,)))
    for c in range(lane, 70, STEP):
        y[row, c] = x[row, c] * factor + shift[1]


"""
HOST = """@cute.jit
def host(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, p: cute.Pointer, STEP: cutlass.Constexpr):
    kernel(x, y, factor, p, STEP).launch(grid=(3, 1, 1), block=(STEP, 1, 1))
"""
LAUNCH = {"kernel": "host", "grid": ["R"], "block": [32], "args": ["x", "y", "float32(2.5)", "shift"]}
BUFFERS = {"x": Buffer("float32", [3, 70]), "y": Buffer("float32", [3, 70], True), "shift": Buffer("float32", [4])}

Make = Callable[..., Program]


@pytest.fixture
def cute_is_installed() -> None:
    pytest.importorskip("cutlass", reason="needs greenfast[cute]")


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """A function from a solution's source to its program; launch: what is changed of LAUNCH."""

    def make(
        source: str = KERNEL + HOST,
        launch: Mapping[str, Any] | None = None,
        constants: Mapping[str, int] | None = None,
        buffers: Mapping[str, Buffer] = BUFFERS,
    ) -> Program:
        path = tmp_path / "mine.py"
        chosen = {"STEP": 32} if constants is None else dict(constants)
        about = {"name": "mine", "language": "cute", "constants": chosen, "launches": [{**LAUNCH, **(launch or {})}]}
        path.write_text(f"{HEADER}GREENFAST = {json.dumps(about)}\n\n\n{source}")
        return program(find_solution(path), "fp32", {"R": 3}, Target("sm_90a"), buffers)

    return make


@needs_cute
def test_tensors_scalars_and_pointers_reach_the_kernel(made: Make) -> None:
    found = made()
    (step,) = found.steps
    assert step.launch.args == (Struct(("x",)), Struct(("y",)), np.float32(2.5), "shift")
    assert (step.kernel.language, step.kernel.requires, step.kernel.block) == ("ptx", "sm_90a", (32, 1, 1))
    assert '.file\t1 "mine.py"' in step.kernel.source
    x, shift = np.arange(210, dtype=np.float32).reshape(3, 70), np.arange(4, dtype=np.float32)
    launched = Launched(step.kernel.source, step.kernel.entry, step.kernel.block, 0, step.launch)
    result = run_chain([launched], {"x": x, "shift": shift}, {"y": OutputSpec(x.shape, "float32")})
    np.testing.assert_array_equal(result.outputs["y"], x * np.float32(2.5) + 1)


@needs_cute
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"launch": {"kernel": "guest"}}, r"launches\[0\].kernel: no @cute.jit function 'guest' in mine.py"),
        ({"launch": {"args": ["x", "y", "float32(1)"]}}, r"launches\[0\].args: 3 given, and none for p"),
        ({"launch": {"args": [*LAUNCH["args"], "x"]}}, r"5 given, 1 more than the function has parameters"),
        ({"launch": {"args": ["x", "z", "float32(1)", "shift"]}}, r"no buffer 'z'; .* x, y, shift"),
        ({"launch": {"block": [64]}}, r"launches\[0\].block: \[64, 1, 1\], and host launches .*reqntid 32, 1, 1"),
        ({"constants": {}}, r"STEP is a Constexpr; give it under constants"),
        ({"buffers": {**BUFFERS, "x": Buffer("complex64", [3, 70])}}, "x holds complex64; CuTe DSL's types are"),
    ],
)
def test_what_does_not_fit_is_refused(made: Make, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        made(**changed)
    assert "mine.py: launches[0]" in str(caught.value)


@needs_cute
def test_dynamic_shared_memory_is_asked_for(made: Make) -> None:
    source = KERNEL.replace(
        "    for c",
        "    room = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout((32,)))\n"
        "    room[lane] = x[row, lane]\n    cute.arch.sync_threads()\n    y[row, lane] = room[31 - lane]\n    for c",
    )
    with pytest.raises(UsageError, match=r"launches\[0\].shared: missing"):
        made(source + HOST)
    assert made(source + HOST, {"shared": 128}).steps[0].kernel.dynamic_smem_bytes == 128


@needs_cute
def test_other_parameters_are_refused_in_words(made: Make) -> None:
    swapped = HOST.replace("kernel(x, y, factor", "kernel(x, x, y, factor")
    kernel = KERNEL.replace("y: cute.Tensor, f", "z: cute.Tensor, y: cute.Tensor, f")
    kernel = kernel.replace("x[row, c] * factor", "x[row, c] * factor + z[row, c]")
    with pytest.raises(UsageError, match=r"parameters of \[8, 8, 8, 4, 8\] bytes, and the launch gives \[8, 8, 4, 8\]"):
        made(kernel + swapped)


@needs_cute
def test_what_the_compiler_refuses_is_an_error_of_the_build(made: Make) -> None:
    with pytest.raises(CompileError, match=r"launches\[0\]: CuTe DSL does not compile host"):
        made(KERNEL.replace("x[row, c] *", "x[row, c, 0] *") + HOST)


def test_without_cute_its_extra_is_named(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenfast.spec.extras._installed", lambda module: False)
    with pytest.raises(UsageError, match=r"needs greenfast\[cute\]: pip install '\.\[cute\]' in a clone of greenfast"):
        made()
