"""The Ada kernel: native FP8 instructions for sm_89 within budget, correct on the emulator, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from greenfast.device.compiler import compile_kernel
from greenfast.device.machine_code import count_instructions, disassemble
from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.judge.task import find_task
from greenfast.kernels.attention import ada
from greenfast.kernels.attention.config import FORMATS, Strides, read_dims
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import Case, OutputSpec
from tasks.fp8_attention import problem as attention_problem
from tests.emulator.kernels import run_source

CONFIG = find_task("fp8_attention").config
DIMS = {"B": 1, "H": 2, "S": 100, "D": 64}


@pytest.mark.parametrize("head_dim", ada.HEAD_DIMS)
@pytest.mark.parametrize("causal", [pytest.param(0, marks=pytest.mark.slow), 1])  # a mask takes registers
@pytest.mark.parametrize("fmt", FORMATS)
def test_native_products_within_the_budget(fmt: str, head_dim: int, causal: int) -> None:
    dims = {**DIMS, "D": head_dim, "CAUSAL": causal}
    compiled = compile_kernel(ada.kernel(read_dims(dims, fmt)[0]), Target("sm_89"))
    budget = CONFIG.rung("ada").budget_for(dims)
    assert compiled.resources.registers <= budget.registers
    assert compiled.resources.smem_bytes <= budget.smem_bytes
    assert compiled.resources.spill_bytes == 0
    counts = count_instructions(disassemble(compiled.cubin, ada.ENTRY))
    # Per tile of 64 keys: 4 x D / 32 pairs of products for the scores, 2 x D / 16 for P V.
    scores, output = 2 * 4 * head_dim // 32, 2 * 2 * head_dim // 16
    assert counts["qmma"] == (output if fmt == "int8" else scores + output)
    assert counts["imma"] == (scores if fmt == "int8" else 0)
    assert counts["hmma"] == counts["local_memory"] == 0


@pytest.mark.parametrize(
    "dims",
    [
        {"B": 1, "H": 2, "S": 1, "D": 64},
        {"B": 1, "H": 2, "S": 200, "D": 64, "CAUSAL": 1},
        {"B": 1, "H": 4, "HK": 2, "S": 33, "KV": 333, "D": 128, "CAUSAL": 2},
        {"B": 1, "H": 4, "HK": 1, "S": 200, "KV": 70, "D": 64, "CAUSAL": 2},
        {"B": 2, "H": 1, "S": 65, "KV": 127, "D": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize("fmt", FORMATS)
def test_it_is_right(fmt: str, dims: dict[str, int]) -> None:
    source = ada.kernel(read_dims(dims, fmt)[0])
    case = attention_problem.make_case(dims, 0, fmt)
    result = run_source(source, ada.launch(*read_dims(dims, fmt)), case, "sm_89")
    assert not any(result.unwritten.values())
    references = attention_problem.references(dims, 0, fmt)
    out = attention_problem.decode(result.outputs, fmt)
    assert worst_bound_ratio(out, references.exact, references.bounds["e4m3"]) <= 1
    assert error_stats(out, references.exact, 1).relative_error <= 0.03
    assert sum(result.counts.bank_conflicts.values()) == 0, "the swizzle is there to avoid them"


def test_unsupported_configurations() -> None:
    with pytest.raises(UsageError, match=r"the Ada kernel is for head dims 64, 128; got head_dim 256"):
        ada.kernel(read_dims({**DIMS, "D": 256}, "e4m3")[0])
    with pytest.raises(UsageError, match=r"fp4.*e4m3.*int8"):
        ada.kernel(read_dims(DIMS, "fp4")[0])
    with pytest.raises(UsageError, match=r"no choice of log_sum_exp; got .*log_sum_exp True"):
        ada.kernel(read_dims({**DIMS, "LSE": 1}, "e4m3")[0])


def test_the_output_has_the_callers_layout() -> None:
    """(B, S, H, 72) in memory, dense, from the kernel for head dim 128."""
    dims = {"B": 2, "H": 2, "S": 70, "D": 128}
    case, source = attention_problem.make_case(dims, 0, "e4m3"), ada.kernel(read_dims(dims, "e4m3")[0])
    plain = run_source(source, ada.launch(*read_dims(dims, "e4m3")), case, "sm_89")
    config, sizes = read_dims(dims, "e4m3")
    plan = ada.launch(replace(config, columns=72), sizes, strides=Strides(out=(70 * 2 * 72, 72, 2 * 72)))
    tight = Case(case.inputs, {"out": OutputSpec((2, 70, 2, 72), "float16")})
    result = run_source(source, plan, tight, "sm_89")
    assert not any(result.unwritten.values())
    wanted = plain.outputs["out"].reshape(2, 2, 70, 128)[..., :72]
    assert np.array_equal(result.outputs["out"].transpose(0, 2, 1, 3), wanted)


def test_a_scale_of_scores_that_float32_lacks_counts_as_nothing() -> None:
    dims = {"B": 1, "H": 1, "S": 70, "D": 64, "CAUSAL": 1}
    case = attention_problem.make_case(dims, 0, "e4m3")
    config, sizes = read_dims(dims, "e4m3")
    out = run_source(ada.kernel(config), ada.launch(config, sizes, 1e-50), case, "sm_89").outputs["out"]
    codes = torch.from_numpy(case.inputs["v"]).view(torch.float8_e4m3fn).float().numpy()[0]
    means = codes.cumsum(0) / np.arange(1, 71)[:, None] * case.inputs["v_scale"]
    assert np.abs(out[0] - means).max() < 0.01
