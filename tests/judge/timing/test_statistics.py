"""The speedup's interval, the noise floor and the verdict, on simulated machines whose truth is known."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from greenfast.judge.timing import estimators
from greenfast.judge.timing.estimators import Interval, noise_floor, pool_seeds, speedup_interval, summarize, verdict

Floats = npt.NDArray[np.float64]
DRIFT, NOISE = 0.005, 0.003


def machine(
    rng: np.random.Generator,
    *,
    processes: int = 3,
    blocks: int = 21,
    drift: float = DRIFT,
    noise: float = NOISE,
    slow_share: float = 0.03,
) -> Floats:
    """Log times of one kernel in 2 * blocks slots of each process: an offset, slow drift, noise, a few slow slots."""
    slots = 2 * blocks
    offset = rng.normal(0, 0.01, (processes, 1))
    slow = (rng.random((processes, slots)) < slow_share) * rng.exponential(0.03, (processes, slots))
    return np.asarray(offset + drift * np.arange(slots) / slots + rng.normal(0, noise, (processes, slots)) + slow)


def interleaved(slots: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Two sides that share each pair of slots in random order."""
    pairs = rng.permuted(slots.reshape(len(slots), -1, 2), axis=2)
    return pairs[..., 0], pairs[..., 1]


def sequential(slots: Floats) -> tuple[Floats, Floats]:
    """All of one side, then all of the other."""
    half = slots.shape[1] // 2
    return slots[:, :half], slots[:, half:]


def welch_differs(a: Floats, b: Floats) -> bool:
    error = math.sqrt(a.var(ddof=1) / a.size + b.var(ddof=1) / b.size)
    return bool(abs(a.mean() - b.mean()) > 1.96 * error)


@pytest.mark.parametrize(("processes", "offset"), [(3, 0.005), (5, 0.005), (3, 0.0)])
def test_a_known_effect_is_covered_about_as_often_as_promised(processes: int, offset: float) -> None:
    rng = np.random.default_rng(11)
    trials, truth, covered, widths = 300, 1.10, 0, []
    for trial in range(trials):
        a, b = interleaved(machine(rng, processes=processes), rng)
        a = a + math.log(truth) + rng.normal(0, offset, (processes, 1))
        found = speedup_interval(np.exp(a), np.exp(b), resamples=1000, seed=trial)
        covered += found.low <= truth <= found.high
        widths.append(found.high - found.low)
    assert covered / trials >= 0.93
    # Coverage by being useless does not count: a required 10 % must be told from 15 %.
    assert np.median(widths) < 0.04


def test_identical_kernels_under_drift_are_told_apart_only_by_sequential_windows() -> None:
    rng = np.random.default_rng(12)
    trials, excludes_one, claims, sequential_claims, interleaved_claims = 300, 0, 0, 0, 0
    for trial in range(trials):
        slots = machine(rng, slow_share=0)
        a, b = interleaved(slots, rng)
        found = speedup_interval(np.exp(a), np.exp(b), resamples=1000, seed=trial)
        excludes_one += not found.low <= 1 <= found.high
        claims += verdict(found, noise_floor=0.005, required=0) in ("FAST", "SLOWER", "SHORT")
        sequential_claims += welch_differs(*sequential(slots[:1]))
        interleaved_claims += welch_differs(*interleaved(slots[:1], rng))
    assert excludes_one / trials <= 0.05
    assert claims == 0
    assert interleaved_claims / trials <= 0.08
    # The same slots: half of the drift is taken for an effect.
    assert sequential_claims / trials > 0.65


def test_sequential_windows_deceive_this_interval_too() -> None:
    rng = np.random.default_rng(13)
    wrong = 0
    for trial in range(50):
        a, b = sequential(machine(rng, drift=0.02))
        found = speedup_interval(np.exp(a), np.exp(b), resamples=500, seed=trial)
        wrong += verdict(found, noise_floor=0.005, required=0) == "SLOWER"
    assert wrong > 25


def test_the_bootstrap_resamples_processes_and_then_blocks() -> None:
    rng = np.random.default_rng(14)
    ratios = [rng.normal(0.1 * p, 0.02, n) for p, n in enumerate((5, 9, 30))]
    expected = []
    for _ in range(4000):
        drawn = [ratios[p] for p in rng.integers(3, size=3)]
        expected.append(np.median(np.concatenate([rng.choice(r, len(r)) for r in drawn])))
    found = speedup_interval([np.exp(r) for r in ratios], [np.ones_like(r) for r in ratios])
    assert found.estimate == pytest.approx(math.exp(np.median(np.concatenate(ratios))))
    half = 4.302653 * np.std(expected)  # Student's t, 97.5 %, 2 degrees of freedom
    assert math.log(found.high / found.estimate) == pytest.approx(half, rel=0.05)
    assert math.log(found.estimate / found.low) == pytest.approx(half, rel=0.05)


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [(0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.99, 4, 4.60409), (0.9, 8, 1.85955), (0.95, 0, 1.95996)],
)
def test_quantiles_of_students_distribution(confidence: float, degrees: int, expected: float) -> None:
    assert estimators._two_sided_quantile(confidence, degrees=degrees) == pytest.approx(expected, rel=1e-5)


def test_same_input_same_interval_and_swapped_sides_invert_it() -> None:
    rng = np.random.default_rng(15)
    a, b = (np.exp(x) for x in interleaved(machine(rng), rng))
    found = speedup_interval(a, b, seed=3)
    assert found == speedup_interval(a.tolist(), b.tolist(), seed=3)
    assert found != speedup_interval(a, b, seed=4)
    swapped = speedup_interval(b, a, seed=3)
    assert (1 / swapped.high, 1 / swapped.estimate, 1 / swapped.low) == pytest.approx(
        (found.low, found.estimate, found.high)
    )


def test_more_confidence_is_a_wider_interval() -> None:
    rng = np.random.default_rng(16)
    a, b = (np.exp(x) for x in interleaved(machine(rng), rng))
    narrow, wide = speedup_interval(a, b, confidence=0.9), speedup_interval(a, b, confidence=0.99)
    assert wide.low < narrow.low < narrow.estimate < narrow.high < wide.high


def test_noiseless_blocks_give_a_point_and_one_process_is_accepted() -> None:
    found = speedup_interval([[3.0, 3.0]], [[2.0, 2.0]])
    assert (found.low, found.estimate, found.high) == pytest.approx((1.5, 1.5, 1.5))


class TestNoiseFloor:
    def test_a_quiet_machine_has_the_least_floor(self) -> None:
        rng = np.random.default_rng(17)
        a, b = interleaved(machine(rng, noise=0.0005), rng)
        assert noise_floor(np.exp(a), np.exp(b)) == 0.005

    @pytest.mark.parametrize("bias", [0.02, -0.02])
    def test_a_biased_protocol_shows(self, bias: float) -> None:
        rng = np.random.default_rng(18)
        a, b = interleaved(machine(rng), rng)
        assert 0.018 < noise_floor(np.exp(a + bias), np.exp(b)) < 0.024

    def test_it_is_the_noise_of_the_estimate_not_of_a_block(self) -> None:
        rng = np.random.default_rng(19)
        a, b = interleaved(machine(rng, noise=0.02), rng)
        per_block = float(np.quantile(np.abs(a - b), 0.95))
        many = interleaved(machine(rng, noise=0.02, blocks=400), rng)
        few_floor = noise_floor(np.exp(a), np.exp(b))
        assert few_floor < per_block / 2
        assert noise_floor(np.exp(many[0]), np.exp(many[1])) < few_floor

    def test_it_is_deterministic(self) -> None:
        rng = np.random.default_rng(20)
        a, b = (np.exp(x) for x in interleaved(machine(rng, noise=0.05), rng))
        assert noise_floor(a, b, seed=1) == noise_floor(a, b, seed=1) > 0.005


@pytest.mark.parametrize(
    ("low", "high", "floor", "required", "expected"),
    [
        (1.15, 1.20, 0.005, 1.15, "FAST"),  # the lower end may equal the requirement
        (1.1499, 1.20, 0.005, 1.15, "INCONCLUSIVE"),
        (1.06, 1.1499, 0.005, 1.15, "SHORT"),
        (1.06, 1.15, 0.005, 1.15, "INCONCLUSIVE"),
        (1.0051, 1.02, 0.005, 0, "FAST"),
        (1.005, 1.02, 0.005, 0, "INCONCLUSIVE"),  # beyond the band, not on its edge
        (1.005, 1.02, 0.005, 1.15, "INCONCLUSIVE"),
        (1 / 1.01, 1.01, 0.005, 1.15, "NO EFFECT"),  # the margin's ends belong to it
        (1 / 1.01, 1.0101, 0.005, 1.15, "INCONCLUSIVE"),
        (0.9900, 1.01, 0.005, 0, "INCONCLUSIVE"),
        (0.9950, 1.005, 0.010, 0, "NO EFFECT"),
        (0.9950, 1.005, 0.011, 0, "INCONCLUSIVE"),  # identical kernels differ by more than the margin here
        (0.991, 0.994, 0.005, 0, "SLOWER"),  # a small effect, well resolved
        (1.002, 1.004, 0.005, 1.001, "NO EFFECT"),  # a requirement inside the noise is not met by noise
        (0.90, 0.995, 0.005, 1.15, "SLOWER"),
        (0.90, 1 / 1.005, 0.005, 1.15, "INCONCLUSIVE"),
        (0.90, 1.20, 0.005, 0, "INCONCLUSIVE"),
        (1.02, 1.03, 0.04, 0, "INCONCLUSIVE"),  # inside the noise, and yet no equivalence
        (1.0, 1.0, 0.0, 0, "NO EFFECT"),
    ],
)
def test_verdict(low: float, high: float, floor: float, required: float, expected: str) -> None:
    interval = Interval(math.sqrt(low * high), low, high)
    assert verdict(interval, noise_floor=floor, required=required) == expected


def judged(
    rng: np.random.Generator, truth: float, *, noise: float, offset: float, trials: int
) -> tuple[Counter[str], float]:
    """Verdicts of whole runs (interval, A/A and verdict), nothing required, and the share of intervals with the truth.

    offset: standard deviation of each label's times between its processes, beyond what they share.
    """
    verdicts: Counter[str] = Counter()
    covered = 0
    for trial in range(trials):
        slow = (rng.random((3, 5, 20)) < 0.03) * rng.exponential(0.03, (3, 5, 20))
        times = rng.normal(0, noise, (3, 5, 20)) + slow + rng.normal(0, offset, (3, 5, 1))
        times[1] -= math.log(truth)
        baseline, candidate, again = np.round(10 * np.exp(times), 3)
        found = speedup_interval(baseline, candidate, resamples=1000, seed=trial)
        floor = noise_floor(baseline, again, resamples=1000, seed=trial)
        covered += found.low <= truth <= found.high
        verdicts[verdict(found, noise_floor=floor, required=0)] += 1
    return verdicts, covered / trials


@pytest.mark.parametrize(("noise", "offset"), [(0.003, 0.02), (0.02, 0.005), (0.02, 0.02)])
def test_an_effect_of_two_percent_is_not_called_equivalence_by_a_noisy_machine(noise: float, offset: float) -> None:
    verdicts, _ = judged(np.random.default_rng(21), 1.02, noise=noise, offset=offset, trials=100)
    assert verdicts["NO EFFECT"] <= 1
    assert verdicts["SLOWER"] == 0


def test_a_quiet_machine_tells_equivalence() -> None:
    verdicts, _ = judged(np.random.default_rng(22), 1.0, noise=0.003, offset=0.0, trials=60)
    assert verdicts == {"NO EFFECT": 60}


@pytest.mark.slow
def test_identical_kernels_are_never_called_fast_in_3600_runs() -> None:
    rng = np.random.default_rng(23)
    coverage = []
    for noise in (0.003, 0.02, 0.05):
        for offset in (0.0, 0.002, 0.005):
            verdicts, covered = judged(rng, 1.0, noise=noise, offset=offset, trials=400)
            assert verdicts["FAST"] == verdicts["SLOWER"] == 0
            coverage.append(covered)
    assert np.mean(coverage) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.003, 0.02, 0.05])
def test_processes_that_differ_by_two_percent_cost_power_not_truth(noise: float) -> None:
    verdicts, covered = judged(np.random.default_rng(24), 1.0, noise=noise, offset=0.02, trials=400)
    assert verdicts["FAST"] + verdicts["SLOWER"] <= 4
    assert verdicts["NO EFFECT"] == 0
    assert covered >= 0.93


@pytest.mark.parametrize(
    ("interval", "floor", "required", "message"),
    [
        (Interval(1.0, 1.1, 1.2), 0.005, 0, "not an interval"),
        (Interval(1.0, 0.0, 1.2), 0.005, 0, "not an interval"),
        (Interval(math.nan, 0.9, 1.1), 0.005, 0, "not an interval"),
        (Interval(1.0, 0.9, math.inf), 0.005, 0, "not an interval"),
        (Interval(1.0, 0.9, 1.1), -0.1, 0, "noise floor"),
        (Interval(1.0, 0.9, 1.1), math.nan, 0, "noise floor"),
        (Interval(1.0, 0.9, 1.1), 0.005, 0.15, "ratio >= 1"),
        (Interval(1.0, 0.9, 1.1), 0.005, math.nan, "ratio >= 1"),
    ],
)
def test_verdict_refuses(interval: Interval, floor: float, required: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verdict(interval, noise_floor=floor, required=required)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([], [], "no processes"),
        ([[1.0]], [], "no processes"),
        ([[1.0], [1.0]], [[1.0]], "differ in processes: 2 and 1"),
        ([[1.0], [1.0, 2.0]], [[1.0], [1.0]], "differ in blocks of process 1: 2 and 1"),
        ([[1.0], []], [[1.0], []], "baseline, process 1: no times"),
        ([[1.0]], [[0.0]], "candidate, process 0: times must be finite and positive"),
        ([[-1.0]], [[1.0]], "finite and positive"),
        ([[math.nan]], [[1.0]], "finite and positive"),
        ([[1.0]], [[math.inf]], "finite and positive"),
        ([[[1.0]]], [[[1.0]]], "flat list"),
    ],
)
def test_bad_blocks_are_refused(a: list[list[float]], b: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speedup_interval(a, b)
    with pytest.raises(ValueError, match=message):
        noise_floor(a, b)


def test_bad_options_are_refused() -> None:
    for confidence in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="confidence"):
            speedup_interval([[1.0]], [[1.0]], confidence=confidence)
    with pytest.raises(ValueError, match="resamples"):
        speedup_interval([[1.0]], [[1.0]], resamples=1)


def test_figures_of_launches() -> None:
    figures = summarize([float(x) for x in range(10, 111, 10)])
    assert figures == {
        "p50_us": 60, "p90_us": 100, "mean_us": 60, "std_us": 33.166, "iters_per_sec": 16666.7, "resolution_us": 10
    }  # fmt: skip
    assert summarize([4.0])["std_us"] == 0
    for bad in ([], [0.0], [math.nan], [1.0, -1.0]):
        with pytest.raises(ValueError, match="samples_us"):
            summarize(bad)


def test_pooled_seeds_keep_their_processes() -> None:
    assert pool_seeds([[[1.0, 2.0], [3.0]], [[4.0], [5.0, 6.0]]]) == [[1.0, 2.0, 4.0], [3.0, 5.0, 6.0]]
    with pytest.raises(ValueError, match="same processes, got"):
        pool_seeds([[[1.0]], [[1.0], [2.0]]])
    with pytest.raises(ValueError, match="no seeds"):
        pool_seeds([])
