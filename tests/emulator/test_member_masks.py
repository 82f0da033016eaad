"""Exchanges between threads of a warp with member masks, compared with a model in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.arch import Target
from tests.emulator.kernels import run

FULL = 0xFFFFFFFF
#: Partitions of a warp, as one label a lane: whole, halves, even and odd, quarters, one lane alone, no structure.
PARTITIONS = {
    "whole": [0] * 32,
    "halves": [n // 16 for n in range(32)],
    "even and odd": [n % 2 for n in range(32)],
    "quarters": [n // 8 for n in range(32)],
    "one alone": [int(n == 13) for n in range(32)],
    "ragged": [(n * n + 3 * n) % 5 for n in range(32)],
}
RNG = np.random.default_rng(11)
VALUES = np.concatenate([RNG.integers(-5, 6, 32), RNG.integers(-(2**31), 2**31, 32), np.full(32, 7)]).astype(np.int32)


def masks_of(labels: list[int]) -> list[int]:
    return [sum(1 << n for n, other in enumerate(labels) if other == label) for label in labels]


def exchange(statement: str, masks: list[int], values: Any = VALUES) -> tuple[list[int], list[int]]:
    """Run ``statement`` on d (result), p (a predicate result), a (value), m (mask) in warps of one block."""
    body = (
        "int t = threadIdx.x; int a = x[t]; unsigned m = masks[t]; unsigned d = 0, f = 0; "
        f'asm volatile("{{ .reg .pred p, q; setp.ne.s32 q, %2, 0; setp.ne.s32 p, 0, 0; {statement} '
        'selp.u32 %1, 1, 0, p; }" : "+&r"(d), "=r"(f) : "r"(a), "r"(m)); y[t] = d; z[t] = f;'
    )
    result = run(
        body,
        {"x": values, "masks": np.array(masks, np.uint32)},
        {"y": (len(values), "uint32"), "z": (len(values), "uint32")},
        threads=len(values),
        target=Target("sm_90a"),
    ).outputs
    return result["y"].tolist(), result["z"].tolist()


def by_group(masks: list[int], values: Any, function: Callable[[list[int], int], Any]) -> list[Any]:
    """function(values of a thread's group, the thread's position in it) for each thread of each warp."""
    result = []
    for t in range(len(values)):
        warp, mask = t // 32 * 32, masks[t]
        lanes = [n for n in range(32) if mask >> n & 1]
        result.append(function([int(values[warp + n]) for n in lanes], lanes.index(t % 32)))
    return result


def of_group(function: Callable[[list[int]], Any]) -> Callable[[list[int], int], int]:
    """Build a function of a group's values, the same for all of its threads."""
    return lambda group, index: int(function(group))


@pytest.mark.parametrize("name", PARTITIONS)
def test_exchanges_stay_in_their_group(name: str) -> None:
    masks = masks_of(PARTITIONS[name]) * 3
    unsigned = VALUES.view(np.uint32)
    reductions: dict[str, tuple[Any, Callable[[list[int]], int]]] = {
        "add.u32": (unsigned, lambda v: sum(v) & FULL),
        "add.s32": (VALUES, lambda v: sum(v) & FULL),
        "min.s32": (VALUES, lambda v: min(v) & FULL),
        "max.s32": (VALUES, lambda v: max(v) & FULL),
        "min.u32": (unsigned, min),
        "max.u32": (unsigned, max),
        "and.b32": (unsigned, lambda v: int(np.bitwise_and.reduce(v))),
        "or.b32": (unsigned, lambda v: int(np.bitwise_or.reduce(v))),
        "xor.b32": (unsigned, lambda v: int(np.bitwise_xor.reduce(v))),
    }
    for op, (values, function) in reductions.items():
        result, _ = exchange(f"redux.sync.{op} %0, %2, %3;", masks)
        assert result == by_group(masks, values, of_group(function)), op
    votes: dict[str, Callable[[list[int]], bool]] = {
        "all": lambda v: all(v),
        "any": lambda v: any(v),
        "uni": lambda v: len({bool(x) for x in v}) == 1,
    }
    for op, decide in votes.items():
        _, result = exchange(f"vote.sync.{op}.pred p, q, %3;", masks)
        assert result == by_group(masks, VALUES, of_group(decide)), op
    result, _ = exchange("vote.sync.ballot.b32 %0, q, %3;", masks)
    whole = [sum(1 << n for n in range(32) if VALUES[t // 32 * 32 + n]) for t in range(96)]
    assert result == [w & mask for w, mask in zip(whole, masks, strict=True)]
    result, _ = exchange("match.any.sync.b32 %0, %2, %3;", masks)
    same = [sum(1 << n for n in range(32) if VALUES[t // 32 * 32 + n] == VALUES[t]) for t in range(96)]
    assert result == [s & mask for s, mask in zip(same, masks, strict=True)]
    result, flags = exchange("match.all.sync.b32 %0|p, %2, %3;", masks)
    agree = by_group(masks, VALUES, lambda group, index: len(set(group)) == 1)
    assert result == [mask if yes else 0 for mask, yes in zip(masks, agree, strict=True)]
    assert flags == [int(yes) for yes in agree]
    result, flags = exchange("elect.sync %0|p, %3;", masks)
    assert result == [(mask & -mask).bit_length() - 1 for mask in masks]
    assert flags == by_group(masks, VALUES, lambda group, index: int(index == 0))


@pytest.mark.parametrize("name", PARTITIONS)
def test_a_shuffle_reads_from_its_group(name: str) -> None:
    """Each thread reads from the next thread of its group, cyclically, and from one outside with an undefined value."""
    masks = masks_of(PARTITIONS[name]) * 3
    result, _ = exchange(
        "{ .reg .b32 above, lane; mov.u32 lane, %%laneid; shl.b32 above, -2, lane; and.b32 above, above, %3; "
        ".reg .pred none; setp.eq.u32 none, above, 0; selp.b32 above, %3, above, none; "
        ".reg .b32 back; neg.s32 back, above; and.b32 above, above, back; bfind.u32 above, above; "
        "shfl.sync.idx.b32 %0|p, %2, above, 31, %3; }",
        masks,
    )
    assert result == by_group(masks, VALUES, lambda group, index: group[(index + 1) % len(group)] & FULL)


def test_half_a_warp_reduces_alone() -> None:
    """The idiom: 16 threads add with a mask of 16, the others do something else."""
    body = (
        "int t = threadIdx.x; unsigned v = 1; "
        'if (t % 32 < 16) { asm volatile("redux.sync.add.u32 %0, %0, 0xffff;" : "+r"(v)); } '
        "y[t] = v;"
    )
    result = run(body, {}, {"y": (64, "uint32")}, threads=64)
    assert result.outputs["y"].tolist() == ([16] * 16 + [1] * 16) * 2


def test_threads_that_have_ended_take_no_part() -> None:
    body = (
        "int t = threadIdx.x; if (t % 32 >= 20) return; unsigned v; "
        'asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(v) : "r"(1)); y[t] = v;'
    )
    result = run(body, {}, {"y": (64, "uint32")}, threads=64)
    assert result.outputs["y"].reshape(2, 32)[:, :20].tolist() == [[20] * 20] * 2


@pytest.mark.parametrize(
    "statement",
    [
        "redux.sync.add.u32 %0, %2, %3;",
        "vote.sync.any.pred p, q, %3;",
        "match.any.sync.b32 %0, %2, %3;",
        "shfl.sync.bfly.b32 %0, %2, 1, 31, %3;",
        "elect.sync %0|p, %3;",
    ],
)
def test_a_thread_that_its_mask_does_not_name_is_a_fault(statement: str) -> None:
    masks = [FULL] * 32
    masks[5] = FULL & ~(1 << 5)
    with pytest.raises(KernelFaultError, match=r"its own membermask 0xffffffdf does not name .* thread .5, 0, 0."):
        exchange(statement, masks, VALUES[:32])
