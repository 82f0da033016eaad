"""Triton solutions: what the compiler is given, what it hands back, and errors that name file, key and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenfast.device.compiler import compile_kernel
from greenfast.emulator.grid import KernelLaunch as Launched
from greenfast.emulator.grid import run_chain
from greenfast.judge.solution.client import RemoteFamily
from greenfast.judge.solution.languages.compiled import without_folders
from greenfast.judge.solution.languages.triton import program
from greenfast.judge.solution.messages import Buffer
from greenfast.judge.solution.schema import find_solution
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, UsageError
from greenfast.spec.kernel import Program
from greenfast.spec.problem import Array, Case, OutputSpec, References

needs_triton = pytest.mark.usefixtures("triton_is_installed")
TARGET = Target("sm_90a")
HEADER = "import triton\nimport triton.language as tl\n\n\n"
TWICE = """@triton.jit
def twice(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)
"""
LAUNCH = {"kernel": "twice", "grid": ["ceildiv(N, BLOCK)"], "args": ["x", "y", "int32(N)"], "num_warps": 1}
FLOATS = {"x": "float32", "y": "float32"}

Make = Callable[..., Program]


@pytest.fixture
def triton_is_installed() -> None:
    pytest.importorskip("triton", reason="needs greenfast[triton]")


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """A function from a kernel's source to the program of a solution with one launch."""

    def make(
        source: str = TWICE,
        launch: Mapping[str, Any] = LAUNCH,
        constants: Mapping[str, int | str] | None = None,
        buffers: Mapping[str, str] = FLOATS,
        dims: Mapping[str, int] | None = None,
        target: Target = TARGET,
        spaces: Mapping[str, Any] | None = None,
    ) -> Program:
        path = tmp_path / "mine.py"
        chosen = {"BLOCK": 64} if constants is None else dict(constants)
        about: dict[str, Any] = {"name": "mine", "language": "triton", "constants": chosen, "workspaces": spaces or {}}
        about["launches"] = [{**LAUNCH, **launch}]
        path.write_text(f"{HEADER}GREENFAST = {json.dumps(about)}\n\n\n{source}")
        found = find_solution(path)
        known = {name: Buffer(dtype, [64]) for name, dtype in buffers.items()}
        return program(found, "fp32", dims or {"N": 100}, target, known)

    return make


def run(made_program: Program, x: Any, y: OutputSpec) -> Any:
    steps = [
        Launched(s.kernel.source, s.kernel.entry, s.kernel.block, s.kernel.dynamic_smem_bytes, s.launch)
        for s in made_program.steps
    ]
    result = run_chain(steps, {"x": x}, {"y": y}, workspaces=made_program.workspaces)
    assert not any(result.unwritten.values())
    return result.outputs["y"]


@needs_triton
def test_a_function_becomes_ptx_that_runs_and_that_the_judge_assembles(made: Make) -> None:
    found = made()
    (step,) = found.steps
    assert (step.kernel.language, step.kernel.requires, step.kernel.block) == ("ptx", "sm_90a", (32, 1, 1))
    assert step.launch.grid == (2, 1, 1)
    assert step.launch.args == ("x", "y", np.int32(100), np.uint64(0), np.uint64(0))
    x = np.arange(100, dtype=np.float32)
    np.testing.assert_array_equal(run(found, x, OutputSpec((100,), "float32")), 2 * x)
    assert compile_kernel(step.kernel, TARGET).resources.registers < 64


@needs_triton
def test_numbers_are_specialised_as_the_jit_does(made: Make) -> None:
    def sizes(n: int) -> tuple[int, str]:
        (step,) = made(dims={"N": n}).steps
        return len(step.launch.args), step.kernel.source

    assert [sizes(n)[0] for n in (1, 16, 17)] == [4, 5, 5], "a 1 is a constant and no argument"
    assert sizes(17)[1] == sizes(35)[1] != sizes(32)[1] == sizes(64)[1]


@needs_triton
def test_whole_rows_of_aligned_pointers_are_loaded_as_vectors(made: Make) -> None:
    (step,) = made(constants={"BLOCK": 128}, dims={"N": 128}).steps
    assert "ld.global.v4" in step.kernel.source


@needs_triton
def test_types_are_those_of_buffers_and_scalars_or_as_annotated(made: Make) -> None:
    source = """@triton.jit
def convert(x_ptr: "*bf16", y_ptr, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.float32) * factor)
"""
    launch = {"kernel": "convert", "grid": [1], "args": ["x", "y", "float32(1.5)"]}
    found = made(source, launch, buffers={"x": "uint16", "y": "float32"})
    numbers = np.arange(64, dtype=np.float32)
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(run(found, bits, OutputSpec((64,), "float32")), 1.5 * numbers)


@needs_triton
def test_a_constexpr_may_be_a_dimension_a_heuristic_or_a_default(made: Make) -> None:
    source = """@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def some(x_ptr, y_ptr, n, N: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, FACTOR: tl.constexpr = 3):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, FACTOR * tl.load(x_ptr + i) + N + EVEN)
"""
    x = np.ones(64, np.float32)
    y = run(made(source, {"kernel": "some", "grid": [1]}, dims={"N": 64}), x, OutputSpec((64,), "float32"))
    np.testing.assert_array_equal(y, np.full(64, 3 + 64 + 1, np.float32))


@needs_triton
def test_scratch_memory_of_the_compiler_is_a_workspace(made: Make) -> None:
    source = """@triton.jit
def described(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[n, BLOCK], strides=[BLOCK, 1], block_shape=[16, BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, shape=[n, BLOCK], strides=[BLOCK, 1], block_shape=[16, BLOCK])
    y.store([tl.program_id(0) * 16, 0], x.load([tl.program_id(0) * 16, 0]))
"""
    found = made(source, {"kernel": "described", "grid": [3]}, dims={"N": 48})
    (step,) = found.steps
    ((name, workspace),) = found.workspaces.items()
    assert step.launch.args[3:] == (name, np.uint64(0))
    assert workspace.nbytes % 3 == 0


@needs_triton
def test_a_file_may_ask_for_the_device_and_the_target_at_its_top_level(made: Make) -> None:
    source = (
        "DEVICE = triton.runtime.driver.active.get_active_torch_device()\n"
        'assert triton.runtime.driver.active.get_current_target().backend == "cuda"\n\n\n'
    )
    assert made(source + TWICE).steps


AUTOTUNED = (
    """@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=2)], key=["n"])
"""
    + TWICE
)


@needs_triton
def test_an_autotuned_function_takes_the_configuration_that_the_solution_names(made: Make) -> None:
    assert made(AUTOTUNED).steps[0].launch.grid == (2, 1, 1)
    with pytest.raises(UsageError, match=r"mine.py: launches\[0\].kernel: twice is autotuned.*BLOCK under constants"):
        made(AUTOTUNED, {"grid": [2]}, constants={})


@needs_triton
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"launch": {"kernel": "thrice"}}, r"launches\[0\].kernel: no @triton.jit function 'thrice'.*it has twice"),
        ({"launch": {"args": ["x", "y"]}}, r"launches\[0\].args: 2 given, and twice takes 3 .*x_ptr, y_ptr, n"),
        ({"launch": {"args": ["x", "z", "int32(N)"]}}, r"launches\[0\].args: no buffer 'z'; .* x, y"),
        ({"launch": {"args": ["x", ["y"], "int32(N)"]}}, r"y_ptr: structs and tensor maps are not passed to Triton"),
        ({"launch": {"num_warps": 3}}, r"launches\[0\].num_warps: 3 is no power of two"),
        ({"launch": {"num_stages": 0}}, r"launches\[0\].num_stages: 0 is not at least 1"),
        ({"launch": {"grid": [2]}, "constants": {}}, r"BLOCK is a tl.constexpr without a value; give it under const"),
        ({"buffers": {**FLOATS, "x": "complex64"}}, r'x holds complex64; annotate x_ptr, such as x_ptr: "\*fp32"'),
    ],
)
def test_what_does_not_fit_is_refused(made: Make, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        made(**changed)
    assert "mine.py: launches[0]" in str(caught.value)


@needs_triton
@pytest.mark.parametrize("annotation", ["", ': "*fp32"'])
def test_a_workspace_has_the_type_that_the_function_says(made: Make, annotation: str) -> None:
    """Without one a float would be stored as a byte."""
    source = TWICE.replace("n, BLOCK", f"w{annotation}, n, BLOCK") + "    tl.store(w + i, 2.5)\n"
    given: dict[str, Any] = {"launch": {"args": ["x", "y", "w", "int32(N)"]}, "spaces": {"w": {"bytes": 512}}}
    if annotation:
        assert str(0x40200000) in made(source, **given).steps[0].kernel.source
        return
    with pytest.raises(UsageError, match=r'w holds bytes of no type; annotate w, such as w: "\*fp32"'):
        made(source, **given)


@needs_triton
def test_what_triton_does_not_compile_is_an_error_of_the_build(made: Make) -> None:
    wrong = TWICE.replace("tl.load(x_ptr + i, mask=i < n)", "x_ptr")
    with pytest.raises(CompileError, match=r"launches\[0\]: Triton does not compile twice"):
        made(wrong)


@needs_triton
def test_the_ptx_is_the_same_wherever_the_solution_lies(made: Make, tmp_path: Path) -> None:
    source = made().steps[0].kernel.source
    assert str(tmp_path) not in source
    assert '.file\t1 "mine.py"' in source
    assert ".debug_info" not in source


class Doubling:
    """A problem whose case has the buffers of the kernels above."""

    def make_case(self, dims: Mapping[str, int], seed: int, fmt: str) -> Case:
        x = np.zeros(dims["N"], np.float32)
        return Case({"x": x}, {"y": OutputSpec(x.shape, "float32")})

    def references(self, dims: Mapping[str, int], seed: int, fmt: str) -> References:
        raise NotImplementedError

    def decode(self, outputs: Mapping[str, Array], fmt: str) -> Any:
        raise NotImplementedError


@needs_triton
def test_code_runs_in_a_confined_process(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    about = {"name": "mine", "language": "triton", "constants": {"BLOCK": 64}, "launches": [LAUNCH]}
    path.write_text(f"{HEADER}GREENFAST = {json.dumps(about)}\n\n\n{TWICE}")
    found = find_solution(path)
    family = RemoteFamily("mine", found.folder, found.config, target=TARGET, problem=Doubling())
    assert family.program({}, "fp32", {"N": 100}).steps[0].kernel.entry == "twice"
    path.write_text(path.read_text().replace("tl.load(x_ptr + i, mask=i < n)", "x_ptr"))
    wrong = RemoteFamily("mine", found.folder, found.config, target=TARGET, problem=Doubling())
    with pytest.raises(CompileError, match="Triton does not compile twice"):
        wrong.program({}, "fp32", {"N": 100})


def test_without_triton_its_extra_is_named(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenfast.spec.extras._installed", lambda module: False)
    with pytest.raises(
        UsageError, match=r"needs greenfast\[triton\]: pip install '\.\[triton\]' in a clone of greenfast"
    ):
        made()


def test_files_of_lines_lose_their_folders_but_tritons_keep_its_name() -> None:
    ptx = (
        '}\n\t.file\t1 "/home/me/mine.py"\n\t.file\t2 "/venv/triton/language/standard.py"\n'
        "\t.section\t.debug_info\n\t{\n.b8 1\n\t}\n\t.section\t.debug_str\n\t{\n$L__info_string0:\n.b8 0\n\t}\n"
    )
    assert without_folders(ptx) == (
        '}\n\t.file\t1 "mine.py"\n\t.file\t2 "triton/language/standard.py"\n'
        "\t.section\t.debug_str\n\t{\n$L__info_string0:\n.b8 0\n\t}\n"
    )
