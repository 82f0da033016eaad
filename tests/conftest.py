"""Tests marked ``gpu`` are skipped where there is no GPU; ``--require-gpu`` turns the skip into a failure."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache

import pytest
from cuda.bindings import driver

from greenfast.device import compiler_process
from greenfast.judge import record_io
from tests.device.compilers import crash


@pytest.fixture
def crashing_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NVRTC, in a separate process, crashes on every source that has the comment ``// crash``."""
    fresh = compiler_process._Compiler()
    monkeypatch.setattr(compiler_process, "_SERVE", crash)
    monkeypatch.setattr(compiler_process, "_COMPILER", fresh)
    yield
    fresh.close()


@pytest.fixture
def made_up_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are read with the conclusions in their files, whatever follows: for tests of anything else about them."""
    monkeypatch.setattr(record_io, "conclude_content", lambda record, content, path: record)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail, instead of skip, GPU tests that cannot run")


def pytest_configure(config: pytest.Config) -> None:
    """Search for cycles seldom: programs of the emulator and torch are large, and a full search took up to 0.7 s."""
    gc.set_threshold(50_000, 20, 50)
    gc.disable()


#: Files with the longest tests, which begin first: one that begins last keeps the other processes waiting.
_FIRST = (
    "tests/test_site.py",
    "tests/test_evidence.py",
    "tests/kernels/serving/test_attention.py",
    "tests/emulator/test_hopper_attention.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first, in the same order in every process."""
    items.sort(key=lambda item: not item.nodeid.startswith(_FIRST))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to search for cycles, without the imported modules, which stay."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave all that is alive out of the searches at the end: pytest and Python search several times, 4 s each."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    reason = _why_no_gpu()
    if reason is None:
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail(f"--require-gpu, but {reason}", pytrace=False)
    pytest.skip(reason)


@cache
def _why_no_gpu() -> str | None:
    """Why GPU tests cannot run here; None where they can."""
    try:
        (error,) = driver.cuInit(0)
    except RuntimeError:  # its library was not found
        return "no NVIDIA driver is installed"
    if error != driver.CUresult.CUDA_SUCCESS:
        return f"no usable NVIDIA GPU (cuInit: {error.name})"
    return None
