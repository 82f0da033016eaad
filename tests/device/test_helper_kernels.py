"""The judge's own kernels on the emulator: the digest is NumPy's, and shared memory is overwritten to its end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.helper_kernels import FIELDS, RANGES, source
from greenfast.emulator.grid import run_grid
from greenfast.emulator.result import GridResult
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Launch, Struct
from greenfast.spec.problem import OutputSpec

Words = NDArray[np.uint64]
KEY = 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**64


def kernel(entry: str) -> CompiledKernel:
    return compile_kernel(source(entry), Target("sm_90a"))


def mixed(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def digest(words: Words, key: int, first: int = 0) -> int:
    """The digest of instruments.cu in NumPy."""
    with np.errstate(over="ignore"):
        numbers = np.arange(first, first + len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return int(mixed(words ^ (np.uint64(key) + numbers)).sum(dtype=np.uint64))


def emulated(ranges: Sequence[tuple[str, Words, int, str]], key: int, blocks: int, mask_key: int = 0) -> GridResult:
    """The digest on the emulator; ranges: name, words, number of the first one, and the sum that is added to."""
    fields = [
        (name, np.uint64(len(words) // 2), np.uint64(first), total, np.uint64(mask_key))
        for name, words, first, total in ranges
    ]
    fields += [(np.uint64(0),) * FIELDS] * (RANGES - len(ranges))  # type: ignore[list-item]
    plan = Launch((blocks, len(ranges), 1), (Struct((*(f for row in fields for f in row), np.uint64(key))),))
    inputs = {name: words for name, words, _, _ in ranges}
    sums = {total: np.zeros(1, np.uint64) for *_, total in ranges}
    outputs = {name: OutputSpec((1,), "uint64") for name in sums}
    return run_grid(kernel("digest").ptx, "digest", (256, 1, 1), 0, plan, inputs | sums, outputs)


def drawn(count: int, seed: int = 0) -> Words:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


@pytest.mark.parametrize(("count", "blocks"), [(2, 1), (62, 1), (512, 1), (1030, 1), (1030, 3)])
def test_the_digest_is_numpys(count: int, blocks: int) -> None:
    words = drawn(count)
    result = emulated([("a", words, 6, "sum")], KEY, blocks)
    assert int(result.outputs["sum"][0]) == digest(words, KEY, 6)
    assert not result.input_writes


def test_ranges_add_to_their_sums() -> None:
    a, b, c = drawn(64, 1), drawn(600, 2), drawn(2, 3)
    result = emulated([("a", a, 0, "one"), ("b", b, 64, "one"), ("c", c, 0, "other")], KEY, 2)
    assert int(result.outputs["one"][0]) == digest(np.concatenate([a, b]), KEY)
    assert int(result.outputs["other"][0]) == digest(c, KEY)


def test_every_bit_its_place_and_the_key_count() -> None:
    words = drawn(64)
    right = digest(words, KEY)
    rng = random.Random(0)
    for _ in range(200):
        other = words.copy()
        other[rng.randrange(64)] ^= np.uint64(1 << rng.randrange(64))
        assert digest(other, KEY) != right
    assert digest(words[::-1], KEY) != right
    assert digest(words, KEY ^ 1) != right
    assert digest(np.zeros(64, np.uint64), KEY) != digest(np.full(64, 2**64 - 1, np.uint64), KEY)


@pytest.mark.parametrize("count", [2, 1030])
def test_masked_memory_shows_nothing_and_has_the_same_digest(count: int) -> None:
    words = np.zeros(count, np.uint64)
    plan = Launch((2, 1, 1), ("a", np.uint64(count // 2), np.uint64(77)))
    outputs = {"a": OutputSpec((count,), "uint64")}
    masked = run_grid(kernel("apply_mask").ptx, "apply_mask", (256, 1, 1), 0, plan, {"a": words}, outputs).outputs["a"]
    assert len(np.unique(masked)) == count
    assert int(emulated([("a", masked, 6, "sum")], KEY, 2, mask_key=77).outputs["sum"][0]) == digest(words, KEY, 6)


@pytest.mark.parametrize("words", [1, 1000, 3072])
def test_shared_memory_is_overwritten_to_its_end(words: int) -> None:
    """A write past it would be a fault."""
    plan = Launch((2, 1, 1), (np.uint64(KEY), np.uint32(words)))
    result = run_grid(kernel("clobber_smem").ptx, "clobber_smem", (1024, 1, 1), 8 * words, plan, {}, {})
    assert result.counts.record().shared_store_bytes == 2 * 8 * words


def test_the_kernels_need_no_memory_of_their_own() -> None:
    for entry in ("spin", "clobber_smem", "apply_mask", "digest"):
        found = kernel(entry).resources
        assert (found.spill_bytes, found.stack_bytes, found.static_smem_bytes, found.global_bytes) == (0, 0, 0, 0)
