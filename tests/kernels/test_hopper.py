"""The Hopper kernel's family: which tiles a shape gets, what is built, how work is dealt, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.device.compiler import compile_kernel
from greenfast.device.machine_code import count_instructions, disassemble
from greenfast.judge.tasks import find_task
from greenfast.kernels.attention import hopper
from greenfast.kernels.attention.config import sizes_of
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import TensorMap

CONFIG = find_task("fp8_attention").config
BIG = {"B": 1, "H": 32, "S": 8192}


@pytest.mark.parametrize("shape", CONFIG.shapes, ids=lambda s: s.name)
def test_every_shape_builds_within_its_budget(shape: object) -> None:
    dims = shape.dims  # type: ignore[attr-defined]
    compiled = compile_kernel(hopper.kernel("e4m3", dims), Target("sm_90a"))
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
    {"BF16": 1, "KBLOCK": 128, "VBLOCK": 128},  # Q as it comes
    {"VROWS": 1},
)
#: Bytes that four warpgroups at head dim 64 store and load a thread at the most, with what takes more registers.
FEW = 128


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("fmt", hopper.FORMATS)
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_no_spills(extras: dict[str, int], fmt: str, head_dim: int, causal: int) -> None:
    dims = {**BIG, "D": head_dim, "CAUSAL": causal, **extras}
    own = "VBLOCK" in dims and "QBLOCK" not in dims and hopper.quantizes_queries(head_dim)
    query = hopper.Query(head_dim, "bfloat16", (head_dim * 2048, head_dim * 2048, head_dim)) if own else None
    compiled = compile_kernel(hopper.kernel(fmt, dims, query), Target("sm_90a"))
    allowed = FEW if head_dim == 64 and "KBLOCK" in extras else 0
    assert compiled.resources.spill_bytes <= allowed
    assert compiled.resources.stack_bytes <= allowed
    assert "C75" not in compiled.log, "the assembler serializes the products"
    assert compiled.resources.smem_bytes <= 232448


def test_tiles_by_shape() -> None:
    for head_dim in (64, 128, 256):
        few, why = hopper.tiling({"B": 1, "H": 2, "S": 100, "D": head_dim})
        assert few.consumers == 1
        assert "1 should take the least time for 2 heads of 100 queries on 132" in why
    two, _ = hopper.tiling({"B": 1, "H": 8, "S": 2048, "D": 64})
    assert two.consumers == 2, "128 blocks in one wave, where one warpgroup a block needs two"
    many = {d: hopper.tiling({"B": 16, "H": 2048 // d, "S": 1024, "D": d})[0] for d in (64, 128, 256)}
    assert [many[d].consumers for d in (64, 128, 256)] == [4, 2, 2]
    assert [many[d].two_levels for d in (64, 128, 256)] == [True, True, False]
    assert hopper.tiling({"B": 1, "H": 8, "S": 100, "KV": hopper.ONE_LEVEL_KEYS + 1, "D": 256})[0].two_levels
    with pytest.raises(UsageError, match=r"D=96.*64, 128, 256"):
        hopper.tiling({**BIG, "D": 96})


def test_what_it_is_not_built_for() -> None:
    with pytest.raises(UsageError, match=r"sm_90a alone.*--arch sm_90a"):
        compile_kernel(hopper.kernel("e4m3", {**BIG, "D": 64}), Target("sm_89"))
    with pytest.raises(UsageError, match=r"fp4.*e4m3, int8"):
        hopper.kernel("fp4", {**BIG, "D": 64})


def test_tensor_maps_describe_the_buffers() -> None:
    dims = {"B": 2, "H": 4, "HK": 2, "S": 100, "KV": 333, "D": 256}
    q, k, v = hopper.launch("e4m3", dims).args[:3]
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
def test_causal_work_is_dealt_evenly(heads: int, length: int, block_m: int, block_n: int) -> None:
    """Counted as the kernel deals it (piece_of and Work in attention_hopper.cuh)."""
    sizes = sizes_of({"B": 1, "H": heads, "S": length, "D": 64, "CAUSAL": 1})
    width, blocks = hopper.heads_at_once(sizes, block_m, block_n), -(-length // block_m)
    loads, seen = np.zeros(hopper.MULTIPROCESSORS), set()
    for piece in range(blocks * heads):
        group, within = divmod(piece, blocks * width)
        at_once = min(width, heads - group * width)
        head, block = group * width + within % at_once, blocks - 1 - within // at_once
        seen.add((head, block))
        number, place = divmod(piece, hopper.MULTIPROCESSORS)
        tiles = -(-min(length, (block + 1) * block_m) // block_n)
        loads[hopper.MULTIPROCESSORS - 1 - place if number % 2 else place] += tiles + 1
    assert len(seen) == blocks * heads
    assert loads.mean() / loads.max() >= 0.9


def test_without_a_mask_one_head_at_a_time() -> None:
    assert hopper.heads_at_once(sizes_of({**BIG, "D": 64}), 256, 128) == 1


def test_queries_as_they_come() -> None:
    """Any strides, those of a dimension of 1 too; what the kernel does not quantize is refused."""
    dims = {"B": 2, "H": 3, "S": 40, "D": 64, "KBLOCK": 128, "VBLOCK": 128}
    plan = hopper.launch("e4m3", dims, query=hopper.Query(40, "float16", (4800, 40, 120)))
    q = plan.args[0]
    assert isinstance(q, TensorMap)
    assert (q.dtype, q.shape, q.strides, q.box) == ("uint16", (2, 3, 40, 40), (9600, 80, 240, 2), (1, 1, 64, 64))
    assert plan.early, "it begins while K and V are quantized"
    assert not hopper.launch("e4m3", {**dims, "QBLOCK": 16}).early
    alone = hopper.launch("e4m3", {**dims, "B": 1}, query=hopper.Query(40, "float16", (7, 40, 120))).args[0]
    assert isinstance(alone, TensorMap)
    assert alone.strides[0] % 16 == 0
    for wrong in ({"QBLOCK": 16}, {"D": 256}, {"KBLOCK": 0}, {"VROWS": 1}):
        with pytest.raises(UsageError, match=r"QBLOCK|VBLOCK"):
            hopper.kernel("e4m3", {**dims, **wrong}, hopper.Query(64, "float16", (1, 1, 1)))
