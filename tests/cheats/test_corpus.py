"""The corpus without a GPU: every cheat is caught by its gate and with its words, every honest kernel passes."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from greenfast.judge.store import read_json
from scripts import corpus
from tests.cheats.corpus import GPU_ONLY, Entry, entries
from tests.cheats.kernels import KERNELS

#: ``slow`` spins for 50,000 cycles: a control of times, on a GPU.
HONEST = [entry for entry in entries() if entry.honest and entry.name != "slow"]
CHEATS = [entry for entry in entries() if not entry.honest]
#: Left to `make test-slow` and scripts/corpus.py, for time: tests/emulator has kernels of the same instructions.
SLOW = {
    *("byte_perm", "cluster_multicast", "dp4a_counts", "grid_sync_not_cooperative", "large_shared", "ldmatrix_round"),
    *("noinc_copies", "pipeline_stages", "register_reallocation", "tf32_sums", "kahan_sums", "grid_sync"),
    *("cluster_ring", "half2_math", "in_place_vectors", "inline_ptx", "in_place_rotation", "bulk_reduce"),
    *("libcu_barrier", "scoped_block_atomics", "one_thread", "tiled_partition", "libcu_atomic_ref", "elected_thread"),
    *(
        "recursive_sums",
        "remote_stores",
        "vector_sums",
        "twelve_launches",
        "counts_without_atomics",
        "warp_specialized",
    ),
    *("gives_up_by_a_trap", "local_array_of_values", "locked_updates", "work_counter", "votes_and_counts"),
    *("two_stage_sums", "virtual_functions", "fixed_point_sums", "constant_table", "block_sums", "named_barriers"),
    *("decoupled_look_back", "aliased_shared", "counter_that_wraps", "bytes_and_bitfields", "function_pointer"),
    "double_sums",
    # Cheats of a mechanism that a quicker one of the same kind and gate has too.
    *("spin_flag_not_volatile", "volatile_plus_equals", "order_of_blocks", "bulk_store_not_awaited_where_large"),
    *("swapped_arguments", "by_multiprocessor", "wrong_on_one_multiprocessor", "by_bits_of_the_address"),
    *("superbatch", "weak_variable", "store_on_a_loc_line", "register_named_vprintf", "function_that_stores"),
    *("fixed_point_overflows", "skips_small", "sums_in_half", "one_column", "odd_warp_size", "known_columns"),
    *("powers_of_two_only", "vectors_only", "neighbour_of_odd_sizes", "samples", "clamped_but_at_the_smallest"),
    *("negative_clamped", "overflows_half", "sign_lost", "truncates", "tree_in_the_input", "patches_the_judge"),
    *("global_timer", "padding_not_set", "out_of_bounds_in_this_century", "clock_bits", "index_of_nine_bits"),
    *("address_by_subtraction", "called_through_vprintf", "known_sizes", "clamped_at_16", "clamped_in_long_rows"),
    *("number_of_the_grid", "one_element", "copies_its_input"),
}


def test_the_corpus_is_whole() -> None:
    assert len(CHEATS) >= 60
    assert len(HONEST) >= 40
    for kernels in KERNELS.values():
        assert {kernel.path.stem for kernel in kernels.values()} == set(kernels)
    assert {entry.name for entry in CHEATS} >= GPU_ONLY
    assert {entry.name for entry in entries()} >= SLOW
    assert len({(entry.kind, entry.name) for entry in entries()}) == len(entries())


def test_the_page_lists_all_of_it() -> None:
    names = [(entry.kind, entry.name) for entry in entries()]
    for device, result in corpus.RESULTS.items():
        judged = [(row["kind"], row["name"]) for row in read_json(result, dict, "corpus")["rows"]]
        assert judged == (names if device == "emulator" else [name for name in names if name in judged])
    results = {name: read_json(path, dict, "corpus") for name, path in corpus.RESULTS.items() if path.exists()}
    assert corpus.page(results) in corpus.PAGE.read_text()


def test_the_bound_on_a_rate_is_that_of_clopper_and_pearson() -> None:
    assert corpus.upper_bound(0, 60) == pytest.approx(1 - 0.05 ** (1 / 60))
    assert corpus.upper_bound(1, 40) == pytest.approx(0.1131, abs=1e-4)
    assert corpus.upper_bound(3, 3) == 1


def test_rows_that_are_judged_again_say_so() -> None:
    here = {"device": {"name": "a GPU"}, "exam_seed": 1, "git": {"sha": "a"}, "created": "2026-01-01T00:00:00Z"}
    first, second = ({"kind": "honest", "name": n, "outcome": "rejected"} for n in ("asserts", "bits"))
    later = here | {"created": "2026-01-02T03:04:00Z", "git": {"sha": "b"}, "rows": [second | {"outcome": "accepted"}]}
    both = corpus.with_rows_of(here | {"rows": [first, second]}, later)
    assert both["rows"][0] == first
    assert both["rows"][1]["outcome"] == "accepted"
    assert both["rows"][1]["again"] == {"created": "2026-01-02T03:04:00Z", "git": {"sha": "b"}}
    added = corpus.with_rows_of(here | {"rows": [second]}, later | {"rows": [first]})
    assert [row["name"] for row in added["rows"]] == ["asserts", "bits"]
    with pytest.raises(SystemExit, match="another device"):
        corpus.with_rows_of(here | {"rows": [first]}, later | {"device": {"name": "another"}})


def _cases(some: list[Entry]) -> list[ParameterSet]:
    slow = pytest.mark.slow
    return [pytest.param(e, id=f"{e.kind}-{e.name}", marks=[slow] if e.name in SLOW else []) for e in some]


@pytest.mark.parametrize("entry", _cases(HONEST))
def test_an_honest_kernel_passes(entry: Entry) -> None:
    found = entry.judge()
    assert found.outcome == "accepted", found


@pytest.mark.parametrize("entry", _cases([e for e in CHEATS if e.says and not e.gpu_only]))
def test_a_cheat_is_caught_without_a_gpu(entry: Entry) -> None:
    found = entry.judge()
    assert entry.caught_as_expected(found), found


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(GPU_ONLY))
def test_what_only_a_gpu_shows_is_caught_on_one(name: str) -> None:
    (entry,) = [entry for entry in CHEATS if entry.name == name]
    found = entry.judge(gpu=True)
    assert found.outcome == "rejected", found
