"""The stack of active ``context_parallel`` contexts. ``sdpa`` and ``flash_attn_varlen_func`` call the innermost one."""

from __future__ import annotations

from typing import Any

#: The active contexts, innermost last. They belong to the process, not to a thread: the backward pass recomputes
#: checkpointed attention on PyTorch's threads. It is a plain list because torch.compile can trace and guard lists.
ACTIVE: list[Any] = []


def in_context_parallel() -> bool:
    """Return whether tensors hold one rank's rows of longer sequences.

    PyTorch's own attention would use these rows only.
    """
    return bool(ACTIVE) and ACTIVE[-1].size > 1
