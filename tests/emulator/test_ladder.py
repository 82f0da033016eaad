"""Every kernel in the tree on the emulator, for its real source, and the emulator as a device of the pipeline."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main as benchmark
from greenfast.cli.main import main
from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import run_grid
from greenfast.emulator.result import GridResult
from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.judge.record_io import REPORT, read_record
from greenfast.judge.record_schema import Record
from greenfast.judge.task import load, load_task, task_folders
from greenfast.numerics.attention import attention, attention_rounding_bound
from greenfast.numerics.formats import dequantize, quantize
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import Case, OutputSpec
from tasks.fp8_sdpa_stage_c_wmma.kernels import family as ladder
from tests.emulator.kernels import run_source
from tests.fakes import emulate_here

SHIPPED = [load_task(folder).config.name for folder in task_folders()]
LOADED = {name: load(name) for name in (*SHIPPED, "examples/row_softmax")}
#: Serving's program of two launches is run by tests/kernels/serving and tests/problems.
TASKS = {name: task for name, task in LOADED.items() if not hasattr(task.family, "program")}
#: Rungs that also run with tails of tiles; the rungs of full fusion do so in a test of their own.
RAGGED = ("stage1", "stage3a")
FULL_FUSION = ["stage3b", "stage3b_pipe3", "stage3b_specialized", "stage3b_persistent"]
#: Each rung of the ladder runs quickly in one format on one target, in turn.
QUICK = (("e4m3", "sm_89"), ("int8", "sm_90a"))
VARIANTS = [
    pytest.param(
        name,
        rung.name,
        fmt,
        target,
        id=f"{task.config.name}-{rung.name}-{fmt}-{target}",
        marks=[pytest.mark.slow] if name == "fp8_sdpa" and (fmt, target) != QUICK[n % 2] else [],
    )
    for target in ("sm_89", "sm_90a")
    for name, task in TASKS.items()
    for n, rung in enumerate(task.config.rungs)
    for fmt in task.config.formats
]


@pytest.mark.parametrize(("task_name", "rung", "fmt", "target"), VARIANTS)
def test_every_variant_is_right(task_name: str, rung: str, fmt: str, target: str) -> None:
    """No separate registry is needed: a variant with an instruction that is not known fails here, named."""
    task = TASKS[task_name]
    toggles = task.config.variant(rung).values
    small = task.config.shape("small").dims
    ragged = [{**small, "S": 35, "D": 128}] if (task_name, fmt) == ("fp8_sdpa", "e4m3") and rung in RAGGED else []
    if (task_name, rung, fmt) == ("fp8_attention", "stage2", "int8"):
        with pytest.raises(UsageError, match="V is E4M3"):
            task.family.kernel(toggles, fmt, small)
        pytest.skip("Stage 2 takes one format for Q, K and V")
    for dims in (small, *ragged):
        source = task.family.kernel(toggles, fmt, dims)
        if source.requires not in ("", target):
            pytest.skip(f"{rung} is for {source.requires} alone")
        case = task.problem.make_case(dims, 1, fmt)
        result = run_source(source, task.family.launch(toggles, fmt, dims), case, target, seed=3)
        assert not any(result.unwritten.values())
        assert result.input_writes == {}
        references = task.problem.references(dims, 1, fmt)
        out = task.problem.decode(result.outputs, fmt)
        gate = task.config.rung(rung).kernel_error or task.config.gates(fmt).kernel_error
        assert worst_bound_ratio(out, references.exact, references.get_bound(gate.rounding)) <= 1
        assert error_stats(out, references.exact, 1).relative_error <= gate.relative_error


def run_rung(
    rung: str, fmt: str, dims: dict[str, int], case: Case, seed: int = 0, target: str = "sm_90a"
) -> GridResult:
    task = TASKS["fp8_sdpa"]
    toggles = task.config.variant(rung).values
    source, plan = task.family.kernel(toggles, fmt, dims), task.family.launch(toggles, fmt, dims)
    return run_source(source, plan, case, target, seed)


@pytest.mark.parametrize("fmt", ["e4m3", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rung", FULL_FUSION)
def test_full_fusion_at_any_length(rung: str, head_dim: int, fmt: str) -> None:
    """Groups without a key, tails of a tile and of a block, stages used again; in other orders of the warps too."""
    problem = TASKS["fp8_sdpa"].problem
    for length in (1, 33, 130) if fmt == "e4m3" else (7, 100):  # the formats differ in conversions alone
        dims = {"B": 1, "H": 2, "S": length, "D": head_dim}
        case = problem.make_case(dims, 5, fmt)
        results = [run_rung(rung, fmt, dims, case, seed) for seed in ((0, 1) if length == 33 else (length,))]
        references = problem.references(dims, 5, fmt)
        for result in results:
            assert not any(result.unwritten.values())
            assert result.outputs["out"].tobytes() == results[0].outputs["out"].tobytes()
            out = problem.decode(result.outputs, fmt)
            assert worst_bound_ratio(out, references.exact, references.bound) <= 1, dims
            assert error_stats(out, references.exact, 1).relative_error <= 2e-3, dims
            assert result.counts.bank_conflicts == {}, dims


#: A head dim and a target for the first and the last rung; the others are slow tests.
RISING = [(rung, (64, 128)[n % 2], "sm_89") for n, rung in enumerate(FULL_FUSION) if n in (0, 3)]


@pytest.mark.parametrize(
    ("rung", "head_dim", "target"),
    [
        pytest.param(*x, marks=[] if x in RISING else [pytest.mark.slow])
        for x in product(FULL_FUSION, (64, 128), ("sm_89", "sm_90a"))
    ],
)
def test_bases_that_move_with_rising_scores(rung: str, head_dim: int, target: str) -> None:
    """Normal inputs outgrow the base of the first tile by no factor of 2^8; these do on every tile."""
    length, heads = 200, 2
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(3, heads, length, head_dim, generator=generator)
    ramp = torch.linspace(0, 20, length)[:, None]
    codes = [quantize(t, "e4m3") for t in (x[0].abs(), x[1].abs() * ramp, x[2])]
    inputs = {name: c.numpy() for name, (c, _) in zip("qkv", codes, strict=True)}
    inputs |= {f"{name}_scale": s.numpy() for name, (_, s) in zip("qkv", codes, strict=True)}
    dims = {"B": 1, "H": heads, "S": length, "D": head_dim}
    case = Case(inputs, {"out": OutputSpec((heads, length, head_dim), "float16")})
    result = run_rung(rung, "e4m3", dims, case, target=target)
    q, k, v = (dequantize(c, s, "e4m3") for c, s in codes)
    scale = head_dim**-0.5
    bound = attention_rounding_bound(q, k, v, scale).numpy()
    out = result.outputs["out"].astype(np.float64)
    assert worst_bound_ratio(out, attention(q, k, v, scale).numpy(), bound) <= 1
    normal = run_rung(rung, "e4m3", dims, TASKS["fp8_sdpa"].problem.make_case(dims, 0, "e4m3"), target=target)
    assert result.counts.exponentials > 1.03 * normal.counts.exponentials  # two for each base that a thread moves


#: The shape for comparisons of rungs, its number of blocks and its tiles of keys.
COMPARED = {"B": 1, "H": 1, "S": 512, "D": 64}
BLOCKS, TILES = 16, 16


@cache
def compared(rung: str) -> GridResult:
    return run_rung(rung, "e4m3", COMPARED, TASKS["fp8_sdpa"].problem.make_case(COMPARED, 0, "e4m3"))


def test_full_fusion_compared_with_stage_2() -> None:
    """Full fusion keeps scores, P and half tiles out of shared memory, and has no block barrier in the loop."""
    dims = COMPARED
    before, after = (compared(rung).counts for rung in ("stage2", "stage3b"))
    products = before.matrix_flops
    assert after.matrix_flops == products * 34 // 32  # the sums of the weights as products with ones
    assert after.exponentials < before.exponentials
    assert after.bank_conflicts == {}
    assert 3 * after.shared_passes < before.shared_passes
    assert after.barriers == BLOCKS * (2 * TILES + 2 * 8)
    assert after.global_store_sectors == dims["H"] * dims["S"] * dims["D"] * 2 // 32  # each once


def test_a_warp_that_copies_compared_with_stage_3b() -> None:
    """The same work to the bit; warps that multiply meet no named barrier between the block's first and its last."""
    before, after = (compared(rung) for rung in ("stage3b", "stage3b_specialized"))
    assert after.outputs["out"].tobytes() == before.outputs["out"].tobytes()
    for same in ("matrix_flops", "exponentials", "global_load_sectors", "global_store_sectors", "bank_conflicts"):
        assert getattr(after.counts, same) == getattr(before.counts, same), same
    assert after.counts.barriers == BLOCKS * (9 + 2 * 8)
    arrivals = {
        k: n for k, n in after.counts.instructions.items() if k.startswith(("mbarrier.arrive", "cp.async.mbarrier"))
    }
    # per tile: one arrival of its copy, two of its readers
    assert sum(arrivals.values()) == BLOCKS * TILES * (1 + 2)


@pytest.mark.parametrize("fmt", ["e4m3", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("head_dim", "lengths"), [(64, (1, 33, 100)), *(pytest.param(d, (300,), marks=pytest.mark.slow) for d in (64, 128))]
)
def test_any_number_of_persistent_blocks_gives_the_bits_of_stage_3b(
    head_dim: int, lengths: tuple[int, ...], fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks process several work tiles with changing heads, in equal and unequal numbers."""
    problem = TASKS["fp8_sdpa"].problem
    for length in lengths:
        multiprocessors = 4 if length == 300 else 1
        monkeypatch.setattr(ladder, "_PERSISTENT_ON", Target("sm_90a", multiprocessors))
        dims = {"B": 1, "H": 3, "S": length, "D": head_dim}
        case = problem.make_case(dims, 6, fmt)
        expected = run_rung("stage3b", fmt, dims, case)
        for seed in (0, 1) if length == 33 else (length,):
            result = run_rung("stage3b_persistent", fmt, dims, case, seed)
            assert not any(result.unwritten.values())
            assert result.outputs["out"].tobytes() == expected.outputs["out"].tobytes(), (dims, multiprocessors)
            assert result.counts.bank_conflicts == {}
            for same in ("matrix_flops", "exponentials", "global_load_sectors", "global_store_sectors"):
                assert getattr(result.counts, same) == getattr(expected.counts, same), same


def test_the_minimum_of_matrix_work_and_exponentials() -> None:
    task = TASKS["fp8_sdpa"]
    dims = task.config.shape("small").dims
    toggles = task.config.variant("stage2").values
    source = task.family.kernel(toggles, "e4m3", dims)
    case = task.problem.make_case(dims, 0, "e4m3")
    ptx = to_ptx(source, Target("sm_89"), assemble=False)
    plan = task.family.launch(toggles, "e4m3", dims)
    counts, again = (
        run_grid(ptx, source.entry, source.block, source.dynamic_smem_bytes, plan, case.inputs, case.outputs).counts
        for _ in range(2)
    )
    assert counts.matrix_flops == 4 * 32 * 32 * 64  # 4 B H S^2 D, both products
    assert counts.exponentials == 32 * 32 + 128  # one per score, and one per thread and tile for the rescale
    assert again == counts  # deterministic


@pytest.mark.parametrize(
    "variant",
    [
        "USE_CP_ASYNC=1,DEBUG_PRINT=1",
        "USE_FUSED_SOFTMAX_PV=2,DEBUG_PRINT=1",
        "USE_FUSED_SOFTMAX_PV=2,USE_WARP_SPECIALIZATION=1,DEBUG_PRINT=1",
        "USE_FUSED_SOFTMAX_PV=2,USE_PERSISTENT_CTAS=1,DEBUG_PRINT=1",
    ],
)
def test_debug_print_prints_from_the_kernel(variant: str) -> None:
    task = TASKS["fp8_sdpa"]
    dims = {"B": 1, "H": 1, "S": 40, "D": 64}
    toggles = task.config.variant(variant).values
    source = task.family.kernel(toggles, "int8", dims)
    case = task.problem.make_case(dims, 0, "int8")
    result = run_grid(
        to_ptx(source, Target("sm_89"), assemble=False),
        source.entry,
        source.block,
        source.dynamic_smem_bytes,
        task.family.launch(toggles, "int8", dims),
        case.inputs,
        case.outputs,
    )
    lines = sorted(result.printed.splitlines())  # the groups of keys of full fusion come in any order
    assert [line.split(",")[0] for line in lines] == ["tile 0: keys 32", "tile 1: keys 8"]


def test_validate_decides_correctness_on_the_emulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_here(monkeypatch)
    argv = [
        "judge",
        "fp8_sdpa",
        "--shapes",
        "small",
        "--seeds",
        "0,1",
        "--device",
        "emulator",
        "--no-quote",
        "--out",
        str(tmp_path),
    ]
    assert main([*argv, "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["device"]["kind"] == "emulated"
    (folder,) = (tmp_path / "fp8_wmma_baseline").iterdir()
    record = read_record(folder)
    assert isinstance(record, Record)
    statuses = {g.gate: g.status for g in record.gates}
    assert statuses == {
        "BUILD": "PASS", "RESOURCES": "PASS", "CORRECTNESS": "PASS", "PERFORMANCE": "PENDING", "EVIDENCE": "PASS",
    }  # fmt: skip
    assert record.decision == "PENDING"
    before, after = record.baseline.counts["b1_h1_s32_d64"], record.candidate.counts["b1_h1_s32_d64"]
    assert record.least_work == {"b1_h1_s32_d64": {"matrix_flops": after.matrix_flops, "exponentials": 32 * 32}}
    assert 2 * before.matrix_flops == after.matrix_flops  # stage1 does but one of the products on tensor cores
    text = next(g.summary for g in record.gates if g.gate == "EVIDENCE")
    assert (
        f"emulated b1_h1_s32_d64: {after.warp_instructions} (baseline {before.warp_instructions}) instructions" in text
    )
    assert f"{after.conflicts} (baseline {before.conflicts}) bank conflicts" in text
    assert text.endswith("matrix_flops 1.00x the least, exponentials 1.12x the least")
    assert (
        f"| b1_h1_s32_d64 | exponentials | 1152 | {after.exponentials} | 1.00x | 1024 |"
        in (folder / REPORT).read_text()
    )
    assert "emulated" in next(g.summary for g in record.gates if g.gate == "PERFORMANCE")


def test_a_wrong_kernel_fails_on_the_emulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_here(monkeypatch)
    task = "tests/cheats/doubling"
    argv = ["kernel", task, "--shapes", "even", "--seeds", "0", "--device", "emulator", "--out", str(tmp_path)]
    for variant, message in (
        ("tail_unwritten", None),
        ("reads_behind", "past the end of 'x'"),
        ("unwritten", "never written"),
    ):
        code = benchmark([*argv, "--variant", variant])
        out = " ".join(capsys.readouterr().out.split())
        assert code == (0 if message is None else 1), (variant, out)
        assert message is None or message in out, variant


def test_the_error_is_the_one_that_a_gpu_recorded() -> None:
    """The error that an H100 recorded for small, seed 0: only the order of accumulation may change it."""
    record = read_record(Path(__file__).parents[2] / "evidence/h100/fp8_sdpa-e4m3-stage2")
    assert isinstance(record, Record)
    (row,) = [r for r in record.candidate.correctness if (r.shape, r.seed) == ("b1_h1_s32_d64", 0)]
    task = TASKS["fp8_sdpa"]
    toggles = task.config.variant("stage2").values
    source = task.family.kernel(toggles, "e4m3", row.dims)
    case = task.problem.make_case(row.dims, 0, "e4m3")
    result = run_grid(
        to_ptx(source, Target("sm_90a"), assemble=False),
        source.entry,
        source.block,
        source.dynamic_smem_bytes,
        task.family.launch(toggles, "e4m3", row.dims),
        case.inputs,
        case.outputs,
    )
    assert case.digest == row.inputs_digest
    exact = task.problem.references(row.dims, 0, "e4m3").exact
    values = error_stats(result.outputs["out"].astype(np.float64), exact, 1).relative_error
    assert row.kernel_error is not None
    assert values == pytest.approx(row.kernel_error.relative_error, rel=0.02)
