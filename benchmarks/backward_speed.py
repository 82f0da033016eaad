"""Time the 8-bit backward pass beside PyTorch's in bfloat16, and measure its errors.

python -m benchmarks backward_speed [--masks] [--json FILE]     on a Hopper GPU

All calls of a shape are timed interleaved, as CUDA graphs: backward passes alone, the steps of the one in 8 bits, and
forward plus backward. "recomputed" and "kept" are PyTorch's backward pass after an int8 forward pass, "kept" on
the output and the log-sum-exp of that. Errors are relative (Frobenius), against float64, of the first and the last
head. TFLOP/s count five products for a backward pass, and seven with the forward pass, whatever a kernel computes.

The rows with masks have a causal window, and lengths of keys. FlashAttention-2 of PyTorch computes them in bfloat16:
the window on the same tensors, the lengths on keys that were packed before, which is not timed. cuDNN in PyTorch has
neither.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from benchmarks.timing import time_calls
from greenfast.judge.report.formatting import table
from greenfast.kernels.attention.backward import CAUSAL, FULL, make_mask
from greenfast.ops import backward, quantized_backward, reference, torch_ops
from greenfast.ops.masked import MASKED_KEPT, MaskSpec

HEADS, TOKENS = 16, 16384
HEAD_DIMS, LENGTHS = (128, 64, 256), (4096, 16384)
#: The keys that a query attends to, of 16,384; and the keys of four sequences of 4,096.
WINDOW, KEYS = 1024, (4096, 3072, 2048, 1024)
_ATEN: Any = torch.ops.aten


def make_tensors(length: int, head_dim: int) -> list[Tensor]:
    """Return Q, K, V and dO, bfloat16 (B, H, S, D)."""
    torch.manual_seed(0)
    shape = (TOKENS // length, HEADS, length, head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def make_cudnn_calls(q: Tensor, k: Tensor, v: Tensor, g: Tensor, causal: bool) -> tuple[Any, Any]:
    """Return the calls of forward plus backward and of the backward pass alone, by cuDNN."""
    scale = q.shape[3] ** -0.5

    def forward() -> Any:
        return _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)

    def backward(results: Any) -> Any:
        out, lse, from_q, from_k, most_q, most_k, seed, offset, _ = results
        return _ATEN._scaled_dot_product_cudnn_attention_backward(
            g, q, k, v, out, lse, seed, offset, None, from_q, from_k, most_q, most_k, 0.0, causal, scale=scale
        )

    kept = forward()
    return lambda: backward(forward()), lambda: backward(kept)


def make_flash_calls(q: Tensor, k: Tensor, v: Tensor, g: Tensor, causal: bool) -> tuple[Any, Any]:
    """Return the same calls by PyTorch's FlashAttention-2."""
    scale = q.shape[3] ** -0.5

    def forward() -> Any:
        return _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)

    def backward(results: Any) -> Any:
        out, lse, from_q, from_k, most_q, most_k, seed, offset, _ = results
        return _ATEN._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, lse, from_q, from_k, most_q, most_k, 0.0, causal, seed, offset, scale=scale
        )

    kept = forward()
    return lambda: backward(forward()), lambda: backward(kept)


def make_flash3_calls(q: Tensor, k: Tensor, v: Tensor, g: Tensor, causal: bool) -> tuple[Any, Any]:
    """Return the same calls by FlashAttention-3, if a package with its backward pass is installed.

    That is FlashAttention's folder hopper, built from source; the wheel fa3-fwd has the forward pass only.
    """
    flash3 = importlib.import_module("flash_attn_interface")
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v, g)]  # (B, S, H, D), its own layout
    options = {"softmax_scale": q.shape[3] ** -0.5}

    def forward() -> Any:
        return flash3._flash_attn_forward(*rows[:3], causal=causal, **options)[:2]

    def backward(out: Tensor, lse: Tensor) -> Any:
        grads = flash3._flash_attn_backward(rows[3], *rows[:3], out, lse, is_causal=causal, **options)
        return [x.transpose(1, 2) for x in grads[:3]]

    kept = forward()
    return lambda: backward(*forward()), lambda: backward(*kept)


PEERS = {"cuDNN bf16": make_cudnn_calls, "FA2 bf16": make_flash_calls, "FA3 bf16": make_flash3_calls}


def make_calls(tensors: Sequence[Tensor], causal: bool) -> dict[str, Callable[[], Any]]:
    """Return the calls by name."""
    q, k, v, g = tensors
    length, scale = q.shape[2], q.shape[3] ** -0.5

    def forward(bits: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch_ops.SDPA_KEPT(q, k, v, "int8", int(causal), scale, bits)  # type: ignore[no-any-return]

    kept, kept_16, mask = forward(8), forward(16), CAUSAL if causal else FULL
    codes = quantized_backward.quantize(q, k, v, *kept, g, scale)

    ds = quantized_backward.allocate_ds(codes, length, length, mask)

    def launch(parts: str) -> Any:
        return quantized_backward.launch(codes, length, length, mask, parts, ds=ds)

    def backward_in_8_bits(out: Tensor, stats: Tensor, key_mean: Tensor) -> Any:
        return quantized_backward.compute_gradients(g, q, k, v, out, stats, key_mean, mask, scale)

    def recompute() -> Any:
        out = torch_ops.SDPA(q, k, v, "int8", int(causal), scale)
        return out, backward.sdpa_backward(g, q, k, v, int(causal), scale)

    def backward_of_kept(out: Tensor, lse: Tensor, key_mean: Tensor) -> Any:
        return backward.sdpa_kept_backward(g, q, k, v, out, lse, key_mean, int(causal), scale)

    calls: dict[str, Callable[[], Any]] = {}
    for name, make in PEERS.items():
        try:
            both, alone = make(q, k, v, g, causal)
            both()
        except (ImportError, RuntimeError) as e:  # not every version of cuDNN has a backward pass at head dim 256
            print(f"{name}, head dim {q.shape[3]}: {str(e).splitlines()[0]}")
            continue
        calls[f"{name}, forward + backward"], calls[f"{name}, backward"] = both, alone
    return calls | {
        "recomputed, forward + backward": recompute,
        "kept, forward + backward": lambda: backward_of_kept(*forward(16)),
        "kept, backward": lambda: backward_of_kept(*kept_16),
        "8-bit, forward + backward": lambda: backward_in_8_bits(*forward(8)),
        "8-bit, backward": lambda: backward_in_8_bits(*kept),
        "8-bit, quantizer": lambda: quantized_backward.quantize(q, k, v, *kept, g, scale),
        "8-bit, kernel of dK and dV": lambda: launch("keys"),
        "8-bit, kernel of dQ": lambda: launch("queries"),
        "int8 forward": lambda: forward(8),
    }


def make_masked_flash_calls(tensors: Sequence[Tensor], lengths: Tensor | None) -> tuple[Any, Any]:
    """Return the calls of PyTorch's FlashAttention-2 with a causal window, or on packed keys of these lengths."""
    q, k, v, g = (x.transpose(1, 2).contiguous() for x in tensors)  # (B, S, H, D)
    options: dict[str, Any] = {"scale": q.shape[3] ** -0.5}
    if lengths is None:
        options |= {"window_size_left": WINDOW - 1, "window_size_right": 0}
        sizes: tuple[Any, ...] = (None, None, q.shape[1], k.shape[1])
    else:
        kept = torch.arange(k.shape[1], device=k.device) < lengths.unsqueeze(1)
        k, v = (x[kept].contiguous() for x in (k, v))
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        every = torch.arange(len(q) + 1, device=q.device, dtype=torch.int32) * q.shape[1]
        sizes = (every, starts, q.shape[1], int(lengths.max()))
        q, g = q.flatten(0, 1), g.flatten(0, 1)

    def forward() -> Any:
        return _ATEN._flash_attention_forward(q, k, v, *sizes, 0.0, False, False, **options)

    def backward(results: Any) -> Any:
        out, lse, seed, unused, _ = results
        return _ATEN._flash_attention_backward(
            g, q, k, v, out, lse, *sizes, 0.0, False, seed, unused, **options
        )  # fmt: skip

    kept_results = forward()
    return lambda: backward(forward()), lambda: backward(kept_results)


def make_masked_calls(tensors: Sequence[Tensor], lengths: Tensor | None) -> dict[str, Callable[[], Any]]:
    """Return the calls with a causal window, or with these lengths of keys, int32 (B,)."""
    q, k, v, g = tensors
    length, scale = q.shape[2], q.shape[3] ** -0.5
    limits = (1, -1, -1) if lengths is not None else (1, WINDOW - 1, 0)
    mask = make_mask(*limits, length, length, lengths=lengths is not None)

    def forward() -> Any:
        return MASKED_KEPT(q, k, v, "int8", lengths, None, *limits, scale)

    kept = out, stats, key_mean = forward()
    codes = quantized_backward.quantize(q, k, v, out, stats, key_mean, g, scale, lengths)

    def backward_in_8_bits(out: Tensor, stats: Tensor, key_mean: Tensor) -> Any:
        return quantized_backward.compute_gradients(g, q, k, v, out, stats, key_mean, mask, scale, lengths)

    ds = quantized_backward.allocate_ds(codes, length, length, mask)

    def launch(parts: str) -> Any:
        return quantized_backward.launch(codes, length, length, mask, parts, lengths, ds)

    both, alone = make_masked_flash_calls(tensors, lengths)
    return {
        "FA2 bf16, forward + backward": both,
        "FA2 bf16, backward": alone,
        "8-bit, forward + backward": lambda: backward_in_8_bits(*forward()),
        "8-bit, backward": lambda: backward_in_8_bits(*kept),
        "8-bit, quantizer": lambda: quantized_backward.quantize(q, k, v, out, stats, key_mean, g, scale, lengths),
        "8-bit, kernel of dK and dV": lambda: launch("keys"),
        "8-bit, kernel of dQ": lambda: launch("queries"),
        "int8 forward": forward,
    }


def measure_masks(head_dim: int) -> list[dict[str, Any]]:
    """Return the rows with a window and with lengths: microseconds, and errors of dQ, dK and dV."""
    rows = []
    for name, length in (("window", max(LENGTHS)), ("lengths", TOKENS // len(KEYS))):
        tensors = make_tensors(length, head_dim)
        lengths = torch.tensor(KEYS, dtype=torch.int32, device="cuda") if name == "lengths" else None
        spec = MaskSpec(1, -1, -1, lengths) if lengths is not None else MaskSpec(1, WINDOW - 1, 0)
        allowed = spec.build_bool(length, length, tensors[0].device)[:, 0]
        calls = make_masked_calls(tensors, lengths)
        errors = {"8-bit": measure_errors(tensors, ~allowed, calls["8-bit, backward"]())}
        us = time_calls(calls)
        rows.append({"head_dim": head_dim, "length": length, "mask": name, "us": us, "errors": errors})
        print(f"D {head_dim}, length {length}, {name}; errors of dQ, dK, dV: {errors}")
        for call, t in us.items():
            print(f"  {call:32} {t:10.1f} us", flush=True)
        del calls
        torch.cuda.empty_cache()
    return rows


def compute_exact(q: Tensor, k: Tensor, v: Tensor, g: Tensor, hidden: Tensor | None) -> tuple[Tensor, ...]:
    """Return dQ, dK and dV of one head in float64. hidden: the scores that a mask leaves out."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    scale = q.shape[-1] ** -0.5
    scores = q @ k.T * scale
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    p = torch.softmax(scores, -1)
    del scores
    dv = p.T @ g
    delta = (g * (p @ v)).sum(-1, keepdim=True)
    ds = (g @ v.T).sub_(delta).mul_(p).mul_(scale)
    return ds @ k, ds.T @ q, dv


def measure_errors(tensors: Sequence[Tensor], hidden: Tensor | None, grads: Sequence[Tensor]) -> list[float]:
    """Return the relative errors of dQ, dK and dV (B, H, S, D) over two heads. hidden: bool (B or 1, S, S), or None."""
    differences, norms = [0.0] * 3, [0.0] * 3
    for index in ((0, 0), (-1, -1)):
        q, k, v, g = (x[index] for x in tensors)
        exact = compute_exact(q, k, v, g, None if hidden is None else hidden[index[0]])
        for i, (got, want) in enumerate(zip(grads, exact, strict=True)):
            differences[i] += float((got[index].double() - want).square().sum())
            norms[i] += float(want.square().sum())
        torch.cuda.empty_cache()
    return [round(math.sqrt(a / b), 5) for a, b in zip(differences, norms, strict=True)]


def find_fastest(us: Mapping[str, float], name: str) -> float:
    """Return the microseconds of the fastest of cuDNN, FlashAttention-2 and FlashAttention-3 in bfloat16."""
    return min(t for full_name, t in us.items() if full_name.endswith(f" bf16, {name}"))


def render_masked_times(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of microseconds with masks, beside FlashAttention-2 in bfloat16, and of errors in per cent."""
    lines = []
    for row in rows:
        us, own = row["us"], [f"{100 * error:.1f}" for error in row["errors"]["8-bit"]]
        parts = [f"{us[f'8-bit, {name}']:.0f}" for name in ("quantizer", "kernel of dK and dV", "kernel of dQ")]
        compared = [
            f"{us[f'8-bit, {name}']:.0f}, {us[f'FA2 bf16, {name}'] / us[f'8-bit, {name}']:.2f}x"
            for name in ("backward", "forward + backward")
        ]
        mask = f"window of {WINDOW}" if row["mask"] == "window" else f"keys {', '.join(map(str, KEYS))}"
        shape = f"{TOKENS // row['length']} x {row['length']}, {mask}"
        lines.append((str(row["head_dim"]), shape, *parts, *compared, " / ".join(own)))
    titles = ("D", "sequences", "quantizer", "dK and dV", "dQ", "backward", "with forward", "errors of dQ, dK, dV")
    return table(titles, lines)


def render_times(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the backward pass in 8 bits: microseconds of its parts, and errors in per cent."""
    lines = []
    for row in rows:
        us = row["us"]
        parts = [f"{us[f'8-bit, {name}']:.0f}" for name in ("quantizer", "kernel of dK and dV", "kernel of dQ")]
        both = f"{us['8-bit, backward']:.0f}, {find_fastest(us, 'backward') / us['8-bit, backward']:.2f}x"
        lines.append((*_format_shape(row), *parts, both, _format_errors(row, "8-bit")))
    return table(("D", "sequences", "quantizer", "dK and dV", "dQ", "backward", "errors of dQ, dK, dV"), lines)


def render_modes(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the forward and the backward pass by ``backward``, beside those in bfloat16."""
    lines = []
    for row in rows:
        us = {name.split(",")[0]: t for name, t in row["us"].items() if name.endswith("forward + backward")}
        fastest = find_fastest(row["us"], "forward + backward")
        peers = [f"{us[name]:.0f}" if name in us else "-" for name in PEERS]
        ours = [f"{us[name]:.0f}, {fastest / us[name]:.2f}x" for name in ("recomputed", "kept", "8-bit")]
        lines.append((*_format_shape(row), *peers, *ours, _format_errors(row, "kept")))
    return table(
        ("D", "sequences", *PEERS, '`"16bit"`', '`"16bit_kept"`', '`"8bit"`', 'errors of `"16bit_kept"`'), lines
    )


def _format_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    length = row["length"]
    return str(row["head_dim"]), f"{TOKENS // length} x {length}, {'causal' if row['causal'] else 'full'}"


def _format_errors(row: Mapping[str, Any], name: str) -> str:
    return " / ".join(f"{100 * error:.1f}" for error in row["errors"][name])


def main(argv: Sequence[str] | None = None) -> None:
    """Print times and errors, and write the record if asked to."""
    parser = make_parser("backward_speed", __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--masks", action="store_true", help="only the rows with masks")
    args = parser.parse_args(argv)
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    masked = [row for head_dim in HEAD_DIMS for row in measure_masks(head_dim)]
    print(render_masked_times(masked))
    rows = []
    for head_dim, length, causal in product(HEAD_DIMS, LENGTHS, (False, True)) if not args.masks else ():
        tensors, scale = make_tensors(length, head_dim), head_dim**-0.5
        calls = make_calls(tensors, causal)
        hidden = torch.ones(1, length, length, dtype=torch.bool, device="cuda").triu_(1) if causal else None
        errors = {
            name: measure_errors(tensors, hidden, calls[f"{name}, backward"]()[:3])
            for name in ("8-bit", "kept", "cuDNN bf16", "FA3 bf16")
            if f"{name}, backward" in calls
        }
        q, k, v, g = tensors
        out, lse = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
        _, stats, key_mean = torch_ops.SDPA_KEPT(q, k, v, "int8", int(causal), scale, 8)
        of_mean = reference.compute_mean_scores(q, key_mean, rotated=True)
        stats = torch.stack([lse, reference.add_mean_scores(stats[..., 1], of_mean, int(causal), scale)], -1)
        no_mean = torch.zeros_like(k[:, :, 0], dtype=torch.float32)
        mask = CAUSAL if causal else FULL
        grads = quantized_backward.compute_gradients(g, q, k, v, out, stats, no_mean, mask, scale)
        errors["8-bit, bf16 forward"] = measure_errors(tensors, hidden, grads)
        us = time_calls(calls)
        flop = 2e-6 * TOKENS * length * HEADS * head_dim / (2 if causal else 1)  # of a product, in millions
        count = {name: 7 if "forward +" in name else 2 if "forward" in name else 5 for name in us}
        tflops = {name: round(count[name] * flop / t) for name, t in us.items() if "quantizer" not in name}
        rows.append(
            {"head_dim": head_dim, "length": length, "causal": causal, "us": us, "tflops": tflops, "errors": errors}
        )
        print(f"D {head_dim}, length {length}, {'causal' if causal else 'full'}; errors of dQ, dK, dV: {errors}")
        for name, t in us.items():
            print(f"  {name:32} {t:10.1f} us {tflops.get(name, 0):6} TFLOP/s", flush=True)
        del calls
        torch.cuda.empty_cache()
    write_measurements(args.json, "backward_speed", torch.cuda.get_device_name(), rows=rows, masked=masked)
