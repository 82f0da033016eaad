"""Launch chains with programmatic dependent launch: accesses that are illegal before griddepcontrol.wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import KernelLaunch, run_chain
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.result import GridResult
from greenfast.ops import cuda
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch, TensorMap
from greenfast.spec.problem import OutputSpec
from tests.emulator.hopper import HOPPER, PREAMBLE
from tests.emulator.kernels import SEEDS

X = np.arange(128, dtype=np.float32)
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
SHARED = "__shared__ __align__(128) float s[64]; __shared__ u64 bar;"


def step(body: str, parameters: str, *args: str, early: bool = False, blocks: int = 2) -> KernelLaunch:
    source = f'{PREAMBLE}\nextern "C" __global__ void k({parameters}) {{\n#line 1 "k.cu"\n{body}\n}}'
    ptx = to_ptx(KernelSource("k", source, "k.cu", (), (64, 1, 1)), HOPPER, assemble=False)
    return KernelLaunch(ptx, "k", (64, 1, 1), 0, Launch((blocks, 1, 1), args, early))


def chain(body: str, *, early: bool = True, seed: int = 0) -> GridResult:
    """A producer writes 2 x to ``mid`` and reads ``old``; then ``body`` with these, x, and the output y."""
    first = "int i = 64 * blockIdx.x + threadIdx.x; mid[i] = 2 * x[i] + 0 * old[i];"
    steps = [
        step(first, "const float* x, float* mid, const float* old", "x", "mid", "old"),
        step(body, "const float* x, float* mid, float* old, float* y", "x", "mid", "old", "y", early=early),
    ]
    outputs = {n: OutputSpec((128,), "float32") for n in ("mid", "old", "y")}
    return run_chain(steps, {"x": X, "old": X}, outputs, seed=seed)


INDEX = "int i = 64 * blockIdx.x + threadIdx.x;\n"
GOOD: dict[str, Any] = {
    "wait": f"float v = x[i];\n{WAIT}\ny[i] = mid[i] + v;",
    "one thread waits, then a barrier": f"if (threadIdx.x == 0) {WAIT}\n__syncthreads();\ny[i] = mid[i] + x[i];",
    "a warp waits and copies": SHARED
    + f"""if (threadIdx.x == 0) {{ init(&bar, 1); init_fence(); }}
    __syncthreads();
    if (threadIdx.x == 0) {{ {WAIT} expect(&bar, 256); bulk_load(s, mid + 64 * blockIdx.x, 256, &bar); }}
    wait(&bar, 0);
    y[i] = s[threadIdx.x] + x[i]; old[i] = y[i];""",
}
BAD: dict[str, tuple[str, str]] = {
    "read": (f"float v = *(volatile float*)(mid + i);\n{WAIT}\ny[i] = v;",
             r"launch 1 \(k\) writes, in a launch that may begin early, with no griddepcontrol\.wait before .*k\.cu:2"),
    "plain read": ("y[i] = mid[i] + 1;", r"a read of byte \d+ of 'mid'.*with no griddepcontrol\.wait.*k\.cu:2"),
    "another warp waits": (f"if (threadIdx.x < 32) {WAIT}\ny[i] = mid[i];",
                           r"a read of byte (128|384) of 'mid'.*k\.cu:3"),
    "non-coherent": ("y[i] = __ldg(mid + i);", r"a read of byte \d+ of 'mid'.*with no griddepcontrol\.wait.*k\.cu:2"),
    "non-coherent behind the wait": (
        f"{WAIT}\ny[i] = __ldg(mid + i);",
        r"a read of byte \d+ of 'mid'.* writes, .* by ld\.global\.nc, which the compiler may move over .*k\.cu:3",
    ),
    "write of what was read": (
        f"old[i] = 1;\n{WAIT}\ny[i] = mid[i];",
        r"a write of byte \d+ of 'old'.*launch 1 \(k\) reads, .*k\.cu:2",
    ),
    "write of what was written": (
        f"mid[i] = 1;\n{WAIT}\ny[i] = mid[i];",
        r"a write of byte \d+ of 'mid'.*launch 1 \(k\) writes, .*k\.cu:2",
    ),
    "atomic": (f"atomicAdd(mid + i, 1.0f);\n{WAIT}\ny[i] = mid[i];", r"of 'mid'.*launch 1 \(k\) writes.*k\.cu:2"),
    "copy": (
        SHARED + f"""if (threadIdx.x == 0) {{ init(&bar, 1); init_fence(); }}
__syncthreads();
if (threadIdx.x == 0) {{ expect(&bar, 256); bulk_load(s, mid + 64 * blockIdx.x, 256, &bar); }}
{WAIT}
wait(&bar, 0);
y[i] = s[threadIdx.x];""",
        r"a read of byte \d+ of 'mid'.*with no griddepcontrol\.wait.*cp\.async\.bulk",
    ),
}  # fmt: skip


@SEEDS
@pytest.mark.parametrize("body", GOOD.values(), ids=GOOD)
def test_behind_the_wait_all_is_there(body: str, seed: int) -> None:
    assert (chain(INDEX + body, seed=seed).outputs["y"] == 3 * X).all()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("body", "message"), BAD.values(), ids=BAD)
def test_what_an_early_launch_may_not_do(body: str, message: str, seed: int) -> None:
    with pytest.raises(KernelFaultError, match=message):
        chain(INDEX + body, seed=seed)
    chain(INDEX + body, early=False, seed=seed)


def test_many_launches() -> None:
    add = step("y[threadIdx.x] += 1;", "float* y", "y", blocks=1)
    zeros = {"y": np.zeros(64, np.float32)}
    assert (run_chain([add] * 300, zeros, {"y": OutputSpec((64,), "float32")}).outputs["y"] == 300).all()


@pytest.mark.parametrize(
    ("head_dim", "early"),
    [(64, True), (64, False), *(pytest.param(128, early, marks=pytest.mark.slow) for early in (True, False))],
)
def test_the_launches_of_sdpa_in_a_row(head_dim: int, early: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 2, 70, head_dim), *[(1, 1, 150, head_dim)] * 2]
    q, k, v = (torch.randn(shape, generator=generator).to(torch.float16) for shape in shapes)
    target = Target("sm_90a")
    config = cuda.build_sdpa_config(target, head_dim, q.dtype, "fp8", 0)
    made = cuda.build_sdpa_steps(q, k, v, config, head_dim**-0.5, target)
    steps = []
    for n, made_step in enumerate(made):
        source, plan, names = made_step.source, made_step.launch, made_step.names
        args = [
            replace(a, buffer=names.get(a.buffer, a.buffer))
            if isinstance(a, TensorMap)
            else names.get(a, a)
            if isinstance(a, str)
            else a
            for a in plan.args
        ]
        plan = replace(plan, args=tuple(args), early=n == 1 and early)
        ptx = to_ptx(source, target, assemble=False)
        steps.append(KernelLaunch(ptx, source.entry, source.block, source.dynamic_smem_bytes, plan))
    outputs = {
        name: OutputSpec(tuple(shape), "uint8" if name.endswith("codes") else "float32")
        for name, shape in cuda.get_quantized_shapes(q.shape, k.shape, config).items()
    }
    outputs["out"] = OutputSpec(tuple(q.shape), "float16")
    inputs = {name: x.view(torch.uint16).numpy() for name, x in (("q", q), ("k", k), ("v", v))}
    chained = run_chain(steps, inputs, outputs).outputs
    alone = dict(inputs)
    for one in steps:  # each by itself, on what those before it left
        alone |= run_chain([one], alone, {n: o for n, o in outputs.items() if n not in alone}, poison=0).outputs
        alone = {n: a for n, a in alone.items() if n != "out" or one is steps[-1]}
    assert np.array_equal(chained["out"], alone["out"])
    result = torch.from_numpy(chained["out"]).float()
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), enable_gqa=True)
    assert (result - expected).norm() < 0.06 * expected.norm()  # FP8's own error; a race would give NaN
