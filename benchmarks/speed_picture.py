"""The picture and the table of README.md: speed compared with common alternatives, from records under evidence/."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.ratios import ratios
from benchmarks.record_schema import Benchmark, SpeedupPair
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.plots import clean

#: In the picture's metadata: the prefix of the digest of the numbers that it shows.
DESCRIPTION = "numbers: sha256 "
#: The head dim and mask of the picture; the table and docs/results.md hold the others.
_HEAD_DIM, _CAUSAL = 128, 1

Series = dict[str, dict[int, float]]  # label -> length -> TFLOP/s

# Okabe and Ito's colours: greenfast stands out, the others of a precision have similar colours.
_COLORS = {
    "greenfast FP8": "#D55E00",
    "FlashAttention-3 FP8": "#0072B2",
    "cuDNN FP8": "#56B4E9",
    "FlashAttention-3 bf16": "#444444",
    "PyTorch cuDNN bf16": "#888888",
    "PyTorch flash (FA2) bf16": "#C4C4C4",
}
_TORCH = {"torch_cudnn": "PyTorch cuDNN bf16", "torch_flash": "PyTorch flash (FA2) bf16"}
_BF16 = {"fa3_bf16": "FlashAttention-3 bf16", **_TORCH}
_CALLS = {"sdpa_fp8": "greenfast FP8", **_BF16}
_KERNELS = {"greenfast": "greenfast FP8", "fa3": "FlashAttention-3 FP8", "cudnn": "cuDNN FP8", **_TORCH}


def _shown(dims: Mapping[str, int]) -> bool:
    return dims["D"] == _HEAD_DIM and dims.get("CAUSAL", 0) == _CAUSAL


def operator_series(record: Benchmark) -> Series:
    """Whole calls on bfloat16 tensors."""
    return _series(record, _CALLS)


def kernel_series(record: Benchmark) -> Series:
    """Kernels only, the FP8 ones on precomputed codes."""
    return _series(record, _KERNELS)


def _series(record: Benchmark, labels: Mapping[str, str]) -> Series:
    found: Series = {label: {} for label in labels.values()}
    for row in record.rows:
        if row.grid and row.tflops is not None and row.backend in labels and _shown(row.dims):
            found[labels[row.backend]][row.dims["S"]] = row.tflops
    return found


def numbers_digest(operator: Benchmark, peers: Benchmark) -> str:
    """The digest of the picture's numbers and caption."""
    shown = [operator_series(operator), kernel_series(peers), _caption(operator, peers)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def _caption(operator: Benchmark, peers: Benchmark) -> str:
    return (
        f"head dim {_HEAD_DIM}, {'causal' if _CAUSAL else 'no'} mask, 16,384 tokens, forward; "
        f"left: {facts.device(operator)}, {operator.created[:10]}; right: {facts.device(peers)}, {peers.created[:10]}"
    )


def speed_picture(operator: Benchmark, peers: Benchmark) -> str:
    """The picture as SVG."""
    digest = numbers_digest(operator, peers)
    with rc_context({"svg.hashsalt": digest, "font.size": 10}):
        figure = Figure(figsize=(10, 4.5), layout="constrained")
        FigureCanvasSVG(figure)
        left, right = figure.subplots(1, 2, sharey=True)
        _draw(left, operator_series(operator), "Whole call on bf16 tensors (FP8: quantization included)")
        _draw(right, kernel_series(peers), "Kernel alone: FP8 on codes, bf16 on tensors")
        left.set_ylabel("TFLOP/s (higher is better)")
        shown = {
            label: handle
            for axes in (right, left)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        shown = {label: shown[label] for label in _COLORS}
        figure.legend(shown.values(), shown, loc="outside upper center", ncols=3, frameon=False)
        figure.supxlabel(f"sequence length; {_caption(operator, peers)}", fontsize=9)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Description": f"{DESCRIPTION}{digest}"})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _draw(axes: Axes, series: Series, title: str) -> None:
    lengths = sorted({length for values in series.values() for length in values})
    width = 0.85 / len(series)
    for n, (label, values) in enumerate(series.items()):
        at = [lengths.index(length) + (n + 0.5) * width - 0.425 for length in values]
        bars = axes.bar(at, list(values.values()), width * 0.94, color=_COLORS[label], label=label)
        axes.bar_label(bars, [f"{value:.0f}" for value in values.values()], fontsize=7, padding=1)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_title(title, fontsize=10, loc="left")
    clean(axes)
    axes.grid(visible=False, axis="x")


def gains_table(record: Benchmark) -> str:
    """Per length and head dim, the least time of the bfloat16 libraries over the time of ``sdpa`` in FP8."""
    found: dict[int, dict[tuple[int, int], str]] = {}
    dims = {row.shape: row.dims for row in record.rows}
    for shape, ratio in ratios(record.rows, SpeedupPair(own="sdpa_fp8", baselines=list(_BF16), title="")).items():
        at = dims[shape]
        found.setdefault(at["S"], {})[at["D"], at.get("CAUSAL", 0)] = f"{ratio:.2f}x"
    head_dims = sorted({head_dim for cells in found.values() for head_dim, _ in cells})
    header = ("sequence length", *(f"head dim {d}" for d in head_dims))
    rows: Sequence[Sequence[str]] = [
        (str(length), *(f"{cells[d, 0]} / {cells[d, 1]}" for d in head_dims)) for length, cells in found.items()
    ]
    return formatting.table(header, rows, right=header)
