"""The choice of the attention kernel for a target."""

from __future__ import annotations

from greenfast.kernels.attention import ada, hopper
from greenfast.kernels.attention.config import AttentionConfig, Sizes
from greenfast.kernels.attention.heuristics import tiling
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Choice


def choose_kernel(target: Target, config: AttentionConfig, sizes: Sizes) -> Choice:
    """Return the kernel for an attention on a target, "hopper" or "ada", and the reason.

    Measured on an H100 (docs/performance-log.md). The Ada kernel has not been timed on its GPU yet.
    Raises UsageError if the target has no kernel for the attention.
    """
    if target.name == hopper.TARGET.name:
        return Choice("hopper", f"wgmma on 8-bit codes; {tiling(config, sizes, target.multiprocessors)[1]}")
    if target.capability < (8, 9):
        raise UsageError(
            f"greenfast's operator has kernels for compute capability 8.9 and up, this is {target.name}; "
            "torch.nn.functional.scaled_dot_product_attention runs there"
        )
    hint = f"; build for {hopper.TARGET.name} on a Hopper GPU" if target.capability == (9, 0) else ""
    refused = ada.refuses(config)
    if refused is not None:
        raise UsageError(f"no kernel for {config}, on {target.name}: {refused}{hint}")
    native = "native on sm_89" if target.capability == (8, 9) else f"correct on {target.name}, native on sm_89"
    return Choice("ada", f"mma.sync on 8-bit codes, {native}; not timed on such a GPU{hint}")
