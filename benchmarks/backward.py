"""Measure what 8-bit products in the backward pass of attention cost in accuracy. Runs on the CPU.

python -m benchmarks backward [--steps 300] [--length 1024] [--json FILE]

A backward pass has five products: Q K^T again, dO V^T, P^T dO, dS K and dS^T Q. Their operands are rounded here as a
kernel would round them, and all else is float32. The errors of dQ, dK and dV are relative (Frobenius), against float64
on the unrounded inputs: first with one product rounded, then for whole recipes. Two small models are then trained with
the recipes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import greenfast
from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from benchmarks.sdpa_inputs import make_inputs
from benchmarks.small_models import MODELS, train
from greenfast.judge.report.formatting import table
from greenfast.judge.request import device_info

_MAX = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
_FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMATS = ("bf16", "e4m3", "e5m2", "int8")
#: Rows that share a scale: of Q and dO, of K and V, and the tile of P and dS (query rows, keys).
_QUERY_BLOCK, _KEY_BLOCK, _TILE = 16, 128, (64, 128)
KINDS = (
    "normal", "uniform", "outliers", "realistic", "biased keys", "logits 2", "logits 4", "logits 8", "sink 0.98",
)  # fmt: skip
#: Kinds of the table of single products.
SHOWN = ("normal", "outliers", "realistic", "logits 4", *MODELS)
PRODUCTS = {"scores": "Q K^T", "weights": "dO V^T", "values": "P^T dO", "queries": "dS K", "keys": "dS^T Q"}


@dataclass(frozen=True)
class Recipe:
    """The number formats of the five products, "float32", "bf16", "e4m3", "e5m2" or "int8", and how they are scaled.

    scores: of Q K^T. weights: of dO V^T, the gradient of the weights P. values, queries, keys: of the products that
    give dV, dQ and dK. centered: the mean of K is subtracted from K in Q K^T and dS K; neither changes an exact result.
    rotated: Q and K, and dO and V, are rotated by a Hadamard matrix before they are rounded. fine: Q and dO have a
    scale for each row, K and V one for 32 rows, and P and dS one for each row of a tile if it is not summed over, else
    for each key. reused: the rounded Q, K and dO of the first two products are the operands of the others too. Their
    scales are multiplied into P and dS before these are rounded, and dQ, dK and dV are rotated back.
    forward: "again": the log-sum-exp and the output come from the backward pass's own scores, and V as it is. "kept":
    the output is that of a forward pass with the same scores and E4M3 for P V. "e4m3" and "int8": both are those of
    such a forward pass, with scores in this format and block scales.
    """

    scores: str = "float32"
    weights: str = "float32"
    values: str = "float32"
    queries: str = "float32"
    keys: str = "float32"
    centered: bool = False
    rotated: bool = False
    fine: bool = False
    reused: bool = False
    forward: str = "again"


def _make_uniform(fmt: str) -> Recipe:
    """Return a recipe with one format."""
    return Recipe(fmt, fmt, fmt, fmt, fmt)


_BF16, _E4M3 = _make_uniform("bf16"), _make_uniform("e4m3")
_INT8 = replace(_make_uniform("int8"), centered=True)
_FINE_INT8 = replace(_INT8, rotated=True, fine=True)
_MIXED = replace(_E4M3, scores="bf16", weights="bf16", centered=True)
RECIPES = {
    "bf16": _BF16,
    "bf16, FP8 forward kept": replace(_BF16, forward="e4m3"),
    "bf16, FP8 forward kept, centered": replace(_BF16, centered=True, forward="e4m3"),
    "bf16, int8 forward kept, centered": replace(_BF16, centered=True, forward="int8"),
    "e4m3": _E4M3,
    "e4m3, centered": replace(_E4M3, centered=True),
    "int8, centered": _INT8,
    "int8 but dO V^T in bf16 (SageBwd), centered": replace(_INT8, weights="bf16"),
    "Q K^T and dO V^T in bf16, e4m3": _MIXED,
    "the same, FP8 forward kept": replace(_MIXED, forward="e4m3"),
    "Q K^T in int8, dO V^T in bf16, e4m3": replace(_MIXED, scores="int8", rotated=True, fine=True),
    "Q K^T and dO V^T in int8, e4m3": replace(_MIXED, scores="int8", weights="int8", rotated=True, fine=True),
    "int8, fine scales": _FINE_INT8,
    "int8, fine scales, codes reused": replace(_FINE_INT8, reused=True),
    "the same, forward kept": replace(_FINE_INT8, reused=True, forward="kept"),
    "int8, codes reused, dO V^T in bf16": replace(_FINE_INT8, reused=True, weights="bf16"),
}
#: Recipes that the models are trained with.
TRAINED = (
    "bf16",
    "bf16, FP8 forward kept, centered",
    "bf16, int8 forward kept, centered",
    "e4m3, centered",
    "int8 but dO V^T in bf16 (SageBwd), centered",
    "Q K^T and dO V^T in bf16, e4m3",
    "int8, fine scales, codes reused",
    "the same, forward kept",
)


def round_blocks(x: Tensor, fmt: str, block: tuple[int, int]) -> Tensor:
    """Round to a format with one scale for each block of these rows and columns; 0 stands for all of them."""
    codes, scale = encode(x, fmt, block)
    return codes * scale


def encode(x: Tensor, fmt: str, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the codes of ``round_blocks``, as float32, and the scale of each number."""
    if fmt in ("float32", "bf16"):
        return (x if fmt == "float32" else x.bfloat16().float()), torch.ones_like(x)
    rows, columns = (min(b, n) or n for b, n in zip(block, x.shape[-2:], strict=True))
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    shape = (*x.shape[:-2], -1, rows, padded.shape[-1] // columns, columns)
    tiles = padded.view(shape)
    scale = (tiles.abs().amax((-3, -1), keepdim=True) / _MAX[fmt]).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (tiles / scale).clamp(-_MAX[fmt], _MAX[fmt])
    codes = codes.round() if fmt == "int8" else codes.to(_FLOATS[fmt]).float()
    kept = (..., slice(x.shape[-2]), slice(x.shape[-1]))
    return codes.view(padded.shape)[kept], scale.expand_as(codes).reshape(padded.shape)[kept]


def make_rotation(size: int) -> Tensor:
    """Return a Hadamard matrix of a power of two with random signs, divided by the root of its size."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    signs = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(0)).mul(2).sub(1)
    return signs * matrix / math.sqrt(size)


def compute_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dQ, dK and dV with rounded products. All tensors are float32 (B, H, S, D) of one shape."""
    length, head_dim = q.shape[-2:]
    scale = head_dim**-0.5
    of_queries, of_keys = ((1, 0), (32, 0)) if recipe.fine else ((_QUERY_BLOCK, 0), (_KEY_BLOCK, 0))
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else torch.zeros(1, 1, dtype=torch.bool)
    rotation = make_rotation(head_dim) if recipe.rotated else torch.eye(head_dim)
    if recipe.centered:
        k = k - k.mean(-2, keepdim=True)

    def encode_all(x: Tensor, fmt: str, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        return encode(x @ rotation, fmt, block)

    q_codes, k_codes = encode_all(q, recipe.scores, of_queries), encode_all(k, recipe.scores, of_keys)
    grad_codes, v_codes = encode_all(grad, recipe.weights, of_queries), encode_all(v, recipe.weights, of_keys)
    scores = ((q_codes[0] * q_codes[1]) @ (k_codes[0] * k_codes[1]).mT * scale).masked_fill(hidden, -math.inf)
    if recipe.forward != "again":
        kept = scores
        if recipe.forward != "kept":
            kept = _round_scores(q, k, recipe.forward).mul(scale).masked_fill(hidden, -math.inf)
        sums, out = _attend_e4m3(kept, v)
    else:
        sums, out = torch.logsumexp(scores, -1, keepdim=True), torch.softmax(scores, -1) @ v
    p = torch.exp(scores - sums)
    dp = (grad_codes[0] * grad_codes[1]) @ (v_codes[0] * v_codes[1]).mT
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) * scale

    def sum_over(tile: Tensor, block: tuple[int, int], x: Tensor, codes: tuple[Tensor, Tensor], fmt: str) -> Tensor:
        """Multiply P^T, dS or dS^T, rounded in blocks, with x, or with codes of it."""
        if recipe.reused and codes[1].amax() != 1.0:
            return round_blocks(tile * codes[1][..., :1].mT, fmt, block) @ codes[0] @ rotation.mT
        return round_blocks(tile, fmt, block) @ round_blocks(x, fmt, (block[1], 0))

    by_key, by_row = ((1, _TILE[0]), (1, _TILE[1])) if recipe.fine else (_TILE[::-1], _TILE)
    dv = sum_over(p.mT, by_key, grad, grad_codes, recipe.values)
    dk = sum_over(ds.mT, by_key, q, q_codes, recipe.keys)
    dq = sum_over(ds, by_row, k, k_codes, recipe.queries)
    return dq, dk, dv


def _round_scores(q: Tensor, k: Tensor, fmt: str) -> Tensor:
    """Compute Q K^T as greenfast's forward pass does; k is centered or not."""
    rotation = make_rotation(q.shape[-1])
    rounded = (round_blocks(x @ rotation, fmt, (rows, 0)) for x, rows in ((q, _QUERY_BLOCK), (k, _KEY_BLOCK)))
    rows, columns = rounded
    return rows @ columns.mT


def _attend_e4m3(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log-sum-exp and the output of attention with E4M3 for P V."""
    top = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True)
    rounded = (p * _MAX["e4m3"]).to(_FLOATS["e4m3"]).float() / _MAX["e4m3"]
    return top + total.log(), rounded @ round_blocks(v, "e4m3", (_KEY_BLOCK, 0)) / total


def compute_exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Compute the gradients in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return torch.autograd.grad(torch.softmax(scores, -1) @ leaves[2], leaves, grad.double())


class _Attention(torch.autograd.Function):
    """Attention with a recipe's gradients. The forward pass is in float32, or FP8 if the recipe keeps such a one."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.causal, ctx.recipe = causal, recipe
        if recipe.forward != "again":
            precision: Any = {"e4m3": "fp8", "int8": "int8", "kept": "int8_fine"}[recipe.forward]
            return greenfast.sdpa(q, k, v, is_causal=causal, precision=precision)
        x, y, z = q.float(), k.float(), v.float()
        attended: Tensor = torch.nn.functional.scaled_dot_product_attention(x, y, z, is_causal=causal)
        return attended.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = (x.float() for x in ctx.saved_tensors)
        grads = compute_gradients(q, k, v, grad.float(), ctx.causal, ctx.recipe)
        return (*(x.to(grad.dtype) for x in grads), None, None)


def attend_with(recipe: Recipe) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    """Return attention with the backward pass of a recipe."""
    return lambda q, k, v, causal: _Attention.apply(q, k, v, causal, recipe)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class GradientErrors:
    """Relative errors. recipe: its name, or one rounded product and its format, with " fine" for finer scales."""

    recipe: str
    inputs: str
    causal: bool
    dq: float
    dk: float
    dv: float


@dataclass(frozen=True)
class TrainingLoss:
    """The mean loss of a model's last steps, and its relative distance from training with bf16."""

    recipe: str
    model: str
    steps: int
    loss: float
    distance: float


Case = tuple[str, bool, tuple[Tensor, Tensor, Tensor, Tensor]]


def generate_cases(length: int) -> Iterator[Case]:
    """Draw Q, K, V and dO, float32 (1, 2, length, 128) that bfloat16 holds, of each kind and mask."""
    for causal in (False, True):
        for kind in KINDS:
            dims = {"B": 1, "H": 2, "S": length, "D": 128, "CAUSAL": int(causal)}
            q, k, v = (x.float() for x in make_inputs(dims, 0, kind, "cpu").bfloat16)
            grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16().float()
            yield kind, causal, (q, k, v, grad)


def capture_cases(name: str, model: Any) -> Iterator[Case]:
    """Return Q, K, V and dO of each layer of a trained model in one more batch."""
    tensors: list[list[Tensor]] = []
    causal_of: list[bool] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        found = [x.detach().float() for x in (q, k, v)]
        out.register_hook(lambda grad: found.append(grad.float()))  # type: ignore[no-untyped-call]
        tensors.append(found)
        causal_of.append(causal)
        return out

    model.loss(attend, torch.Generator().manual_seed(2)).backward()
    for layer, (found, causal) in enumerate(zip(tensors, causal_of, strict=True), 1):
        yield f"{name}, layer {layer}", causal, (found[0], found[1], found[2], found[3])


def single_products() -> dict[str, Recipe]:
    """Return recipes with one product rounded."""
    one = {
        f"{title} {fmt}{' fine' if fine else ''}": Recipe(**{product: fmt}, fine=fine, centered=True)  # type: ignore[arg-type]
        for product, title in PRODUCTS.items()
        for fmt in FORMATS
        for fine in ([False] if fmt == "bf16" else [False, True])
    }
    rotated = {
        f"{title} {fmt} fine, rotated": replace(one[f"{title} {fmt} fine"], rotated=True)
        for product, title in PRODUCTS.items()
        for fmt in ("e4m3", "int8")
        if product in ("scores", "weights")
    }
    return one | rotated


def measure_errors(case: Case, recipes: dict[str, Recipe]) -> list[GradientErrors]:
    """Measure the errors of recipes on a case."""
    kind, causal, tensors = case
    exact = compute_exact(*tensors, causal)
    rows = []
    for name, recipe in recipes.items():
        found = compute_gradients(*tensors, causal, recipe)
        dq, dk, dv = (float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
        rows.append(GradientErrors(name, kind, causal, dq, dk, dv))
    return rows


def measure_losses(name: str, steps: int) -> tuple[Any, list[TrainingLoss]]:
    """Train a model with each recipe. Return the one of bf16, and the losses of all."""
    tail, rows, losses = max(1, steps // 5), [], {}
    kept = None
    for title in TRAINED:
        model, losses[title] = train(name, attend_with(RECIPES[title]), steps)
        kept = model if kept is None else kept
        loss, wanted = (float(losses[t][-tail:].mean()) for t in (title, TRAINED[0]))
        rows.append(TrainingLoss(title, name, steps, loss, abs(loss - wanted) / wanted))
        print(f"{name}, {title}: loss {loss:.4f}, {rows[-1].distance:.2%} from bf16", flush=True)
    return kept, rows


def find_worst(rows: Sequence[GradientErrors], recipe: str, inputs: str) -> str:
    """Return the largest error of dQ, dK and dV, with and without a mask and in all layers, in per cent."""
    own = [r for r in rows if (r.recipe, r.inputs.split(",")[0]) == (recipe, inputs)]
    return f"{100 * max(max(r.dq, r.dk, r.dv) for r in own):.1f}"


def render_products(rows: Sequence[GradientErrors]) -> str:
    """Return a table of errors with one product rounded: with scales of blocks / with finer ones."""
    lines = []
    for title in PRODUCTS.values():
        for fmt in FORMATS:
            names = (f"{title} {fmt}", *([f"{title} {fmt} fine"] if fmt != "bf16" else []))
            lines.append((title, fmt, *(" / ".join(find_worst(rows, name, kind) for name in names) for kind in SHOWN)))
    return table(("product", "format", *SHOWN), lines)


def render_recipes(rows: Sequence[GradientErrors]) -> str:
    """Return a table of the errors of recipes."""
    kinds = (*KINDS, *MODELS)
    return table(("products", *kinds), [(name, *(find_worst(rows, name, kind) for kind in kinds)) for name in RECIPES])


def render_losses(rows: Sequence[TrainingLoss]) -> str:
    """Return a table of the losses of the trained models, and their distances from bf16."""
    names = list(dict.fromkeys(row.model for row in rows))
    lines = []
    for title in dict.fromkeys(row.recipe for row in rows):
        own = {row.model: row for row in rows if row.recipe == title}
        lines.append((title, *(f"{own[name].loss:.4f} ({own[name].distance:.2%})" for name in names)))
    return table(("products", *names), lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables and optionally write a record."""
    parser = make_parser("backward", __doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model and recipe")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the random inputs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    singles, errors, losses = single_products(), [], []
    for case in generate_cases(args.length):
        errors += measure_errors(case, singles | RECIPES)
        print(f"{case[0]}, {'causal' if case[1] else 'full'}: measured", flush=True)
    for name in MODELS:
        model, rows = measure_losses(name, args.steps)
        losses += rows
        for case in capture_cases(name, model):
            errors += measure_errors(case, singles | RECIPES)
    print(render_products(errors), render_recipes(errors), render_losses(losses), sep="\n\n")
    device = device_info(None, 60.0)
    write_measurements(args.json, "backward", device, length=args.length, errors=errors, losses=losses)
