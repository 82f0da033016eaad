"""Measure what 8-bit attention costs in the quality of two small trained models. Runs on the CPU.

python -m benchmarks quality [--steps 300] [--batches 8] [--json FILE] [--plot FILE]

A language model of bytes and a denoiser of images (``benchmarks.small_models``) are trained with attention in bfloat16.
Then other batches run with each recipe: the error of each layer's attention is relative (Frobenius), against float32 on
the same Q, K and V; the end metrics are the loss, and of the denoiser the PSNR of its output against that with
attention in bfloat16. ``sage`` is SageAttention 2++ as PyTorch computes it (``benchmarks.sage``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import greenfast
from benchmarks import sage
from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from benchmarks.small_models import MODELS, Attention, train
from greenfast.judge.report.formatting import table
from greenfast.judge.request import device_info
from greenfast.ops.quantized import SdpaPrecision

BASELINE = "bf16"
PRECISIONS: tuple[SdpaPrecision, ...] = ("fp8", "int8", "int8_fine", "fp8_token")
RECIPES = (BASELINE, *PRECISIONS, "sage")


@dataclass(frozen=True)
class ModelQuality:
    """A model with a recipe: the error of each layer, the mean loss, and the PSNR of outputs against bf16, in dB."""

    model: str
    recipe: str
    errors: list[float]
    loss: float
    psnr: float | None


def attend_exactly(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute attention in the tensors' dtype by PyTorch."""
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def attend_with(recipe: str) -> Attention:
    """Return attention with the products of a recipe."""
    if recipe == BASELINE:
        return attend_exactly
    if recipe == "sage":
        return sage.attend
    precision = cast(SdpaPrecision, recipe)
    return lambda q, k, v, causal: greenfast.sdpa(q, k, v, is_causal=causal, precision=precision)


@torch.no_grad()
def measure(name: str, model: Any, recipe: str, batches: int, wanted: list[Tensor]) -> ModelQuality:
    """Run batches with a recipe. wanted: the model's outputs with bf16, which the call of bf16 fills."""
    attention, errors, outputs = attend_with(recipe), [], []

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = attention(q, k, v, causal)
        exact = attend_exactly(q.float(), k.float(), v.float(), causal)
        errors.append(float((out.float() - exact).norm() / exact.norm()))
        return out

    hook = model.head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    generator = torch.Generator().manual_seed(2)
    losses = [float(model.loss(attend, generator)) for _ in range(batches)]
    hook.remove()
    layers = len(model.layers)
    if recipe == BASELINE:
        wanted[:] = outputs
    psnr = None
    if name == "denoiser" and recipe != BASELINE:
        one, other = torch.cat(outputs), torch.cat(wanted)
        peak = float(other.max() - other.min())
        psnr = 10 * math.log10(peak**2 / float((one - other).square().mean()))
    means = [sum(errors[layer::layers]) / batches for layer in range(layers)]
    return ModelQuality(name, recipe, means, sum(losses) / batches, psnr)


def render(rows: Sequence[ModelQuality]) -> str:
    """Return the table of all models and recipes."""
    losses = {row.model: row.loss for row in rows if row.recipe == BASELINE}
    lines = [
        (
            row.model, row.recipe, ", ".join(f"{x:.4f}" for x in row.errors), f"{row.loss:.5f}",
            f"{row.loss / losses[row.model] - 1:+.3%}", "-" if row.psnr is None else f"{row.psnr:.1f} dB",
        )
        for row in rows
    ]  # fmt: skip
    return table(("model", "attention", "error of each layer", "loss", "against bf16", "PSNR to bf16"), lines)


def draw(rows: Sequence[ModelQuality], path: Path) -> None:
    """Draw the largest error of a layer, by model and recipe."""
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row.model for row in rows))
    shown = [recipe for recipe in RECIPES if any(row.recipe == recipe for row in rows)]
    for i, name in enumerate(names):
        errors = [max(row.errors) for recipe in shown for row in rows if (row.model, row.recipe) == (name, recipe)]
        axes.bar([place + 0.4 * i for place in range(len(shown))], errors, 0.38, label=name)
    axes.set_xticks([place + 0.2 * (len(names) - 1) for place in range(len(shown))], shown)
    axes.set_ylabel("relative error, worst layer")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, print a table, and optionally write a record and a picture."""
    parser = make_parser("quality", __doc__)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="training steps of each model")
    parser.add_argument("--batches", type=int, default=8, metavar="N", help="batches to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to write the picture, an SVG file")
    args = parser.parse_args(argv)
    rows = []
    for name in MODELS:
        model, losses = train(name, attend_exactly, args.steps)
        print(f"{name}: loss {float(losses[0]):.3f} to {float(losses[-1]):.3f}", flush=True)
        wanted: list[Tensor] = []
        rows += [measure(name, model, recipe, args.batches, wanted) for recipe in RECIPES]
    print(render(rows))
    if args.plot:
        draw(rows, args.plot)
    device = device_info(None, 60.0)
    write_measurements(args.json, "quality", device, steps=args.steps, batches=args.batches, quality=rows)


if __name__ == "__main__":
    main()
