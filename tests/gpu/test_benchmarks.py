"""Comparisons on a GPU, on a small shape: they time what is installed and detect a wrong kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from benchmarks.comparison import BenchCell
from benchmarks.records import Benchmark, read_record
from benchmarks.registry import KERNEL
from benchmarks.sdpa import SMALL, peers
from benchmarks.session import BenchSession
from greenfast.device.compiler import compile_kernel
from greenfast.device.session import KernelImage
from greenfast.judge.task import Shape
from greenfast.kernels.attention import hopper
from greenfast.kernels.attention.config import read_dims
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Launch
from tests.benchmarks.command_line import run_benchmark

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def test_a_run_has_times_of_all_that_is_installed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = run_benchmark(capsys, "peers", "--shapes", "small,mission", "--out", tmp_path)
    assert ran.code == 0, ran.err
    record = cast(Benchmark, read_record(Path(ran.out.splitlines()[-1])))
    missing = {c.name for c in record.backends if c.missing}
    assert not missing & {KERNEL, "torch_flash"}
    for row in record.rows:
        assert (row.median_us is None) == bool(row.reason), row
        if row.backend not in missing:
            assert not row.reason
        if row.median_us is not None:
            assert 1 < (row.p25_us or 0) <= row.median_us <= (row.p75_us or 0) < 200
            assert row.rounds >= 7
            assert (row.error or 1) < 0.1
            assert row.cache == "warm"


def image_of(dims: dict[str, int]) -> tuple[KernelImage, Launch]:
    source = hopper.kernel(*read_dims(dims, "e4m3"))
    cubin = compile_kernel(source, Target("sm_90a")).cubin
    image = KernelImage(cubin, source.entry, source.block, source.dynamic_smem_bytes)
    return image, hopper.launch(*read_dims(dims, "e4m3"))


@pytest.fixture
def session() -> Iterator[BenchSession]:
    before = torch.cuda.current_stream()
    yield BenchSession(0)
    torch.cuda.set_stream(before)


def test_a_wrong_kernel_is_detected(session: BenchSession) -> None:
    dims = SMALL[1].dims
    image, plan = image_of(dims)
    cell = BenchCell(SMALL[1], (KERNEL,), sampled=64)
    session.open(cell, (image, plan))
    right = session.add(KERNEL, True)
    assert right.reason == ""
    assert right.finite
    assert (right.kernel_error or 1) < 0.03
    assert (right.bound_ratio or 9) <= 1
    assert session.time(7).changed == []
    # A softmax of another scale, and half of the heads.
    scaled = replace(plan, args=tuple(np.float32(0.2) if isinstance(a, np.float32) else a for a in plan.args))
    session.open(cell, (image, scaled))
    assert (session.add(KERNEL, False).kernel_error or 0) > 0.03
    fewer = replace(plan, args=tuple(np.int32(4) if i == 8 else a for i, a in enumerate(plan.args)))
    session.open(cell, (image, fewer))
    assert not session.add(KERNEL, False).finite
    session.close()


def test_outliers_and_a_mask(session: BenchSession) -> None:
    dims = {"B": 2, "H": 2, "S": 1000, "D": 128, "CAUSAL": 1}
    image, plan = image_of(dims)
    names = peers().contenders
    session.open(BenchCell(Shape(name="any", dims=dims), tuple(names), "outliers", seed=1, sampled=1000), (image, plan))
    for backend in session.facts(names).backends:
        if not backend.missing:
            found = session.add(backend.name, False)
            assert found.reason == "", (backend, found)
            assert (found.error or 1) < 0.2
    session.close()


def test_the_operator_is_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = run_benchmark(capsys, "sdpa", "--shapes", "d64_s1024_causal", "--rounds", "7", "--out", tmp_path)
    assert ran.code == 0, ran.err
    record = cast(Benchmark, read_record(Path(ran.out.splitlines()[-1])))
    missing = {c.name for c in record.backends if c.missing}
    assert not missing & {"sdpa_fp8", "torch_flash"}
    for row in record.rows:
        if row.backend not in missing:
            assert not row.reason
            assert row.median_us
            assert row.rounds == 7


def test_host_time_of_the_operator(session: BenchSession) -> None:
    rows = session.host(BenchCell(SMALL[1], ("sdpa_fp8", "torch"), sampled=1))
    assert all(1 < row.least_us <= row.median_us < 1000 for row in rows)
