"""Measure what 8-bit attention costs in the quality of two small trained models. Runs on the CPU.

python -m benchmarks quality [--steps 300] [--batches 8] [--json FILE]

A language model of bytes and a denoiser of images (``benchmarks.small_models``) are trained with attention in bfloat16.
Then other batches run with each recipe: the error of each layer's attention is relative (Frobenius), against float32 on
the same Q, K and V; the end metrics are the loss, and of the denoiser the PSNR of its output against that with
attention in bfloat16. ``sage`` is SageAttention 2++ as PyTorch computes it (``benchmarks.sage``).
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
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


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all models and recipes. rows: ModelQuality as mappings."""
    losses = {row["model"]: row["loss"] for row in rows if row["recipe"] == BASELINE}
    lines = [
        (
            row["model"], row["recipe"], ", ".join(f"{x:.4f}" for x in row["errors"]), f"{row['loss']:.5f}",
            f"{row['loss'] / losses[row['model']] - 1:+.3%}", "-" if row["psnr"] is None else f"{row['psnr']:.1f} dB",
        )
        for row in rows
    ]  # fmt: skip
    return table(("model", "attention", "error of each layer", "loss", "against bf16", "PSNR to bf16"), lines)


def render_page(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of kept records, and where each was measured."""
    parts = []
    for record in records:
        versions = f"commit {record['git']['sha'][:10]}; torch {record['environment']['torch']}"
        parts += [render(record["quality"]), f"Measured on a CPU after {record['steps']:,} training steps; {versions}."]
    return "\n\n".join(parts)


def picture(record: Mapping[str, Any]) -> str:
    """Draw the largest error of a layer by recipe, in a panel for each model, as SVG."""
    names = list(dict.fromkeys(row["model"] for row in record["quality"]))
    with rc_context({"svg.hashsalt": "greenfast", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8.4, 2.6), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
            rows = [row for row in record["quality"] if row["model"] == name and row["recipe"] != BASELINE]
            axes.bar([row["recipe"] for row in rows], [max(row["errors"]) for row in rows], color="#2a9d5c")
            axes.set_title(name, fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[0].set_ylabel("relative error, worst layer")
        out = io.StringIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, print a table, and optionally write a record."""
    parser = make_parser("quality", __doc__)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="training steps of each model")
    parser.add_argument("--batches", type=int, default=8, metavar="N", help="batches to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    args = parser.parse_args(argv)
    rows = []
    for name in MODELS:
        model, losses = train(name, attend_exactly, args.steps)
        print(f"{name}: loss {float(losses[0]):.3f} to {float(losses[-1]):.3f}", flush=True)
        wanted: list[Tensor] = []
        rows += [measure(name, model, recipe, args.batches, wanted) for recipe in RECIPES]
    print(render([asdict(row) for row in rows]))
    device = device_info(None, 60.0)
    write_measurements(args.json, "quality", device, steps=args.steps, batches=args.batches, quality=rows)


if __name__ == "__main__":
    main()
