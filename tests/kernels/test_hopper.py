"""The Hopper kernel's family: the tiles of a shape, what is built, how work is distributed, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenfast.device.compiler import compile_kernel
from greenfast.device.machine_code import count_instructions, disassemble
from greenfast.judge.task import find_task
from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention import heuristics, hopper
from greenfast.kernels.attention.config import AttentionConfig, Mask, Sizes, Strides, read_dims
from greenfast.kernels.attention.heuristics import Tiling
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import TensorMap

CONFIG = find_task("fp8_attention").config
BIG = {"B": 1, "H": 32, "S": 8192}


#: Shapes whose kernels test_no_spills builds too, or almost.
SLOW = (
    *("b2_h8_s256_d64", "b1_h8_s2048_d64", "b2_h32_s1024_d64", "b2_h16_s1024_d128", "b2_h16_s1000_d64_causal"),
    *("b2_h8_s1000_d256_causal", "b1_h8_hk2_s33_kv333_d128_causal_last", "b1_h4_hk1_s200_kv70_d64_causal_last"),
    *(
        "b1_h8_s500_d128_fine_scales",
        "b1_h8_s512_d128",
        "b1_h8_s500_d128_softcap30",
        "b1_h8_s500_d128_lse_bf16",
        "b2_h16_s1000_d128_causal",
    ),
)


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=[pytest.mark.slow] if s.name in SLOW else [], id=s.name) for s in CONFIG.shapes]
)
def test_every_shape_builds_within_its_budget(shape: object) -> None:
    dims = shape.dims  # type: ignore[attr-defined]
    compiled = compile_kernel(hopper.kernel(*read_dims(dims, "e4m3")), Target("sm_90a"))
    budget = CONFIG.rung("hopper").budget_for(dims)
    assert compiled.resources.smem_bytes <= budget.smem_bytes
    assert compiled.resources.spill_bytes == compiled.resources.stack_bytes == 0
    counts = count_instructions(disassemble(compiled.cubin, hopper.ENTRY))
    assert counts["qgmma"] > 0
    assert counts["hmma"] == counts["local_memory"] == 0
    assert "C75" not in compiled.log, "the assembler serializes the products"


EXTRAS: tuple[dict[str, int], ...] = (
    {},
    {"LSE": 1, "BF16": 1, "KBLOCK": 128, "VCHANNEL": 1},
    {"BF16": 1, "QBLOCK": 16, "KBLOCK": 128, "VBLOCK": 128},
    {"BF16": 1, "QBLOCK": 16, "KBLOCK": 128, "VBLOCK": 128, "QUANTIZES_Q": 1},
    {"SOFTCAP": 50},
)
#: The most bytes that four warpgroups at head dim 64 spill per thread, with options that take more registers and in
#: int8, and any in int8: a register or two, once in a work tile.
FEW, FEW_INT8 = 128, 16


@pytest.mark.parametrize("head_dim", [*(pytest.param(d, marks=pytest.mark.slow) for d in (64, 128)), 256])
@pytest.mark.parametrize(
    ("fmt", "causal", "extras"),
    [
        # A mask takes registers, and these extras more than the others: so do these kernels, which are built quickly.
        pytest.param(fmt, causal, extras, id=f"{fmt}-{causal}-{extras}", marks=[] if quick else [pytest.mark.slow])
        for fmt, causal in (("e4m3", 1), ("e4m3", 0), ("int8", 1), ("int8", 0))
        for extras in EXTRAS
        for quick in [causal and fmt == "e4m3" and {"QUANTIZES_Q", "LSE", "SOFTCAP"} & extras.keys()]
    ],
)
def test_no_spills(extras: dict[str, int], fmt: str, head_dim: int, causal: int) -> None:
    dims = {**BIG, "D": head_dim, "CAUSAL": causal, **extras}
    fuse_q_quant = "QUANTIZES_Q" in dims
    config, sizes = read_dims({key: n for key, n in dims.items() if key != "QUANTIZES_Q"}, fmt)
    compiled = compile_kernel(hopper.kernel(replace(config, fuse_q_quant=fuse_q_quant), sizes), Target("sm_90a"))
    allowed = FEW_INT8 if fmt == "int8" else 0
    if head_dim == 64 and ("KBLOCK" in extras or fmt == "int8"):
        allowed = FEW
    assert compiled.resources.spill_bytes <= allowed
    assert compiled.resources.stack_bytes <= allowed
    assert "C75" not in compiled.log, "the assembler serializes the products"
    assert compiled.resources.smem_bytes <= 232448


def tiles(dims: dict[str, int], multiprocessors: int = 132) -> Tiling:
    return heuristics.tiling(*read_dims(dims, "e4m3"), multiprocessors)[0]


def test_tiles_by_shape() -> None:
    for head_dim in (64, 128, 256):
        few, why = heuristics.tiling(*read_dims({"B": 1, "H": 2, "S": 100, "D": head_dim}, "e4m3"), 132)
        assert few.consumers == 1
        assert "1 should take the least time for 2 heads of 100 queries on 132" in why
    two = tiles({"B": 1, "H": 8, "S": 2048, "D": 64})
    assert two.consumers == 2, "128 blocks in one wave; one warpgroup per block would need two waves"
    assert tiles({"B": 1, "H": 8, "S": 2048, "D": 64}, 66).consumers == 4, "with half as many multiprocessors"
    many = {d: tiles({"B": 16, "H": 2048 // d, "S": 1024, "D": d}) for d in (64, 128, 256)}
    assert [many[d].consumers for d in (64, 128, 256)] == [4, 2, 2]
    assert [many[d].two_levels for d in (64, 128, 256)] == [True, True, False]
    assert tiles({"B": 1, "H": 8, "S": 100, "KV": heuristics.ONE_LEVEL_KEYS + 1, "D": 256}).two_levels
    with pytest.raises(UsageError, match=r"D=96.*64, 128, 256"):
        tiles({**BIG, "D": 96})


@pytest.mark.parametrize("causal", [0, 1])
def test_fixed_tiles_depend_on_no_size(causal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(b, h, s, kv) for b in (1, 3, 64) for h in (1, 40) for s in (1, 100, 4096) for kv in (64, 2048, 40000)]
    for head_dim in HEAD_DIMS:
        dims = [{"B": b, "H": h, "S": s, "KV": kv, "D": head_dim, "CAUSAL": causal} for b, h, s, kv in sizes]
        assert len({tiles(d) for d in dims}) > 1
        with monkeypatch.context() as patch:
            patch.setattr(heuristics, "BATCH_INVARIANT", True)
            assert len({tiles(d) for d in dims}) == 1
            assert tiles(dims[0]) in heuristics._candidates(read_dims(dims[0], "e4m3")[0], 40000)


def test_the_variable_that_fixes_the_tiles() -> None:
    assert [heuristics.read_batch_invariant(value) for value in (None, "", "0", "1")] == [False, False, False, True]
    with pytest.raises(UsageError, match="GREENFAST_BATCH_INVARIANT='yes': allowed are 0, and 1"):
        heuristics.read_batch_invariant("yes")


def test_unsupported_targets_and_formats() -> None:
    with pytest.raises(UsageError, match=r"sm_90a only.*--arch sm_90a"):
        compile_kernel(hopper.kernel(*read_dims({**BIG, "D": 64}, "e4m3")), Target("sm_89"))
    with pytest.raises(UsageError, match=r"fp4.*e4m3.*int8"):
        hopper.kernel(*read_dims({**BIG, "D": 64}, "fp4"))


def test_tensor_maps_describe_the_buffers() -> None:
    dims = {"B": 2, "H": 4, "HK": 2, "S": 100, "KV": 333, "D": 256}
    q, k, v = hopper.launch(*read_dims(dims, "e4m3")).args[:3]
    assert isinstance(q, TensorMap)
    assert isinstance(k, TensorMap)
    assert isinstance(v, TensorMap)
    assert (q.buffer, q.shape, q.box, q.swizzle) == ("q", (8, 100, 256), (1, 64, 128), 128)
    assert (k.buffer, k.shape, k.strides) == ("k", (4, 333, 256), (333 * 256, 256, 1))
    assert (v.buffer, v.shape, v.strides) == ("v_t", (4, 256, 336), (256 * 336, 336, 1))


@pytest.mark.parametrize(
    ("heads", "length", "block_m", "block_n"),
    [(8, 16384, 128, 128), (32, 16384, 256, 128), (32, 4096, 128, 128), (512, 1024, 256, 128), (16, 16384, 128, 256)],
)
def test_causal_work_is_distributed_evenly(heads: int, length: int, block_m: int, block_n: int) -> None:
    """Counted as the kernel distributes it (StaticScheduler and WorkTile in attention/scheduler.cuh)."""
    sizes = Sizes(1, heads, heads, length, length)
    width, blocks = heuristics.head_swizzle(Mask.UPPER_LEFT, sizes, block_m, block_n, 132), -(-length // block_m)
    loads, seen = np.zeros(132), set()
    for work_tile in range(blocks * heads):
        group, within = divmod(work_tile, blocks * width)
        at_once = min(width, heads - group * width)
        head, block = group * width + within % at_once, blocks - 1 - within // at_once
        seen.add((head, block))
        number, place = divmod(work_tile, 132)
        tiles = -(-min(length, (block + 1) * block_m) // block_n)
        loads[132 - 1 - place if number % 2 else place] += tiles + 1
    assert len(seen) == blocks * heads
    assert loads.mean() / loads.max() >= 0.9


def test_without_a_mask_one_head_at_a_time() -> None:
    assert heuristics.head_swizzle(Mask.NONE, Sizes(1, 32, 32, 8192, 8192), 256, 128, 132) == 1


def test_strides_of_unquantized_queries() -> None:
    """Any strides, also of a dimension of 1; strides that the kernel cannot quantize from are refused."""
    config = AttentionConfig(
        head_dim=64, columns=40, query_scales="block", key_scales="block", value_scales="block", fuse_q_quant=True
    )
    sizes = Sizes(2, 3, 3, 40, 40)
    plan = hopper.launch(config, sizes, strides=Strides(query=(4800, 40, 120)))
    q = plan.args[0]
    assert isinstance(q, TensorMap)
    assert (q.dtype, q.shape, q.strides, q.box) == ("uint16", (2, 3, 40, 40), (9600, 80, 240, 2), (1, 1, 64, 64))
    assert plan.early
    assert not hopper.launch(replace(config, fuse_q_quant=False), sizes).early
    alone = hopper.launch(config, Sizes(1, 3, 3, 40, 40), strides=Strides(query=(7, 40, 120))).args[0]
    assert isinstance(alone, TensorMap)
    assert alone.strides[0] % 16 == 0
    with pytest.raises(UsageError, match=r"a Q that the Hopper kernel quantizes"):
        hopper.kernel(replace(config, query_scales="head"), sizes)
    with pytest.raises(UsageError, match=r"QBLOCK, VBLOCK.*KBLOCK"):
        replace(config, key_scales="head")
