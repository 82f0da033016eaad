"""The kernel that finds the slots of new tokens, on the emulator, against PyTorch's operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import KernelLaunch, run_chain
from greenfast.kernels.serving import slots
from greenfast.serving.pages import compute_token_slots
from greenfast.spec.arch import Target
from greenfast.spec.problem import OutputSpec


@pytest.mark.parametrize("seed", range(8))
def test_slots_are_the_cpus(seed: int) -> None:
    generator = np.random.default_rng(seed)
    batch, page, entries, paged = int(generator.integers(1, 6)), (16, 64)[seed % 2], 4, seed % 4 < 3
    counts = generator.integers(0, 90, batch) * generator.integers(0, 2, batch)
    starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    tokens = int(starts[-1]) + seed % 3 + 1
    given = {"starts": starts}
    if paged:
        given["before"] = generator.integers(0, 200, batch).astype(np.int32)
        given["block_table"] = generator.integers(0, 999, (batch, entries)).astype(np.int32)
        if seed % 2:
            given["counted_from"] = generator.integers(0, 50, batch).astype(np.int32)
    optional = frozenset(given) - {"starts"}
    outputs = {"slots": OutputSpec((tokens,), "int64"), "positions": OutputSpec((tokens,), "int64")}
    outputs["lengths"] = OutputSpec((batch,), "int32")
    if not paged:
        outputs["made_table"] = OutputSpec((batch, entries), "int32")
    launch = slots.launch(batch, tokens, page, entries, entries, optional)
    ptx = to_ptx(slots.KERNEL, Target("sm_90a"), assemble=False)
    found = run_chain([KernelLaunch(ptx, slots.ENTRY, slots.KERNEL.block, 0, launch)], given, outputs).outputs
    tensors = {name: torch.from_numpy(x) for name, x in given.items()}
    before, table, counted = (tensors.get(name) for name in ("before", "block_table", "counted_from"))
    wanted = compute_token_slots(tensors["starts"], before, table, counted, tokens, entries, page)
    assert found["slots"].tolist() == wanted.slots.tolist()
    assert found["lengths"].tolist() == wanted.lengths.tolist()
    end = int(starts[-1])
    assert found["positions"][:end].tolist() == wanted.positions[:end].tolist()
    if not paged:
        assert found["made_table"].tolist() == wanted.table.tolist()
