"""Compilation ahead of time: list the kernels that calls need, and compile them into the cache.

Shapes determine the kernels, so this needs no GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from greenfast.device import cache
from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention import backward as backward_kernels
from greenfast.kernels.attention.config import Mask
from greenfast.ops.cuda import build_attention_step, build_quantize_step, build_sdpa_config, build_sdpa_steps, get_sizes
from greenfast.ops.launch_plans import require_hopper
from greenfast.ops.quantized import DTYPES, PRECISIONS
from greenfast.spec.arch import Target
from greenfast.spec.errors import MachineError, UsageError, unknown
from greenfast.spec.kernel import KernelSource

#: Pairs of them need every kernel that any lengths need; a test proves it.
LENGTHS = (128, 512, 1024, 4096, 16384, 32768)
#: These numbers of heads over all batches need every kernel of a length; the choice depends on the occupancy.
_HEADS = tuple(2**n for n in range(12))
#: Above this number of query rows over all heads the attention kernel is always the same.
_MAX_ROWS = 1 << 17
_MAX_LENGTH = (1 << 31) - 1  # lengths are 32-bit in the kernels
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_MAX_WORKERS = 16  # each needs about 50 MiB
#: Passes of ``backward=`` -> the numbers that the forward kernel writes of each row for it (``build_sdpa_config``).
_STATS = {"16bit": 0, "16bit_kept": 1, "8bit": 2}


@dataclass(frozen=True)
class WarmupResult:
    """The number of compiled kernels, the number of kernels already cached, and the wall time."""

    compiled: int
    cached: int
    seconds: float


def kernels_for(
    target: Target,
    *,
    head_dims: Sequence[int] = HEAD_DIMS,
    dtypes: Sequence[str] = tuple(_DTYPES),
    precisions: Sequence[str] = ("fp8", "int8"),
    causal: Sequence[bool] = (False, True),
    log_sum_exp: bool = False,
    backward: Sequence[str] = (),
    lengths: Sequence[int] = LENGTHS,
    left_out: Callable[[str], None] = lambda combination: None,
) -> list[KernelSource]:
    """Return the kernels, each once, of ``greenfast.sdpa``, and of ``quantize`` and ``attention`` with default options.

    They cover tensors of any batch and heads, with each pair of ``lengths`` as the lengths of queries and keys.
    log_sum_exp: include the kernels for ``return_lse``. backward: include the kernels of training with these values of
    ``backward``; "16bit" needs no more. left_out: called with each combination without a kernel on the target.

    Raises UsageError for arguments that no call can have, and if the target has no kernel for any combination.
    """
    _check_arguments(head_dims, dtypes, precisions, causal, backward, lengths)
    kernels: dict[KernelSource, None] = {}
    refusal = ""
    labels = {0: "", 1: ", log-sum-exp", 2: ', backward="8bit"'}
    wanted = sorted({0, int(log_sum_exp), *(_STATS[name] for name in backward)})
    for head_dim, dtype, precision, stats in product(head_dims, dtypes, precisions, wanted):
        combination = f"head dim {head_dim}, {dtype}, {precision}{labels[stats]}"
        try:
            if stats == 2:
                kernels.update(dict.fromkeys(_list_backward_kernels(head_dim, _DTYPES[dtype], causal, target)))
            for query, key in _generate_tensors(head_dim, _DTYPES[dtype], lengths):
                kernels.update(dict.fromkeys(_list_call_kernels(query, key, precision, causal, stats, target)))
        except NotImplementedError as e:
            left_out(combination)
            refusal = refusal or f"{combination}: {e}"
    if not kernels:
        raise UsageError(f"{refusal}; nothing can be compiled for {target.name}")
    return list(kernels)


def _generate_tensors(head_dim: int, dtype: torch.dtype, lengths: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield meta tensors of queries and keys, for all pairs of lengths and from few heads to many."""
    for heads, q_len, kv_len in product(_HEADS, lengths, lengths):
        shapes = ((1, heads, length, head_dim) for length in (q_len, kv_len))
        query, key = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        yield query, key


def _list_call_kernels(
    query: Tensor, key: Tensor, precision: str, causal: Sequence[bool], stats: int, target: Target
) -> Iterator[KernelSource]:
    """Yield the kernels of the operators for such tensors. Raises NotImplementedError if sdpa has none.

    stats: as of ``build_sdpa_config``. ``attention`` writes one number of a row at most.
    """
    heads, q_len = query.shape[1:3]
    codes = build_sdpa_config(target, query.shape[3], query.dtype, precision, Mask.NONE, stats=stats)
    if heads == 1 or heads * q_len <= _MAX_ROWS:
        for masked in causal:
            config = replace(codes, mask=Mask(int(masked)))
            if stats < 2:
                unfused = replace(config, fuse_q_quant=False)
                yield build_attention_step(unfused, get_sizes(query.shape, key.shape), 1.0, target).source
            if codes.key_scales != "head":
                yield from (step.source for step in build_sdpa_steps(query, key, key, config, 1.0, target))
    yield build_quantize_step(query, key, key, codes).source


def _list_backward_kernels(
    head_dim: int, dtype: torch.dtype, causal: Sequence[bool], target: Target
) -> Iterator[KernelSource]:
    """Yield the kernels of the backward pass in 8 bits. Raises NotImplementedError if sdpa has none."""
    require_hopper(target, 'backward="8bit" has kernels for Hopper GPUs')
    if dtype != torch.bfloat16 or head_dim not in backward_kernels.KEYS_TILINGS:
        raise NotImplementedError('backward="8bit" takes bfloat16 and the head dims 64, 128 and 256')
    for masked in causal:
        yield from backward_kernels.list_kernels(head_dim, backward_kernels.CAUSAL if masked else backward_kernels.FULL)


def warm(
    sources: Iterable[KernelSource],
    target: Target,
    progress: Callable[[CompiledKernel], None] = lambda kernel: None,
    *,
    workers: int | None = None,
) -> WarmupResult:
    """Compile the missing kernels in threads; NVRTC releases the GIL. Several processes may do so at once.

    progress: called in this thread with each kernel after it is compiled. workers: number of threads; the default is
    one per processor.
    """
    start = time.perf_counter()
    compiled = cached = 0
    pool = ThreadPoolExecutor(workers or min(len(os.sched_getaffinity(0)), _MAX_WORKERS))
    try:
        for job in as_completed([pool.submit(_compile_cached, source, target) for source in sources]):
            kernel = job.result()
            compiled, cached = compiled + (not kernel.from_cache), cached + kernel.from_cache
            progress(kernel)
    finally:
        pool.shutdown(cancel_futures=True)
    return WarmupResult(compiled, cached, time.perf_counter() - start)


def _compile_cached(source: KernelSource, target: Target) -> CompiledKernel:
    """Compile through the cache, and check that the kernel is in the cache afterwards."""
    kernel = compile_kernel(source, target)
    if not kernel.from_cache and not compile_kernel(source, target).from_cache:
        try:
            where = f"the kernel cache {cache.cache_dir()}"
        except RuntimeError as e:
            where = f"the kernel cache ({e})"
        raise MachineError(
            f"{where} does not keep compiled kernels; set GREENFAST_CACHE_DIR to a writable folder on a disk that is "
            "not full"
        )
    return kernel


def _check_arguments(
    head_dims: Sequence[int], dtypes: Sequence[str], precisions: Sequence[str], causal: Sequence[bool],
    backward: Sequence[str], lengths: Sequence[int],
) -> None:  # fmt: skip
    sequences: tuple[tuple[str, Any, type, str], ...] = (
        ("head_dims", head_dims, int, "whole numbers"),
        ("dtypes", dtypes, str, "names"),
        ("precisions", precisions, str, "names"),
        ("causal", causal, bool, "True and False"),
        ("backward", backward, str, "names"),
        ("lengths", lengths, int, "whole numbers"),
    )
    for argument, values, kind, needed in sequences:
        if isinstance(values, str) or not isinstance(values, Sequence) or any(type(x) is not kind for x in values):
            raise UsageError(f"{argument}: {values!r}; a sequence of {needed} is needed")
    for head_dim in head_dims:
        if head_dim % 8 or not 8 <= head_dim <= HEAD_DIMS[-1]:
            raise UsageError(f"head dim {head_dim}: the kernels take multiples of 8 up to {HEAD_DIMS[-1]}")
    named = ("dtype", dtypes, _DTYPES), ("precision", precisions, PRECISIONS), ("backward", backward, _STATS)
    for argument, names, allowed in named:
        for name in names:
            if name not in allowed:
                raise unknown(argument, name, allowed)
    for length in lengths:
        if not 1 <= length <= _MAX_LENGTH:
            raise UsageError(f"length {length}: the kernels take lengths from 1 to {_MAX_LENGTH}")
