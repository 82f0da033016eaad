"""The fast kernels as a family: Hopper's, Ada's, and Stage 2 of the ladder; and the choice between them."""

from __future__ import annotations

from collections.abc import Mapping

from greenfast.kernels.attention import ada, hopper
from greenfast.kernels.attention.config import VALUE_FORMAT, AttentionConfig, Sizes, read_dims
from greenfast.kernels.attention.heuristics import tiling
from greenfast.kernels.ladder import family as ladder
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Choice, KernelSource, Launch

_STAGE2 = {"USE_CP_ASYNC": 1, "USE_WMMA_QK": 1, "USE_WMMA_PV": 1}


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
        return ladder.kernel(_ladder_toggles(), fmt, _ladder_dims(fmt, dims), instrumented=instrumented)
    if instrumented:
        raise UsageError("the Hopper kernel has no phases to count: its warpgroups are in different ones at a time")
    return hopper.kernel(*read_dims(dims, fmt))


def launch(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
    """Return the grid and arguments of that kernel."""
    if toggles.get("USE_QMMA"):
        return ada.launch(*read_dims(dims, fmt))
    if not toggles["USE_WGMMA"]:
        return ladder.launch(_ladder_toggles(), fmt, _ladder_dims(fmt, dims))
    return hopper.launch(*read_dims(dims, fmt))


def choose(target: Target, fmt: str, dims: Mapping[str, int]) -> Choice:
    """Return the fastest rung for a shape on a target, and the reason. Raises UsageError if there is none."""
    return choose_kernel(target, *read_dims(dims, fmt))


def choose_kernel(target: Target, config: AttentionConfig, sizes: Sizes) -> Choice:
    """Return the same for an attention.

    Measured on an H100 (docs/performance-log.md). The Ada kernel has not been timed on its GPU yet.
    """
    if target.name == hopper.TARGET.name:
        return Choice("hopper", f"wgmma on 8-bit codes; {tiling(config, sizes, target.multiprocessors)[1]}")
    hint = f"; build for {hopper.TARGET.name} on a Hopper GPU" if target.capability == (9, 0) else ""
    if target.capability >= (8, 9):
        refused = ada.refuses(config)
        if refused is None:
            native = "native on sm_89" if target.capability == (8, 9) else f"correct on {target.name}, native on sm_89"
            return Choice("ada", f"mma.sync on 8-bit codes, {native}; not timed on such a GPU{hint}")
    else:
        refused = _stage2_refuses(config, sizes)
        if refused is None:
            return Choice("stage2", f"codes to half, WMMA: {target.name} has no products of 8-bit floats")
    raise UsageError(f"no kernel for {config}, on {target.name}: {refused}{hint}")


def _ladder_toggles() -> dict[str, int]:
    return {name: _STAGE2.get(name, 0) for name in ladder.TOGGLES}


def _stage2_refuses(config: AttentionConfig, sizes: Sizes) -> str | None:
    if config.format != VALUE_FORMAT:
        return f"Stage 2 takes Q, K and V in one format, and with {config.format} V is E4M3: compare with ada"
    if config.head_dim not in ladder.HEAD_DIMS:
        return f"Stage 2 is for head dims {', '.join(map(str, ladder.HEAD_DIMS))}"
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
