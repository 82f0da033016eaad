"""Compile what the GPU tests run, in parallel, into the cache: ``python -m tests.gpu.compile_ahead``.

In the tests, several processes would compile the same kernel at once while the GPU waits. A kernel that is not listed
here is compiled by the test that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from greenfast.device.gpu import Gpu
from greenfast.judge.task import find_task
from greenfast.kernels.attention import ada, hopper
from greenfast.kernels.attention.config import FORMATS, read_dims
from greenfast.kernels.attention.heuristics import rules
from greenfast.ops import warmup
from greenfast.ops.quantized import PRECISIONS
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource
from tasks.fp8_sdpa_stage_c_wmma.kernels import family as ladder
from tests.emulator.corpus.everything import ENTRIES
from tests.emulator.corpus.runner import kernel_of
from tests.emulator.instructions.case import kernel_source
from tests.emulator.instructions.catalog import units
from tests.gpu import test_hopper
from tests.kernels.tiling_dims import MULTIPROCESSORS, rule_dims

HOPPER = Target("sm_90a")


def sources(target: Target) -> Iterator[KernelSource]:
    """The kernels of the tests for a GPU that runs this target."""
    yield from (kernel_source(unit) for unit in units())
    rungs = find_task("fp8_sdpa").config
    for rung, fmt, head_dim in product(rungs.rungs, ("e4m3", "int8"), ladder.HEAD_DIMS):
        dims = {"B": 1, "H": 2, "S": 300, "D": head_dim}
        yield ladder.kernel(rungs.rung_variant(rung).values, fmt, dims)
    for fmt, head_dim, causal in product(FORMATS, ada.HEAD_DIMS, (0, 1, 2)):
        dims = {"B": 2, "H": 4, "HK": 2, "S": 200, "KV": 70, "D": head_dim, "CAUSAL": causal}
        yield ada.kernel(read_dims(dims, fmt)[0])
    if target.name == HOPPER.name:
        yield from warmup.kernels_for(target, log_sum_exp=True, backward=("8bit",), precisions=tuple(PRECISIONS))
        yield from _attention()
        yield from (kernel_of(e) for e in ENTRIES if e.kind == "cuda" and e.target == target.name)


def _attention() -> Iterator[KernelSource]:
    """The kernels of test_hopper.py that calls in PyTorch do not use."""
    for shape, head_dim, causal in product(test_hopper.SHAPES, (64, 128, 256), (0, 1)):
        yield hopper.kernel(*read_dims({**shape, "D": head_dim, "CAUSAL": causal}, "e4m3"))
    for (q_len, kv_len), causal in product(test_hopper.PAIRS, (0, 1, 2)):
        dims = {"B": 2, "H": 8, "HK": 1, "S": q_len, "KV": kv_len, "D": 128, "CAUSAL": causal}
        yield hopper.kernel(*read_dims(dims, "e4m3"))
    for multiprocessors, shape in test_hopper.TILINGS:
        for extras, fmt, head_dim in product(test_hopper.EXTRAS, FORMATS, (64, 128, 256)):
            yield hopper.kernel(*read_dims({**shape, "D": head_dim, **extras}, fmt), multiprocessors)
    for rule in rules():
        yield hopper.kernel(*read_dims(rule_dims(rule), rule.key[-1]), MULTIPROCESSORS)


def main() -> None:
    """Compile for the first GPU, and print a summary."""
    target = Target.of_device(Gpu(0).capability)
    wanted = dict.fromkeys(sources(target))
    done = warmup.warm(wanted, target)
    print(f"{target.name}: {done.compiled} kernels compiled, {done.cached} cached, {done.seconds:.0f} s")


if __name__ == "__main__":
    main()
