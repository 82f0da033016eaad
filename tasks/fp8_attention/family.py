"""The kernels of the task: greenfast's for Hopper and for Ada, and Stage 2 of the ladder as their baseline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from greenfast.judge.task import load_family, load_task
from greenfast.kernels.attention import ada, hopper
from greenfast.kernels.attention.choice import choose_kernel
from greenfast.kernels.attention.config import VALUE_FORMAT, AttentionConfig, Sizes, read_dims
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Choice, KernelSource, Launch

_LADDER_TASK = load_task(Path(__file__).parents[1] / "fp8_sdpa_stage_c_wmma")
_LADDER = load_family(_LADDER_TASK)
_STAGE2 = _LADDER_TASK.config.variant("stage2").values
_STAGE2_HEAD_DIMS = (64, 128)


def kernel(
    toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
) -> KernelSource:
    """Render the kernel of a shape. Raises UsageError for a format or shape that it does not compute."""
    if toggles.get("USE_QMMA"):
        if toggles["USE_WGMMA"]:
            raise UsageError("USE_WGMMA=1 and USE_QMMA=1 are two kernels; one of them is 0")
        if instrumented:
            raise UsageError("the Ada kernel has no phase counters")
        return ada.kernel(read_dims(dims, fmt)[0])
    if not toggles["USE_WGMMA"]:
        return _LADDER.kernel(_STAGE2, fmt, _ladder_dims(fmt, dims), instrumented=instrumented)
    if instrumented:
        raise UsageError("the Hopper kernel has no phases to count: its warpgroups are in different ones at a time")
    return hopper.kernel(*read_dims(dims, fmt))


def launch(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
    """Return the grid and arguments of that kernel."""
    if toggles.get("USE_QMMA"):
        return ada.launch(*read_dims(dims, fmt))
    if not toggles["USE_WGMMA"]:
        return _LADDER.launch(_STAGE2, fmt, _ladder_dims(fmt, dims))
    return hopper.launch(*read_dims(dims, fmt))


def choose(target: Target, fmt: str, dims: Mapping[str, int]) -> Choice:
    """Return the fastest rung for a shape on a target, and the reason. Raises UsageError if there is none."""
    config, sizes = read_dims(dims, fmt)
    if target.capability >= (8, 9):
        return choose_kernel(target, config, sizes)
    refused = _stage2_refuses(config, sizes)
    if refused is not None:
        raise UsageError(f"no kernel for {config}, on {target.name}: {refused}")
    return Choice("stage2", f"codes to half, WMMA: {target.name} has no products of 8-bit floats")


def _stage2_refuses(config: AttentionConfig, sizes: Sizes) -> str | None:
    if config.format != VALUE_FORMAT:
        return f"Stage 2 takes Q, K and V in one format, and with {config.format} V is E4M3: compare with ada"
    if config.head_dim not in _STAGE2_HEAD_DIMS:
        return f"Stage 2 is for head dims {', '.join(map(str, _STAGE2_HEAD_DIMS))}"
    lacking = config.beyond("head_dim", "key_mean", "rotate")
    if lacking or sizes.kv_heads != sizes.heads or sizes.kv_len != sizes.q_len:
        return f"Stage 2 has no {', '.join([*lacking, 'grouped heads', 'lengths that differ'])}"
    return None


def _ladder_dims(fmt: str, dims: Mapping[str, int]) -> dict[str, int]:
    """Return the dimensions for the ladder. Raises UsageError for options that it does not support."""
    refused = _stage2_refuses(*read_dims(dims, fmt))
    if refused is not None:
        raise UsageError(f"{refused}; got {dict(dims)}")
    return {d: dims[d] for d in "BHSD"}
