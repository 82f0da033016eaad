"""Fences of memory and of proxies, and the order of launches: fence, membar, griddepcontrol (PTX ISA)."""

from __future__ import annotations

import numpy as np

from greenfast.emulator.machine.ordering import scope_of
from greenfast.emulator.machine.state import WARP, Lanes, Machine, Operation, lane_indices
from greenfast.emulator.ptx.syntax import Instruction


def _nothing(m: Machine, lanes: Lanes) -> None:
    """Nothing to be done."""


def fence(i: Instruction) -> Operation:
    """fence and membar: what a thread wrote before one, an atomic or volatile write after it passes on.

    fence.proxy.async and fence.mbarrier_init make their block's mbarriers visible to bulk copies, whichever thread
    began them; the first orders what went through the generic proxy too (see proxies.py).
    """
    proxy = i.parts[:2] == ("proxy", "async") and i.parts[2:3] != ("global",)
    if i.name == "membar" or i.parts[0] in ("sc", "acq_rel", "acquire", "release"):
        scope = scope_of(i.parts)
        return lambda m, lanes: m.races.fence(lanes, scope)
    if not proxy and i.parts[0] != "mbarrier_init":
        return _nothing

    def run(m: Machine, lanes: Lanes) -> None:
        m.mbarriers.show(np.unique(m.block_of[lanes]), len(m.blocks))
        if proxy and m.proxies is not None:
            m.proxies.fence(lanes)

    return run


def grid_order(i: Instruction) -> Operation:
    """griddepcontrol: after a wait, earlier launches are complete for the warps of the waiting threads."""
    waits = "wait" in i.parts

    def run(m: Machine, lanes: Lanes) -> None:
        if waits:
            m.behind_wait.reshape(-1, WARP)[np.unique(lane_indices(lanes) // WARP)] = True

    return run


BUILDERS = {"fence": fence, "membar": fence, "griddepcontrol": grid_order}
