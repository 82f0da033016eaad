"""The comparison with peers on a GPU, on a small shape: times of whoever is installed, and a wrong kernel found out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from greenfast.bench.peer_session import SMALL, PeerSession
from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import KernelImage
from greenfast.judge.peers import OWN
from greenfast.judge.record import PeersRecord
from greenfast.judge.records import read_record
from greenfast.kernels.attention import hopper
from greenfast.kernels.attention.config import read_dims
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Launch
from tests.cli.command_line import run_here

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def test_a_run_has_times_of_everyone_installed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = run_here(capsys, "bench", "fp8_attention", "--peers", "--shapes", "small,mission", "--out", tmp_path)
    assert ran.code == 0, ran.err
    record = cast(PeersRecord, read_record(Path(ran.out.splitlines()[-1])))
    missing = {c.name for c in record.contenders if c.missing}
    assert not missing & {OWN, "torch_flash"}
    for row in record.rows:
        assert (row.median_us is None) == bool(row.reason), row
        if row.contender not in missing:
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
def session() -> Iterator[PeerSession]:
    before = torch.cuda.current_stream()
    yield PeerSession(0)
    torch.cuda.set_stream(before)


def test_a_wrong_kernel_is_found_out(session: PeerSession) -> None:
    dims = SMALL[1].dims
    image, plan = image_of(dims)
    session.open(dims, 0, "normal", 64)
    right = session.add(OWN, image, plan, True)
    assert right.reason == ""
    assert right.finite
    assert (right.kernel_error or 1) < 0.03
    assert (right.bound_ratio or 9) <= 1
    assert session.time(7).changed == []
    # A softmax of another scale, and half of the heads.
    scaled = replace(plan, args=(*plan.args[:-1], np.float32(0.2)))
    assert (session.add(OWN, image, scaled, False).kernel_error or 0) > 0.03
    fewer = replace(plan, args=tuple(np.int32(4) if i == 8 else a for i, a in enumerate(plan.args)))
    assert not session.add(OWN, image, fewer, False).finite
    session.close()


def test_outliers_and_a_mask(session: PeerSession) -> None:
    dims = {"B": 2, "H": 2, "S": 1000, "D": 128, "CAUSAL": 1}
    image, plan = image_of(dims)
    session.open(dims, 1, "outliers", 1000)
    for contender in session.contenders():
        if not contender.missing:
            found = session.add(contender.name, image, plan, False)
            assert found.reason == "", (contender, found)
            assert (found.error or 1) < 0.2
    session.close()
