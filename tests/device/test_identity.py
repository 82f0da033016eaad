"""The hash of machine code: equal exactly for kernels that do the same, whatever their text looks like."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.cubin import Image
from greenfast.device.identity import code_hash, launch_differences, launch_facts
from greenfast.spec.arch import Target
from greenfast.spec.errors import MachineError
from greenfast.spec.kernel import Argument, KernelSource, Launch, Struct, TensorMap

#: One of each thing in a cubin: constants, tables, a pointer to one, functions, strings, shared memory, branches.
SOURCE = """
struct Sizes { static constexpr int kRows = 3; static constexpr int kColumns = 5; };
__constant__ float bank[4] = {1, 2, 3, 4};
__device__ const float table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
__device__ const float* parts[2] = {table, table + 4};
__device__ int counter;
__device__ __noinline__ float scaled(float x, int i) { return table[i & 7] * x + bank[i & 3]; }
// adds up
extern "C" __global__ void __launch_bounds__(128) k(float* x, int n) {
  __shared__ float tile[128];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  float sum = scaled(tile[127 - threadIdx.x], threadIdx.x + n) + parts[n & 1][threadIdx.x & 3];
  if (n == 6) atomicAdd(&counter, Sizes::kColumns);
  switch (n) {
    case 1: sum += 1.25f; break;
    case 2: sum *= 2; break;
    case 3: sum = sqrtf(sum); break;
    case 4: sum = expf(sum); break;
    case 5: sum -= 9; break;
  }
  x[threadIdx.x] = sum / x[200];
}
extern "C" __global__ void other(float* x) { x[0] = bank[2]; }
"""
PRINTS = 'extern "C" __global__ void k(int n) { if (n > 7) printf("n is %d", n); }'


def compiled(text: str, arch: str, entry: str = "k", name: str = "k.cu", folder: Path | None = None) -> CompiledKernel:
    folders = (folder,) if folder else ()
    return compile_kernel(KernelSource(entry, text, name, folders, (128, 1, 1)), Target(arch))


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_100"])
def test_names_comments_folders_and_unused_constants_do_not_matter(arch: str, tmp_path: Path) -> None:
    before, text = compiled(SOURCE, arch), SOURCE
    for old, new in [
        ("Sizes", "Extents"),
        ("kRows = 3", "kAllRows = 4"),
        ("  __shared__", "\n\n\n  __shared__"),
        ("// adds up", "/* something else\n   on two lines */"),
        ("counter", "visits"),
        ("table", "values"),
        ("bank", "weights"),
        ("struct Extents {", "struct Extents { static constexpr long long kUnused = 7; static constexpr char kNo = 0;"),
    ]:
        assert old in text
        text = text.replace(old, new)
    struct, rest = text[1:].split("\n", 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "sizes.cuh").write_text(struct)
    after = compiled(f'#include "elsewhere/sizes.cuh"\n{rest}', arch, name="another.cu", folder=tmp_path)
    assert after.kernel_hash != before.kernel_hash
    assert code_hash(after) == code_hash(before)


#: Changes of the kernel itself, and of things that it refers to.
KERNEL_CHANGES = {
    "case 5: sum -= 9;": "case 6: sum -= 9;",
    "sum *= 2;": "sum *= 3;",
    "tile[128]": "tile[160]",
    "__launch_bounds__(128)": "__launch_bounds__(256)",
    " __launch_bounds__(128)": " __cluster_dims__(2, 1, 1) __launch_bounds__(128)",
    "float* x, int n": "float* x, long long before, int n",
}


def test_each_change_of_a_kernel_changes_the_hash() -> None:
    """The kernels are in one text, which is compiled and listed once."""
    assert all(SOURCE.count(old) == 1 for old in KERNEL_CHANGES)
    start, end = SOURCE.index('extern "C"'), SOURCE.index('extern "C" __global__ void other')
    kernel = SOURCE[start:end]
    changed = [kernel, *(kernel.replace(*change) for change in KERNEL_CHANGES.items())]
    text = SOURCE + "".join(one.replace(" k(", f" k{n}(") for n, one in enumerate(changed))
    before, same, *others = (code_hash(compiled(text, "sm_90a", f"k{n}")) for n in ("", *range(len(changed))))
    assert before == same
    assert before not in others
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    ("arch", "old", "new"),
    [
        ("sm_89", "7, 8}", "7, 9}"),
        ("sm_90a", "{1, 2, 3, 4};", "{1, 2, 3, 5};"),
        ("sm_89", "table + 4", "table + 3"),
        ("sm_90a", "kColumns = 5", "kColumns = 6"),
    ],
)
def test_different_data_changes_the_hash(arch: str, old: str, new: str) -> None:
    assert old in SOURCE
    assert code_hash(compiled(SOURCE.replace(old, new), arch)) != code_hash(compiled(SOURCE, arch))


def test_other_kernels_of_a_source_do_not_count() -> None:
    """Other kernels of the source do not count, except ``__constant__`` variables, which are loaded with each."""
    before = code_hash(compiled(SOURCE, "sm_90a", "other"))
    assert before != code_hash(compiled(SOURCE, "sm_90a"))
    assert code_hash(compiled(SOURCE.replace("sum *= 2;", "sum *= 3;"), "sm_90a", "other")) == before
    assert code_hash(compiled(SOURCE.replace("{1, 2, 3, 4}", "{1, 2, 9, 4}"), "sm_90a", "other")) != before


def test_the_text_that_a_kernel_prints_counts() -> None:
    hashes = {code_hash(compiled(PRINTS.replace("n is", text), "sm_90a")) for text in ("n is", "n=", "n is")}
    assert len(hashes) == 2


def test_bytes_without_the_kernel_are_refused() -> None:
    kernel = compiled(SOURCE, "sm_90a")
    for cubin in (b"", b"\x7fELF\x02\x01", kernel.cubin[:300]):
        with pytest.raises(MachineError, match="cannot be read"):
            code_hash(dataclasses.replace(kernel, cubin=cubin))
    missing = dataclasses.replace(kernel.source, entry="missing")
    with pytest.raises(MachineError, match="no kernel 'missing'"):
        code_hash(dataclasses.replace(kernel, source=missing))


def test_sections_symbols_and_relocations_are_read() -> None:
    image = Image(compiled(SOURCE, "sm_90a").cubin)
    data = image.find(".nv.global.init")
    assert data is not None
    found = {symbol.name: symbol for symbol in image.symbols if symbol.section == data}
    table, parts = found["table"], found["parts"]
    raw = image.sections[data].data[table.value : table.value + table.size]
    assert np.frombuffer(raw, np.float32).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    leads_to = [(image.symbols[r.symbol].name, r.addend) for r in image.relocations(data) if r.offset >= parts.value]
    assert leads_to == [("table", 0), ("table", 16)]


# Launch facts.

LAUNCH = Launch((2, 3, 1), ("x", np.int32(5), "out", "x", np.float32(0.125)))
KERNEL = KernelSource("k", "", "k.cu", (), (128, 1, 1), 1024)


def test_a_launch_is_described_in_words() -> None:
    facts = launch_facts(KERNEL, LAUNCH, {"N": 5})
    assert facts.arguments == "buffer 0; int32 5; buffer 1; buffer 0; float32 0.125"
    assert (facts.grid, facts.block, facts.dynamic_smem_bytes, facts.dims) == ((2, 3, 1), (128, 1, 1), 1024, {"N": 5})


@pytest.mark.parametrize(
    ("source", "launch", "differs"),
    [
        ({}, {"grid": (2, 4, 1)}, "the grid (2x3x1, now 2x4x1)"),
        ({"block": (256, 1, 1)}, {}, "the block (128x1x1, now 256x1x1)"),
        ({"dynamic_smem_bytes": 0}, {}, "the dynamic shared memory (1024 bytes, now 0 bytes)"),
        ({}, {"early": True}, "the early launch (no, now yes)"),
        ({}, {"cluster": (2, 1, 1)}, "the cluster (1x1x1, now 2x1x1)"),
        ({}, {"args": LAUNCH.args[:-1]}, "the number of arguments (5, now 4)"),
        ({}, {"args": (*LAUNCH.args[:-1], np.float32(0.126))}, "argument 4 (float32 0.125, now float32 0.126)"),
        ({}, {"args": ("x", np.int32(5), "x", "x", LAUNCH.args[-1])}, "argument 2 (buffer 1, now buffer 0)"),
    ],
)
def test_each_difference_of_a_launch_is_named(source: dict[str, Any], launch: dict[str, Any], differs: str) -> None:
    then = launch_facts(KERNEL, LAUNCH, {})
    assert launch_differences(then, then) == []
    now = launch_facts(dataclasses.replace(KERNEL, **source), dataclasses.replace(LAUNCH, **launch), {})
    assert launch_differences(then, now) == [differs]


def test_arguments_of_every_kind_are_distinguished() -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_int))

    box = TensorMap("x", "uint8", (8, 64), (64, 1), (8, 32), 32)
    arguments: list[Argument] = [
        "x", np.int32(1), np.int64(1), np.float32(1), b"\1", Pair(1, 2), Pair(1, 3), Struct(("x", np.int32(1))),
        Struct((np.zeros(2, np.int32),)), box, dataclasses.replace(box, swizzle=64),
        dataclasses.replace(box, strides=(128, 1)), dataclasses.replace(box, dtype="int8"),
    ]  # fmt: skip
    described = [launch_facts(KERNEL, Launch((1, 1, 1), (a,)), {}).arguments for a in arguments]
    assert len(set(described)) == len(arguments)
    assert described[-4] == "tensor map of buffer 0: uint8 8x64, strides 64x1, box 8x32, swizzle 32"
