"""Small cases of every kernel for Hopper under compute-sanitizer, and planted faults that show what its tools see.

python scripts/sanitize.py [--tools memcheck,racecheck,synccheck] [--cases TEXT] [--timeout S] [--log FOLDER]

Needs a Hopper GPU and compute-sanitizer of the CUDA toolkit. First the cases whose names contain TEXT run without a
tool, as many at a time as there are processors, which compiles their kernels into the cache. Then the tools run at the
same time, each over all these cases, and each fault runs under the tool that is to see it. Exit 1 if a case fails
without a tool, if memcheck or synccheck reports something about a case, or if a tool comes to no end. What racecheck
reports has to be read: for it an arrival at an mbarrier is of its own thread alone, so it accuses correct kernels in
which one thread arrives for others. What the tools print goes to FOLDER.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu_session import GpuSession
from greenfast.device.session import Executable, KernelImage
from greenfast.judge.report.formatting import table
from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.quantize import qkv
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import Case, OutputSpec

TOOLS = ("memcheck", "racecheck", "synccheck")
#: Whose reports decide the exit code.
DECIDING = ("memcheck", "synccheck")
PRECISIONS = ("fp8", "int8", "int8_fine")
_RUN = "case: "
_FOUND = re.compile(r"ERROR SUMMARY: (\d+)|RACECHECK SUMMARY: (\d+)")
_REPORT = re.compile(r"^========= (?:Invalid|Barrier|Error|Misaligned).*")

# ---- cases ----------------------------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every family of kernels, by name, with calls that launch it."""
    for precision, head_dim, causal in product(PRECISIONS, HEAD_DIMS, (False, True)):
        name = f"sdpa {precision}, head dim {head_dim}{', causal' if causal else ''}"
        yield name, partial(_sdpa, precision, head_dim, causal)
    for precision, head_dim in product(PRECISIONS, HEAD_DIMS):
        yield f"quantize, attention {precision}, head dim {head_dim}", partial(_kept, precision, head_dim)
    for head_dim in HEAD_DIMS:
        yield f"norm, RoPE, head dim {head_dim}", partial(_transform, head_dim)
        yield f"LayerNorm, tables of heads, head dim {head_dim}", partial(_transform_of_heads, head_dim)
    for head_dim, rows in product(HEAD_DIMS, (1, 300)):
        name = f"serving {'decode' if rows == 1 else 'prefill'}, append, plan, head dim {head_dim}"
        yield name, partial(_serve, head_dim, rows)
    for head_dim in HEAD_DIMS:
        yield f"parallel, head dim {head_dim}", partial(_parallel, head_dim)
    yield "masks by tiles", _make_masks
    for precision, head_dim in product(PRECISIONS, HEAD_DIMS):
        yield f"masked {precision}, head dim {head_dim}", partial(_masked, precision, head_dim)
        yield f"packed {precision}, head dim {head_dim}", partial(_packed, precision, head_dim)
    for head_dim in HEAD_DIMS:
        yield f"two parts, head dim {head_dim}", partial(_parts, head_dim)
        yield f"backward in 8 bits, head dim {head_dim}", partial(_backward, head_dim)
        yield f"masked backward in 8 bits, head dim {head_dim}", partial(_masked_backward, head_dim)


def _randn(*shape: int) -> Any:
    import torch

    made = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))  # on the CPU: no kernel of PyTorch's
    return made.bfloat16().cuda()


def _sdpa(precision: str, head_dim: int, causal: bool) -> None:
    """More work tiles than multiprocessors: blocks load rows of Q where they have read others. Then skipped tiles."""
    import greenfast

    attend: Any = greenfast.sdpa
    q, k, v = (_randn(1, 140, 90, head_dim) for _ in range(3))
    attend(q, k, v, is_causal=causal, precision=precision, return_lse=causal)
    k, v = _randn(1, 2, 700, head_dim), _randn(1, 2, 700, head_dim)
    attend(q[:, :2], k, v, precision=precision)
    k[:, :, 0] = 4.0
    attend(
        q[:, :2] + 1, k, v, is_causal=causal, causal_alignment="lower_right", precision=precision, skip_threshold=0.5
    )


def _kept(precision: str, head_dim: int) -> None:
    import greenfast

    quantize: Any = greenfast.quantize
    codes = quantize(*(_randn(1, 3, 300, head_dim) for _ in range(3)), precision=precision)
    greenfast.attention(codes, is_causal=True)


#: Rows, and the choice of work for a block: of one head, then of several, as in longer sequences.
_BLOCKS: tuple[tuple[int, dict[int, tuple[int, int, int]]], ...] = ((300, {}), (301, {0: (2, 2, 4)}))


def _transform(head_dim: int) -> None:
    """Pairs of columns in one thread, in two threads and adjacent ones; norms of each head and over all heads."""
    import greenfast

    block: Any = greenfast.attention_block
    for rows, shares in _BLOCKS:
        q, k, v = (_randn(1, n, rows, head_dim) for n in (4, 2, 2))
        for rope_dim, interleaved, heads in (
            (head_dim, False, ((), ())), (24, False, ((4,), (2,))), (24, True, ((), ()))
        ):  # fmt: skip
            with patch.dict(qkv._SHARES, shares):
                block(
                    q, k, v, True, q_norm=_randn(*heads[0], head_dim), k_norm=_randn(*heads[1], head_dim),
                    rope=(_randn(rows, rope_dim // 2), _randn(rows, rope_dim // 2)), rope_dim=rope_dim,
                    rope_interleaved=interleaved,
                )  # fmt: skip


def _transform_of_heads(head_dim: int) -> None:
    """LayerNorm of each head, then over all heads with tables of each head."""
    import greenfast

    block: Any = greenfast.attention_block
    for rows, shares in _BLOCKS:
        q, k, v = (_randn(1, 4, rows, head_dim) for _ in range(3))
        table = _randn(rows, head_dim // 2)
        of_heads = _randn(1, rows, 4, head_dim // 2).transpose(1, 2)
        for shape, rope in (((), (table, table)), ((4,), (of_heads, of_heads))):
            weight, bias = _randn(*shape, head_dim), _randn(*shape, head_dim)
            options = dict(q_norm=weight, k_norm=weight, q_norm_bias=bias, k_norm_bias=bias, rope=rope)
            with patch.dict(qkv._SHARES, shares):
                block(q, k, v, norm="layer", **options)


def _serve(head_dim: int, rows: int) -> None:
    """Three sequences with some past; their new tokens are appended, then attended to."""
    import torch

    import greenfast

    cache = greenfast.PagedKVCache(64, 64, 2, head_dim, device="cuda")
    past, names = [0, 70, 600], ["a", "b", "c"]
    for name, before in zip(names, past, strict=True):
        assert cache.reserve(name, before + rows)
    total, every = 3 * rows, [0] * 3
    for starts, counts in ((every, past), (past, [rows] * 3)):
        slots = cache.slot_mapping(names, starts, counts)
        q, k, v = (_randn(sum(counts), n, head_dim) for n in (8, 2, 2))
        k_cache, v_cache, k_scale, v_scale = cache.layer(0)
        q = greenfast.append_kv(q, k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
    lengths = torch.tensor([0, rows, 2 * rows, total], dtype=torch.int32).cuda()
    used = torch.tensor([before + rows for before in past], dtype=torch.int32).cuda()
    plan = greenfast.ServingPlan(lengths, used, rows, heads=8, kv_heads=2, head_dim=head_dim, causal=True)
    for prepared in (plan, None):
        greenfast.flash_attn_varlen_func(
            q, k_cache, v_cache, lengths, None, rows, 1000, seqused_k=used, block_table=cache.block_table(names),
            k_descale=k_scale, v_descale=v_scale, causal=True, scheduler_metadata=prepared,
        )  # fmt: skip


def _parallel(head_dim: int) -> None:
    """What a rank computes: codes of its keys, attention to two parts of them, and the merge."""
    from greenfast.kernels.quantize.qkv import sample_places
    from greenfast.parallel import blocks
    from greenfast.parallel.blocks import LseMerge
    from greenfast.parallel.quantized_kv import QuantizedKV

    q, k, v = _randn(1, 4, 400, head_dim), _randn(1, 2, 400, head_dim), _randn(1, 2, 400, head_dim)
    keys, merged = QuantizedKV.allocate_like(k, "fp8"), LseMerge(count=2)
    blocks.quantize_keys(k, v, k[:, :, sample_places(400)].contiguous(), "fp8", keys)
    for first, count, causal in ((0, 400, 1), (200, 256, 0)):
        merged.add(*blocks.attend(q[:, :, first:], keys, count, "fp8", causal, 0.1, False), first)


def _make_masks() -> None:
    """Masks of booleans with any strides, of segments, and of lists of blocks with indices out of range."""
    import torch

    from greenfast import BlockMask

    dense = _randn(1, 2, 300, 416) > 0
    for mask in (dense, dense[..., 1:], dense.mT):
        BlockMask.from_bool(mask)
    BlockMask.from_segments(torch.arange(300, device="cuda") // 70, causal=True)
    indices = torch.tensor([0, 2, 2, -1, 99], device="cuda").expand(1, 2, 3, 5)
    BlockMask.from_blocks(torch.full((1, 2, 3), 9, device="cuda"), indices, 300, 300)


def _masked(precision: str, head_dim: int) -> None:
    """Every source of a schedule: lengths, windows, gathered keys, bits of each head, and lists of blocks."""
    import torch

    import greenfast

    attend: Any = greenfast.sdpa
    q, k, v = _randn(2, 4, 300, head_dim), _randn(2, 2, 416, head_dim), _randn(2, 2, 416, head_dim)
    dense = _randn(2, 4, 300, 416) > 0
    indices = torch.tensor([0, 2, 2, -1, 99], device="cuda").expand(1, 1, 3, 5)
    lengths = torch.tensor([0, 333], device="cuda")
    options: tuple[dict[str, Any], ...] = (
        {"kv_lengths": lengths, "is_causal": True, "return_lse": True}, {"window": (100, 30)},
        {"window": (60, 0), "kv_lengths": lengths, "softcap": 20.0, "sinks": torch.zeros(4, device="cuda")},
        {"attn_mask": dense[:, :1, :1]}, {"attn_mask": dense, "return_lse": True},
        {"attn_mask": greenfast.BlockMask.from_blocks(torch.full((1, 1, 3), 9, device="cuda"), indices, 300, 416)},
        {"attn_mask": dense[:1, :1], "skip_threshold": 0.5},
    )  # fmt: skip
    for chosen in options:
        attend(q, k, v, precision=precision, enable_gqa=True, **chosen)


def _packed(precision: str, head_dim: int) -> None:
    """Sequences of several lengths, also without rows, with a window and with unused keys."""
    import torch

    import greenfast

    attend: Any = greenfast.varlen_attn
    queries = torch.tensor([0, 0, 1, 200, 333], dtype=torch.int32, device="cuda")
    keys = torch.tensor([0, 90, 90, 300, 555], dtype=torch.int32, device="cuda")
    q, k, v = _randn(333, 4, head_dim), _randn(555, 2, head_dim), _randn(555, 2, head_dim)
    used = torch.tensor([90, 0, 111, 254], dtype=torch.int32, device="cuda")
    for chosen in ({}, {"window_size": (-1, 0), "seqused_k": used}, {"window_size": (50, 20)}):
        attend(q, k, v, queries, keys, 199, 255, enable_gqa=True, precision=precision, **chosen)


def _parts(head_dim: int) -> None:
    """Text and image tokens that become one sequence: the boundary is inside a tile, then at its end."""
    import greenfast

    block: Any = greenfast.attention_block
    for first in (77, 128):
        q, k, v = ([_randn(1, n, rows, head_dim) for rows in (first, 300)] for n in (4, 2, 2))
        tables = [(_randn(rows, head_dim // 2), _randn(rows, head_dim // 2)) for rows in (first, 300)]
        norms = [_randn(head_dim) for _ in range(2)]
        block(q, k, v, q_norm=norms, k_norm=norms, rope=tables, rope_interleaved=first == 77)


def _backward(head_dim: int) -> None:
    """The quantizers and both kernels, with grouped heads and lengths that no tile divides."""
    import greenfast

    attend: Any = greenfast.sdpa
    for causal, rows, keys in ((False, 200, 333), (True, 300, 300), (False, 64, 1)):
        q, k, v = (_randn(1, n, s, head_dim).requires_grad_() for n, s in ((4, rows), (2, keys), (2, keys)))
        out = attend(q, k, v, is_causal=causal, enable_gqa=True, precision="int8", backward="8bit")
        out.backward(_randn(*out.shape))


def _masked_backward(head_dim: int) -> None:
    """Windows narrower than a tile, with rows and tiles without a key, and lengths with empty sequences."""
    import torch

    import greenfast

    attend: Any = greenfast.sdpa
    lengths = torch.tensor([0, 1, 300], dtype=torch.int32, device="cuda")
    options: tuple[dict[str, Any], ...] = (
        {"window": (40, 5)}, {"window": (30, 0), "causal_alignment": "lower_right"}, {"kv_lengths": lengths},
        {"kv_lengths": lengths, "is_causal": True, "window": (200, 0)},
    )  # fmt: skip
    for chosen in options:
        q, k, v = (_randn(3, n, s, head_dim).requires_grad_() for n, s in ((4, 450), (2, 333), (2, 333)))
        out = attend(q, k, v, enable_gqa=True, precision="int8", backward="8bit", **chosen)
        out.backward(_randn(*out.shape))


def run_cases(text: str, exactly: bool = False) -> None:
    """Launch the kernels of the case with this name, or of all cases with the text in their names."""
    import torch

    for name, run in cases():
        if name == text if exactly else text in name:
            print(f"{_RUN}{name}", flush=True)
            run()
            torch.cuda.synchronize()


# ---- planted faults -------------------------------------------------------------------------------------------------

#: A buffer of 64 floats, two mbarriers of one arrival, and a bulk copy of row n of x that counts at one of them.
_BULK = """
__shared__ __align__(128) float s[64]; __shared__ __align__(8) unsigned long long full, empty;
const unsigned t = threadIdx.x, to = (unsigned)__cvta_generic_to_shared(s);
const unsigned f = (unsigned)__cvta_generic_to_shared(&full), e = (unsigned)__cvta_generic_to_shared(&empty);
if (t == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1; mbarrier.init.shared.b64 [%1], 1;"
                         "fence.mbarrier_init.release.cluster;" :: "r"(f), "r"(e) : "memory");
__syncthreads();
auto wait = [](unsigned bar, int parity) {
  asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra W; }"
               :: "r"(bar), "r"(parity) : "memory");
};
auto load = [&](int n, unsigned bar) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 256;" :: "r"(bar) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
               :: "r"(to), "l"(x + 64 * n), "r"(bar) : "memory");
};
auto arrive = [](unsigned bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(bar) : "memory"); };
auto fence = [] { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); };
"""
_PIPELINE = """
if (t == 32) for (int n = 0; n < 4; ++n) { wait(e, n % 2 ^ 1); load(n, f); }
if (t < 32) for (int n = 0; n < 4; ++n) {
  wait(f, n % 2);
  y[32 * n + t] = s[t] + s[t + 32];
  fence();
  __syncwarp();
  if (t == 0) arrive(e);
}"""


#: Eight pairs of warps meet at named barriers, then all at barrier 0, as in the quantizer of head dim 256 with norm.
_PAIRS = """
__shared__ float s[512], all[512];
const unsigned t = threadIdx.x;
float sum = 0;
for (int n = 0; n < 4; ++n) {
  s[t] = x[t % 256] + n;
  asm volatile("bar.sync %0, 64;" :: "r"(1 + t / 64) : "memory");
  all[t] = s[t ^ 32];
  __syncthreads();
  sum += all[511 - t];
  __syncthreads();
}
y[t % 256] = sum;
"""


@dataclass(frozen=True)
class Planted:
    """The body of a kernel k(const float* x, float* y), and the tool that is to see its fault. x, y: 256 floats."""

    tool: str
    body: str
    threads: int = 64


#: None of them waits for what never comes.
PLANTED = {
    "a write out of bounds": Planted("memcheck", "y[threadIdx.x + (1 << 26)] = x[0];"),
    "a bulk copy from out of bounds": Planted("memcheck", _BULK + "if (t == 32) load(1 << 22, f); wait(f, 0);"),
    "no barrier between two warps": Planted(
        "racecheck", "__shared__ float s[64]; s[threadIdx.x] = x[threadIdx.x]; y[threadIdx.x] = s[63 - threadIdx.x];"
    ),
    "a correct pipeline of bulk copies": Planted("racecheck", _BULK + _PIPELINE),
    "the pipeline without a proxy fence": Planted("racecheck", _BULK + _PIPELINE.replace("fence();", "")),
    "no wait for a bulk copy": Planted(
        "racecheck", _BULK + "if (t == 32) load(0, f); __syncthreads(); y[t] = s[t]; wait(f, 0);"
    ),
    "a bulk copy over what is read": Planted(
        "racecheck", _BULK + "if (t == 32) { load(0, f); wait(f, 0); load(1, e); } wait(f, 0); y[t] = s[t]; wait(e, 0);"
    ),
    "correct pairs of warps, then all": Planted("racecheck", _PAIRS, 512),
    "a barrier in a branch": Planted("synccheck", "if (threadIdx.x < 48) __syncthreads(); y[threadIdx.x] = x[0];"),
    "an mbarrier that is not initialised": Planted(
        "synccheck",
        """__shared__ unsigned long long bar; y[threadIdx.x] = x[0];
        if (threadIdx.x == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];"
          :: "r"((unsigned)__cvta_generic_to_shared(&bar)) : "memory");""",
    ),
}


def run_planted(name: str) -> None:
    """Launch a planted fault."""
    body, block = PLANTED[name].body, (PLANTED[name].threads, 1, 1)
    source = f'extern "C" __global__ void k(const float* x, float* y) {{\n{body}\n}}'
    target = Target("sm_90a")
    kernel = compile_kernel(KernelSource("k", source, "planted.cu", (), block), target)
    x = np.zeros(256, np.float32)
    image = KernelImage(kernel.cubin, "k", block, 0)
    case = Case({"x": x}, {"y": OutputSpec((256,), "float32")})
    GpuSession(0).run(Executable.single(image, Launch((1, 1, 1), ("x", "y"))), case, 1)


# ---- the tools ------------------------------------------------------------------------------------------------------


def compile_cases(names: Sequence[str], timeout_s: float) -> list[str]:
    """Run each case in a process of its own, without a tool. Return the outputs of failing cases."""

    def run(name: str) -> str:
        command = [sys.executable, __file__, "--run", name]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        return ended.stdout + ended.stderr if ended.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return [output for output in threads.map(run, names) if output]


@dataclass
class Tool:
    """A tool that runs over this script with some arguments."""

    tool: str
    arguments: tuple[str, ...]
    log: Path
    timeout_s: float

    def __post_init__(self) -> None:
        options = ["--tool", self.tool, "--print-limit", "20", "--error-exitcode", "9"]
        if self.tool == "memcheck":  # PyTorch asks the driver for functions that it may not have
            options += ["--report-api-errors", "no"]
        command = ["compute-sanitizer", *options, sys.executable, __file__, *self.arguments]
        # PyTorch's allocator would hide where a tensor ends.
        settings = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
        self._begin, self._output = time.monotonic(), self.log.open("w")
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, env=settings,
                                         start_new_session=True)  # fmt: skip
        self.seconds = 0.0

    def poll(self) -> bool:
        """Whether it has ended; it is ended after ``timeout_s``."""
        self.seconds = time.monotonic() - self._begin
        if self._process.poll() is None and self.seconds > self.timeout_s:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.poll() is None:
            return False
        self._output.close()
        return True


def summary(log: str) -> tuple[str, int, dict[str, str]]:
    """How many errors a tool counted, "no end" without a sum; of how many cases; by case, its first report."""
    case, first, found, begun = "", dict[str, str](), "no end", 0
    for line in log.splitlines():
        if line.startswith(_RUN):
            case, begun = line.removeprefix(_RUN), begun + 1
        elif _REPORT.match(line):
            first.setdefault(case, line.removeprefix("========= "))
        elif match := _FOUND.search(line):
            found = match[1] or match[2]
    return found, begun, first


def main() -> int:
    """Run the tools over the cases and over the planted faults, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS), type=lambda text: text.split(","))
    parser.add_argument("--cases", default="", metavar="TEXT")
    parser.add_argument(
        "--timeout", default=600.0, type=float, metavar="S", help="seconds for each (default: %(default)s)"
    )
    parser.add_argument("--log", type=Path, metavar="FOLDER")
    parser.add_argument("--run", metavar="NAME", help="`cases`, a case or a planted fault, without a tool")
    asked = parser.parse_args()
    if unknown := set(asked.tools) - set(TOOLS):
        parser.error(f"--tools: {', '.join(sorted(unknown))} is none of {', '.join(TOOLS)}")
    if asked.run:
        if asked.run in PLANTED:
            run_planted(asked.run)
        else:
            run_cases(asked.cases if asked.run == "cases" else asked.run, asked.run != "cases")
        return 0
    if failed := compile_cases([name for name, _ in cases() if asked.cases in name], asked.timeout):
        print(*failed, sep="\n")
        return 1
    folder = asked.log or Path(tempfile.mkdtemp(prefix="sanitize-"))
    folder.mkdir(parents=True, exist_ok=True)
    over_cases = {
        tool: Tool(tool, ("--run", "cases", "--cases", asked.cases), folder / f"{tool}.log", asked.timeout)
        for tool in asked.tools
    }
    faults = {
        name: Tool(planted.tool, ("--run", name), folder / f"{name.replace(' ', '_')}.log", asked.timeout)
        for name, planted in PLANTED.items()
        if planted.tool in asked.tools
    }
    waiting = [*over_cases.values(), *faults.values()]
    while waiting := [tool for tool in waiting if not tool.poll()]:
        time.sleep(0.1)
    rows = []
    for name, tool in over_cases.items():
        found, begun, first = summary(tool.log.read_text(errors="replace"))
        said = "; ".join(f"{case}: {line}" for case, line in first.items())
        rows.append((name, str(begun), found, f"{tool.seconds:.0f}", said or "-"))
    print(table(("tool", "cases", "errors", "s", "first of each case"), rows))
    planted = []
    for name, tool in faults.items():
        found, _, first = summary(tool.log.read_text(errors="replace"))
        planted.append((name, tool.tool, found, f"{tool.seconds:.0f}", next(iter(first.values()), "-")))
    print(table(("planted", "tool", "errors", "s", "first"), planted))
    print(f"what the tools printed: {folder}")
    return int(any(row[2] == "no end" or (row[0] in DECIDING and row[2] != "0") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
