"""Compilation targets: the GPU architectures that kernels are built for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from greenfast.spec.errors import UsageError, unknown

# cp.async and WMMA on shared memory as used here start with sm_80; E4M3 conversions in hardware with sm_89.
# Target -> its GPUs, and the number of multiprocessors of the first one.
_TARGETS = {
    "sm_80": ("Ampere (A100)", 108),
    "sm_86": ("Ampere (A10, RTX 30)", 72),
    "sm_89": ("Ada (L4, L40S, RTX 40)", 58),
    "sm_90": ("Hopper (H100, H200)", 132),
    "sm_90a": ("Hopper, with wgmma and setmaxnreg", 132),
    "sm_100": ("Blackwell (B200)", 148),
    "sm_120": ("Blackwell (RTX 50)", 170),
}
TARGETS: tuple[str, ...] = tuple(_TARGETS)


@dataclass(frozen=True)
class Target:
    """An architecture name for NVRTC, such as ``sm_89`` or ``sm_90a``, and the size of the GPU.

    multiprocessors: their number; 0 means the number of the first GPU of ``description``.
    """

    name: str
    multiprocessors: int = 0

    def __post_init__(self) -> None:
        if not self.multiprocessors and self.name in _TARGETS:
            object.__setattr__(self, "multiprocessors", _TARGETS[self.name][1])

    @staticmethod
    def parse(text: str) -> Target:
        """Read a target's name; also accepts ``8.9`` and ``9.0a`` (the form of TORCH_CUDA_ARCH_LIST).

        Raises UsageError for a target that the kernels are not built for.
        """
        dotted = re.fullmatch(r"(\d+)\.(\d)(a?)", text.strip())
        name = f"sm_{dotted[1]}{dotted[2]}{dotted[3]}" if dotted else text.strip()
        if name not in _TARGETS:
            raise unknown("target", text, _TARGETS)
        return Target(name)

    @staticmethod
    def of_device(compute_capability: tuple[int, int], multiprocessors: int = 0) -> Target:
        """Return the best target for a device of this compute capability."""
        major, minor = compute_capability
        specific = f"sm_{major}{minor}a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"
        if specific in _TARGETS:
            return Target(specific, multiprocessors)
        # Machine code also runs on higher minor versions of the same major version.
        older = [n for n in _TARGETS if not n.endswith("a") and Target(n).capability[0] == major]
        runnable = [n for n in older if Target(n).capability[1] <= minor]
        if not runnable:
            raise UsageError(f"compute capability {major}.{minor} is not supported; targets: {', '.join(TARGETS)}")
        return Target(runnable[-1], multiprocessors)

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor) compute capability."""
        digits = self.name.removeprefix("sm_").rstrip("a")
        return int(digits[:-1]), int(digits[-1])

    @property
    def description(self) -> str:
        """The GPUs of this target."""
        return _TARGETS[self.name][0]

    def runs_on(self, compute_capability: tuple[int, int]) -> bool:
        """Return whether machine code for this target loads on a device of this compute capability."""
        if self.name.endswith("a"):
            return compute_capability == self.capability
        return self.capability[0] == compute_capability[0] and self.capability[1] <= compute_capability[1]
