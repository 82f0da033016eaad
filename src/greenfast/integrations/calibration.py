"""Errors of a model's attention on a user's own batch, and the policy that they suggest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from greenfast.integrations import diffusers, transformers
from greenfast.integrations.models import Policy
from greenfast.ops.arguments import parse_number
from greenfast.ops.quantized import Precision


@dataclass(frozen=True)
class Calibration:
    """Relative errors of attention, and the policy that keeps those above ``limit`` in 16 bits.

    layers: name -> the largest error of its calls. steps: the median error of each denoising step; one without steps.
    """

    precision: str
    limit: float
    layers: dict[str, float]
    steps: list[float]
    policy: Policy

    def __str__(self) -> str:
        lines = [f"{error:.4f} {'16 bits' if error > self.limit else self.precision:8s} {name}"
                 for name, error in self.layers.items()]  # fmt: skip
        if len(self.steps) > 1:
            lines += [f"{error:.4f} step {step}" for step, error in enumerate(self.steps)]
        return "\n".join([*lines, f"policy for errors above {self.limit}: {self.policy}"])


def calibrate(model: Any, batch: Any, *, precision: Precision = "fp8", limit: float = 0.1) -> Calibration:
    """Measure the error of each attention of a model on a batch, and propose the policy for ``accelerate``.

        policy = greenfast.calibrate(pipe, dict(prompt="a fox", num_inference_steps=8)).policy
        greenfast.integrations.diffusers.accelerate(pipe, policy=policy)

    model: a diffusers pipeline or transformer, or a transformers model, as for their ``accelerate``. batch: the
    keyword arguments of one call (a mapping), its positional arguments (a tuple or list), or its only one. The error
    is the norm of the difference to attention in float32 on the same 16-bit Q, K and V, after norm and RoPE, relative.
    Each layer passes on the float32 result, so that errors do not add up. Layers with an error above ``limit`` stay
    in 16 bits. So do the first and last denoising steps if their median error over the other layers is above it.
    It needs no gradient, and restores the model. Attention in float32 takes seconds for long sequences.

    Raises the errors of ``accelerate``, and ValueError if the batch runs none of the replaced layers.
    """
    limit = parse_number("limit", limit)
    arguments, keywords = ((), batch) if isinstance(batch, Mapping) else (
        (batch if isinstance(batch, tuple | list) else (batch,)), {}
    )  # fmt: skip
    of_transformers = type(getattr(model, "_orig_mod", model)).__module__.partition(".")[0] == "transformers"
    accelerate = transformers.accelerate if of_transformers else diffusers.accelerate
    with accelerate(model, precision=precision, min_length=0) as accelerated, torch.no_grad():
        accelerated.errors = {}
        model(*arguments, **keywords)
    errors = accelerated.errors
    if not errors:
        raise ValueError("batch: it ran none of the replaced layers; their own code computed all calls")
    layers: dict[str, float] = {}
    for (name, _), measured in errors.items():
        layers[name] = max(layers.get(name, 0.0), *measured)
    kept = {name for name, error in layers.items() if error > limit}
    by_step: dict[int, list[float]] = {}
    for (name, step), measured in errors.items():
        if name not in kept:
            by_step.setdefault(step, []).extend(measured)
    steps = [statistics.median(by_step[step]) for step in sorted(by_step)]
    first = next((i for i, error in enumerate(steps) if error <= limit), len(steps))
    last = next((i for i, error in enumerate(reversed(steps)) if error <= limit), len(steps))
    policy = Policy(tuple(sorted(kept)), first, last) if len(steps) > 1 else Policy(tuple(sorted(kept)))
    return Calibration(precision, limit, layers, steps, policy)
