"""pytest fixtures that run kernels on the emulator: ``pytest_plugins = ["greenfast.emulator.pytest_plugin"]``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from greenfast.emulator import KernelFaultError, KernelReport, run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the fixture."""
    group = parser.getgroup("greenfast", "PTX emulator")
    group.addoption("--emulator-seed", type=int, default=0, metavar="N", help="seed of the order of the warps")
    group.addoption("--emulator-orders", type=int, default=None, metavar="N", help="orders of the warps per kernel")


@pytest.fixture
def emulate(request: pytest.FixtureRequest) -> Callable[..., KernelReport]:
    """Return ``greenfast.emulator.run`` with the seed and the orders of the command line.

    A fault of the kernel fails the test with its location, without a traceback; ``check=False`` returns it.
    """
    defaults: dict[str, Any] = {
        "seed": request.config.getoption("--emulator-seed"),
        "orders": request.config.getoption("--emulator-orders"),
    }

    def run_or_fail(*args: Any, **options: Any) -> KernelReport:
        try:
            return run(*args, **{**defaults, **options})
        except KernelFaultError as e:
            raise pytest.fail.Exception(str(e), pytrace=False) from None

    return run_or_fail


@pytest.fixture
def emulate_triton(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run the Triton kernels of a test in the emulator, on CPU tensors and on those with ``device="cuda"``.

    The value is the ``greenfast.emulator.triton.Activation``. A fault of a kernel fails the test at its launch.
    """
    pytest.importorskip("triton")
    activate = importlib.import_module("greenfast.emulator.triton").activate  # only now, because it imports PyTorch
    with activate(cuda_tensors_as_cpu=True, seed=request.config.getoption("--emulator-seed")) as activation:
        yield activation
