"""Comparisons of attention: the Hopper kernel and greenfast.sdpa with other libraries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.comparison import BenchCell, Comparison, ErrorLimits
from benchmarks.records import SpeedupPair
from benchmarks.registry import KERNEL
from benchmarks.sdpa_backends import BACKENDS
from benchmarks.sdpa_inputs import INPUTS
from benchmarks.session import BenchSession
from greenfast.device.identity import launch_facts
from greenfast.judge.task import Shape
from greenfast.kernels.attention.config import VALUE_FORMAT, AttentionConfig, read_dims
from greenfast.ops import cuda
from greenfast.ops.quantized import PRECISIONS
from greenfast.spec.arch import Target
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.kernel import KernelSource

_TOKENS, _HIDDEN = 16384, 2048
#: greenfast.sdpa is timed only on Hopper GPUs.
_TARGET = Target("sm_90a")
#: Largest relative error of greenfast.sdpa. A larger error is not rounding: no times are recorded.
_OPERATOR_LIMIT = 0.2

_BF16 = ("torch_flash", "torch_cudnn", "fa3_bf16")
_PEERS = (KERNEL, "fa3", "cudnn", *_BF16)
_OPERATOR = ("sdpa_fp8", "sdpa_int8", "sdpa_int8_fine", "attention_fp8", "quantize_fp8", "copy", *_BF16)
_OPERATOR_ERRORS = (
    *("sdpa_fp8", "sdpa_int8", "sdpa_int8_fine", "fp8_channel", "fp8_plain", "int8_plain"),
    *("fa3", "cudnn", "sage", *_BF16),
)
#: With this many keys, sums need more bits than the tensor cores have.
_LONG = 131072


def grid_shape(head_dim: int, length: int, causal: bool) -> Shape:
    """Return a shape with 16,384 tokens and a hidden size of 2048, as in the FlashAttention papers."""
    dims = {"B": _TOKENS // length, "H": _HIDDEN // head_dim, "S": length, "D": head_dim}
    name = f"d{head_dim}_s{length}{'_causal' if causal else ''}"
    return Shape(name=name, dims={**dims, "CAUSAL": 1} if causal else dims)


def _grid(*lengths: int) -> tuple[Shape, ...]:
    return tuple(grid_shape(d, s, c) for d in (64, 128, 256) for s in lengths for c in (False, True))


def _shape(name: str, b: int, h: int, s: int, d: int) -> Shape:
    return Shape(name=name, dims={"B": b, "H": h, "S": s, "D": d})


_MISSION = _shape("mission", 1, 8, 512, 64)
#: The task's shapes, too small to fill a GPU.
SMALL = (
    _shape("small", 1, 1, 32, 64), _MISSION, _shape("mission_b2", 2, 8, 256, 64), _shape("long", 1, 8, 2048, 64),
)  # fmt: skip


def _error_cells(backends: tuple[str, ...], kinds: tuple[str, ...]) -> tuple[BenchCell, ...]:
    """Return the cells for errors by kind of inputs and head dim."""
    cells = []
    for kind in kinds:
        for head_dim in (64, 128):
            shape = _shape(f"accuracy_d{head_dim}_{kind.replace(' ', '_')}", 1, 8, 2048, head_dim)
            cells.append(BenchCell(shape, backends, kind, seed=1, sampled=2048, series="inputs"))
    return tuple(cells)


def _long_cell(backends: tuple[str, ...]) -> BenchCell:
    """Return the cell for errors with many keys and one head."""
    return BenchCell(_shape(f"accuracy_s{_LONG}", 1, 1, _LONG, 128), backends, seed=1, sampled=512, series="inputs")


def flops(dims: Mapping[str, int]) -> float:
    """Return the operations of a shape: 4 B H S^2 D, half of it with a mask, as in the FlashAttention papers."""
    config, sizes = read_dims(dims, VALUE_FORMAT)
    full = 4.0 * sizes.batch * sizes.heads * sizes.q_len * sizes.kv_len * config.head_dim
    return full / 2 if config.causal else full


def attention_bytes(dims: Mapping[str, int]) -> int:
    """Return the bytes of Q, K, V and the output in 16 bits."""
    config, sizes = read_dims(dims, VALUE_FORMAT)
    rows = sizes.heads * sizes.q_len + sizes.kv_heads * sizes.kv_len
    return 4 * sizes.batch * rows * config.head_dim


def _elements(dims: Mapping[str, int]) -> int:
    config, sizes = read_dims(dims, VALUE_FORMAT)
    return sizes.batch * sizes.heads * sizes.q_len * config.head_dim


def peers() -> Comparison:
    """Compare the Hopper kernel on E4M3 codes with FP8 attention of other libraries, and show torch in bfloat16."""
    same_codes = tuple(name for name in _PEERS if BACKENDS[name].same_codes)
    lengths = tuple(
        BenchCell(_shape(f"accuracy_s{s}", 1, 1, s, 128), same_codes, seed=1, sampled=512, series="length")
        for s in (2048, 8192, 32768, 131072)
    )
    return Comparison(
        name="peers",
        what="",
        own=(KERNEL,),
        versus=(SpeedupPair(own=KERNEL, baselines=["fa3", "cudnn"], title="greenfast / better FP8 peer"),),
        timed=(
            *(BenchCell(shape, _PEERS, grid=True) for shape in _grid(1024, 4096, 16384)),
            *(BenchCell(shape, _PEERS) for shape in SMALL),
        ),
        accuracy=(*_error_cells(_PEERS, ("normal", "outliers")), *lengths),
        inputs=INPUTS,
        session=BenchSession,
        flops=flops,
        bytes_moved=lambda dims: 5 * _elements(dims),  # codes, and an output in half
    )


def operator() -> Comparison:
    """Compare greenfast.sdpa on bfloat16, including quantization, with bfloat16 attention of torch and others."""
    return Comparison(
        name="operator",
        what="greenfast.sdpa, quantization included",
        own=tuple(name for name in dict.fromkeys(_OPERATOR + _OPERATOR_ERRORS) if _is_own_attention(name)),
        versus=(
            SpeedupPair(own="sdpa_fp8", baselines=list(_BF16), title="sdpa fp8 / best bf16"),
            SpeedupPair(own="sdpa_int8", baselines=list(_BF16), title="sdpa int8 / best bf16"),
        ),
        timed=tuple(
            BenchCell(shape, _OPERATOR, sampled=shape.dims["S"], grid=True)
            for shape in _grid(512, 1024, 2048, 4096, 16384)
        ),
        accuracy=(*_error_cells(_OPERATOR_ERRORS, tuple(INPUTS)), _long_cell(_OPERATOR_ERRORS)),
        inputs=INPUTS,
        session=BenchSession,
        flops=flops,
        bytes_moved=attention_bytes,
        host=BenchCell(_MISSION, ("sdpa_fp8", "attention_fp8", "torch"), sampled=1),
        limits=ErrorLimits(error=_OPERATOR_LIMIT),
        kernels=operator_kernels,
        arch=_TARGET.name,
    )


def _is_own_attention(name: str) -> bool:
    return BACKENDS[name].own and BACKENDS[name].attention


def operator_kernels() -> dict[str, tuple[KernelSource, LaunchFacts]]:
    """Return every kernel that ``operator`` times with its launch, by step and shape. Needs no GPU."""
    kernels: dict[str, tuple[KernelSource, LaunchFacts]] = {}
    for dims, (q, k), precision, config in _list_calls(operator().timed):
        unfused = replace(config, fuse_q_quant=False)
        steps = {
            "quantize": cuda.build_quantize_step(q, k, k, unfused),
            "attention": cuda.build_attention_step(unfused, cuda.get_sizes(q.shape, k.shape), 1.0, _TARGET),
            "sdpa": cuda.build_sdpa_steps(q, k, k, config, 1.0, _TARGET)[1],
        }
        kernels |= {
            f"{step} {precision}, {format_dims(dims)}": (s.source, launch_facts(s.source, s.launch, dims))
            for step, s in steps.items()
        }
    return kernels


def sdpa_kernels(cells: Sequence[BenchCell]) -> dict[str, tuple[KernelSource, LaunchFacts]]:
    """Return the kernels of ``greenfast.sdpa`` on these cells, each with its launch on the first cell that uses it."""
    kernels: dict[KernelSource, tuple[str, LaunchFacts]] = {}
    for dims, (q, k), precision, config in _list_calls(cells):
        for number, step in enumerate(cuda.build_sdpa_steps(q, k, k, config, 1.0, _TARGET), 1):
            facts = launch_facts(step.source, step.launch, dims)
            kernels.setdefault(step.source, (f"step {number} of {precision}, {format_dims(dims)}", facts))
    return {name: (source, facts) for source, (name, facts) in kernels.items()}


def _list_calls(
    cells: Sequence[BenchCell],
) -> Iterator[tuple[Mapping[str, int], tuple[Tensor, Tensor], str, AttentionConfig]]:
    """Yield the shape, the tensors, the precision and the configuration of every call of ``greenfast.sdpa``."""
    for cell in cells:
        dims = cell.shape.dims
        q, k = meta_tensors(dims)
        for precision in PRECISIONS:
            config = cuda.build_sdpa_config(_TARGET, q.shape[3], q.dtype, precision, dims.get("CAUSAL", 0))
            yield dims, (q, k), precision, config


def meta_tensors(dims: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """Return Q, and K or V, of a shape as bfloat16 meta tensors."""
    key_shape = (dims["B"], dims.get("HK", dims["H"]), dims.get("KV", dims["S"]), dims["D"])
    shapes = ((dims["B"], dims["H"], dims["S"], dims["D"]), key_shape)
    q, k = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    return q, k


def format_dims(dims: Mapping[str, int]) -> str:
    """Format a shape: B=1, H=8, ..."""
    return ", ".join(f"{key}={value}" for key, value in dims.items())
