"""Fences of memory and of proxies, and the order of launches: fence, membar, griddepcontrol (PTX ISA)."""

from __future__ import annotations

import numpy as np

from greenfast.emulator.instructions.access import addresses
from greenfast.emulator.instructions.operands import do_nothing
from greenfast.emulator.machine.blocks import WARP, ThreadSet, lane_indices
from greenfast.emulator.machine.ordering import parse_scope
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Immediate, Instruction
from greenfast.emulator.ptx.unsupported import unsupported
from greenfast.spec.kernel import MAP_BYTES


def fence(i: Instruction) -> Operation:
    """Build fence and membar: earlier accesses become part of later atomic or volatile writes of the thread.

    fence.proxy.async and fence.mbarrier_init make the mbarriers of the block visible to bulk copies of all threads. The
    first one also orders generic accesses before asynchronous ones (see proxies.py).
    """
    proxy = i.parts[:2] == ("proxy", "async") and i.parts[2:3] != ("global",)
    if i.name == "membar" or i.parts[0] in ("sc", "acq_rel", "acquire", "release"):
        scope = parse_scope(i.parts)
        return lambda m, lanes: m.races.fence(lanes, scope)
    if "tensormap:generic" in i.parts and "acquire" in i.parts:
        return _fence_map(i)
    if not proxy and i.parts[0] != "mbarrier_init":
        return do_nothing

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        m.mbarriers.show(np.unique(m.block_of[lanes]), len(m.blocks))
        if proxy and m.proxies is not None:
            m.proxies.fence(lanes)

    return run


def _fence_map(i: Instruction) -> Operation:
    """Build a fence after which tensor copies use a tensor map as it was written."""
    if i.operands[1] != Immediate(MAP_BYTES):
        raise unsupported(i, f"needs a size of {MAP_BYTES} bytes")
    where = addresses(i.operands[0], i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        m.races.fence(lanes, parse_scope(i.parts))
        blocks = m.block_of[lanes]
        for address, block in set(zip(where(m, lanes).tolist(), blocks.tolist(), strict=True)):
            m.races.fence_tensormap(address - m.memory.base, [block])

    return run


def grid_order(i: Instruction) -> Operation:
    """Build griddepcontrol: after a wait, earlier launches are complete for the warps of the waiting threads."""
    waits = "wait" in i.parts

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        if waits:
            m.after_pdl_wait.reshape(-1, WARP)[np.unique(lane_indices(lanes) // WARP)] = True

    return run


BUILDERS = {"fence": fence, "membar": fence, "griddepcontrol": grid_order}
