"""The serving comparison: attention over a paged FP8 cache and appending to it, with FlashAttention-3."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.backends import KERNEL
from benchmarks.comparison import BenchCell, Comparison, ErrorLimits
from benchmarks.record_schema import SpeedupPair
from benchmarks.serving_backends import BACKENDS
from benchmarks.serving_cases import GROUPS, ServingCase, bytes_moved, cases, flops, host_case
from benchmarks.serving_kernels import timed_launches
from benchmarks.serving_session import ServingSession

#: Largest relative error of a correct output of greenfast; rounding Q, K, V and P explains 0.06.
_LIMIT = 0.1
_FP8, _BF16 = ("vllm_fa3", "fa3"), ("vllm_fa3_bf16", "fa3_bf16")
_CONTENDERS = {
    "decode": (KERNEL, *_FP8, *_BF16, "plan", "vllm_fa3_plan"),
    "prefill": (KERNEL, "varlen", *_FP8, *_BF16),
    "append": ("append", "copy"),
    "read": ("read_sum", "read_max", "read_norm"),
    "host": (
        "kvcache", "kvcache_unplanned", "kvcache_appending", "varlen_decode", "append_last", "plan_update", *_FP8,
    ),
}  # fmt: skip


def serving(groups: Sequence[str] = GROUPS, *, quick: bool = False, fa3_library: str = "") -> Comparison:
    """Return the comparison of these groups of cases. fa3_library: file of vLLM's FlashAttention-3.

    Raises UsageError for unknown groups.
    """
    chosen = cases(groups, quick=quick)
    host = host_case() if "host" in groups else None
    measured = [*chosen, *([host] if host else [])]
    return Comparison(
        name="serving",
        what="attention over a paged FP8 cache",
        own=tuple(name for name, c in BACKENDS.items() if c.own and c.attention),
        versus=tuple(
            SpeedupPair(own=KERNEL, baselines=list(baselines), title=f"{group}: greenfast / {label}", group=f"{group}_")
            for group in ("decode", "prefill")
            if group in groups
            for baselines, label in ((_FP8, "FA3 FP8"), (_FP8 + _BF16, "best FA3"))
        ),
        timed=tuple(_cell(case) for case in chosen),
        accuracy=(),
        inputs={"normal": "N(0, 1) in bfloat16"},
        session=partial(ServingSession, fa3_library=fa3_library, cases=measured),
        flops=flops,
        bytes_moved=bytes_moved,
        host=_cell(host) if host else None,
        limits=ErrorLimits(error=_LIMIT),
        kernels=partial(timed_launches, measured),
        arch="sm_90a",
    )


def _cell(case: ServingCase) -> BenchCell:
    names = _CONTENDERS[case.group]
    if case.token_scales:
        names = (names[0], "token_scales", *names[1:])
    return BenchCell(case.shape, names, grid=case.group in ("decode", "prefill"))
