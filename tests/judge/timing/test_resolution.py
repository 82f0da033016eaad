"""The clock's step is part of the noise floor: times in steps support no claim below one."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.judge.record_schema import Claim, SpeedupRow, TimingRow
from greenfast.judge.timing.estimators import resolution_us, speedup_row

PROCESSES, BLOCKS, LAUNCHES = 3, 12, 20
CLAIM = Claim(confidence=0.95, required=0.0, gated=["s"])


def timed(rng: np.random.Generator, us: float, step: float, noise: float, drift: np.ndarray) -> TimingRow:
    """A kernel's launches on a clock with steps: both time stamps fall on one."""
    starts = rng.uniform(0, 1, (PROCESSES, BLOCKS, LAUNCHES))
    times = us * (1 + noise * rng.standard_normal(starts.shape)) * drift[:, None, None]
    if step:
        times = (np.floor(starts + times / step) - np.floor(starts)) * step
    return TimingRow(
        shape="s", dims={}, seed=0, method="", cache="warm", warmup_iters=0, timed_iters=times.size, discarded_iters=0,
        p50_us=round(float(np.median(times)), 3), p90_us=round(float(np.quantile(times, 0.9)), 3), mean_us=1, std_us=1,
        iters_per_sec=1,
        block_medians_us=np.round(np.median(times, axis=2), 3).tolist(), resolution_us=resolution_us(times.ravel()),
    )  # fmt: skip


def measured(seed: int, us: float, ratio: float, step: float, noise: float = 0.002) -> SpeedupRow:
    rng = np.random.default_rng(seed)
    drift = 1 + 0.002 * rng.standard_normal(PROCESSES)
    baseline, candidate, again = (timed(rng, t, step, noise, drift) for t in (us, us / ratio, us))
    return speedup_row([baseline], [candidate], [again], "s", "warm", CLAIM)


@pytest.mark.parametrize("ratio", [1.0, 1.003, 1 / 1.003])
@pytest.mark.parametrize(("us", "step"), [(4.0, 0.032), (4.31, 0.032), (2.5, 0.032), (9.0, 0.5), (30.0, 1.0)])
def test_less_than_a_step_is_never_claimed(us: float, step: float, ratio: float) -> None:
    rows = [measured(seed, us + 0.003 * seed, ratio, step) for seed in range(25)]
    assert {row.verdict for row in rows} & {"FAST", "SLOWER", "SHORT"} == set()
    assert all(row.noise_floor >= step / us / 1.1 for row in rows)


def test_what_is_above_a_step_is_claimed() -> None:
    assert {measured(seed, 4.0, 1.05, 0.032).verdict for seed in range(10)} == {"FAST"}
    assert {measured(seed, 400.0, 1.02, 0.032).verdict for seed in range(10)} == {"FAST"}


def test_a_clock_without_visible_steps_costs_nothing() -> None:
    assert {measured(seed, 4.0, 1.02, 0.0).verdict for seed in range(10)} == {"FAST"}
    assert all(measured(seed, 40.0, 1.0, 0.0).noise_floor == 0.005 for seed in range(10))


@pytest.mark.parametrize(
    ("samples", "step"),
    [([4.0] * 9, 0.0), ([4.0, 4.032, 4.096], 0.032), ([4.0, 4.00004, 4.5], 0.5), ([7.0], 0.0), ([1, 3, 4.024], 1.024)],
)
def test_the_step_is_the_least_difference(samples: list[float], step: float) -> None:
    assert resolution_us(samples) == pytest.approx(step)
