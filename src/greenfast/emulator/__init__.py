"""The PTX emulator: CUDA and PTX kernels on NumPy, without a GPU, with their faults and counts (docs/emulator.md).

``run`` is its Python API, ``greenfast.emulator.pytest_plugin`` a pytest fixture, ``greenfast emulate`` its command.
It needs the extra ``emulator`` and imports only the compiler's part of ``device``.
"""

from greenfast.emulator.arguments import In, Out
from greenfast.emulator.kernel_run import Fault, KernelReport, run
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.observed import Observe

__all__ = ["Fault", "In", "KernelFaultError", "KernelReport", "Observe", "Out", "run"]
