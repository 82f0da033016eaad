"""What is wrong with each kernel of the doubling task, and what must be said about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from greenfast.judge.task import LoadedTask, load

TASK = Path(__file__).parent / "doubling"


@cache
def doubling() -> LoadedTask:
    """The task whose rungs are the kernels of its folder."""
    return load(TASK)


@dataclass(frozen=True)
class Cheat:
    """A kernel that runs but is not right.

    gate: the one that must fail. says: a pattern that one of its reasons must match.
    shapes, seeds: as few as show it. fools: whether the evaluator of naive.py takes it for right.
    """

    name: str
    gate: str
    says: str
    shapes: tuple[str, ...] = ("even",)
    seeds: tuple[int, ...] = (0,)
    fools: bool = True


_OTHER_BITS = r"even seed \d: launch \d+ of \d+ left other bits than the checked ones"

CHEATS = (
    Cheat("unwritten", "CORRECTNESS", r"finite \(1024 of 1024 output elements .* were never written; y\[0\]: got NaN"),
    Cheat(
        "tail_unwritten",
        "CORRECTNESS",
        r"finite \(232 of 1000 output elements .* never written; y\[768\]: got NaN",
        shapes=("tail",),
    ),
    Cheat("zeros", "CORRECTNESS", r"max_abs_err, .*kernel_bound \(y\[\d+\]: got 0, expected", fools=False),
    Cheat("nan", "CORRECTNESS", r"finite \(1 of 1024 output elements are not finite"),
    Cheat("infinity", "CORRECTNESS", r"finite \(1 of 1024 output elements are not finite", fools=False),
    Cheat("input_overwritten", "CORRECTNESS", r"memory \(input 'x' was changed\)"),
    Cheat("writes_in_front", "CORRECTNESS", r"memory \(memory around 'y' was written\)"),
    Cheat("writes_behind", "CORRECTNESS", r"memory \(memory around 'y' was written\)"),
    Cheat("reads_behind", "CORRECTNESS", r"finite \(1 of 1024 output elements are not finite"),
    Cheat("remembers", "CORRECTNESS", r"repeat \(2 runs on the same input gave different bits"),
    Cheat("later_wrong", "PERFORMANCE", _OTHER_BITS),
    Cheat("later_idle", "PERFORMANCE", _OTHER_BITS),
    Cheat("works_on_launches", "PERFORMANCE", _OTHER_BITS),
    Cheat("every_second_launch", "PERFORMANCE", _OTHER_BITS),
    Cheat("first_address", "PERFORMANCE", _OTHER_BITS),
    Cheat("previous_output", "PERFORMANCE", _OTHER_BITS),
    Cheat("cached_by_address", "PERFORMANCE", _OTHER_BITS),
    Cheat("guards_in_between", "PERFORMANCE", _OTHER_BITS),
    Cheat(
        "input_restored", "PERFORMANCE", r"an access outside of its buffers, or a write to an input: .*ILLEGAL_ADDRESS"
    ),
    Cheat("one_shape", "CORRECTNESS", r"one_shape tail seed 0: max_abs_err", shapes=("even", "tail")),
    Cheat("one_seed", "CORRECTNESS", r"one_seed even seed 1: max_abs_err", seeds=(0, 1)),
    Cheat("cached_by_shape", "CORRECTNESS", r"cached_by_shape even seed 1: max_abs_err", seeds=(0, 1)),
    Cheat("order_dependent", "CORRECTNESS", r"repeat \(2 runs on the same input gave different bits", shapes=("many",)),
)

#: Kernels that end their process, and what their process reports.
FAILURES = {
    "wild_pointer": r"ran \(run: .*CUDA_ERROR_ILLEGAL_ADDRESS",
    "trap": r"ran \(run: .*CUDA_ERROR_(LAUNCH_FAILED|ILLEGAL_INSTRUCTION|ASSERT)",
}

#: Kernels that no GPU can launch, and what BUILD says of them.
UNLAUNCHABLE = {
    "too_much_smem": r"cannot be launched at even: a block asks for 307200 bytes of shared memory",
    "too_many_registers": r"cannot be launched at even: 1024 threads of \d+ registers need \d+; a block has at most",
}
