"""Compiling: results, the cache, and error messages."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from cuda.pathfinder import DynamicLibNotFoundError

from greenfast.device import cache, compiler, nvrtc, toolchain
from greenfast.device.compiler import CompiledKernel, compile_kernel, entries, kernel_hash, to_ptx
from greenfast.device.identity import code_hash
from greenfast.device.machine_code import disassemble
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, MachineError
from greenfast.spec.kernel import KernelSource

pytestmark = pytest.mark.usefixtures("cache_folder")

ADA = Target("sm_89")
HOPPER = Target("sm_90a")

SIMPLE = 'extern "C" __global__ void k(float* out) { out[threadIdx.x] = 1.0f; }'
SHARED = """extern "C" __global__ void k(float* x) {
    __shared__ float tile[128];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[127 - threadIdx.x];
}"""
LOCAL_ARRAY = """extern "C" __global__ void k(float* x, int n) {
    float v[64];
    for (int i = 0; i < 64; ++i) v[(i * n) & 63] = x[i];
    x[0] = v[n & 63];
}"""
# 96 values are live at once, and with 1024 threads each has 64 registers.
SPILLING = """extern "C" __global__ void __launch_bounds__(1024) k(float* x, int n) {
    float v[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) v[i] = x[i * n];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 96; ++i) sum = sum * v[i] + v[95 - i];
    x[0] = sum;
}"""


def source(text: str, *include_dirs: Path, smem: int = 0, name: str = "k.cu") -> KernelSource:
    return KernelSource("k", text, name, include_dirs, (128, 1, 1), smem)


def write(folder: Path, **headers: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in headers.items():
        (folder / f"{name}.cuh").write_text(text)
    return folder


def same_build(a: CompiledKernel, b: CompiledKernel) -> bool:
    def plain(kernel: CompiledKernel) -> CompiledKernel:
        return dataclasses.replace(kernel, compile_ms=0.0, from_cache=False)

    return plain(a) == plain(b)


# Results


@pytest.mark.parametrize("target", [ADA, HOPPER], ids=lambda t: t.name)
def test_machine_code_and_report(target: Target) -> None:
    kernel = compile_kernel(source(SHARED, smem=1024), target)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.resources.static_smem_bytes == 512
    assert kernel.resources.dynamic_smem_bytes == 1024
    assert kernel.resources.smem_bytes == 1536
    assert 0 < kernel.resources.registers < 64
    assert kernel.resources.spill_bytes == kernel.resources.stack_bytes == 0
    assert kernel.compiler.startswith("NVRTC ")
    assert kernel.compiler.count(".") == 2, "the patch release is known"
    assert f"-arch={target.name}" in kernel.options
    assert "--ptxas-options=-v" in kernel.options
    assert not kernel.from_cache
    assert kernel.compile_ms > 0


def test_run_time_indexed_array_has_a_stack() -> None:
    assert compile_kernel(source(LOCAL_ARRAY), ADA).resources.stack_bytes >= 256


def test_spills_are_seen() -> None:
    resources = compile_kernel(source(SPILLING), ADA).resources
    assert resources.spill_store_bytes > 0
    assert resources.spill_load_bytes > 0


def test_cuda_and_cccl_headers_are_found() -> None:
    text = "#include <cuda_fp8.h>\n#include <mma.h>\n#include <cuda/std/cstdint>\n" + SIMPLE
    compile_kernel(source(text), ADA)


@pytest.mark.parametrize("target", [ADA, HOPPER], ids=lambda t: t.name)
def test_ptx(target: Target) -> None:
    ptx = to_ptx(source(SIMPLE), target)
    assert f".target {target.name}" in ptx
    assert ".entry k(" in ptx
    assert "\0" not in ptx


@pytest.mark.parametrize("target", [ADA, HOPPER], ids=lambda t: t.name)
def test_ptx_without_assembly_equals_that_of_the_machine_code(target: Target) -> None:
    for _ in range(2):
        assert to_ptx(source(SHARED), target, assemble=False) == to_ptx(source(SHARED), target)
    refused = source(SIMPLE.replace("{", '{ asm("no_such_instruction;");', 1))
    assert "no_such_instruction" in to_ptx(refused, target, assemble=False)
    with pytest.raises(CompileError):
        to_ptx(refused, target)
    with pytest.raises(CompileError):
        to_ptx(source(SIMPLE.replace("{", "{ undeclared();", 1)), target, assemble=False)


def test_no_machine_path_in_options(tmp_path: Path) -> None:
    folder = write(tmp_path / "project", a="inline __device__ float one() { return 1.0f; }")
    kernel = compile_kernel(source('#include "a.cuh"\n' + SIMPLE, folder), ADA)
    assert not any("/" in option for option in kernel.options)


# The hash


def test_hash_covers_what_decides_the_kernel(tmp_path: Path) -> None:
    base = source('#include "a.cuh"\n' + SIMPLE, write(tmp_path / "one", a='#include "b.cuh"', b="// 1"))
    elsewhere = dataclasses.replace(base, include_dirs=(write(tmp_path / "two", a='#include "b.cuh"', b="// 1"),))
    assert kernel_hash(base) == kernel_hash(elsewhere) == kernel_hash(dataclasses.replace(base, name="other.cu"))
    others = [
        dataclasses.replace(base, source=base.source + " "),
        dataclasses.replace(base, block=(64, 1, 1)),
        dataclasses.replace(base, dynamic_smem_bytes=16),
        dataclasses.replace(base, include_dirs=(write(tmp_path / "three", a='#include "b.cuh"', b="// 2"),)),
        dataclasses.replace(base, include_dirs=()),
    ]
    hashes = {kernel_hash(other) for other in [base, *others]}
    assert len(hashes) == 1 + len(others)
    assert all(len(h) == 16 and int(h, 16) >= 0 for h in hashes)


@pytest.mark.parametrize(
    "text",
    [
        '#include "pipe.cuh"',
        '#define NAME "pipe.cuh"\n#include NAME',
        '#include /* */ "pipe.cuh"',
        '#include \\\n"pipe.cuh"',
        '#include_next "pipe.cuh"',
        '#if __has_include("pipe.cuh")\n#endif',
        '#define NAME "pipe.cuh"\n#if __has_include(NAME)\n#endif',
        '#define NAME "pipe.cuh"\n# /*\n#include "header.cuh"\n*/ include NAME',
        '#include "header.cuh"',
    ],
)
def test_a_pipe_is_no_header(tmp_path: Path, text: str) -> None:
    """The compiler would wait for it until its time is up."""
    os.mkfifo(tmp_path / "pipe.cuh")
    write(tmp_path, header='#define OTHER "pipe.cuh"\n#include OTHER')
    with pytest.raises(CompileError, match=r"k\.cu: it includes 'pipe\.cuh', a pipe or a device"):
        compile_kernel(source(text + '\nextern "C" __global__ void k() {}', tmp_path), ADA)


def test_a_pipe_that_nothing_includes_is_no_matter(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = "#if defined(__has_include)\n#ifdef __has_include\n#endif\n#endif\n"
    compile_kernel(source(text + 'extern "C" __global__ void k() {}', tmp_path), ADA)


def test_a_name_that_may_mean_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_MAX_CANDIDATES", 2)
    write(tmp_path, a="", b="", c="")
    with pytest.raises(CompileError, match=r"k\.cu: it includes a file by a macro, and this may be any of more than 2"):
        compile_kernel(source('#define NAME "a.cuh"\n#include NAME\n' + SIMPLE, tmp_path), ADA)


def test_hash_survives_include_cycles_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "sub", a='#pragma once\n#include "b.cuh"', b='#pragma once\n#include "a.cuh"\n#define B 1')
    base = source('  #  include <sub/a.cuh>\n#include "missing.cuh"\n' + SIMPLE, tmp_path)
    before = kernel_hash(base)
    write(tmp_path / "sub", b='#pragma once\n#include "a.cuh"\n#define B 2')
    assert kernel_hash(base) != before, "b.cuh is found next to a.cuh"


@pytest.mark.parametrize("language", ["cuda", "ptx"])
def test_a_nul_does_not_hide_what_follows(language: Literal["cuda", "ptx"]) -> None:
    """NVRTC takes it for the end of the text; the emulator, and who reads the file, would go on."""
    made = dataclasses.replace(source(SIMPLE + "\n\0#error hidden"), language=language)
    with pytest.raises(CompileError, match=r"k\.cu: line 2 has a NUL byte, .* stops reading; delete it"):
        compile_kernel(made, ADA)


# The time and the place of a compile


TIMES = """#define PASTE(a, b) a##b
#include "where.cuh"
extern "C" __global__ void k(char* out) {
    const char *time = PASTE(__TI, ME__), *date = __DATE__, *stamp = __TIMESTAMP__;
    for (int i = 0; i < 8; ++i) out[i] = time[i];
    for (int i = 0; i < 11; ++i) out[8 + i] = date[i];
    for (int i = 0; i < 24; ++i) out[19 + i] = stamp[i];
    place(out + 43);
}"""


@pytest.mark.parametrize("isolated", [False, True])
def test_neither_time_nor_folder_changes_the_machine_code(
    isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """__DATE__, __TIME__ (pasted too), __TIMESTAMP__, and __FILE__ of a header in two clones of a project."""
    hashes = set()
    for number, folder in enumerate((tmp_path / "a", tmp_path / "another" / "clone")):
        monkeypatch.setenv("TZ", ("UTC", "America/New_York")[number])
        time.tzset()
        (folder / "sub").mkdir(parents=True)
        write(folder, where='#include "sub/deep.cuh"')
        write(folder / "sub", deep="__device__ void place(char* out) { for (auto f = __FILE__; *f; ) *out++ = *f++; }")
        made = source(TIMES, folder)
        compiled = compile_kernel(made, HOPPER, use_cache=False, isolated=isolated)
        hashes.add(code_hash(compiled))
        assert f'"{folder}/sub/deep.cuh"' in compiled.ptx, "the line table has the whole path"
        if not number:
            time.sleep(1.1 - time.time() % 1)  # into the next second
    monkeypatch.undo()
    time.tzset()
    assert len(hashes) == 1


def test_an_error_in_a_header_has_its_whole_path(tmp_path: Path) -> None:
    """The compiler sees it by a relative one."""
    write(tmp_path, wrong="__device__ void place() { assert(nothing); }")
    for isolated in (False, True):
        with pytest.raises(CompileError, match=rf"(?m)^{re.escape(str(tmp_path))}/wrong\.cuh\(1\): error"):
            compile_kernel(source('#include "wrong.cuh"', tmp_path), ADA, isolated=isolated)


def test_a_time_is_refused_where_the_clock_cannot_be_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "fix_clock", lambda _: False)
    write(tmp_path, when="#define WHEN __TIME__")
    with pytest.raises(CompileError, match=r"has __DATE__ or __TIME__, .* take them out"):
        compile_kernel(source('#include "when.cuh"\n' + SIMPLE, tmp_path), ADA, use_cache=False)
    assert compile_kernel(source(SIMPLE), ADA, use_cache=False).cubin


# Standard headers


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("cstdint", "std::uint8_t a = 1; uint32_t b = UINT32_MAX; uintptr_t c = SIZE_MAX; x[0] = a + b + c;"),
        ("stdint.h", "int64_t a = INT64_MIN; x[0] = a;"),
        ("cmath", "x[0] = std::sqrt(x[1]) + std::pow(2, 3) + sqrtf(x[2]) + std::fmax(x[3], 1.0) + INFINITY + M_PI;"),
        ("math.h", "x[0] = exp(x[1]) + std::isnan(x[1]) + NAN + HUGE_VALF;"),
        ("limits", "constexpr float most = std::numeric_limits<float>::infinity(); x[0] = most;"),
        ("stdio.h", 'printf("%f", x[0]);'),
        ("cstdio", 'std::printf("%f", x[0]);'),
        ("cstring", 'std::memcpy(x, x + 1, 4); x[0] = std::strlen("abc") + memcmp(x, x + 1, 4);'),
        ("stddef.h", "size_t n = offsetof(float4, y); std::byte b{1}; x[n] = int(b);"),
        ("cassert", "assert(x[0] > 0);"),
        ("cstdlib", "x[0] = std::abs(int(x[1])); if (x[0] == 1) abort();"),
        ("cfloat", "constexpr float most = FLT_MAX; x[0] = most + DBL_EPSILON;"),
        ("limits.h", "x[0] = INT_MAX + CHAR_BIT;"),
        ("time.h", "clock_t then = clock(); x[0] = then;"),
        ("cinttypes", 'printf("%" PRIu64, uint64_t(1));'),
        ("cuda.h", "x[0] = sizeof(CUtensorMap);"),
        ("stdbool.h", "x[0] = true;"),
        ("cuda_runtime.h", "x[0] = make_float4(1, 2, 3, 4).x;"),
        ("cuda_fp16.h", "x[0] = __half2float(__float2half(x[1]));"),
    ],
)
def test_standard_headers_are_there(header: str, body: str) -> None:
    """By their usual names and in std, as with nvcc; a whole namespace std does not make <cmath> ambiguous."""
    text = f'#include <{header}>\nusing namespace std;\nextern "C" __global__ void k(float* x) {{ {body} }}'
    assert to_ptx(source(text), ADA)


def test_standard_headers_of_templates_are_there() -> None:
    names = ("algorithm", "array", "initializer_list", "new", "tuple", "type_traits", "utility")
    body = """std::array<float, 2> a{1, 2}; auto t = std::make_tuple(1, 2.0f); auto [first, second] = t;
        x[0] = std::max(a[0], std::get<1>(t)) + std::min({1, 2}) + std::clamp(second, 0.0f, 1.0f) + first;
        std::swap(x[0], x[1]); std::fill(x, x + 2, std::move(x[3])); static_assert(std::is_same_v<int, int>);
        for (int i : {1, 2}) x[i] = std::pair<int, int>(i, 2).second;"""
    text = "".join(f"#include <{name}>\n" for name in names) + f'extern "C" __global__ void k(float* x) {{ {body} }}'
    assert to_ptx(source(text), ADA)


def test_every_standard_header_compiles_beside_the_others() -> None:
    """All together in one compile: an include must not spoil another."""
    names = sorted(path.name for path in toolchain.STANDARD_HEADERS.iterdir())
    heavy = {"atomic", "barrier", "chrono", "complex", "latch", "mdspan", "memory", "ranges", "semaphore", "variant"}
    light = [name for name in names if name not in heavy]
    assert len(light) > 40
    assert to_ptx(source("".join(f"#include <{name}>\n" for name in (*light, *light)) + SIMPLE), ADA)


def test_a_header_of_the_project_comes_before_a_standard_one(tmp_path: Path) -> None:
    (tmp_path / "cmath").write_text("#define MINE 7")
    made = source('#include <cmath>\nextern "C" __global__ void k(int* y) { *y = MINE; }', tmp_path)
    assert "7;" in to_ptx(made, ADA)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("<iostream>", r"<iostream> is for code of the host.*inside #ifndef __CUDACC_RTC__"),
        ("<cub/cub.cuh>", r"<cub/cub\.cuh> and <thrust/\.\.\.> have code of the host.*<cub/block/block_reduce\.cuh>"),
        ("<torch/extension.h>", r"<torch/extension\.h> is for code of the host"),
        ('"mine.h"', r"'mine\.h' is not in the folders of the source.*<cuda/std/\.\.\.>"),
    ],
)
def test_a_header_that_is_not_there_is_explained(header: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        to_ptx(source(f"#include {header}\n{SIMPLE}"), ADA)


def test_a_lambda_with_auto_parameters_is_explained() -> None:
    twice = 'extern "C" __global__ void k(int* y) { auto f = [](auto v) { return 2 * v; }; *y = f(*y); }'
    with pytest.raises(CompileError, match="a lambda with auto parameters: name their types"):
        to_ptx(source(twice), ADA)
    assert to_ptx(source(twice.replace("auto v", "int v")), ADA)


# The cache


def test_a_header_that_changes_while_it_is_compiled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one content would have the other's hash, and its place in the cache for good."""
    made = source('#include "value.cuh"\nextern "C" __global__ void k(int* y) { *y = VALUE; }', tmp_path)
    honest = nvrtc.run

    def meanwhile(job: nvrtc.Job) -> nvrtc.CompilerOutput:
        write(tmp_path, value="#define VALUE 22")
        return honest(job)

    write(tmp_path, value="#define VALUE 11")
    monkeypatch.setattr(nvrtc, "run", meanwhile)
    for use_cache in (True, False):
        write(tmp_path, value="#define VALUE 11")
        with pytest.raises(CompileError, match="a file that it includes changed while it was compiled"):
            compile_kernel(made, ADA, use_cache=use_cache)
    monkeypatch.setattr(nvrtc, "run", honest)
    write(tmp_path, value="#define VALUE 11")
    assert "11;" in compile_kernel(made, ADA).ptx


def test_cache_hit_is_identical() -> None:
    first, second = compile_kernel(source(SHARED), ADA), compile_kernel(source(SHARED), ADA)
    assert not first.from_cache
    assert second.from_cache
    assert same_build(first, second)
    assert to_ptx(source(SHARED), ADA) == to_ptx(source(SHARED), ADA, use_cache=False)
    assert not compile_kernel(source(SHARED), ADA, use_cache=False).from_cache


def test_cache_distinguishes_builds() -> None:
    compile_kernel(source(SHARED), ADA)
    assert not compile_kernel(source(SHARED), HOPPER).from_cache
    assert not compile_kernel(source(SHARED + "\n"), ADA).from_cache


def test_dynamic_smem_changes_the_report_not_the_machine_code() -> None:
    first, second = compile_kernel(source(SIMPLE), ADA), compile_kernel(source(SIMPLE, smem=4096), ADA)
    assert second.cubin == first.cubin
    assert second.resources.dynamic_smem_bytes == 4096
    assert second.kernel_hash != first.kernel_hash


def test_header_edit_misses_the_cache(tmp_path: Path) -> None:
    folder = write(tmp_path / "project", a="#define VALUE 1.0f")
    text = '#include "a.cuh"\nextern "C" __global__ void k(float* out) { out[threadIdx.x] = VALUE; }'
    first = compile_kernel(source(text, folder), ADA)
    write(folder, a="#define VALUE 2.0f")
    second = compile_kernel(source(text, folder), ADA)
    assert not second.from_cache
    assert second.kernel_hash != first.kernel_hash
    assert second.cubin != first.cubin


@pytest.mark.parametrize(
    "include",
    ['#define H "mul.cuh"\n#include H', '#/**/include "mul.cuh"', '#inc\\\nlude "mul.cuh"', '%:include "mul.cuh"'],
)
def test_an_edit_of_a_header_that_is_included_in_another_way(tmp_path: Path, include: str) -> None:
    kernel = source(f'{include}\nextern "C" __global__ void k(float* x) {{ *x = MUL; }}', tmp_path)
    write(tmp_path, mul="#define MUL 2.0f\n")
    before = compile_kernel(kernel, ADA)
    write(tmp_path, mul="#define MUL 3.0f\n")
    after = compile_kernel(kernel, ADA)
    assert not after.from_cache
    assert after.cubin != before.cubin
    assert after.kernel_hash != before.kernel_hash


def test_other_folder_hits_the_cache(tmp_path: Path) -> None:
    text = '#include "a.cuh"\n' + SIMPLE
    compile_kernel(source(text, write(tmp_path / "one", a="// a")), ADA)
    assert compile_kernel(source(text, write(tmp_path / "two", a="// a")), ADA).from_cache


@pytest.mark.parametrize("name", ["k.cu", "other.cu", "below/other.cu", "/absent/other.cu"])
@pytest.mark.parametrize("isolated", [False, True])
def test_a_line_directive_keeps_its_name_and_the_cache(
    name: str, isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = source(SIMPLE.replace("{", f'{{\n#line 7 "{name}"\n'), write(tmp_path / "project"))
    for folder, cached in (("one", False), ("two", True)):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        compiled = compile_kernel(kernel, ADA, isolated=isolated)
        assert re.findall(r'\.file\s+\d+ "(.*)"', compiled.ptx) == ["k.cu", name]
        assert compiled.from_cache == cached


def test_a_cached_kernel_names_the_headers_of_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments share the cache, and each has its own folders of the project and of the CUDA headers."""
    text = """#include "../above.cuh"
    #include "inside.cuh"
    #include <library.cuh>
    extern "C" __global__ void k(int* x) { x[0] = above(x[0]) + inside(x[1]) + library(x[2]); }"""
    own_headers = toolchain.include_dirs()
    for environment in (tmp_path / "one", tmp_path / "two"):
        write(environment, above="__device__ int above(int i) { int unused; return i % 7; }")
        project = write(environment / "project", inside="__device__ int inside(int i) { int unused; return i % 3; }")
        library = write(environment / "cuda", library="__device__ int library(int i) { int unused; return i % 5; }")
        monkeypatch.setattr(toolchain, "include_dirs", lambda library=library: (*own_headers, library))
        kernel = compile_kernel(source(text, project), ADA)
        for file in ("above.cuh", "project/inside.cuh", "cuda/library.cuh"):
            assert f'"{environment}/{file}"' in kernel.ptx
        assert f"{environment}/cuda/library.cuh(1)" in kernel.log
        assert kernel.from_cache == (environment.name == "two")
        compiled = compile_kernel(source(text, project), ADA, use_cache=False)
        assert kernel.ptx == compiled.ptx
        assert re.sub(r"= .* ms", "", kernel.log) == re.sub(r"= .* ms", "", compiled.log)
    (tmp_path / "two" / "above.cuh").rename(tmp_path / "two" / "project" / "above.cuh")
    moved = compile_kernel(source(text.replace("../above", "above"), project), ADA)
    assert f'"{project}/above.cuh"' in moved.ptx


def test_a_header_in_another_of_the_folders_is_compiled_again(tmp_path: Path) -> None:
    """The sources are alike, but the folder that the cache has by its number lacks the header."""
    text = '#include "a.cuh"\nextern "C" __global__ void k(int* x) { x[0] = a(x[0]); }'
    header = "__device__ int a(int i) { return i % 7; }"
    first, second = write(tmp_path / "first", a=header), write(tmp_path / "second")
    assert f'"{first}/a.cuh"' in compile_kernel(source(text, first, second), ADA).ptx
    kernel = compile_kernel(source(text, second, first), ADA)
    assert f'"{first}/a.cuh"' in kernel.ptx
    assert not kernel.from_cache


def test_header_in_the_current_folder_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path / "here", a="#error wrong header"))
    compile_kernel(source('#include "a.cuh"\n' + SIMPLE, write(tmp_path / "project", a="// right")), ADA)


def test_unusable_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GREENFAST_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert not compile_kernel(source(SIMPLE), ADA).from_cache


def test_unwritable_entries(cache_folder: Path) -> None:
    cache.store(b"key", [b"value"])
    entries = cache_folder / "entries"
    for entry in entries.glob("*/*"):
        entry.unlink()
        entry.parent.rmdir()
    entries.rmdir()
    entries.write_text("in the way")
    assert not compile_kernel(source(SIMPLE), ADA).from_cache


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


NOTICE = re.compile(
    r"greenfast: an entry of the build cache in \S+ is damaged \(its SHA-256 differs\); it is built again\n"
)


def test_damaged_entry_is_compiled_again(cache_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = compile_kernel(source(SIMPLE), ADA)
    (entry,) = cache_folder.glob("entries/*/*")
    whole = entry.read_bytes()
    code = whole.index(first.cubin) + len(first.cubin) // 2  # one bit of the machine code: it was used silently
    damages = [flipped(whole, at) for at in (code, 0, 70, len(whole) - 1)]
    for damaged in (*damages, whole[:-1], whole + b"\0", b"", b"not json\nrest", b"\xff\xfe"):
        entry.write_bytes(damaged)
        again = compile_kernel(source(SIMPLE), ADA)
        assert not again.from_cache
        assert again.cubin == first.cubin
        assert NOTICE.fullmatch(capfd.readouterr().err)
        assert compile_kernel(source(SIMPLE), ADA).from_cache  # it was replaced
        assert capfd.readouterr().err == ""


def test_a_damaged_entry_that_cannot_be_replaced_is_told_of_once(
    cache_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache.store(b"key", [b"value"])
    (entry,) = cache_folder.glob("entries/*/*")
    entry.write_bytes(flipped(entry.read_bytes(), -1 % entry.stat().st_size))
    assert cache.load(b"key") is None
    assert cache.load(b"key") is None
    assert NOTICE.fullmatch(capfd.readouterr().err)


def test_an_entry_under_another_key_is_damaged(cache_folder: Path) -> None:
    cache.store(b"one", [b"1"])
    (one,) = cache_folder.glob("entries/*/*")
    cache.store(b"two", [b"2"])
    (two,) = set(cache_folder.glob("entries/*/*")) - {one}
    two.write_bytes(one.read_bytes())
    assert cache.load(b"one") == [b"1"]
    assert cache.load(b"two") is None


def test_a_listing_of_machine_code_is_made_again(cache_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kernel = compile_kernel(source(SIMPLE), ADA)
    before = set(cache_folder.glob("entries/*/*"))
    listing = disassemble(kernel.cubin, "k")
    (entry,) = set(cache_folder.glob("entries/*/*")) - before
    entry.write_bytes(entry.read_bytes().replace(b"STG", b"LDG"))
    assert disassemble(kernel.cubin, "k") == listing
    assert NOTICE.fullmatch(capfd.readouterr().err)


def test_cache_usage(cache_folder: Path) -> None:
    assert cache.usage() == (0, 0)
    for key in (b"one", b"two"):
        cache.store(key, [bytes(1000)])
    count, size = cache.usage()
    assert count == 2
    assert size == sum(file.stat().st_size for file in cache_folder.glob("entries/*/*")) > 2000


def test_cache_folder_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_dir() == Path(os.environ["GREENFAST_CACHE_DIR"])
    monkeypatch.delenv("GREENFAST_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_dir() == Path("/xdg/greenfast")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_dir() == Path.home() / ".cache" / "greenfast"


def test_two_processes_at_once() -> None:
    script = f"""
import hashlib, json
from greenfast.device.compiler import compile_kernel
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource
for i in range(3):
    kernel = compile_kernel(KernelSource("k", {SHARED!r} + "//" * i, "k.cu", (), (128, 1, 1)), Target("sm_89"))
    print(json.dumps([hashlib.sha256(kernel.cubin).hexdigest(), kernel.resources.registers]))
"""
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert len([json.loads(line) for line in outputs[0][0].splitlines()]) == 3
    assert compile_kernel(source(SHARED), ADA).from_cache


# Failures


def compile_error(text: str, *include_dirs: Path) -> str:
    with pytest.raises(CompileError) as caught:
        compile_kernel(source(text, *include_dirs, name="ladder.cu"), ADA)
    return str(caught.value)


def test_error_names_file_line_and_text() -> None:
    message = compile_error('extern "C" __global__ void k(float* out) {\n    out[0] = missing;\n}')
    assert 'ladder.cu(2): error: identifier "missing" is undefined' in message
    assert "out[0] = missing;" in message
    assert "sm_89" in message.splitlines()[0]
    assert "ptxas info" not in message
    assert "NVRTC_ERROR" not in message
    assert "/ladder.cu" not in message


def test_an_error_holds_nothing_that_a_terminal_acts_on() -> None:
    assert "directive: ?[31mred?[0m ?" in compile_error("#error \x1b[31mred\x1b[0m \u202e\n")


def test_error_in_a_header_names_the_header(tmp_path: Path) -> None:
    folder = write(tmp_path / "project", a="\n#error wrong tile")
    message = compile_error('#include "a.cuh"\n' + SIMPLE, folder)
    assert "a.cuh(2): " in message
    assert "wrong tile" in message


def test_missing_header_is_named() -> None:
    assert 'ladder.cu(1): catastrophic error: cannot open source file "nowhere.cuh"' in compile_error(
        '#include "nowhere.cuh"\n' + SIMPLE
    )


def test_warnings_are_kept_with_errors() -> None:
    message = compile_error('extern "C" __global__ void k(float* x) {\n    int unused;\n    x[0] = y;\n}')
    assert 'ladder.cu(2): warning #177-D: variable "unused"' in message
    assert 'ladder.cu(3): error: identifier "y"' in message


def test_error_in_inline_ptx_names_the_source_line() -> None:
    message = compile_error('extern "C" __global__ void k(float* x) {\n    x[0] = 1;\n    asm volatile("no.such;");\n}')
    assert "ladder.cu(3): ptxas error: " in message
    assert "no.such;" in message


def test_too_much_shared_memory() -> None:
    text = SHARED.replace("tile[128]", "tile[64000]")
    assert "Entry function 'k' uses too much shared data (0x3e800 bytes" in compile_error(text)


def test_missing_entry() -> None:
    message = compile_error(SIMPLE.replace('extern "C" ', ""))
    assert "ladder.cu: no kernel 'k', only: _Z1kPf" in message
    assert 'extern "C"' in message


def test_a_cached_source_is_checked_for_its_kernel() -> None:
    compile_kernel(source(SIMPLE), ADA)
    with pytest.raises(CompileError, match="no kernel 'other', only: k"):
        compile_kernel(dataclasses.replace(source(SIMPLE), entry="other"), ADA)


def test_ptx_holds_every_kernel() -> None:
    two = SIMPLE + SIMPLE.replace(" k(", " other(")
    assert entries(to_ptx(dataclasses.replace(source(two), entry=""), ADA)) == ["k", "other"]


def test_target_that_nvrtc_does_not_know() -> None:
    with pytest.raises(MachineError, match=r"NVRTC [\d.]+ does not take the options for sm_1, .*-arch"):
        compile_kernel(source(SIMPLE), Target("sm_1"))


def test_missing_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> None:
        raise DynamicLibNotFoundError("no libnvrtc")

    monkeypatch.setattr(toolchain, "load_nvidia_dynamic_lib", absent)
    with pytest.raises(MachineError, match="pip: nvidia-cuda-nvrtc"):
        compile_kernel(source(SIMPLE), ADA)


def test_nvrtc_is_loaded_with_its_builtins_before_a_thread_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in cuda.pathfinder, which gives its second caller the library without waiting for the builtins."""
    loaded: list[str] = []

    def load(name: str) -> SimpleNamespace:
        if not loaded:
            loaded.append(name)
            time.sleep(0.1)
            loaded.append("builtins")
        return SimpleNamespace(abs_path=name)

    def load_and_look(_: int) -> list[str]:
        toolchain.nvrtc_library()
        return list(loaded)

    monkeypatch.setattr(toolchain, "load_nvidia_dynamic_lib", load)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(load_and_look, range(2))) == [["nvrtc", "builtins"]] * 2


def test_nvrtc_is_not_called_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the cache holds NVRTC's version."""

    def absent() -> None:
        raise MachineError("no NVRTC")

    monkeypatch.setattr(toolchain, "nvrtc_library", absent)
    monkeypatch.setattr(compiler, "make_program_cache_key", lambda **_: pytest.fail("NVRTC is asked"))
    with pytest.raises(MachineError, match="no NVRTC"):
        compile_kernel(source(SIMPLE), ADA)


def test_a_file_has_the_same_fingerprint_in_an_image_layer(tmp_path: Path) -> None:
    """Layers of images keep times in whole seconds."""
    file = tmp_path / "libnvrtc.so"
    file.write_bytes(b"1234")
    os.utime(file, ns=(0, 7_000_000_123))
    before = toolchain.file_fingerprint(file)
    os.utime(file, ns=(0, 7_000_000_000))
    assert toolchain.file_fingerprint(file) == before
    os.utime(file, ns=(0, 8_000_000_000))
    assert toolchain.file_fingerprint(file) != before


def cuda_headers(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_incomplete_headers_name_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cuda_headers(tmp_path / "include", "cuda_fp8.h")
    monkeypatch.setattr(toolchain, "_header_folders", lambda: [folder])
    with pytest.raises(MachineError, match=r"crt/mma\.h; install with pip: nvidia-cuda-crt "):
        compile_kernel(source(SIMPLE), ADA)
    cuda_headers(folder, "crt/mma.h")
    monkeypatch.setattr(toolchain, "find_nvidia_header_directory", lambda _: None)
    with pytest.raises(MachineError, match="pip: nvidia-cuda-cccl"):
        compile_kernel(source(SIMPLE), ADA)


def test_system_toolkit_is_used_where_packages_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvidia_header_directory", lambda _: None)
    headers = ("cuda_fp8.h", "crt/mma.h")
    new = cuda_headers(tmp_path / "cuda13" / "include", *headers, "cccl/cuda/std/version")
    monkeypatch.setattr(toolchain, "get_cuda_path_or_home", lambda: str(new.parent))
    assert toolchain.cuda_include_dirs() == (new, new / "cccl")
    old = cuda_headers(tmp_path / "cuda12" / "include", *headers, "cuda/std/version")
    monkeypatch.setattr(toolchain, "get_cuda_path_or_home", lambda: str(old.parent))
    assert toolchain.cuda_include_dirs() == (old,)
    assert toolchain.fingerprint()
