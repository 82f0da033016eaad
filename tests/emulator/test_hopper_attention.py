"""The Hopper attention kernel on the emulator: tiles, ping-pong, masks, grouped heads and lengths that differ."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from greenfast.emulator.result import GridResult
from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.kernels import KERNEL_DIR
from greenfast.kernels.attention import heuristics, hopper
from greenfast.kernels.attention.config import QUERY_BLOCK, Strides, read_dims
from greenfast.numerics.formats import quantize_blocks
from greenfast.ops import reference
from greenfast.spec.errors import GreenfastError
from greenfast.spec.kernel import KernelSource
from greenfast.spec.problem import Case, OutputSpec
from tasks.fp8_attention import problem as attention_problem
from tests.emulator.kernels import run_source

SMALL = {"B": 1, "H": 2, "S": 150, "D": 64}
BLOCKS = {"QBLOCK": 16, "KBLOCK": 128, "VBLOCK": 128}
#: A shape, of how many multiprocessors, and warpgroups a block: few multiprocessors make blocks of several warpgroups,
#: and blocks that do several work tiles.
CASES = {
    "one query": ({"B": 1, "H": 2, "S": 1, "D": 64}, 132, 1),
    "grouped heads, last query": ({"B": 1, "H": 4, "HK": 2, "S": 33, "KV": 270, "D": 128, "CAUSAL": 2}, 132, 1),
    "queries without a key": ({"B": 1, "H": 4, "HK": 1, "S": 200, "KV": 70, "D": 64, "CAUSAL": 2}, 132, 1),
    "wide tiles, ping-pong": ({"B": 1, "H": 2, "S": 330, "D": 64}, 1, 2),
    "causal": ({"B": 1, "H": 2, "S": 220, "D": 64, "CAUSAL": 1}, 1, 4),
    "causal, log-sum-exp": ({"B": 1, "H": 1, "S": 400, "D": 64, "CAUSAL": 1, "LSE": 1}, 1, 4),
    "head dim 128, ping-pong": ({"B": 1, "H": 2, "S": 200, "D": 128}, 1, 2),
    "head dim 128, causal": ({"B": 1, "H": 3, "S": 300, "D": 128, "CAUSAL": 1}, 2, 2),
    "head dim 256, one level": ({"B": 1, "H": 2, "S": 200, "D": 256, "CAUSAL": 1}, 2, 2),
    "bfloat16": ({**SMALL, "BF16": 1}, 132, 1),
    "scales of blocks": ({**SMALL, "KV": 290, "KBLOCK": 128}, 132, 1),
    "scales of blocks, wide tiles": ({"B": 1, "H": 1, "S": 120, "KV": 530, "D": 64, "KBLOCK": 128}, 1, 2),
    "scales of channels": ({**SMALL, "HK": 1, "VCHANNEL": 1}, 132, 1),
    "scales, head dim 128": ({"B": 1, "H": 1, "S": 200, "D": 128, "KBLOCK": 128, "VCHANNEL": 1}, 1, 2),
    "scales, head dim 256": ({**SMALL, "D": 256, "KBLOCK": 128, "VCHANNEL": 1, "BF16": 1, "LSE": 1}, 132, 1),
    "scales of all blocks": ({"B": 1, "H": 2, "S": 200, "KV": 300, "D": 64, **BLOCKS}, 1, 4),
    "scales of all blocks, ping-pong": ({"B": 1, "H": 2, "S": 100, "KV": 400, "D": 64, **BLOCKS}, 2, 2),
    "scales of all blocks, causal": (
        {"B": 1, "H": 2, "HK": 1, "S": 200, "D": 128, "CAUSAL": 1, "BF16": 1, **BLOCKS},
        2,
        2,
    ),
    "scales of all blocks, head dim 256": ({**SMALL, "D": 256, "KV": 400, "LSE": 1, **BLOCKS}, 132, 1),
}
FINE = {"QBLOCK": 1, "KBLOCK": 32, "VBLOCK": 128}
CASES |= {
    "fine scales": ({"B": 1, "H": 2, "HK": 1, "S": 90, "KV": 300, "D": 64, "BF16": 1, **FINE}, 132, 1),
    "fine scales, causal": ({"B": 1, "H": 1, "S": 260, "D": 128, "CAUSAL": 1, "LSE": 1, **FINE}, 1, 1),
    "fine scales, head dim 256": ({"B": 1, "H": 1, "S": 70, "KV": 150, "D": 256, **FINE}, 132, 1),
}
#: Run in int8 too: the first two in int8 alone, unless slow tests run.
INT8 = (
    "causal",
    "queries without a key",
    "fine scales",
    "head dim 128, ping-pong",
    "scales of blocks, wide tiles",
    "scales, head dim 256",
    "fine scales, causal",
    "fine scales, head dim 256",
)


def emulate(
    dims: dict[str, int], fmt: str, source: KernelSource | None = None, seed: int = 5, size: int = 132
) -> GridResult:
    """On a GPU of ``size`` multiprocessors."""
    config, sizes = read_dims(dims, fmt)
    case = attention_problem.make_case(dims, 0, fmt)
    plan = hopper.launch(config, sizes, multiprocessors=size)
    result = run_source(source or hopper.kernel(config, sizes, size), plan, case, seed=seed)
    assert not any(result.unwritten.values())
    return result


@pytest.mark.parametrize("fmt", ["e4m3", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dims", "head_dim", "dtype", "consumers"),
    [
        pytest.param(
            {"B": 2, "H": 2, "HK": 1, "S": 90, "KV": 140, "D": 64}, 64, torch.float16, 2, marks=pytest.mark.slow
        ),
        pytest.param(
            *({"B": 1, "H": 2, "S": 130, "D": 128, "CAUSAL": 1, "BF16": 1}, 72, torch.bfloat16, 2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"B": 1, "H": 1, "S": 70, "KV": 130, "D": 128, "BF16": 1}, 128, torch.bfloat16, 1, marks=pytest.mark.slow
        ),
        ({"B": 1, "H": 1, "S": 70, "KV": 130, "D": 64, "BF16": 1, **FINE}, 64, torch.bfloat16, 1),
        ({"B": 1, "H": 2, "HK": 1, "S": 70, "KV": 140, "D": 256, "CAUSAL": 2}, 200, torch.float16, 2),
        pytest.param({"B": 1, "H": 1, "S": 70, "KV": 130, "D": 256}, 256, torch.float16, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_queries_that_the_kernel_quantizes(
    dims: dict[str, int], head_dim: int, dtype: torch.dtype, consumers: int, fmt: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They come as (B, S, H, D), and the output is computed from their codes."""
    monkeypatch.setattr(heuristics, "_COST", {n: 1.0 if n == consumers else 100.0 for n in (1, 2, 4)})
    dims = {**BLOCKS, **dims}
    coded, sizes = read_dims(dims, fmt)
    config = replace(coded, columns=head_dim, fuse_q_quant=True)
    assert heuristics.tiling(config, sizes, 2)[0].consumers == consumers
    case, q, own = with_queries(dims, head_dim, dtype, fmt)
    plan = hopper.launch(config, sizes, strides=Strides(query=q.stride()[:3]), multiprocessors=2)
    result = run_source(hopper.kernel(config, sizes, 2), plan, own)
    assert not any(result.unwritten.values())

    matrix = reference.build_rotation(dims["D"])
    rotated = torch.nn.functional.pad(q.float(), (0, dims["D"] - head_dim)) @ matrix
    codes, scale = quantize_blocks(rotated.flatten(0, 1), fmt, 1 if dims["QBLOCK"] == 1 else QUERY_BLOCK)
    of_codes = Case(case.inputs | {"q": codes.numpy(), "q_scale": scale.numpy()}, case.outputs)
    outputs = run_source(hopper.kernel(coded, sizes), hopper.launch(coded, sizes), of_codes).outputs
    wanted = attention_problem.decode(outputs, fmt).reshape(*q.shape[:3], -1)[..., :head_dim]
    values = attention_problem.decode(result.outputs, fmt)
    assert np.linalg.norm(values - wanted) < 2e-3 * np.linalg.norm(wanted)  # a code in a thousand may differ by one


def with_queries(dims: dict[str, int], head_dim: int, dtype: torch.dtype, fmt: str) -> tuple[Case, torch.Tensor, Case]:
    """The case of a shape, queries (B, H, S, head_dim) of a dtype, and the case with these in place of its codes."""
    case = attention_problem.make_case(dims, 0, fmt)
    shape = (dims["B"], dims["S"], dims["H"], head_dim)
    q = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).transpose(1, 2)
    inputs = case.inputs | {"q": q.transpose(1, 2).contiguous().view(torch.uint16).numpy()}
    return case, q, Case(inputs, {"out": OutputSpec((*q.shape[:3], head_dim), case.outputs["out"].dtype)})


@pytest.mark.parametrize(
    ("header", "fence", "head_dim"),
    [
        ("load_q_input", "  // order these reads before the TMA write that reuses the buffer", 64),
        pytest.param("load_q_staged", "  // as in load_q_input.cuh", 256, marks=pytest.mark.slow),
    ],
)
def test_rows_of_q_that_are_released_without_a_fence_are_caught(
    header: str, fence: str, head_dim: int, tmp_path: Path
) -> None:
    """Remove both fences again: "sdpa: a proxy fence before TMA may overwrite rows of Q that were read"."""
    dims = {**BLOCKS, "B": 1, "H": 4, "S": 60, "KV": 140, "D": head_dim}
    _, q, own = with_queries(dims, head_dim, torch.float16, "e4m3")
    coded, sizes = read_dims(dims, "e4m3")
    config = replace(coded, columns=head_dim, fuse_q_quant=True)
    plan = hopper.launch(config, sizes, strides=Strides(query=q.stride()[:3]), multiprocessors=2)
    kernel = hopper.kernel(config, sizes, 2)
    run_source(kernel, plan, own)
    message = r"bulk write over what a load read with no fence\.proxy\.async since.* the load at .*load_q_\w+\.cuh:"
    old = without(kernel, f"attention/sm90/{header}.cuh", f"    ptx::fence_proxy_async();{fence}\n", "", tmp_path)
    for seed in range(2):
        with pytest.raises(GreenfastError, match=message):
            run_source(old, plan, own, seed=seed)


#: One rule for each distinct pair of new and replaced tiles.
TILINGS = list({(r.key, r.tiles, r.instead_of): r for r in reversed(heuristics.rules())}.values())


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(
            r,
            marks=[] if r.key[:2] == (128, True) and r.key[-1] == "e4m3" else [pytest.mark.slow],
            id=f"{r.key}, {r.keys}",
        )
        for r in TILINGS
    ],
)
def test_measured_tiles_where_the_kernel_quantizes_queries(rule: heuristics.Rule) -> None:
    """They leave the bits that the planned tiles leave with as many polynomials; every stage is used again."""
    head_dim, causal, fmt = rule.key[0], rule.key[1], rule.key[-1]
    keys = max(tiles.block_n * tiles.stages for tiles in (rule.tiles, rule.instead_of)) + 20
    dims = {"B": 1, "H": 1, "S": 70, "KV": keys, "D": head_dim, **BLOCKS} | ({"CAUSAL": 2} if causal else {})
    coded, sizes = read_dims(dims, fmt)
    config = replace(coded, fuse_q_quant=True)
    case = attention_problem.make_case(dims, 0, fmt)
    q = np.random.default_rng(1).standard_normal((1, 70, head_dim)).astype(np.float16)
    own = Case(case.inputs | {"q": q.view(np.uint16)[None]}, case.outputs)
    values = []
    for tiles in (rule.tiles, replace(rule.instead_of, polynomials=rule.tiles.polynomials)):
        plan = hopper.launch(config, sizes, multiprocessors=1, tiles=tiles)
        result = run_source(hopper.kernel(config, sizes, 1, tiles=tiles), plan, own)
        assert not any(result.unwritten.values())
        values.append(result.outputs["out"])
    assert np.array_equal(values[0], values[1])


def check(outputs: dict[str, NDArray[Any]], dims: dict[str, int], fmt: str) -> None:
    references = attention_problem.references(dims, 0, fmt)
    out = attention_problem.decode(outputs, fmt)
    assert worst_bound_ratio(out, references.exact, references.bounds["e4m3_polynomial"]) <= 1
    assert error_stats(out, references.exact, 1).relative_error <= 0.03
    if dims.get("LSE"):
        wanted = attention_problem.log_sum_exp(dims, 0, fmt)
        assert (np.isinf(outputs["lse"]) == np.isinf(wanted)).all()
        finite = np.isfinite(wanted)
        assert np.abs(outputs["lse"] - wanted)[finite].max() <= 1e-4


#: Cases that take long; quicker ones cover the same code.
SLOW = (
    *("fine scales, causal", "fine scales, head dim 256", "wide tiles, ping-pong", "head dim 128, causal"),
    *("scales of blocks", "bfloat16", "scales of all blocks, ping-pong", "scales of blocks, wide tiles"),
    *("scales of channels", "scales of all blocks", "scales of all blocks, head dim 256", "head dim 128, ping-pong"),
    "head dim 256, one level",
    # four warpgroups: causal in int8; LSE: head dim 256; scales of blocks and channels: head dim 256; fine: in int8
    *("causal, log-sum-exp", "scales, head dim 128", "fine scales"),
)


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        *(pytest.param(n, "e4m3", marks=[pytest.mark.slow] if n in (*SLOW, *INT8[:2]) else []) for n in CASES),
        *(pytest.param(n, "int8", marks=[pytest.mark.slow] if n in INT8[3:] else []) for n in INT8),
    ],
)
def test_it_is_right(name: str, fmt: str) -> None:
    dims, multiprocessors, consumers = CASES[name]
    assert heuristics.tiling(*read_dims(dims, "e4m3"), multiprocessors)[0].consumers == consumers
    result = emulate(dims, fmt, size=multiprocessors)
    check(result.outputs, dims, fmt)


@pytest.mark.parametrize(
    ("dims", "head_dim", "order"),
    [
        pytest.param({"B": 2, "H": 2, "S": 70, "D": 64}, 40, "BSHD", marks=pytest.mark.slow),
        ({"B": 2, "H": 2, "HK": 1, "S": 70, "D": 128, "BF16": 1, "CAUSAL": 1, "LSE": 1}, 72, "BHSD"),
        pytest.param({"B": 2, "H": 3, "S": 40, "D": 256}, 136, "SBHD", marks=pytest.mark.slow),
        pytest.param({"B": 1, "H": 2, "S": 150, "D": 64}, 64, "HSBD", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_output_has_the_callers_layout(dims: dict[str, int], head_dim: int, order: str) -> None:
    """Its rows are tight, in any order of batch, heads and queries; nothing is written outside of them."""
    case = attention_problem.make_case(dims, 0, "e4m3")
    plain = run_source(hopper.kernel(*read_dims(dims, "e4m3")), hopper.launch(*read_dims(dims, "e4m3")), case)
    sizes = {"B": dims["B"], "H": dims["H"], "S": dims["S"], "D": head_dim}
    shape = tuple(sizes[d] for d in order)
    strides = {d: int(np.prod(shape[i + 1 :])) for i, d in enumerate(order)}
    config, of_case = read_dims(dims, "e4m3")
    config = replace(config, columns=head_dim)
    specs = {**case.outputs, "out": OutputSpec(shape, case.outputs["out"].dtype)}
    plan = hopper.launch(config, of_case, strides=Strides(out=tuple(strides[d] for d in "BHS")))
    result = run_source(hopper.kernel(config, of_case), plan, Case(case.inputs, specs))
    assert not any(result.unwritten.values())
    values = result.outputs["out"].transpose([order.index(d) for d in "BHSD"])
    wanted = plain.outputs["out"].reshape(dims["B"], dims["H"], dims["S"], dims["D"])[..., :head_dim]
    assert np.array_equal(values, wanted)
    if "LSE" in dims:
        assert np.array_equal(result.outputs["lse"], plain.outputs["lse"])


def test_two_levels_at_head_dim_256(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heuristics, "ONE_LEVEL_KEYS", 128)
    dims = {"B": 1, "H": 1, "S": 70, "KV": 200, "D": 256}
    assert heuristics.tiling(*read_dims(dims, "e4m3"), 2)[0].two_levels
    check(emulate(dims, "e4m3", size=2).outputs, dims, "e4m3")


#: Text removed from a header, its number of occurrences, and the expected fault.
MUTANTS = {
    "V before its stage is free": (
        "attention/sm90/load_kv.cuh",
        "  shared.v_empty[s].wait(ring.parity ^ 1);\n",
        "",
        "more arrivals than the phase expects",
    ),
    "ones behind V without a fence": (
        "attention/sm90/kernel.cuh",
        "    ptx::fence_proxy_async();\n  }\n  __syncthreads();\n",
        "  }\n  __syncthreads();\n",
        "no fence.proxy.async since",
    ),
    "O before its product has ended": (
        "attention/sm90/mainloop.cuh",
        "    ptx::wgmma_wait<0>();\n    if constexpr (Traits::kPromoteAccum) {\n",
        "    if constexpr (Traits::kPromoteAccum) {\n",
        "accumulator before a wgmma.wait_group",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_that_lacks_a_step_is_caught(name: str, tmp_path: Path) -> None:
    header, old, new, message = MUTANTS[name]
    dims = {"B": 1, "H": 1, "S": 64, "KV": 900, "D": 128}
    source = without(hopper.kernel(*read_dims(dims, "e4m3")), header, old, new, tmp_path)

    def in_several_orders() -> None:  # of the warps: not in every one does a missing wait show
        for seed in range(6):
            emulate(dims, "e4m3", source, seed)

    with pytest.raises(GreenfastError, match=message):
        in_several_orders()


def without(source: KernelSource, header: str, old: str, new: str, folder: Path) -> KernelSource:
    """Return the kernel with one occurrence of a text in a header replaced."""
    shutil.copytree(KERNEL_DIR, folder / "kernels")
    file = folder / "kernels" / header
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    return replace(source, include_dirs=(folder / "kernels",))


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ("    ptx::fence_proxy_async();\n", "no fence.proxy.async since"),
        ("    shared.q_full[warpgroup].wait(parity);\n", "that nothing has written"),
    ],
)
def test_queries_that_lack_a_step_are_caught(old: str, message: str, tmp_path: Path) -> None:
    dims = {"B": 1, "H": 1, "S": 130, "KV": 130, "D": 64, "KBLOCK": 128, "VBLOCK": 128}
    case = attention_problem.make_case(dims, 0, "e4m3")
    config, sizes = read_dims({**dims, "QBLOCK": 16}, "e4m3")
    config = replace(config, fuse_q_quant=True)
    own = Case(case.inputs | {"q": np.full((1, 1, 130, 64), 0x3C00, np.uint16)}, case.outputs)
    source = without(hopper.kernel(config, sizes), "attention/sm90/load_q_input.cuh", old, "", tmp_path)

    def in_several_orders() -> None:
        for seed in range(6):
            run_source(source, hopper.launch(config, sizes), own, seed=seed)

    with pytest.raises(GreenfastError, match=message):
        in_several_orders()
