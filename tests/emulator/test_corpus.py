"""The corpus of kernels: right or refused by name, never wrong, never accused; no bug is missed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.emulator.corpus import runner
from tests.emulator.corpus.entry import Args, Entry, Out, Rng, bind
from tests.emulator.corpus.everything import ENTRIES
from tests.emulator.corpus.runner import classify

BY_NAME = {entry.name: entry for entry in ENTRIES}
#: One or two entries of each kind, without headers that take seconds to compile.
QUICK = """
reduce_half_warps reduce_lower_half_alone reduce_even_lanes redux_of_half_warps redux_after_others_left
reduce_last_block scan_hillis_steele scan_decoupled_look_back histogram_match_any match_all_of_active
sort_bitonic_in_registers merge_path vector_add transpose_swizzled_halves stencil_1d game_of_life fft_64
matmul_register_tiles mma_f16 mma_tf32 mma_f64 mma_s8_saturated mma_e4m3 ldmatrix_at_a_generic_address
spin_lock_within_warps ticket_lock flag_between_warps grid_barrier_by_hand early_return_before_a_barrier
branches_that_meet_at_syncwarp votes_in_branches named_barriers_producer_consumer benign_equal_writes
calls_that_are_not_inlined function_pointers switch_with_a_jump_table struct_by_value constants_and_device_variables
printf_of_everything big_integers_with_carries bit_tricks sha256 softmax_online flash_attention_causal
cp_async_with_a_cache_hint bulk_copies_whose_size_differs_per_block warp_specialised_bulk_pipeline
tensor_map_that_differs_per_block wgmma_s8 initialisers_that_hold_addresses branch_by_a_table a_warp_at_work
atomics_on_global_memory no_check_of_the_end shared_memory_that_is_not_initialised
no_barrier_between_write_and_read cp_async_waits_for_one_group_too_few mbarrier_expects_more_bytes_than_come
two_barriers_that_wait_for_each_other flag_that_is_never_set trap_that_is_reached barriers_in_two_branches_of_a_warp
scatter_to_the_same_places recursion_fibonacci reduction_without_barriers_in_a_warp
exchange_within_a_warp_without_syncwarp lost_update_within_a_warp shared_memory_of_a_block_that_has_ended
cluster_reads_a_neighbours_shared_memory
""".split()  # noqa: SIM905


def judge(entry: Entry) -> None:
    """Check that an entry has its declared outcome."""
    outcome = classify(entry)
    if entry.refused:
        assert outcome.status == "refused", str(outcome)
        assert entry.refused in outcome.detail, str(outcome)
    else:
        assert outcome.status == ("found" if entry.kind == "bug" else "right"), str(outcome)


@pytest.mark.parametrize("name", QUICK)
def test_some_of_the_corpus(name: str) -> None:
    judge(BY_NAME[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in QUICK])
def test_the_rest_of_the_corpus(name: str) -> None:
    judge(BY_NAME[name])


def test_the_corpus_is_as_large_as_its_page_says_and_hardly_any_is_refused() -> None:
    for kind, least, refused in (("cuda", 114, 0), ("ptx", 23, 3), ("bug", 40, 0)):
        mine = [entry for entry in ENTRIES if entry.kind == kind]
        assert len(mine) >= least
        assert sum(bool(entry.refused) for entry in mine) == refused
    assert all(entry.lines for entry in ENTRIES if entry.kind == "bug")


def _copy(expected: list[int]) -> Entry:
    """Return a kernel that copies 32 words, with the expected words."""

    def build(rng: Rng) -> Args:
        return np.arange(32, dtype=np.uint32), Out(np.array(expected, np.uint32))

    return replace(BY_NAME["vector_loads_and_stores"], name="copy", source=_SOURCE, build=build)


_SOURCE = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y)
{
  .reg .b64 %a, %b, %i; .reg .b32 %t, %v; .reg .pred %p;
  ld.param.u64 %a, [x]; ld.param.u64 %b, [y]; mov.u32 %t, %tid.x; mul.wide.u32 %i, %t, 4;
  add.u64 %a, %a, %i; add.u64 %b, %b, %i;
  ld.global.u32 %v, [%a];
  st.global.u32 [%b], %v;
  ret;
}
"""


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        ("", "", "right"),
        ("st.global.u32 [%b], %v;", "add.u32 %v, %v, 1; st.global.u32 [%b], %v;", "wrong"),
        ("st.global.u32 [%b], %v;", "st.global.u32 [%a], %v;", "wrong"),
        ("[%b], %v", "[%b+4], %v", "accused"),
        ("ret;", "tex.1d.v4.f32.s32 {%v, %v, %v, %v}, [x, {%t}]; ret;", "refused"),
        ("ret;", "again: add.u32 %v, %v, 1; setp.ne.u32 %p, %t, 99; @%p bra again; ret;", "slow"),
    ],
)
def test_the_runner_tells_outcomes_apart(old: str, new: str, status: str) -> None:
    entry = _copy(list(range(32)))
    limit = 0.2 if status == "slow" else None  # a quick machine comes to the emulator's own limit in a second
    assert classify(replace(entry, source=entry.source.replace(old, new)), limit=limit).status == status


def test_the_runner_tells_a_crash_from_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **more: object) -> None:
        raise IndexError("of the emulator's own")

    monkeypatch.setattr(runner, "run_grid", broken)
    assert classify(_copy(list(range(32)))).status == "crashed"


def test_a_bug_must_be_named_with_its_line() -> None:
    result = BY_NAME["no_check_of_the_end"]
    assert classify(result).status == "found"
    assert classify(replace(result, faults="misaligned")).status == "missed"
    elsewhere = result.source.replace(" // <-", "").replace("int i", "int i /* // <- */")
    assert classify(replace(result, source=elsewhere)).status == "missed"
    right = replace(BY_NAME["vector_add"], kind="bug", faults="anything")
    assert classify(right).status == "missed"


def test_a_wrong_expectation_is_seen() -> None:
    entry = BY_NAME["vector_add"]

    def build(rng: Rng) -> Args:
        a, b, y, n = entry.build(rng)
        off = y.expected.copy()
        off[700] = np.nextafter(off[700], np.float32(np.inf))
        return a, b, Out(off), n

    outcome = classify(replace(entry, build=build))
    assert outcome.status == "wrong"
    assert "1 of 1000 differ, first at (700,)" in outcome.detail


def test_inputs_depend_on_the_seed_alone() -> None:
    entry = BY_NAME["vector_add"]
    one, same, other = bind(entry), bind(entry), bind(entry, seed=1)
    assert all(np.array_equal(one.inputs[n], same.inputs[n], equal_nan=True) for n in one.inputs)
    assert not np.array_equal(one.inputs["a"], other.inputs["a"], equal_nan=True)


def test_a_fault_in_ptx_without_lines_of_a_source_names_the_line_of_the_ptx() -> None:
    source = _SOURCE.replace("  ld.global", "  /* a comment\n of two lines */ ld.global").replace(
        "[%b], %v", "[%b+4], %v"
    )
    outcome = classify(replace(_copy(list(range(32))), source=source))
    assert "out of bounds" in outcome.detail
    assert "at ptx:11, block (0, 0, 0), thread (31, 0, 0)" in outcome.detail
