"""The problems of examples/ and the solutions of examples/solutions: references, bounds, kernels on the emulator."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from greenfast.device.compiler import compile_kernel
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.judge.implementation import BuiltProgram
from greenfast.judge.solution.cuda_program import DeclaredFamily
from greenfast.judge.solution.messages import Buffer
from greenfast.judge.solution.schema import ResolvedSolution, find_solution
from greenfast.judge.task import LoadedTask, Shape, load
from greenfast.spec.arch import Target
from greenfast.spec.extras import EXTRAS
from greenfast.spec.kernel import Program

EXAMPLES = Path(__file__).parents[1] / "examples"
SOLUTIONS = sorted(path.stem for path in (EXAMPLES / "solutions").glob("*.py"))
NAMES = ("matmul", "layer_norm", "causal_attention")
TASKS = {name: load(EXAMPLES / name) for name in ("row_softmax", *NAMES)}
TARGET = Target("sm_90a")
FMT = "fp16"
Inputs = Mapping[str, torch.Tensor]

EXPECTED: dict[str, Callable[[Inputs], torch.Tensor]] = {
    "matmul": lambda x: x["a"] @ x["b"],
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x["x"], x["x"].shape[1:], x["weight"], x["bias"], 1e-5),
    "causal_attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x["q"], x["k"], x["v"], is_causal=True
    ),
}
#: Wrong in ways that look right: the last product left out, another epsilon, a mask off by one.
WRONG: dict[str, Callable[[Inputs], torch.Tensor]] = {
    "matmul": lambda x: x["a"][:, :-1] @ x["b"][:-1],
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x["x"], x["x"].shape[1:], x["weight"], x["bias"], 1e-2),
    "causal_attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x["q"], x["k"], x["v"], attn_mask=torch.ones(x["q"].shape[1], x["q"].shape[1]).tril(1).bool()
    ),
}


def tensors(task: LoadedTask, dims: Mapping[str, int], variant: str = "normal") -> Inputs:
    inputs = task.problem.make_case(dims, 0, FMT, **with_variant(variant)).inputs
    return {name: torch.from_numpy(array).double() for name, array in inputs.items()}


def with_variant(variant: str) -> dict[str, Any]:
    return {} if variant == "normal" else {"variant": variant}


def variants(task: LoadedTask) -> tuple[str, ...]:
    return ("normal", *getattr(task.problem, "VARIANTS", ()))


def small_shapes(task: LoadedTask) -> list[Shape]:
    return [task.config.shape(name) for name in task.config.defaults.shapes if name != "wide"]


def ratio(task: LoadedTask, dims: Mapping[str, int], outputs: Mapping[str, NDArray[Any]], variant: str) -> float:
    references = task.problem.references(dims, 0, FMT, **with_variant(variant))
    return worst_bound_ratio(task.problem.decode(outputs, FMT), references.exact, references.bound)


@pytest.mark.parametrize("name", NAMES)
def test_references_are_those_of_torch(name: str) -> None:
    task = TASKS[name]
    for shape in small_shapes(task):
        for variant in variants(task):
            references = task.problem.references(shape.dims, 0, FMT, **with_variant(variant))
            expected = EXPECTED[name](tensors(task, shape.dims, variant)).numpy()
            np.testing.assert_allclose(references.exact, expected, rtol=1e-9, atol=1e-9)
            assert (references.full == references.exact).all()
            assert (references.bound > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_no_kernel_within_the_bound_misses_another_gate(name: str) -> None:
    task = TASKS[name]
    gates = task.config.gates(FMT)
    for shape in task.config.shapes:
        # Of rows, columns and heads that are like each other a few are enough.
        dims = {name: min(size, {"B": 1, "H": 1}.get(name, 64)) if name in "RMNBH" else size
                for name, size in shape.dims.items()}  # fmt: skip
        for seed in task.config.seeds:
            references = task.problem.references(dims, seed, FMT)
            worst = error_stats(references.exact + references.bound, references.exact, gates.error.bad_abs_err)
            assert worst.max_abs_err <= gates.error.max_abs_err
            assert worst.mean_abs_err <= gates.error.mean_abs_err
            assert worst.relative_error <= gates.kernel_error.relative_error


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_lets_half_results_through_and_stops_wrong_ones(name: str) -> None:
    task = TASKS[name]
    (output,) = task.problem.make_case(task.config.shapes[0].dims, 0, FMT).outputs
    for variant in variants(task):
        dims = task.config.shape("odd").dims
        x = tensors(task, dims, variant)
        assert ratio(task, dims, {output: EXPECTED[name](x).half().numpy()}, variant) <= 1
        assert ratio(task, dims, {output: WRONG[name](x).half().numpy()}, variant) > 1


def emulated(task: LoadedTask, program: Program, shape: Shape, variant: str) -> float:
    """The worst error of a program's result over its bound; its memory accesses hold."""
    kernels = tuple(compile_kernel(step.kernel, TARGET) for step in program.steps)
    case = task.problem.make_case(shape.dims, 0, FMT, **with_variant(variant))
    result = EmulatorSession().run(BuiltProgram(program, kernels).executable, case, 1)
    assert result.violations == []
    return ratio(task, shape.dims, result.outputs, variant)


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_kernel_is_right_on_the_emulator(name: str) -> None:
    task = TASKS[name]
    found = find_solution(task.folder / task.config.defaults.baseline)
    for shape in small_shapes(task)[1:]:
        assert emulated(task, DeclaredFamily(found).program({}, "", shape.dims), shape, "normal") <= 1


def rendered(found: ResolvedSolution, task: LoadedTask, shape: Shape) -> Program:
    case = task.problem.make_case(shape.dims, 0, FMT)
    buffers = {name: Buffer(array.dtype.name, list(array.shape)) for name, array in case.inputs.items()}
    buffers |= {name: Buffer(spec.dtype, list(spec.shape), True) for name, spec in case.outputs.items()}
    language = importlib.import_module(f"greenfast.judge.solution.languages.{found.config.language}")
    program: Program = language.program(found, FMT, shape.dims, TARGET, buffers)
    return program


@pytest.mark.parametrize("name", SOLUTIONS)
def test_the_solution_is_right_on_the_emulator(name: str) -> None:
    found = find_solution(EXAMPLES / "solutions" / f"{name}.py")
    extra = found.config.language
    pytest.importorskip(EXTRAS[extra][0], reason=f"needs greenfast[{extra}]")
    task = TASKS[found.config.problem]
    for shape in small_shapes(task):
        found_ratios = [
            emulated(task, rendered(found, task, shape), shape, variant)
            for variant in (variants(task) if shape.name == "small" else ("normal",))
        ]
        assert max(found_ratios) <= 1
        if shape.name == "odd":
            assert max(found_ratios) > 0.2  # a bound that is never near stops nothing


def test_every_solution_names_its_problem_and_every_problem_has_one() -> None:
    solved = {find_solution(EXAMPLES / "solutions" / f"{name}.py").config.problem for name in SOLUTIONS}
    assert solved == set(TASKS)


def test_the_page_quotes_the_example_as_it_is() -> None:
    page = (EXAMPLES.parent / "docs" / "judging-triton.md").read_text()
    (quoted,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert quoted in (EXAMPLES / "solutions" / "triton_softmax.py").read_text()


def test_a_fault_names_the_line_of_the_solution(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs greenfast[triton]")
    text = (EXAMPLES / "solutions" / "triton_softmax.py").read_text()
    path = tmp_path / "mine.py"
    path.write_text(text.replace(".to(tl.float16), mask=inside)", ".to(tl.float16))"))
    task, line = TASKS["row_softmax"], 1 + text[: text.index("tl.store")].count("\n")
    with pytest.raises(
        KernelFaultError, match=rf"write out of bounds: .* past the end of 'y' .* at mine.py:{line}, block"
    ):
        emulated(
            task, rendered(find_solution(path), task, task.config.shape("odd")), task.config.shape("odd"), "normal"
        )
