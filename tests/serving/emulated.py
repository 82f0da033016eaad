"""The serving kernels of a case on the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import KernelLaunch, run_chain
from greenfast.kernels.serving import attention as serving
from greenfast.kernels.serving.config import ServingConfig
from greenfast.spec.kernel import KernelSource, Launch, Struct, Workspace
from greenfast.spec.problem import Array, OutputSpec
from tests.serving.oracle import Case

_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "e4m3"}


def launches(
    c: Case, *, wide: bool = False, few_rows: int = 0, multiprocessors: int = 1
) -> list[tuple[KernelSource, Launch]]:
    """The plan's launch and the attention's."""
    options = c.options
    kv_heads, page = c.k_cache.shape[2], c.k_cache.shape[1]
    softcap = options.get("softcap", 0.0)
    config = ServingConfig(
        head_dim=c.q.shape[2],
        query=_NAMES[c.q.dtype],
        out=_NAMES[options["out_dtype"]],
        wide=wide,
        few_rows=few_rows,
        token_scales=c.k_scale.dim() == 3,
        softcap=softcap > 0,
        value_layout="rows" if c.v_cache.dim() == 4 else "grouped",
    )
    sizes = sizes_of(c)
    window = options.get("window", (-1, -1))
    window = (window[0], 0) if options["causal"] else window
    scales = {0: (0, 0), 1: (0, 1), 2: (kv_heads, 1), 3: (kv_heads * page, page)}[c.k_scale.dim()]
    of_page, of_token, of_head = c.k_cache.stride()[:3]
    strides = serving.ServingStrides(
        q=_two(c.q),
        k=(of_page, of_token, of_head),
        v=c.v_cache.stride()[: 3 if c.v_cache.dim() == 4 else 2],
        table=c.block_table.stride(0),
        q_scale=(0, 0) if c.q_scale is None else _two(c.q_scale),
        k_scale=scales,
        v_scale=scales,
    )
    optional = {"lse", *(name for name in ("sinks", "q_scale") if getattr(c, name) is not None)}
    return [
        (serving.plan_kernel(config), serving.plan_launch(config, sizes, window, multiprocessors)),
        (
            serving.kernel(config),
            serving.launch(
                config, sizes, strides, window, options["softmax_scale"], softcap, frozenset(optional), multiprocessors
            ),
        ),
    ]


def _two(x: Tensor) -> tuple[int, int]:
    """Its first two strides."""
    first, second = x.stride()[:2]
    return first, second


def sizes_of(c: Case) -> serving.ServingSizes:
    lengths = (c.cu_seqlens_q[1:] - c.cu_seqlens_q[:-1]).tolist()
    return serving.ServingSizes(
        sequences=len(lengths),
        tokens=c.q.shape[0],
        max_q_len=max(lengths, default=0),
        heads=c.q.shape[1],
        kv_heads=c.k_cache.shape[2],
        pages=c.k_cache.shape[0],
        page=c.k_cache.shape[1],
        table_entries=c.block_table.shape[1],
    )


def array(x: Tensor) -> Array:
    """Its memory, from the first byte that it has to its last: 16-bit floats as uint16, codes as uint8."""
    flat = torch.as_strided(x, (x.untyped_storage().size() // x.element_size(),), (1,), 0)
    view = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    return np.ascontiguousarray(flat.view(view.get(x.dtype, x.dtype)).numpy())


def attention(
    c: Case, *, wide: bool = False, few_rows: int = 0, multiprocessors: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp."""
    return attentions(c, 1, wide=wide, few_rows=few_rows, multiprocessors=multiprocessors, seed=seed)[0]


def attentions(
    c: Case, times: int, *, wide: bool = False, few_rows: int = 0, multiprocessors: int = 1, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """The outputs and log-sum-exps of some launches with one plan."""
    plan, kernel = launches(c, wide=wide, few_rows=few_rows, multiprocessors=multiprocessors)
    config = ServingConfig(head_dim=c.q.shape[2], wide=wide, few_rows=few_rows)
    sizes = sizes_of(c)
    blocks = serving.grid_blocks(config, sizes, multiprocessors)
    inputs = {
        name: array(x)
        for name, x in c.arguments().items()
        if isinstance(x, Tensor) and x.numel() and name not in ("q_scale", "sinks")
    }
    inputs |= {name: array(x) for name, x in (("q_scale", c.q_scale), ("sinks", c.sinks)) if x is not None}
    total, heads, head_dim = c.q.shape
    outputs, steps = {}, [plan]
    for n in range(times):
        outputs[f"out_{n}"] = OutputSpec((total, heads, head_dim), "uint16")
        outputs[f"lse_{n}"] = OutputSpec((heads, total), "float32")
        params, *maps = kernel[1].args
        assert isinstance(params, Struct)
        fields = [f"{x}_{n}" if isinstance(x, str) and x in ("out", "lse") else x for x in params.fields]
        steps.append((kernel[0], replace(kernel[1], args=(Struct(tuple(fields)), *maps))))
    result = run_chain(
        [
            KernelLaunch(to_ptx(k, serving.TARGET, assemble=False), k.entry, k.block, k.dynamic_smem_bytes, launch)
            for k, launch in steps
        ],
        inputs,
        outputs,
        workspaces={
            "plan": Workspace(4 * serving.plan_words(config, sizes, blocks)),
            "partials": Workspace(4 * serving.partial_words(config, sizes, blocks)),
        },
        seed=seed,
    )
    out = [torch.from_numpy(result.outputs[f"out_{n}"]).view(c.options["out_dtype"]) for n in range(times)]
    return [(x, torch.from_numpy(result.outputs[f"lse_{n}"])) for n, x in enumerate(out)]
