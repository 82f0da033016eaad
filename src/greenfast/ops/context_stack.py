"""Where calls of ``greenfast.sdpa`` and ``flash_attn_varlen_func`` go while a ``context_parallel`` is entered."""

from __future__ import annotations

from typing import Any

#: The contexts that are entered, the innermost last. Of the process, not of a thread: the backward pass computes
#: checkpointed attention again on PyTorch's threads. A plain list is what torch.compile can trace and guard.
ACTIVE: list[Any] = []


def in_context_parallel() -> bool:
    """Whether tensors are one rank's rows of longer sequences: PyTorch's own attention would see these rows alone."""
    return bool(ACTIVE) and ACTIVE[-1].size > 1
