"""Compiling ahead: it finds the kernels that calls need, and they are in the cache afterwards."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from greenfast.device import cache
from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.kernels.attention import backward
from greenfast.ops import warmup
from greenfast.ops.cuda import build_attention_step, build_sdpa_config, build_sdpa_steps, get_sizes
from greenfast.ops.warmup import kernels_for, warm
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, MachineError, UsageError
from greenfast.spec.kernel import KernelSource
from tests.cli.command_line import environment

HOPPER = Target("sm_90a")
SMALL = {"head_dims": [64], "dtypes": ["float16"], "precisions": ["fp8"], "causal": [False], "lengths": [128]}

Shape = tuple[int, ...]


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache for the test; the folder does not exist yet."""
    monkeypatch.setenv("GREENFAST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kernels_of_a_call(
    query: Shape, key: Shape, dtype: str = "float16", precision: str = "fp8", causal: int = 0, lse: bool = False
) -> list[KernelSource]:
    """Return the kernels of ``sdpa`` and ``attention`` for tensors of these shapes, from their plans."""
    q, k = (torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape in (query, key))
    config = build_sdpa_config(HOPPER, q.shape[3], q.dtype, precision, causal, stats=int(lse))
    on_codes = build_attention_step(replace(config, fuse_q_quant=False), get_sizes(q.shape, k.shape), 0.1, HOPPER)
    steps = (*build_sdpa_steps(q, k, k, config, 0.1, HOPPER), on_codes)
    return [step.source for step in steps]


def tiny(count: int) -> list[KernelSource]:
    """Kernels that compile in milliseconds."""
    text = 'extern "C" __global__ void k(float* out) {{ out[threadIdx.x] = {}.0f; }}'
    return [KernelSource("k", text.format(n), "k.cu", (), (128, 1, 1)) for n in range(count)]


# Which kernels


def test_every_call_finds_its_kernels_compiled() -> None:
    result, seen = set(kernels_for(HOPPER, log_sum_exp=True)), set()
    draw = random.Random(0)
    lengths = (1, 7, 64, 100, 200, 256, 300, 500, 512, 1000, 1024, 2048, 4096, 9000, 16384, 16385, 32768, 70000)
    kinds = product((64, 128, 256), ("float16", "bfloat16"), ("fp8", "int8"), (0, 1, 2), (False, True))
    for (head_dim, dtype, precision, causal, lse), _ in product(kinds, range(15)):
        q_len, kv_len = draw.choice(lengths), draw.choice(lengths)
        heads = draw.randint(1, min(1500, max(1, (1 << 18) // q_len)))  # more make a causal plan slow
        batch = draw.choice([n for n in (1, 2, 3, 8) if n <= heads])
        kv_heads = heads // batch
        query, key = (batch, kv_heads * draw.choice((1, 4)), q_len, head_dim), (batch, kv_heads, kv_len, head_dim)
        call = kernels_of_a_call(query, key, dtype, precision, causal, lse)
        assert result.issuperset(call), (query, key, dtype, precision, causal, lse)
        seen.update(call)
    assert len(seen) > 0.8 * len(result), "few kernels that no call needs"


@pytest.mark.parametrize("length", [1, 100, 128, 512, 2048, 8192])
def test_one_length_is_enough_for_any_number_of_heads(length: int) -> None:
    options = {**SMALL, "lengths": [length], "log_sum_exp": True, "causal": [False, True]}
    result = set(kernels_for(HOPPER, **options))  # type: ignore[arg-type]
    for heads in [*range(1, 140), 200, 256, 500, 512, 1000, 1024, 3000]:
        for lse in (False, True):
            assert result.issuperset(kernels_of_a_call((1, heads, length, 64), (1, heads, length, 64), lse=lse)), heads


def test_a_padded_head_dim_has_its_own_quantizer() -> None:
    result = kernels_for(HOPPER, head_dims=[80], lengths=[300])
    assert set(result).issuperset(kernels_of_a_call((2, 3, 300, 80), (2, 3, 300, 80)))
    assert len(result) == len(set(result))


def test_the_options_leave_kernels_out() -> None:
    def texts(**options: Sequence[object] | bool) -> str:
        sources = kernels_for(HOPPER, **{"lengths": [128], **options})  # type: ignore[arg-type]
        return "\n".join(source.source for source in sources)

    everything = texts(log_sum_exp=True)
    for option, value, word in (
        ("head_dims", [64, 128], "kHeadDim = 256"),
        ("dtypes", ["float16"], "__nv_bfloat16"),
        ("dtypes", ["bfloat16"], "half"),
        ("precisions", ["fp8"], "kInt8 = true"),
        ("precisions", ["int8"], "kInt8 = false"),
        ("causal", [False], "kCausal = true"),
        ("causal", [True], "kCausal = false"),
        ("log_sum_exp", False, "kLse = true"),
    ):
        assert word in everything
        assert word not in texts(**{"log_sum_exp": True, option: value}), option
    assert "kLse = false" in everything, "inference as well as training"


def test_training_finds_its_kernels_compiled() -> None:
    """The forward kernels write other numbers of each row. Only the pass in 8 bits has backward kernels."""
    common: dict[str, Any] = {"head_dims": [128], "dtypes": ["bfloat16"], "precisions": ["int8"], "lengths": [4096]}
    inference = set(kernels_for(HOPPER, **common))
    assert set(kernels_for(HOPPER, backward=["16bit"], **common)) == inference
    assert set(kernels_for(HOPPER, backward=["16bit_kept"], **common)) == set(
        kernels_for(HOPPER, log_sum_exp=True, **common)
    )
    trained = set(kernels_for(HOPPER, backward=["8bit"], **common)) - inference
    shape = (4, 16, 4096, 128)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    for causal, mask in enumerate((backward.FULL, backward.CAUSAL)):
        config = build_sdpa_config(HOPPER, 128, x.dtype, "int8", causal, stats=2)
        call = {step.source for step in build_sdpa_steps(x, x, x, config, 0.1, HOPPER)} - inference
        assert trained.issuperset({*call, *backward.list_kernels(128, mask)})
        assert any("kScoreMax = true" in source.source for source in call)


def test_combinations_that_cannot_train_in_8_bits_are_named() -> None:
    left_out: list[str] = []
    kernels_for(HOPPER, head_dims=[72, 128], dtypes=["float16", "bfloat16"], precisions=["int8"], lengths=[300],
                backward=["8bit"], left_out=left_out.append)  # fmt: skip
    assert left_out == [
        f'head dim {d}, {dtype}, int8, backward="8bit"'
        for d, dtype in ((72, "float16"), (72, "bfloat16"), (128, "float16"))
    ]
    with pytest.raises(UsageError, match="unknown backward '4bit'; allowed: 16bit, 16bit_kept, 8bit"):
        kernels_for(HOPPER, backward=["4bit"])


def test_what_a_target_has_no_kernel_for_is_left_out_and_named() -> None:
    left_out: list[str] = []
    result = kernels_for(
        Target("sm_89"), head_dims=[64, 256], precisions=["fp8"], log_sum_exp=True, left_out=left_out.append
    )
    assert {source.entry for source in result} == {"fp8_attention_ada", "quantize_qkv"}
    assert "kHeadDim = 256" not in "".join(source.source for source in result)
    assert left_out == [
        "head dim 64, float16, fp8, log-sum-exp",
        *[f"head dim 64, bfloat16, fp8{more}" for more in ("", ", log-sum-exp")],
        *[f"head dim 256, {dtype}, fp8{more}" for dtype in ("float16", "bfloat16") for more in ("", ", log-sum-exp")],
    ]


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("sm_90a", {"head_dims": [64, 100]}, "head dim 100: the kernels take multiples of 8 up to 256"),
        ("sm_90a", {"head_dims": [512]}, "head dim 512: the kernels take multiples of 8 up to 256"),
        ("sm_90a", {"head_dims": [0]}, "head dim 0: "),
        ("sm_90a", {"dtypes": ["float32"]}, "unknown dtype 'float32'; allowed: bfloat16, float16"),
        ("sm_90a", {"precisions": ["fp4"]}, "unknown precision 'fp4'; allowed: fp8, int8"),
        ("sm_90a", {"lengths": [0]}, "length 0: the kernels take lengths from 1 to 2147483647"),
        ("sm_90a", {"lengths": [1 << 31]}, "length 2147483648: the kernels take lengths"),
        ("sm_80", {}, "head dim 64, float16, fp8: .* 8.9 and up, this is sm_80; .* nothing .* compiled for sm_80"),
        ("sm_89", {"head_dims": [256]}, "head dim 256, float16, fp8: .* the Ada kernel is for head dims 64, 128; "),
    ],
)
def test_what_no_call_can_have_is_named(target: str, options: dict[str, list[int]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kernels_for(Target(target), **options)  # type: ignore[arg-type]


# Into the cache


@pytest.mark.usefixtures("cache_folder")
def test_kernels_come_from_the_cache_afterwards() -> None:
    """Those of the library: in test_build_library.py."""
    sources = tiny(4)
    steps: list[CompiledKernel] = []
    done = warm(sources, HOPPER, steps.append)
    assert (done.compiled, done.cached) == (len(sources), 0)
    assert done.seconds > 0
    assert {step.source for step in steps} == set(sources)
    assert all(compile_kernel(source, HOPPER).from_cache for source in sources)
    again = warm(sources, HOPPER)
    assert (again.compiled, again.cached) == (0, len(sources))


WARMS = """
import sys
from greenfast.ops.warmup import warm
from greenfast.spec.arch import Target
from tests.ops.test_warmup import tiny
print("ready", flush=True)
sys.stdin.readline()
done = warm(tiny(12), Target("sm_90a"), workers=2)
print(done.compiled + done.cached, done.compiled)
"""


@pytest.mark.slow
def test_processes_that_warm_at_once_leave_a_whole_cache(cache_folder: Path) -> None:
    folders = os.pathsep.join([environment()["PYTHONPATH"], str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", WARMS]
    processes = [
        subprocess.Popen(
            command,
            env=environment(PYTHONPATH=folders),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    assert not cache_folder.exists()
    seen = 0
    with ThreadPoolExecutor(len(processes)) as pool:  # start all before waiting for the first
        ends = [pool.submit(process.communicate, "go\n", 120) for process in processes]
        while not all(end.done() for end in ends):
            for entry in cache_folder.glob("entries/*/*"):
                _, lengths, parts = entry.read_bytes().split(b"\n", 2)  # after the digest
                assert sum(json.loads(lengths)) == len(parts), "an entry that is there is whole"
                seen += 1
    outputs = [end.result() for end in ends]
    assert seen > 0
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    counts = [tuple(map(int, out.split())) for out, _ in outputs]
    assert [count for count, _ in counts] == [12] * 3
    assert sum(compiled for _, compiled in counts) >= 12
    assert len(list(cache_folder.glob("entries/*/*"))) == 12
    assert list(cache_folder.glob("tmp/*")) == [], "nothing half-written is left"
    for source in tiny(12):
        saved, fresh = compile_kernel(source, HOPPER), compile_kernel(source, HOPPER, use_cache=False)
        assert saved.from_cache
        assert (saved.cubin, saved.ptx, saved.resources) == (fresh.cubin, fresh.ptx, fresh.resources)


@pytest.mark.usefixtures("cache_folder")
def test_workers_compile_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers wait for each other; a single one would wait for ever."""
    both, compiled = Barrier(2, timeout=30), warmup._compile_cached

    def meet(source: KernelSource, target: Target) -> CompiledKernel:
        both.wait()
        return compiled(source, target)

    monkeypatch.setattr(warmup, "_compile_cached", meet)
    assert warm(tiny(4), HOPPER, workers=2).compiled == 4


def test_a_cache_that_keeps_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GREENFAST_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(MachineError, match=r"file/cache does not keep .* set GREENFAST_CACHE_DIR to a writable"):
        warm(tiny(1), HOPPER)


@pytest.mark.usefixtures("cache_folder")
def test_without_a_home_folder_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache, "cache_dir", homeless)
    with pytest.raises(MachineError, match=r"the kernel cache \(Could not determine home directory\.\) does not keep"):
        warm(tiny(1), HOPPER)


@pytest.mark.usefixtures("cache_folder")
def test_an_interrupt_stops_what_has_not_begun() -> None:
    sources = tiny(40)

    def interrupt(kernel: CompiledKernel) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm(sources, HOPPER, interrupt, workers=1)
    saved, _ = cache.usage()
    assert 1 <= saved < len(sources)


@pytest.mark.usefixtures("cache_folder")
def test_a_kernel_that_does_not_compile_is_named() -> None:
    wrong = KernelSource("k", "#error no\n", "wrong.cu", (), (128, 1, 1))
    with pytest.raises(CompileError, match=r"wrong\.cu"):
        warm([wrong, *tiny(1)], HOPPER)


@pytest.mark.parametrize(
    "wrong",
    [
        {"head_dims": 64},
        {"head_dims": ["64"]},
        {"dtypes": "float16"},
        {"precisions": [8]},
        {"causal": ["yes"]},
        {"causal": True},
        {"lengths": [128.5]},
        {"lengths": None},
    ],
    ids=str,
)
def test_arguments_of_the_wrong_type(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=f"{name}: .*; a sequence of"):
        kernels_for(HOPPER, **{**SMALL, **wrong})
