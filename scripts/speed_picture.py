"""The picture and the table of README.md: speed compared with what people use today, from records under evidence/."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from greenfast.bench.operator_record import OperatorRecord, SpeedRow
from greenfast.judge.record import PeersRecord
from greenfast.judge.report import facts, format
from greenfast.judge.report.plots import clean

#: In the picture's metadata: before the digest of the numbers that it shows.
DESCRIPTION = "numbers: sha256 "
#: The head dim and mask of the picture; the table and docs/results.md hold the others.
_HEAD_DIM, _CAUSAL = 128, 1

Series = dict[str, dict[int, float]]  # label -> length -> TFLOP/s

# Okabe and Ito's colours: greenfast stands out, the others of a precision are near each other.
_COLORS = {
    "greenfast FP8": "#D55E00",
    "FlashAttention-3 FP8": "#0072B2",
    "cuDNN FP8": "#56B4E9",
    "PyTorch cuDNN bf16": "#777777",
    "PyTorch flash (FA2) bf16": "#BBBBBB",
}
_CALLS = {"sdpa fp8": "greenfast FP8", "torch cudnn": "PyTorch cuDNN bf16", "torch flash": "PyTorch flash (FA2) bf16"}
_CONTENDERS = {
    "greenfast": "greenfast FP8",
    "fa3": "FlashAttention-3 FP8",
    "cudnn": "cuDNN FP8",
    "torch_cudnn": "PyTorch cuDNN bf16",
    "torch_flash": "PyTorch flash (FA2) bf16",
}


def _flops(dims: Mapping[str, int]) -> float:
    """As the FlashAttention papers count: 4·B·H·S²·D, half of it with a mask."""
    full = 4.0 * dims["B"] * dims["H"] * dims["S"] ** 2 * dims["D"]
    return full / 2 if dims.get("CAUSAL") else full


def _shown(dims: Mapping[str, int]) -> bool:
    return dims["D"] == _HEAD_DIM and dims.get("CAUSAL", 0) == _CAUSAL


def operator_series(record: OperatorRecord) -> Series:
    """Whole calls on bfloat16 tensors."""
    found: Series = {label: {} for label in _CALLS.values()}
    for row in record.speed:
        if row.call in _CALLS and _shown(row.dims):
            found[_CALLS[row.call]][row.dims["S"]] = _flops(row.dims) / row.median_us / 1e6
    return found


def kernel_series(record: PeersRecord) -> Series:
    """Kernels alone, those of FP8 on codes that exist already."""
    found: Series = {label: {} for label in _CONTENDERS.values()}
    for row in record.rows:
        if row.grid and row.median_us is not None and _shown(row.dims):
            found[_CONTENDERS[row.contender]][row.dims["S"]] = _flops(row.dims) / row.median_us / 1e6
    return found


def numbers_digest(operator: OperatorRecord, peers: PeersRecord) -> str:
    """Of what the picture shows; with other numbers or another caption it is another one."""
    shown = [operator_series(operator), kernel_series(peers), _caption(operator, peers)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def _caption(operator: OperatorRecord, peers: PeersRecord) -> str:
    return (
        f"head dim {_HEAD_DIM}, {'causal' if _CAUSAL else 'no'} mask, 16,384 tokens, forward; "
        f"left: {operator.device.name}, {operator.created[:10]}; right: {facts.device(peers)}, {peers.created[:10]}"
    )


def speed_picture(operator: OperatorRecord, peers: PeersRecord) -> str:
    """The picture as SVG."""
    digest = numbers_digest(operator, peers)
    with rc_context({"svg.hashsalt": digest, "font.size": 10}):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        FigureCanvasSVG(figure)
        left, right = figure.subplots(1, 2, sharey=True)
        _draw(left, operator_series(operator), "Whole call on bf16 tensors (FP8: quantization included)")
        _draw(right, kernel_series(peers), "Kernel alone: FP8 on codes, bf16 on tensors")
        left.set_ylabel("TFLOP/s (higher is better)")
        handles, labels = right.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
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


def gains_table(record: OperatorRecord) -> str:
    """Per length and head dim, the time of PyTorch's faster bfloat16 backend over that of ``sdpa`` in FP8."""
    found: dict[int, dict[tuple[int, int], str]] = {}
    for dims, calls in _by_shape(record):
        rival = min(row.median_us for name, row in calls.items() if name.startswith("torch"))
        ratio = f"{rival / calls['sdpa fp8'].median_us:.2f}x"
        found.setdefault(dims["S"], {})[dims["D"], dims.get("CAUSAL", 0)] = ratio
    head_dims = sorted({head_dim for cells in found.values() for head_dim, _ in cells})
    header = ("sequence length", *(f"head dim {d}" for d in head_dims))
    rows: Sequence[Sequence[str]] = [
        (str(length), *(f"{cells[d, 0]} / {cells[d, 1]}" for d in head_dims)) for length, cells in found.items()
    ]
    return format.table(header, rows, right=header)


def _by_shape(record: OperatorRecord) -> list[tuple[dict[str, int], dict[str, SpeedRow]]]:
    found: dict[tuple[tuple[str, int], ...], dict[str, SpeedRow]] = {}
    for row in record.speed:
        found.setdefault(tuple(row.dims.items()), {})[row.call] = row
    return [(dict(dims), calls) for dims, calls in found.items()]
