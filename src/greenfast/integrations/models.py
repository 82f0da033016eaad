"""Whole models with fused attention: layers and steps that stay in 16 bits, replaced layers, and their calls.

``integrations.diffusers`` and ``integrations.transformers`` replace the attention of layers by calls of ``Layer``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from greenfast.integrations.switch import use
from greenfast.ops.arguments import parse_length
from greenfast.ops.block import RowArguments, join_parts, parse_transform, transform_both
from greenfast.ops.masked import MaskSpec
from greenfast.ops.quantized import PRECISIONS_AND_AUTO, AutoPrecision, check_choice
from greenfast.ops.routing import Routed, explain
from greenfast.ops.sdpa import attention_block

_ATTENTION_BLOCK: Callable[..., Tensor] = attention_block
_MAX_SCORES = 1 << 26  # of attention in float32, at a time


@dataclass(frozen=True)
class Policy:
    """The layers and denoising steps of a model that stay in 16 bits.

    layers: their names, as ``Accelerated.replaced`` lists them. first_steps, last_steps: numbers of denoising steps.
    """

    layers: Collection[str] = ()
    first_steps: int = 0
    last_steps: int = 0

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError that names the field."""
        if isinstance(self.layers, str) or not all(isinstance(name, str) for name in self.layers):
            raise TypeError(f"layers: {self.layers!r}; a collection of names of layers is needed")
        for name in ("first_steps", "last_steps"):
            parse_length(name, getattr(self, name))


@dataclass(eq=False)
class Accelerated:
    """A report of the layers that ``accelerate`` replaced in a model, with ``undo``.

    replaced: name of each replaced layer -> its replacement. left: name of each other layer -> the reason.
    routed: counts of calls, of replaced layers and of the routed ``sdpa`` that others run. errors: relative errors by
    layer and step, while ``calibrate`` measures. As a context manager it calls ``undo`` at the end of the block.
    """

    precision: AutoPrecision
    min_length: int | None
    policy: Policy
    get_step: Callable[[], tuple[int, int]] | None = None
    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    routed: Routed = field(default_factory=Routed)
    errors: dict[tuple[str, int], list[float]] | None = field(default=None, repr=False)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for invalid arguments of ``accelerate``."""
        check_choice("precision", self.precision, PRECISIONS_AND_AUTO)
        if self.min_length is not None:
            self.min_length = parse_length("min_length", self.min_length)
        if not isinstance(self.policy, Policy):
            raise TypeError(f"policy: a {type(self.policy).__name__}; a greenfast.Policy is needed")

    def replace(self, name: str, description: str, undo: Callable[[], None]) -> None:
        """Record a replaced layer."""
        self.replaced[name] = description
        self._undo.append(undo)

    def add_undo(self, undo: Callable[[], None]) -> None:
        """Record a function that restores another part of the model."""
        self._undo.append(undo)

    def finish(self, model: str, known: Collection[str]) -> None:
        """Check the replaced layers. Undo and raise ValueError if there are none, or if a policy names other layers.

        model: the name of its class. known: the names of the layers that can be replaced.
        """
        unknown = sorted(set(self.policy.layers) - {*self.replaced, *self.left})
        if unknown or not self.replaced:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.left.items())[:3])
            self.undo()
            if unknown:
                raise ValueError(f"policy: no layers {', '.join(unknown)} in {model}")
            raise ValueError(
                f"{model}: no attention that is known. Known: {', '.join(known)}"
                f"{f'. Found: {reasons}' if reasons else ''}. `with greenfast.use():` routes any model"
            )

    def undo(self) -> None:
        """Restore the original object of every replaced attribute of the model."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()

    def __str__(self) -> str:
        kinds = sorted(set(self.replaced.values()))
        lines = [f"{sum(x == kind for x in self.replaced.values())} layers: {kind}" for kind in kinds]
        lines += [f"left: {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(
            [*lines, f"calls: {self.routed.taken} here, {sum(self.routed.fallen_back.values())} by PyTorch"]
        )


class Layer:
    """A replaced layer: it chooses for each call the kernels here or the layer's own code."""

    def __init__(self, name: str, owner: Accelerated) -> None:
        self.name = name
        self.owner = owner
        self.in_16_bits = name in owner.policy.layers

    def is_kept(self) -> bool:
        """Return whether the policy keeps this call in 16 bits."""
        owner = self.owner
        if self.in_16_bits or owner.get_step is None:
            return self.in_16_bits
        step, count = owner.get_step()
        return step < owner.policy.first_steps or step >= count - owner.policy.last_steps

    def choose(
        self, like: Tensor, query: tuple[int, int, int, int], key: tuple[int, int, int, int], mask: Tensor | None,
        causal: bool = False, sinks: Tensor | None = None, *, always: bool = False,
    ) -> str:  # fmt: skip
        """Return the precision of a call with these shapes; empty if PyTorch's attention shall compute it.

        like: a tensor of the device and dtype. always: there is no other implementation that could be faster.
        """
        owner = self.owner
        one = like.new_empty(1, 1, 1, 1)
        q, k = one.expand(query), one.expand(key)
        precision, min_length = owner.precision, owner.min_length
        if always or owner.errors is not None:
            precision, min_length = "fp8" if precision == "auto" else precision, 0
        explanation = explain(
            q, k, k, mask, 0.0, causal, None, True, precision=precision, min_length=min_length, sinks=sinks
        )
        if explanation.taken:
            owner.routed.count(explanation)
        return explanation.precision if explanation.taken else ""

    def run_original(self, call: Callable[[], Any]) -> Any:
        """Run the layer's own code: in 16 bits if the policy keeps it, else with its attention routed."""
        if self.is_kept():
            return call()
        switch = use(self.owner.precision, self.owner.min_length)
        switch.routed = self.owner.routed
        with switch:
            return call()

    def attend(self, query: Any, key: Any, value: Any, **options: Any) -> Tensor:
        """Call ``attention_block``. While errors are measured, return attention in float32, rounded."""
        owner = self.owner
        out = _ATTENTION_BLOCK(query, key, value, **options)
        if owner.errors is None:
            return out
        exact = attend_exactly(query, key, value, **options)
        norm = exact.norm()
        step = 0 if owner.get_step is None else owner.get_step()[0]
        error = float((out.float() - exact).norm() / norm) if norm > 0 else 0.0
        owner.errors.setdefault((self.name, step), []).append(error)
        return exact.to(out.dtype)


@torch.no_grad()
def attend_exactly(
    query: Any, key: Any, value: Any, *, is_causal: bool = False, scale: float | None = None, precision: str = "",
    attn_mask: Tensor | None = None, sinks: Tensor | None = None, q_norm: Any = None, k_norm: Any = None,
    norm: Any = "rms", q_norm_bias: Any = None, k_norm_bias: Any = None, norm_eps: float = 1e-6, rope: Any = None,
    rope_dim: int | None = None, rope_interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``attention_block`` in float32 on Q and K of 16 bits, some rows at a time. Returns float32."""
    row = RowArguments(
        query, key, value, q_norm, k_norm, norm, q_norm_bias, k_norm_bias, norm_eps, rope, rope_dim, rope_interleaved
    )
    if isinstance(query, list | tuple):
        row = join_parts(row)
    query, key, value, *transform = row
    options = parse_transform(query, key, *transform)
    if options is not None:
        query, key = transform_both(query, key, options)
    group = query.shape[1] // key.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (key, value))
    batch, heads, rows, columns = query.shape
    mask = attn_mask
    if is_causal:
        mask = MaskSpec(right=0).build_bool(rows, k.shape[2], query.device)
    step = max(1, _MAX_SCORES // max(1, batch * heads * k.shape[2]))
    out = []
    for first in range(0, rows, step):
        part = slice(first, first + step)
        scores = query[:, :, part].float() @ k.transpose(2, 3) * (columns**-0.5 if scale is None else scale)
        if mask is not None:
            scores = scores.masked_fill(~(mask if mask.shape[2] == 1 else mask[:, :, part]), -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat((scores, sink), 3).softmax(3)[..., :-1]
        else:
            weights = scores.softmax(3).nan_to_num(0.0)  # of rows without keys
        out.append(weights @ v)
    return torch.cat(out, 2)
