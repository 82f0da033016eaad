"""The kernels of the corpus with a header of their own, one file per kind."""

from tests.cheats.kernels import honest, launch, memory, races, state, time, values
from tests.cheats.kernels.kernel import Kernel

HONEST = "honest"
#: By kind and name.
KERNELS: dict[str, dict[str, Kernel]] = {
    "memory": memory.KERNELS,
    "state": state.KERNELS,
    "time": time.KERNELS,
    "races": races.KERNELS,
    "values": values.KERNELS,
    "launch": launch.KERNELS,
    HONEST: honest.KERNELS,
}
