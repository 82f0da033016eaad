"""The plan of the serving attention: each chunk of keys of each row tile goes to one block, once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import KernelLaunch, run_chain
from greenfast.kernels import KERNEL_DIR
from greenfast.kernels.serving import attention as serving
from greenfast.kernels.serving.config import ServingConfig
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import Array, OutputSpec

CHUNK, HEADER = 512, 8
MOST = 512  # work items of a block that a test has room for
_FIELDS = ("index", "head", "begin", "end", "sequence", "first_row", "key_begin", "key_end")

_WORKS = KernelSource(
    entry="works",
    source="""#include "serving/plan.cuh"
using namespace greenfast::serving;
extern "C" __global__ void works(int* words, int* counts, int* found, int kv_heads, int max_tiles, int parallel_heads,
                      int most) {
  const Plan plan{words, static_cast<int>(gridDim.x), max_tiles, parallel_heads};
  WorkScheduler scheduler;
  scheduler.start(plan);
  int count = 0;
  for (Work work; scheduler.next_work(plan, kv_heads, work); ++count) {
    if (count == most) __trap();
    const int item[8] = {work.index,         work.head,           work.begin,         work.end,
                         work.tile.sequence, work.tile.first_row, work.tile.key_begin, work.tile.key_end};
    for (int i = 0; i < 8; ++i) found[(blockIdx.x * most + count) * 8 + i] = item[i];
  }
  counts[blockIdx.x] = count;
}
""",
    name="works.cu",
    include_dirs=(KERNEL_DIR,),
    block=(1, 1, 1),
)


@dataclass(frozen=True)
class Made:
    """A plan: its header, and for each block its items, rows of numbers in the order of ``_FIELDS``."""

    tiles: int
    k_chunks: int
    round_robin: bool
    blocks: list[Array]

    def items(self) -> Array:
        return np.concatenate(self.blocks)


def made(
    lengths: list[tuple[int, int]], *, group: int = 1, kv_heads: int = 1, window: tuple[int, int] = (-1, 0),
    multiprocessors: int = 2, wide: bool = False, head_dim: int = 64, max_q_len: int | None = None,
) -> Made:  # fmt: skip
    config = ServingConfig(head_dim=head_dim, wide=wide)
    queries, keys = (np.array([x[i] for x in lengths], np.int32) for i in (0, 1))
    most_q = max(queries.tolist(), default=0) if max_q_len is None else max_q_len
    sizes = serving.ServingSizes(len(lengths), int(queries.sum()), most_q, group * kv_heads, kv_heads, 1, 16, 1)
    blocks = serving.grid_blocks(config, sizes, multiprocessors)
    words, max_tiles = serving.plan_words(config, sizes, blocks), sizes.max_tiles(config.rows)
    plan = serving.plan_kernel(config)
    parallel_heads = serving.parallel_heads(sizes, blocks)
    numbers = (np.int32(kv_heads), np.int32(max_tiles), np.int32(parallel_heads), np.int32(MOST))
    result = run_chain(
        [
            KernelLaunch(to_ptx(plan, serving.TARGET, assemble=False), plan.entry, plan.block, 0,
                 serving.plan_launch(config, sizes, window, multiprocessors)),
            KernelLaunch(to_ptx(_WORKS, serving.TARGET, assemble=False), "works", (1, 1, 1), 0,
                 Launch((blocks, 1, 1), ("plan", "counts", "found", *numbers))),
        ],
        {
            "cu_seqlens_q": np.concatenate([[0], queries.cumsum()]).astype(np.int32),
            "seqused_k": keys if len(keys) else np.zeros(1, np.int32),
        },
        {
            "plan": OutputSpec((words,), "int32"),
            "counts": OutputSpec((blocks,), "int32"),
            "found": OutputSpec((blocks, MOST, len(_FIELDS)), "int32"),
        },
    )  # fmt: skip
    found, counts = result.outputs["found"], result.outputs["counts"]
    tiles, k_chunks, round_robin = result.outputs["plan"][:3].tolist()
    return Made(tiles, k_chunks * parallel_heads, bool(round_robin), [found[b, : counts[b]] for b in range(blocks)])


def limits(q_len: int, kv_len: int, window: tuple[int, int]) -> tuple[Array, Array]:
    """The first key of each query, and the one behind its last."""
    position = np.arange(q_len, dtype=np.int64) + kv_len - q_len
    left, right = window
    begin = np.maximum(0, position - left) if left >= 0 else np.zeros(q_len, np.int64)
    return begin, np.minimum(kv_len, position + 1 + right) if right >= 0 else np.full(q_len, kv_len, np.int64)


def check(
    plan: Made, lengths: list[tuple[int, int]], *, group: int = 1, kv_heads: int = 1,
    window: tuple[int, int] = (-1, 0), rows: int = 64,
) -> None:  # fmt: skip
    """Every row tile is there, with all of the keys of its rows, each chunk of them once."""
    covered: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    ranges: dict[tuple[int, int, int], set[tuple[int, int]]] = {}
    for item in plan.items().tolist():
        _, head, begin, end, sequence, first_row, key_begin, key_end = item
        at = sequence, first_row, head
        covered.setdefault(at, []).append((begin, end))
        ranges.setdefault(at, set()).add((key_begin, key_end))
    units = tiles = 0
    for sequence, (q_len, kv_len) in enumerate(lengths):
        first_keys, stop_keys = limits(q_len, max(kv_len, 0), window)
        for first_row in range(0, q_len * group, rows):
            tokens = slice(first_row // group, (min(first_row + rows, q_len * group) - 1) // group + 1)
            begin, stop = int(first_keys[tokens].min()), int(stop_keys[tokens].max())
            stop = max(begin, stop)
            chunks = max(1, -(-stop // CHUNK) - begin // CHUNK)
            tiles += 1
            units += chunks * kv_heads
            for head in range(kv_heads):
                at = sequence, first_row, head
                assert ranges.pop(at) == {(begin, stop)}, at
                ends = [0]
                for first, last in sorted(covered.pop(at)):
                    assert first == ends[-1] < last, at
                    ends.append(last)
                assert ends[-1] == chunks, at
    assert not covered
    assert (plan.tiles, plan.k_chunks) == (tiles, units)


@pytest.mark.parametrize("multiprocessors", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 5])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (64, 0), (600, 300), (0, 0), (3, -1)])
def test_each_chunk_of_each_row_tile_is_someones(multiprocessors: int, window: tuple[int, int]) -> None:
    lengths = [(1, 5000), (30, 40), (0, 900), (70, 1100), (5, 0), (9, 3)]
    options = {"group": 3, "kv_heads": 2, "window": window}
    check(made(lengths, multiprocessors=multiprocessors, **options), lengths, **options)  # type: ignore[arg-type]


def test_few_tiles_are_shared_in_equal_runs() -> None:
    plan = made([(1, 40_000)], group=8, kv_heads=1, multiprocessors=5)
    check(plan, [(1, 40_000)], group=8)
    assert not plan.round_robin
    assert [int((b[:, 3] - b[:, 2]).sum()) for b in plan.blocks] == [8] * 9 + [7]


def test_runs_end_where_sequences_do() -> None:
    """33 runs of 15 or 16 chunks would cut four of eight sequences in five; 32 of 16 cut all in four."""
    lengths = [(1, 64 * CHUNK)] * 8
    plan = made(lengths, kv_heads=2, multiprocessors=33)
    check(plan, lengths, kv_heads=2)
    assert not plan.round_robin
    assert [[end - begin for _, _, begin, end, *_ in b.tolist()] for b in plan.blocks] == [[16]] * 64 + [[]] * 2


def test_where_equal_runs_would_leave_many_blocks_without_work_they_differ_by_one() -> None:
    plan = made([(1, 12 * CHUNK)], multiprocessors=5)
    check(plan, [(1, 12 * CHUNK)])
    assert sorted(int((b[:, 3] - b[:, 2]).sum()) for b in plan.blocks) == [1] * 8 + [2] * 2


def test_fewer_units_than_blocks_leave_blocks_without_work() -> None:
    plan = made([(1, 1500)], multiprocessors=5)
    check(plan, [(1, 1500)])
    assert not plan.round_robin
    assert sorted(len(b) for b in plan.blocks) == [0] * 7 + [1] * 3


def test_many_tiles_are_dealt_longest_first() -> None:
    lengths = [(1, 512 * n) for n in range(1, 41)]
    plan = made(lengths, multiprocessors=1)
    check(plan, lengths)
    assert plan.round_robin
    for items in plan.blocks:
        chunks = items[:, 3]
        assert (np.diff(chunks) <= 0).all()
    shares = [int(items[:, 3].sum()) for items in plan.blocks]
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("lengths", [(1024,) * 8, (137, 9000, 512, 33, 4000, 1500, 1202)])
def test_blocks_of_a_prefill_have_about_as_many_keys(lengths: tuple[int, ...]) -> None:
    """Tiles of keys of all of a block's items: at most a twentieth and a quarter of the longest item above the mean."""
    batch = [(n, n) for n in lengths]
    plan = made(batch, group=4, kv_heads=4, wide=True, head_dim=128, multiprocessors=33)
    check(plan, batch, group=4, kv_heads=4, rows=192)
    assert plan.round_robin
    keys = [int((-(-items[:, 7] // 128)).sum()) for items in plan.blocks]
    longest = -(-max(lengths) // 128)
    mean = sum(keys) / len(keys)
    assert max(keys) <= mean * 1.05 + longest / 4


def test_an_empty_batch_has_no_work() -> None:
    for lengths in ([], [(0, 0)], [(0, 700)]):
        plan = made(lengths, multiprocessors=3)
        assert (plan.tiles, plan.k_chunks) == (0, 0)
        assert all(len(b) == 0 for b in plan.blocks)


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.slow)])  # wide: 40,000 rows, below
def test_two_thousand_sequences(wide: bool) -> None:
    generator = np.random.default_rng(5)
    lengths = [
        (int(q), int(k)) for q, k in zip(generator.integers(0, 4, 2000), generator.integers(0, 1500, 2000), strict=True)
    ]
    plan = made(lengths, wide=wide, multiprocessors=8)
    check(plan, lengths, rows=ServingConfig(head_dim=64, wide=wide).rows)


def test_forty_thousand_rows_of_a_sequence() -> None:
    plan = made([(40_000, 40_000)], wide=True, multiprocessors=5)
    check(plan, [(40_000, 40_000)], rows=ServingConfig(head_dim=64, wide=True).rows)


def test_negative_lengths_are_none() -> None:
    lengths = [(3, -7), (2, -(2**31)), (2, 30)]
    check(made(lengths), lengths)


def test_more_queries_than_were_said_write_nothing_beyond_the_plan() -> None:
    """A call that is wrong: rows are left out, and memory is not touched (the emulator would say so)."""
    plan = made([(700, 900), (1, 300), (300, 300)], max_q_len=64)
    assert plan.tiles == 3
    assert {tuple(x) for x in plan.items()[:, 4:6].tolist()} == {(0, 0), (1, 0), (2, 0)}


def test_more_units_than_an_int_can_hold_are_dealt() -> None:
    """Eight sequences of 2^30 - 1 keys have 2^32 units of 256 heads."""
    plan = made([(1, 2**30 - 1)] * 8, kv_heads=256, multiprocessors=5)
    assert plan.round_robin
    assert {tuple(x) for x in plan.items()[:, [4, 1]].tolist()} == {(b, h) for b in range(8) for h in range(256)}
    assert (plan.items()[:, 3] == 2**21).all()


def sizes(batch: int, queries: int, heads: int, kv_heads: int) -> serving.ServingSizes:
    return serving.ServingSizes(batch, batch * queries, queries, heads, kv_heads, 1, 64, 1)


@pytest.mark.parametrize(
    ("head_dim", "batch", "queries", "heads", "kv_heads", "rows"),
    [
        # What was faster on an H100, in the record of wide_rows and for chunks over more keys.
        (64, 1, 512, 32, 8, 64),
        (64, 16, 64, 32, 8, 64),
        (64, 32, 17, 32, 8, 64),
        (64, 1, 2048, 32, 8, 192),
        (128, 2, 512, 32, 8, 64),
        (128, 3, 130, 8, 2, 64),
        (128, 3, 700, 32, 8, 192),
        (256, 2, 512, 8, 2, 64),
        (256, 1, 130, 2, 1, 64),
        (256, 2, 512, 32, 8, 128),
        # Batches that fill it.
        (64, 16, 1024, 64, 8, 192),
        (128, 16, 1024, 32, 8, 192),
        (256, 16, 1024, 16, 8, 128),
        (128, 1, 16384, 32, 8, 192),
        (128, 61, 2048, 32, 8, 192),
        # Decoding, and a few tokens more.
        (128, 1, 1, 32, 8, 8),
        (64, 4, 2, 64, 8, 16),
        (128, 4, 16, 32, 8, 64),
    ],
)
def test_row_tiles_of_a_batch(head_dim: int, batch: int, queries: int, heads: int, kv_heads: int, rows: int) -> None:
    wide, few = serving.row_tiles(head_dim, sizes(batch, queries, heads, kv_heads), 132)
    assert ServingConfig(head_dim=head_dim, wide=wide, few_rows=few).rows == rows


@pytest.mark.parametrize(
    ("head_dim", "batch", "longest", "tokens", "rows"),
    [
        # A long prompt, or a chunk of one, among sequences that decode: what was faster on an H100.
        (64, 32, 512, 31 + 512, 64),
        (64, 32, 2048, 31 + 2048, 64),
        (128, 32, 512, 31 + 512, 64),
        (128, 64, 1024, 63 + 1024, 64),
        (256, 32, 2048, 31 + 2048, 128),
        (256, 64, 1024, 63 + 1024, 128),
        # All of them long; so are they taken to be where nothing is known.
        (64, 32, 512, 32 * 512, 192),
        (128, 64, 1024, 64 * 1024, 192),
    ],
)
def test_row_tiles_follow_the_tokens(head_dim: int, batch: int, longest: int, tokens: int, rows: int) -> None:
    found = dataclasses.replace(sizes(batch, longest, 32, 8), tokens=tokens)
    wide, few = serving.row_tiles(head_dim, found, 132)
    assert ServingConfig(head_dim=head_dim, wide=wide, few_rows=few).rows == rows


def test_blocks_of_decoding_are_a_multiple_of_the_heads() -> None:
    def blocks(head_dim: int, few_rows: int, kv_heads: int) -> int:
        config = ServingConfig(head_dim=head_dim, few_rows=few_rows)
        return serving.grid_blocks(config, sizes(4, 1, 4 * kv_heads, kv_heads), 132)

    assert [blocks(256, 8, n) for n in (1, 2, 4, 8, 16, 40)] == [132, 132, 132, 128, 128, 132]
    assert [blocks(128, 8, n) for n in (1, 8, 16, 40)] == [264, 264, 256, 264]
    assert blocks(256, 0, 8) == 132
