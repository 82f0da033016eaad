"""A check that cannot fail is refused: outputs that decode drops, and tolerances that answers without work meet."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from greenfast.device.session import RunResult
from greenfast.judge.formats.defined import unit_of_outputs
from greenfast.judge.gates.correctness import check_cases
from greenfast.judge.gates.sensitivity import fill_outputs, find_dropped
from greenfast.judge.record_schema import GateResult
from greenfast.judge.request import CasePlan
from greenfast.judge.task import ErrorGate, FormatGates, KernelErrorGate, Shape
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import Array, Case, OutputSpec, References
from tasks.fp8_attention import problem as attention
from tests.fakes import case_run

Floats = NDArray[np.float64]
Decode = Callable[[dict[str, Array]], Floats]
RNG = np.random.default_rng(7)
OUTPUTS: dict[str, Array] = {
    "y": RNG.standard_normal((6, 8)).astype(np.float32),
    "z": RNG.standard_normal(5).astype(np.float16),
    "n": RNG.integers(-9, 9, 7).astype(np.int32),
    "c": (RNG.standard_normal(4) + 1j * RNG.standard_normal(4)).astype(np.complex64),
    "b": RNG.integers(0, 2, 9).astype(np.bool_),
}


def joined(**changed: Callable[[Array], Array]) -> Decode:
    """A decode of all outputs, of which some are changed on their way."""

    def decode(outputs: dict[str, Array]) -> Floats:
        parts = []
        for name, array in outputs.items():
            values = changed[name](array) if name in changed else array
            if values.dtype.kind == "c":
                values = np.concatenate([values.real.ravel(), values.imag.ravel()])
            parts.append(values.astype(np.float64).ravel())
        return np.concatenate(parts)

    return decode


def zeroed(*place: Any) -> Callable[[Array], Array]:
    def without(array: Array) -> Array:
        array = array.copy()
        array[place] = 0
        return array

    return without


@pytest.mark.parametrize(
    ("decode", "dropped"),
    [
        (joined(), ""),
        (joined(y=lambda y: y * np.float32(2) + 1), ""),
        (joined(z=lambda z: z[:0]), "'z'"),
        (joined(z=np.zeros_like), "'z'"),
        (joined(y=lambda y: y[:, :-1]), "'y'"),
        (joined(y=zeroed(slice(None), 3)), "'y'"),
        (joined(y=zeroed(-1, -1)), "'y'"),
        (joined(z=zeroed(0)), "'z'"),
        (joined(z=np.abs), "highest bit of 5 elements of 'z'"),
        (joined(n=np.abs), "'n'"),
        (joined(n=lambda n: n & 0xFFFF), "highest bit of 7 elements of 'n'"),
        (joined(c=lambda c: c.real), "'c'"),
        (joined(c=lambda c: c.conj() * c), "'c'"),
        (joined(b=lambda b: b[1:]), "'b'"),
        (joined(y=lambda y: y.mean(keepdims=True)), "'y'"),
    ],
)
def test_what_decode_drops_is_found(decode: Decode, dropped: str) -> None:
    found = find_dropped(decode, OUTPUTS, decode(OUTPUTS))
    assert dropped in found
    assert bool(found) == bool(dropped)


def test_codes_with_a_scale_and_signed_zeros_are_shown() -> None:
    outputs: dict[str, Array] = {
        "codes": np.array([[0, 1, 2], [3, 0, 5]], np.int8),
        "scale": np.array([1.0, 0.5], np.float32),
    }

    def decode(o: dict[str, Array]) -> Floats:
        return np.concatenate([(o["codes"] * o["scale"][:, None]).ravel(), o["scale"]]).astype(np.float64)

    assert find_dropped(decode, outputs, decode(outputs)) == ""
    zeros: dict[str, Array] = {"y": np.zeros(6, np.float16), "empty": np.zeros(0, np.float32)}
    shown = joined()
    assert find_dropped(shown, zeros, shown(zeros)) == ""


# The whole gate, with kernels that are Python

OPEN = {"max_abs_err": 1e300, "mean_abs_err": 1e300, "pct_bad": 100.0, "bad_abs_err": 1e300}


class Problem:
    """y = f(x), judged by a tolerance; with ``second``, also z = -x, which decode may drop."""

    def __init__(
        self, f: Callable[[Floats], Floats], tolerance: float = 1e-2, *, relative: bool = True, second: bool = False,
        drops: bool = False, matched: float = 1.0,
    ) -> None:  # fmt: skip
        self.f, self.tolerance, self.relative, self.second, self.drops = f, tolerance, relative, second, drops
        self.matched = matched

    def make_case(self, dims: dict[str, int], seed: int, fmt: str) -> Case:
        x = np.random.default_rng(seed).standard_normal((dims["R"], dims["C"])).astype(np.float32)
        outputs = {"y": OutputSpec(self.f(x.astype(np.float64)).shape, "float32")}
        return Case({"x": x}, outputs | ({"z": OutputSpec(x.shape, "float32")} if self.second else {}))

    def right(self, case: Case) -> dict[str, Array]:
        x = case.inputs["x"].astype(np.float64)
        return {n: v.astype(np.float32) for n, v in {"y": self.f(x), "z": -x}.items() if n in case.outputs}

    def references(self, dims: dict[str, int], seed: int, fmt: str) -> References:
        case = self.make_case(dims, seed, fmt)
        x = case.inputs["x"].astype(np.float64)
        outputs = [self.f(x), *([-x] if self.second and not self.drops else [])]
        exact = np.concatenate([o.ravel() for o in outputs])
        t = self.tolerance
        return References(
            full=exact, exact=exact, bound=t * (1 + np.abs(exact)), matched=self.matched,
            relative=t * (unit_of_outputs(outputs) + np.abs(exact)) if self.relative else None,
            sizes=tuple(o.size for o in outputs),
        )  # fmt: skip

    def decode(self, outputs: dict[str, Array], fmt: str) -> Floats:
        return np.concatenate([v.astype(np.float64).ravel() for n, v in outputs.items() if n == "y" or not self.drops])


def softmax(x: Floats) -> Floats:
    p = np.exp(0.1 * (x - x.max(1, keepdims=True)))
    return cast(Floats, p / p.sum(1, keepdims=True))


def judged(
    problem: Problem, kernel: Callable[[Problem, Case], dict[str, Array]] = Problem.right,
    dims: tuple[int, int] = (4, 512), seeds: int = 3,
) -> GateResult:  # fmt: skip
    """CORRECTNESS of a kernel."""

    class Worker:
        def run(self, executable: object, case: Case, repeats: int) -> RunResult:
            return RunResult(kernel(problem, case))

        def close(self) -> None: ...

    shape = Shape(name="s", dims={"R": dims[0], "C": dims[1]})
    side: Any = SimpleNamespace(
        role="candidate", variant=SimpleNamespace(name="it"), programs={"s": None}, distinct=[],
        executable=lambda name: SimpleNamespace(workspaces={}),
    )  # fmt: skip
    gates = FormatGates(error=ErrorGate(**OPEN), kernel_error=KernelErrorGate(relative_error=1e300))
    case_plans = [CasePlan(shape, 2**40 + n, randomized=True) for n in range(seeds)]
    return check_cases(case_run([side], problem, case_plans, "f", gates, Worker))


def zeros(problem: Problem, case: Case) -> dict[str, Array]:
    return {name: np.zeros_like(array) for name, array in problem.right(case).items()}


def means(problem: Problem, case: Case) -> dict[str, Array]:
    return {name: np.full_like(array, array.mean()) for name, array in problem.right(case).items()}


def half(problem: Problem, case: Case) -> dict[str, Array]:
    return {name: array / 2 for name, array in problem.right(case).items()}


@pytest.mark.parametrize("lazy", [zeros, means, half])
@pytest.mark.parametrize("matched", [1.0, 0.99])
def test_a_tolerance_that_zeros_meet_is_relative(lazy: Any, matched: float) -> None:
    problem = Problem(softmax, matched=matched)
    result = judged(problem)
    assert result.status == "PASS"
    assert ("tolerance at s", "as stated", "relative: zeros would meet the stated one", "PASS") in result.checks
    assert judged(problem, lazy).status == "FAIL"


def test_each_output_has_its_own_size() -> None:
    """Zeros in the output whose values are small, next to one whose values are not."""

    def first_only(problem: Problem, case: Case) -> dict[str, Array]:
        return problem.right(case) | {"y": np.zeros(case.outputs["y"].shape, np.float32)}

    problem = Problem(softmax, second=True)
    assert judged(problem).status == "PASS"
    assert judged(problem, first_only).status == "FAIL"


@pytest.mark.parametrize(
    ("f", "options", "name"),
    [
        (lambda x: np.maximum(-np.abs(x) - 1, 0), {}, "zeros"),
        (lambda x: 1 + 1e-4 * x, {}, "a constant"),
        (lambda x: np.cos(np.arange(x.size).reshape(x.shape)) + 1e-5 * x, {}, "the answer to other inputs"),
        (lambda x: x + 1e-4 * np.sin(x), {}, "a copy of 'x'"),
        (lambda x: 0.5 + np.abs(x).mean(keepdims=True) * 1e-3, {}, "a constant"),
        (softmax, {"relative": False}, "zeros"),
        (lambda x: 1e-3 * x, {"relative": False}, "zeros"),
    ],
)
def test_what_needs_no_work_cannot_be_judged(f: Any, options: dict[str, Any], name: str) -> None:
    result = judged(Problem(f, **options))
    assert result.status == "PENDING"
    assert result.summary.startswith("s cannot be judged: ")
    assert name in result.summary
    assert any(name in check[2] and check[3] == "PENDING" for check in result.checks)


@pytest.mark.parametrize("dims", [(4, 512), (1, 1), (1, 7), (64, 3)])
def test_what_needs_work_is_judged_as_stated(dims: tuple[int, int]) -> None:
    for f in (lambda x: 2 * x, np.square, lambda x: x, lambda x: x.sum(1)):
        result = judged(Problem(cast(Any, f), 1e-5), dims=dims)
        assert result.status == "PASS", result
    assert judged(Problem(lambda x: 2 * x, 1e-5), dims=(1, 1), seeds=1).status == "PASS", "a mean is the answer"


def test_an_output_that_is_dropped_is_refused() -> None:
    def sevens(problem: Problem, case: Case) -> dict[str, Array]:
        return problem.right(case) | {"z": np.full(case.outputs["z"].shape, 7, np.float32)}

    for kernel in (Problem.right, sevens):
        with pytest.raises(UsageError, match=r"s seed \d+: CORRECTNESS cannot check all outputs: .*'z'.*decode"):
            judged(Problem(np.square, second=True, drops=True), kernel)
    assert judged(Problem(np.square, second=True), sevens).status == "FAIL"


def test_an_output_near_one_of_the_fills_is_none_that_any_value_meets() -> None:
    for value in (7.0, 99.0):
        result = judged(Problem(lambda x, value=value: value + 1e-3 * x, 1e-2, relative=False))  # type: ignore[misc]
        assert "cannot be judged: a constant" in result.summary


def test_a_bound_that_any_value_meets_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot judge output 'y': it passes with 7 in all"):
        judged(Problem(np.square, 100.0, relative=False))


def test_what_an_output_is_filled_with() -> None:
    """Bits of bfloat16 get the values' bits: as an integer, 7 would be nearly 0, which may be the right answer."""
    filled = dict(fill_outputs(OUTPUTS | {"bits": np.zeros(3, np.uint16)}))
    assert set(filled) == {"y", "z", "n", "c", "bits"}, "no other value of a Boolean is far from both"
    for n, value in enumerate((7.0, 99.0)):
        assert all((filled[name][n][name] == value).all() for name in "yznc")
        values = (filled["bits"][n]["bits"].astype(np.uint32) << 16).view(np.float32)
        assert (values == value).all()


def test_a_log_sum_exp_is_compared() -> None:
    """A row without a key has minus infinity, and nothing else."""
    dims = {"B": 1, "H": 1, "S": 3, "KV": 1, "D": 64, "CAUSAL": 2, "LSE": 1}
    case, wanted = attention.make_case(dims, 5, "e4m3"), attention.references(dims, 5, "e4m3")
    sums = attention.log_sum_exp(dims, 5, "e4m3").astype(np.float32)
    out = wanted.exact[: wanted.sizes[0]].reshape(case.outputs["out"].shape).astype(np.float16)
    decoded = attention.decode({"out": out, "lse": sums}, "e4m3")
    assert find_dropped(lambda o: attention.decode(o, "e4m3"), {"out": out, "lse": sums}, decoded) == ""
    for bounds in (wanted.bound, *wanted.bounds.values()):
        assert (np.abs(decoded - wanted.exact) <= bounds).all()
        for place, value in ((0, -np.float32(3e38)), (0, 0.0), (2, sums[0, 2] + 0.5), (2, 7.0)):
            wrong = sums.copy()
            wrong[0, place] = value
            changed = attention.decode({"out": out, "lse": wrong}, "e4m3")
            assert not (np.abs(changed - wanted.exact) <= bounds).all(), (place, value)
