"""What no GPU can launch is said before anything runs."""

from __future__ import annotations

import pytest

from greenfast.spec.arch import TARGETS, Target
from greenfast.spec.facts import Resources
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.limits import launch_faults

USED = Resources(registers=32, static_smem_bytes=1024, dynamic_smem_bytes=0, stack_bytes=0, spill_store_bytes=0,
                 spill_load_bytes=0)  # fmt: skip


def faults(
    block: tuple[int, int, int] = (128, 1, 1),
    grid: tuple[int, int, int] = (1, 1, 1),
    smem: int = 0,
    registers: int = 32,
    target: str = "sm_90a",
    cooperative: bool = False,
) -> list[str]:
    source = KernelSource("k", "", "k.cu", (), block, smem)
    used = Resources(**{**vars(USED), "registers": registers})
    return launch_faults(source, Launch(grid, (), cooperative=cooperative), used, Target(target))


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_gpu_can_launch_has_no_fault(target: str) -> None:
    assert faults((1024, 1, 1), (2**31 - 1, 65535, 65535), smem=98 * 1024, registers=64, target=target) == []
    assert faults((1, 1, 64), registers=255, target=target) == []


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"block": (2048, 1, 1)}, "its block is 2048 x 1 x 1; extents are at least 1, and at most 1024 x 1024 x 64"),
        ({"block": (64, 32, 1)}, "its block of 64 x 32 x 1 has 2048 threads; at most 1024 are allowed"),
        ({"block": (0, 1, 1)}, "its block is 0 x 1 x 1"),
        ({"grid": (2113, 1, 1), "cooperative": True}, "launch of 2113 blocks; at most 2112 are resident at once"),
        ({"grid": (265, 2, 1), "registers": 128, "cooperative": True}, "of 530 blocks; at most 528 are resident"),
        ({"block": (-32, 1, 1)}, "its block is -32 x 1 x 1"),
        ({"grid": (0, 1, 1)}, "its grid is 0 x 1 x 1"),
        ({"grid": (1, 65536, 1)}, "its grid is 1 x 65536 x 1"),
        ({"grid": (2**31, 1, 1)}, "its grid is 2147483648 x 1 x 1"),
        ({"smem": 227 * 1024}, "a block asks for 233472 bytes of shared memory (232448 of them dynamic); on sm_90a"),
        ({"smem": -1}, "a block asks for 1023 bytes of shared memory (-1 of them dynamic)"),
        ({"smem": 99 * 1024, "target": "sm_89"}, "on sm_89 it has at most 101376"),
        ({"block": (1024, 1, 1), "registers": 72}, "1024 threads of 72 registers need 73728; a block has at most"),
    ],
)
def test_what_it_cannot_is_said(asked: dict[str, object], says: str) -> None:
    (fault,) = faults(**asked)  # type: ignore[arg-type]
    assert says in fault
