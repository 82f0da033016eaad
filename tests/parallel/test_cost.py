"""The model of time, compared with a simulation of the turns of every rank, and what ``auto`` makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from greenfast.parallel import cost
from greenfast.parallel.cost import CallSizes, Link
from greenfast.parallel.layout import ShardLayout
from greenfast.parallel.ring import build_ring_steps


def sizes(size: int, rows: int = 131072, heads: int = 32, kv_heads: int = 32, causal: bool = True) -> CallSizes:
    return CallSizes(size, 1, heads, kv_heads, rows // size, rows // size, 128, causal)


def simulated_ring(of: CallSizes, machine: Link) -> float:
    """When the last rank ends, event by event: a rank receives a block while it attends to the one before."""
    rows = of.rows
    codes = 2.0 * of.batch * of.kv_heads * of.keys * of.head_dim
    output = 2.0 * of.batch * of.heads * of.rows * of.head_dim
    ready, done = [machine.latency] * of.size, [machine.latency + 3 * codes / machine.memory] * of.size
    plans = [build_ring_steps(rank, ShardLayout(of.size, True), rows, of.causal) for rank in range(of.size)]
    ready = list(done)
    for turn in range(of.size):
        began = [max(done[r], ready[r]) for r in range(of.size)]
        for r in range(of.size):
            plan = plans[r][turn]
            assert plan is not None
            first, count, masked = plan
            pairs = (rows - first) * count / (2 if masked else 1)
            done[r] = began[r] + 4.0 * of.batch * of.heads * pairs * of.head_dim / machine.flops
            if turn:
                done[r] += output * (2.25 if of.size == 2 else 5) / machine.memory
        sender = [(r - 1) % of.size for r in range(of.size)]
        rates = [
            machine.link if s // machine.node == r // machine.node else machine.network for r, s in enumerate(sender)
        ]
        # The receiver's other buffer is free once its turn has begun; the sender has its block since then too.
        ready = [max(began[r], began[s]) + machine.latency + codes / rates[r] for r, s in enumerate(sender)]
    return max(done)


@pytest.mark.parametrize("size", [2, 4, 8, 64])
@pytest.mark.parametrize("rows", [32768, 131072, 1 << 20])
@pytest.mark.parametrize("causal", [True, False])
def test_the_ring_as_simulated(size: int, rows: int, causal: bool) -> None:
    of, machine = sizes(size, rows, causal=causal), Link()
    # A closed form for all turns alike; in the simulation a slow link is waited for rank by rank.
    assert cost.estimate_ring(of, machine).seconds == pytest.approx(simulated_ring(of, machine), rel=0.03)


def test_exchanges_are_hidden_where_there_is_enough_to_compute() -> None:
    short, long = (cost.estimate_ring(sizes(2, rows)) for rows in (2048, 131072))
    assert short.exposed / short.seconds > 0.3
    assert long.exposed / long.seconds < 0.02
    assert cost.estimate_ulysses(sizes(1)).exposed == 0


def test_heads_that_ranks_do_not_divide_cost_their_share() -> None:
    even, odd = (cost.estimate_ulysses(sizes(4, heads=heads, kv_heads=heads)) for heads in (32, 33))
    assert odd.computing / even.computing == pytest.approx(36 / 32, rel=0.02)


def test_auto() -> None:
    name, reason = cost.choose_method(sizes(64, 1 << 20, heads=8, kv_heads=8))
    assert name == "ring"
    assert "64 ranks do not divide 8 heads" in reason
    slow = replace(Link(), link=1e9, node=2)
    grouped, _ = cost.choose_method(sizes(2, 8192, kv_heads=1), slow)
    assert grouped == "ring", "one head of K and V is less than Q and O"
    whole, reason = cost.choose_method(sizes(8, 16384))
    assert whole == "ulysses", "one exchange, where a ring would have seven"
    assert "ms of exposed exchanges" in reason
