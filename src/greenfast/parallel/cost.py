"""Cost model of attention on several GPUs. ``method="auto"`` chooses the method by it.

The figures of a link are of two H100 with NVLink (NCCL, point to point), measured at 16 and 128 MiB: 92 microseconds
and 286 GB/s. This gives 1 MiB in 96 microseconds (measured: 119). Attention runs at the rate of the FP8 kernel on long
sequences. docs/parallel.md compares the model with runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Rates of a GPU and its links.

    flops: of attention on one GPU, 1/s. memory: bytes/s of kernels that copy. link: bytes/s from one GPU to another in
    its node, each way, after ``latency`` seconds. node: GPUs of a node. network: bytes/s of a GPU to other nodes.
    """

    flops: float = 945e12
    memory: float = 2.5e12
    link: float = 286e9
    latency: float = 92e-6
    node: int = 8
    network: float = 50e9  # 400 Gb/s


@dataclass(frozen=True)
class CallSizes:
    """The sizes of attention on one rank: (batch, heads, rows, head_dim) of Q, and heads and rows of K and V.

    size: number of ranks.
    """

    size: int
    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """FLOPs of one rank, counted as 4 * B * H * S * S * D, half of it with a mask."""
        whole = 4.0 * self.batch * self.heads * self.rows * self.keys * self.size * self.head_dim
        return whole / 2 if self.causal else whole


@dataclass(frozen=True)
class Estimate:
    """Seconds of one forward pass: in total, of attention itself, and of exposed exchanges."""

    seconds: float
    computing: float
    exposed: float


def estimate_ring(sizes: CallSizes, machine: Link = Link()) -> Estimate:
    """Estimate ring attention: codes of K and V go to the next rank in each step.

    Beyond a node the slowest link determines the rate.
    """
    codes = 2.0 * sizes.batch * sizes.kv_heads * sizes.keys * sizes.head_dim
    rate = machine.link if sizes.size <= machine.node else machine.network
    travel = machine.latency + codes / rate if sizes.size > 1 else 0.0
    step = sizes.flops / sizes.size / machine.flops
    output = 2.0 * sizes.batch * sizes.heads * sizes.rows * sizes.head_dim
    # A merge reads two results and writes one; with more than two ranks the sum is float32.
    merge = output * (2.25 if sizes.size == 2 else 5) / machine.memory
    later = max(0, sizes.size - 2)  # steps that end with a merge, and overlap an exchange
    exposed = max(0.0, travel - step) + later * max(0.0, travel - step - merge)
    computing = step * sizes.size + 3 * codes / machine.memory + (sizes.size - 1) * merge
    first = machine.latency if sizes.size > 1 else 0.0  # the exchange of sampled keys
    return Estimate(computing + exposed + first, computing, exposed + first)


def estimate_ulysses(sizes: CallSizes, machine: Link = Link()) -> Estimate:
    """Estimate Ulysses: codes of Q, K and V to the heads and 16-bit outputs back, overlapped in up to four parts."""
    each = -(-sizes.heads // sizes.size)  # heads per rank
    keys = max(1, min(each, -(-sizes.kv_heads // sizes.size)))
    parts = 4 if keys % 4 == 0 else 2 if keys % 2 == 0 else 1
    rows = sizes.batch * sizes.head_dim * sizes.size
    coming = rows * (each * sizes.rows + 2.0 * keys * sizes.keys)
    going = 2.0 * rows * each * sizes.rows
    inside = (min(sizes.size, machine.node) - 1) / sizes.size
    outside = max(0, sizes.size - machine.node) / sizes.size

    def travel(count: float) -> float:
        return machine.latency + max(count * inside / machine.link, count * outside / machine.network)

    work = sizes.flops * each * sizes.size / sizes.heads / machine.flops
    computing = work + (2 * coming + 2 * (coming + going)) / machine.memory
    if sizes.size == 1:
        return Estimate(computing, computing, 0.0)
    ends = travel(coming / parts) + travel(going / parts)
    hidden = travel(coming) + travel(going) - ends
    exposed = machine.latency + ends + max(0.0, hidden - work * (parts - 1) / parts)
    return Estimate(computing + exposed, computing, exposed)


def select_method(requested: str, sizes: CallSizes) -> tuple[str, str]:
    """Return the method of a call, and the reason. requested: a method or "auto"."""
    if sizes.size == 1:
        return "single", "a mesh of one rank: nothing is exchanged"
    if 0 in (sizes.batch, sizes.heads, sizes.rows, sizes.keys):
        return "ring", "no rows, or no keys: nothing is exchanged"
    return choose_method(sizes) if requested == "auto" else (requested, f"{requested} was requested")


def choose_method(sizes: CallSizes, machine: Link = Link()) -> tuple[str, str]:
    """Return the faster method for these sizes, and the reason."""
    estimates = {"ring": estimate_ring(sizes, machine), "ulysses": estimate_ulysses(sizes, machine)}
    name = min(estimates, key=lambda method: estimates[method].seconds)
    other = "ring" if name == "ulysses" else "ulysses"
    reason = (
        f"{_format_estimate(estimates[name])} by {name}, {_format_estimate(estimates[other])} by {other}, of a "
        f"model with {sizes.size} ranks, "
        f"{machine.link / 1e9:g} GB/s within a node of {machine.node} and {machine.network / 1e9:g} GB/s between nodes"
    )
    if sizes.heads % sizes.size:
        reason += f"; {sizes.size} ranks do not divide {sizes.heads} heads"
    return name, reason


def _format_estimate(estimate: Estimate) -> str:
    return f"{estimate.seconds * 1e3:.3g} ms ({estimate.exposed * 1e3:.2g} ms of exposed exchanges)"
