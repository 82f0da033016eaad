"""Every rung's machine code: budgets, promises, and what the toggles change in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import pytest

from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.machine_code import count_instructions, disassemble
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource
from tasks.fp8_sdpa_stage_c_wmma.kernels import family as ladder
from tests.kernels.ladder_task import CONFIG, RUNGS, SMALL, is_full_fusion, toggles

ARCHS = ("sm_89", "sm_90a")
LARGEST_SMEM = 99 * 1024  # per block on sm_89

Variant = tuple[str, int, str, str]  # rung, head dim, format, arch
# Every rung for every architecture and head dim; the formats differ in a few instructions only, so they alternate.
VARIANTS: list[Variant] = [
    (rung, head_dim, "int8" if (head_dim, arch) == (128, "sm_89") else "e4m3", arch)
    for arch in ARCHS
    for head_dim in ladder.HEAD_DIMS
    for rung in RUNGS
]


@dataclass(frozen=True)
class Built:
    kernel: CompiledKernel

    @cached_property
    def sass(self) -> str:
        return disassemble(self.kernel.cubin, self.kernel.source.entry)

    @cached_property
    def counts(self) -> dict[str, int]:
        return count_instructions(self.sass)


def build(job: tuple[KernelSource, str]) -> Built:
    return Built(compile_kernel(job[0], Target(job[1])))


def render(variant: Variant, *, instrumented: bool = False, **changes: int) -> tuple[KernelSource, str]:
    rung, head_dim, fmt, arch = variant
    dims = {**SMALL, "D": head_dim}
    return ladder.kernel(toggles(rung, **changes), fmt, dims, instrumented=instrumented), arch


class Builds(dict[Variant, Built]):
    """Builds, each made when it is first asked for; that they compile also proves Python's plan of shared memory."""

    def __missing__(self, variant: Variant) -> Built:
        self[variant] = built = build(render(variant))
        return built


@pytest.fixture(scope="module")
def builds() -> Builds:
    return Builds()


def name(variant: Variant) -> str:
    return "-".join(map(str, variant))


#: Every rung builds quickly for one of these, and some for the other one too; the rest are slow tests.
QUICK, OTHER = (64, "e4m3", "sm_90a"), (128, "int8", "sm_89")
QUICK_VARIANTS = {*((rung, *QUICK) for rung in RUNGS), *((rung, *OTHER) for rung in ("stage1", "stage2", "stage3b"))}
BY_VARIANT = pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if v in QUICK_VARIANTS else [pytest.mark.slow], id=name(v)) for v in VARIANTS]
)
#: For tests that compare several rungs.
BOTH = pytest.mark.parametrize("target", [QUICK, pytest.param(OTHER, marks=pytest.mark.slow)])


@BY_VARIANT
def test_nothing_is_spilled(builds: dict[Variant, Built], variant: Variant) -> None:
    resources = builds[variant].kernel.resources
    assert resources.spill_bytes == 0
    assert resources.stack_bytes == 0
    assert builds[variant].counts["local_memory"] == 0


@BY_VARIANT
def test_budget(builds: dict[Variant, Built], variant: Variant) -> None:
    rung, head_dim, *_ = variant
    resources = builds[variant].kernel.resources
    budget = CONFIG.rung(rung).budget
    if head_dim == 64:  # as in every shape of the task
        assert resources.registers <= min(budget.registers, 128)
        assert resources.smem_bytes <= budget.smem_bytes
    assert resources.smem_bytes <= LARGEST_SMEM
    assert resources.static_smem_bytes == 0


@BY_VARIANT
def test_promises(builds: dict[Variant, Built], variant: Variant) -> None:
    rung = CONFIG.rung(variant[0])
    counts = builds[variant].counts
    assert {c: counts[c] for c, least in rung.promises.at_least.items() if counts[c] < least} == {}
    assert {c: counts[c] for c, most in rung.promises.at_most.items() if counts[c] > most} == {}
    if rung.after is not None:
        before = builds[(rung.after, *variant[1:])].counts
        assert [c for c in rung.promises.more_than_predecessor if counts[c] <= before[c]] == []


@BY_VARIANT
def test_instructions_follow_the_toggles(builds: dict[Variant, Built], variant: Variant) -> None:
    """Whatever the config promises: a toggle that is off adds no instruction, one that is on at least a tile's work."""
    rung, head_dim, *_ = variant
    t, counts = toggles(rung), builds[variant].counts
    fused = is_full_fusion(t)
    # by one thread, 16 codes of K or V each: of a tile, and in full fusion of 2 KB for each stage and in the loop; one
    # warp for all copies them in two places, and does not set the stages apart
    copies = 2 * 2048 // 16 // 64 * (3 + t["USE_THREE_STAGE_PIPE"]) if fused else 2 * 32 * head_dim // 16 // 128
    if t["USE_WARP_SPECIALIZATION"]:
        copies = 2 * 2 * 2048 // 16 // 32
    assert counts["cp_async"] >= copies if t["USE_CP_ASYNC"] else counts["cp_async"] == 0
    # by one warp, each 16 x 8 x 16 multiply-adds: one of the four 16 x 16 tiles of scores, a quarter of the output; in
    # full fusion both products of 16 queries and a tile, and its sum
    hmma = (2 * head_dim // 16) * t["USE_WMMA_QK"] + (2 * 2 * head_dim // 32) * t["USE_WMMA_PV"]
    assert counts["hmma"] == 2 * 16 + 2048 // head_dim // 16 if fused else counts["hmma"] >= hmma
    assert (counts["hmma"] > 0) == bool(t["USE_WMMA_QK"] or t["USE_WMMA_PV"])
    # operands that are made from codes in registers need no half tiles to load
    assert (counts["ldsm"] > 0) == (counts["hmma"] > 0 and not fused)
    assert counts["mufu_ex2"] >= 8 + 1, "eight weights and one rescale per thread"


@BOTH
def test_tensor_cores_come_in_steps(builds: dict[Variant, Built], target: tuple[int, str, str]) -> None:
    scalar, stage1, stage2 = (builds[(rung, *target)].counts for rung in ("scalar", "stage1", "stage2"))
    assert stage2["hmma"] > stage1["hmma"] > scalar["hmma"] == 0
    assert stage2["cp_async"] > 0
    assert stage1["cp_async"] > 0
    assert scalar["cp_async"] == 0


@BOTH
def test_no_two_rungs_are_the_same_kernel(builds: dict[Variant, Built], target: tuple[int, str, str]) -> None:
    kernels = [builds[(rung, *target)].kernel for rung in RUNGS]
    assert len({kernel.cubin for kernel in kernels}) == len(RUNGS)
    assert len({kernel.kernel_hash for kernel in kernels}) == len(RUNGS)


def test_stage_3a_saves_the_tile_of_p_and_the_swizzle_its_padding(builds: dict[Variant, Built]) -> None:
    smem = {rung: builds[(rung, 64, "e4m3", "sm_90a")].kernel.resources.smem_bytes for rung in RUNGS}
    assert smem["stage2"] - smem["stage3a"] >= 2048
    assert smem["stage3a"] - smem["stage3a_swizzle"] >= 2 * 32 * 8 * 2
    assert smem["stage1"] - smem["wmma_qk"] >= 2 * 2 * 32 * 64 - 128, "two stages of K and V codes, in units of 128"
    assert smem["kv_lut"] - smem["stage2"] >= 256 * 2 - 128


@BOTH
def test_a_third_stage_takes_its_memory_and_full_fusion_fewer_barriers(
    builds: dict[Variant, Built], target: tuple[int, str, str]
) -> None:
    two, three, stage2 = (builds[(rung, *target)] for rung in ("stage3b", "stage3b_pipe3", "stage2"))
    stages = 4 * 2 * 2048  # one for each of four groups of keys: a tile of K and one of V
    assert three.kernel.resources.smem_bytes == 3 * stages
    # with two stages the partial results are larger: 16 rows of 64 columns, bias and sum of eight warps
    assert two.kernel.resources.smem_bytes == 8 * 16 * (64 + 2) * 4 > 2 * stages
    # one of two warps per tile; of the whole block one before and one after each 64 columns of partial results
    assert two.counts["bar_sync"] == three.counts["bar_sync"] == 1 + 2 * target[0] // 64
    assert stage2.counts["bar_sync"] >= 5


def test_a_copying_warp_fits_without_taking_registers_from_the_multiplying_warps(builds: dict[Variant, Built]) -> None:
    for arch in ARCHS:
        one, before = (builds[(rung, 64, "e4m3", arch)] for rung in ("stage3b_specialized", "stage3b"))
        # Two blocks of nine warps: five on one of the four schedulers, each with a quarter of 65536 registers.
        assert one.kernel.resources.registers <= 65536 // 4 // 5 // 32 // 8 * 8 == 96
        assert one.kernel.resources.smem_bytes == before.kernel.resources.smem_bytes + 2 * 8 * 8  # mbarriers
        # of the block at the start, once for either kind of warp, of those that multiply twice at the end, none per
        # tile; and no groups of copies to wait for
        assert one.counts["bar_sync"] == 4 == before.counts["bar_sync"] + 1
        assert "LDGDEPBAR" in before.sass
        assert "LDGDEPBAR" not in one.sass
        assert "ARRIVES.LDGSTSBAR" in one.sass


def test_persistent_blocks_keep_the_next_tiles_separate_from_partial_results(builds: dict[Variant, Built]) -> None:
    for arch in ARCHS:
        one, before = (builds[(rung, 64, "e4m3", arch)] for rung in ("stage3b_persistent", "stage3b"))
        first = 4 * 2 * 2048  # of each group of keys a tile of K and one of V
        smem = one.kernel.resources.smem_bytes
        assert smem == before.kernel.resources.smem_bytes + first
        assert 2 * (smem + 1024) <= 100 * 1024, "two blocks, as on Ada's multiprocessors too"
        assert one.kernel.resources.registers <= 65536 // (2 * 256)
        # where the partial results have been read
        assert one.counts["bar_sync"] == before.counts["bar_sync"] + 1


# The debug build


@pytest.mark.parametrize("rung", ["scalar", "stage2", "stage3b", "stage3b_specialized", "stage3b_persistent"])
def test_debug_print_prints(builds: dict[Variant, Built], rung: str) -> None:
    variant: Variant = (rung, 64, "e4m3", "sm_90a")
    source, arch = render(variant, DEBUG_PRINT=1)
    debug = build((source, arch))
    plain = builds[variant].kernel
    assert debug.kernel.kernel_hash != plain.kernel_hash
    assert debug.kernel.cubin != plain.cubin
    assert re.search(r"call\S* \(\w+\),\s*vprintf", debug.kernel.ptx)
    assert "vprintf" not in plain.ptx
    assert b"row 0 " in debug.kernel.cubin
    assert b"row 0 " not in plain.cubin
    assert debug.kernel.resources.spill_bytes == 0


# The instrumented build


@pytest.mark.parametrize(
    "rung", ["scalar", "stage3b", *(pytest.param(r, marks=pytest.mark.slow) for r in ("stage2", "stage3a_swizzle"))]
)
def test_instrumented_builds_read_the_clock_and_stay_in_registers(builds: dict[Variant, Built], rung: str) -> None:
    variant: Variant = (rung, 64, "e4m3", "sm_90a")
    built, plain = build(render(variant, instrumented=True)), builds[variant]
    prefetches = toggles(rung)["USE_CP_ASYNC"]
    # the start, and the end of each phase that the rung has
    assert built.sass.count("CLOCKLO") >= 1 + len(built.kernel.source.phases) - (1 - prefetches)
    assert "CLOCKLO" not in plain.sass
    assert built.kernel.kernel_hash != plain.kernel.kernel_hash
    assert built.counts["local_memory"] == 0
    assert built.kernel.resources.spill_bytes == 0
    assert built.counts["hmma"] == plain.counts["hmma"]
