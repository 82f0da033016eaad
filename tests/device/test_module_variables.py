"""State across launches: each way to keep it is counted from the machine code, and tables for reading are not."""

from __future__ import annotations

import re

import pytest

from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.cubin import Image
from greenfast.device.module_variables import HEAP_BYTES, find_readonly_globals, variable_bytes
from greenfast.spec.arch import Target
from greenfast.spec.errors import DamagedCodeError, MachineError
from greenfast.spec.kernel import KernelSource

ADA, HOPPER, BLACKWELL = Target("sm_89"), Target("sm_90a"), Target("sm_120a")
KERNEL = 'extern "C" __global__ void k(int* x) { %s }'
COUNTS = "ld.global.u32 %0, [hidden]; add.u32 %0, %0, 1; st.global.u32 [hidden], %0;"


def inline(ptx: str, after: str = "x[0] = v;") -> str:
    return KERNEL % f'int v = 0; asm volatile("{ptx}" : "+r"(v) :: "memory"); {after}'


#: name -> (source, bytes of state)
STATE = {
    "a variable": ("__device__ int n;" + KERNEL % "x[0] = n++;", 4),
    "one with an initial value": ("__device__ int n[3] = {1, 2};" + KERNEL % "x[0] = n[x[1]]++;", 12),
    "of a structure": ("__device__ float2 n[100];" + KERNEL % "atomicAdd(&n[x[0]].x, 1.0f);", 800),
    "managed": ("__device__ __managed__ int n;" + KERNEL % "x[0] = n++;", 4),
    "static in the function": (KERNEL % "static int n = 5; x[0] = n++;", 4),
    "inline PTX": (inline("{ .global .u32 hidden; " + COUNTS + " }"), 4),
    "inline PTX, an array": (inline("{ .global .align 16 .b8 hidden[64]; " + COUNTS + " }"), 64),
    "inline PTX, other registers": (
        "__device__ int n = 3;" + inline("{ .reg .u64 q; mov.u64 q, n; ld.global.u32 %0, [q]; st.global.u32 [q], 9; }"),
        4,
    ),
    "inline PTX after an empty scope": ("__device__ int n = 3;" + inline("{ } st.global.u32 [n], 9;", "x[0] = n;"), 4),
    "through a pointer variable": ("__device__ int n[64]; __device__ int* p = n;" + KERNEL % "x[0] = p[3]++;", 256),
    "in a called function": (
        "__device__ int n[16]; __device__ __noinline__ int f(int i) { return n[i]++; }" + KERNEL % "x[0] = f(x[1]);",
        64,
    ),
    "passed to a function": (
        "__device__ int n[16] = {1}; __device__ __noinline__ void f(int* p) { *p += 1; }"
        + KERNEL % "f(n + x[0]); x[1] = n[3];",
        64,
    ),
    "passed after a printf": (
        "__device__ int n = 1; __device__ __noinline__ void f(int* p) { *p += 1; }"
        + KERNEL % 'if (x[0]) printf("%d", x[1]); f(&n); x[1] = n;',
        4,
    ),
    "returned by a function": (
        "__device__ int n[16] = {1}; __device__ __noinline__ int* f(int i) { return n + i; }"
        + KERNEL % "*f(x[0]) += 3; x[1] = *f(x[2]);",
        64,
    ),
    "its address in an output": (
        'extern "C" __device__ int n[16] = {1}; extern "C" __global__ void k(int** x)'
        " { if (x[0]) x[0][2]++; x[0] = n; }",
        64,
    ),
    "its address in shared memory": (
        "__device__ int n[16] = {1};"
        + KERNEL % "__shared__ int* s[32]; s[threadIdx.x] = n; __syncthreads(); s[x[0]][1]++; x[1] = n[1];",
        64,
    ),
    "its address in local memory": (
        "__device__ int n[16] = {1};" + KERNEL % "int* volatile s[32]; s[x[2]] = n; s[x[0]][1]++; x[1] = n[1];",
        64,
    ),
    "its address by branches": (
        "__device__ int n = 3;"
        + KERNEL % "for (int i = 0; i < 64; i++) if ((unsigned long long)&n >> i & 1) x[2] += 1 << i; x[0] = n;",
        4,
    ),
    "a string literal": (
        KERNEL
        % (
            'char* s = (char*)"abcdefgh";'
            'asm volatile("st.u8 [%0], %1;" :: "l"(s + x[1]), "r"(x[2]) : "memory"); x[0] = s[x[3]];'
        ),
        9,
    ),
    "__constant__ through its address": (
        "__constant__ int c[4] = {1, 2, 3, 4};"
        + KERNEL % 'int* p; asm volatile("cvta.const.u64 %0, %1;" : "=l"(p) : "l"(c)); x[0] = p[0]; p[x[1]] = 7;',
        16,
    ),
    "a variable that another kernel writes": (
        '__device__ int n; extern "C" __global__ void other(int* x) { n = x[0]; }' + KERNEL % "x[0] = n;",
        4,
    ),
    "the device heap": (KERNEL % "int* p = (int*)malloc(4); x[1] = *p; *p = x[0]; free(p);", HEAP_BYTES),
}
#: name -> (source, bytes of __constant__ variables)
TABLES = {
    "a constexpr member": (
        "struct S { static constexpr int a[4] = {1, 2, 3, 4}; };" + KERNEL % "x[0] = S::a[x[1]];",
        0,
    ),
    "a constexpr member that nothing uses": ("struct S { static constexpr int a = 4; };" + KERNEL % "x[0] = S::a;", 0),
    "a static const array": (KERNEL % "static const int t[5] = {4, 3, 2, 9, 8}; x[0] = t[x[1]];", 0),
    "a __device__ const array": ("__device__ const int n[4] = {1, 2, 3, 4};" + KERNEL % "x[0] = n[x[1]];", 0),
    "a variable that is only read": ("__device__ int n[4] = {1, 2, 3, 4};" + KERNEL % "x[0] = n[x[1]];", 0),
    "one that nothing uses": ("__device__ int n;" + KERNEL % "x[0] = 1;", 0),
    "one that is copied to shared memory": (
        "__device__ int n[4] = {3};"
        + KERNEL
        % (
            "__shared__ int s[4];"
            'asm volatile("cp.async.ca.shared.global [%0], [%1], 16; cp.async.wait_all;"'
            ':: "r"((unsigned)__cvta_generic_to_shared(s)), "l"(__cvta_generic_to_global(n))); x[0] = s[x[1]];'
        ),
        0,
    ),
    "__constant__": ("__constant__ int c[4] = {1, 2, 3, 4};" + KERNEL % "x[0] = c[x[1]];", 16),
    "a table of the compiler's": (KERNEL % "x[0] = sinf(x[1]);", 0),
    "a table of functions": (
        "typedef int (*F)(int); __device__ __noinline__ int f(int i) { return 3 * i; }"
        "__device__ __noinline__ int g(int i) { return 5 * i; } __device__ F t[2] = {f, g};"
        + KERNEL
        % "x[1] = t[x[0]](x[2]);",
        0,
    ),
    "tables of virtual functions": (
        "struct A { virtual __device__ int f(int i) const = 0; };"
        "struct B : A { __device__ int f(int i) const override { return 3 * i; } };"
        "struct C : A { __device__ int f(int i) const override { return 5 * i; } };"
        + KERNEL
        % "B b; C c; const A* a = x[0] ? (const A*)&b : &c; x[1] = a->f(x[2]);",
        0,
    ),
    "printf": (KERNEL % 'if (x[0] > 7) printf("n is %%d %%s", x[0], "of these");', 0),
    "assert": (KERNEL % 'if (x[0] > 7) __assertfail("x", "file", 3, "k", 1); x[0] = 1;', 0),
    "shared memory": (KERNEL % "__shared__ int s[32]; s[threadIdx.x] = x[0]; __syncthreads(); x[1] = s[3];", 0),
}


def compiled(text: str, target: Target) -> CompiledKernel:
    source = KernelSource(entry="k", source=text.replace("%%", "%"), name="k.cu", include_dirs=(), block=(32, 1, 1))
    return compile_kernel(source, target)


@pytest.mark.parametrize("target", [ADA, HOPPER, BLACKWELL], ids=lambda target: target.name)
@pytest.mark.parametrize("name", STATE)
def test_memory_that_outlives_a_launch_is_counted(name: str, target: Target) -> None:
    text, expected = STATE[name]
    assert compiled(text, target).resources.global_bytes == expected


@pytest.mark.parametrize("target", [ADA, HOPPER, BLACKWELL], ids=lambda target: target.name)
@pytest.mark.parametrize("name", TABLES)
def test_what_is_only_read_is_not(name: str, target: Target) -> None:
    text, constant = TABLES[name]
    found = compiled(text, target).resources
    assert (found.global_bytes, found.constant_bytes) == (0, constant)


def test_without_ptx_every_variable_counts() -> None:
    kernel = compiled(TABLES["__constant__"][0] + "__device__ const int t[2] = {1, 2};", HOPPER)
    assert variable_bytes(kernel.cubin) == (24, 16)
    assert variable_bytes(kernel.cubin, kernel.ptx) == (0, 16)


def test_bytes_that_no_symbol_names_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code whose symbols were stripped."""
    kernel = compiled("__device__ char a[3]; __device__ int n[8];" + KERNEL % "x[0] = n[x[1]]++ + a[x[2]]++;", HOPPER)
    assert variable_bytes(kernel.cubin, kernel.ptx) == (35, 0)
    whole = Image._symbols
    monkeypatch.setattr(Image, "_symbols", lambda self, table: [s for s in whole(self, table) if s.name != "n"])
    assert variable_bytes(kernel.cubin, kernel.ptx) == (35, 0)
    monkeypatch.setattr(Image, "_symbols", lambda self, table: [])
    assert variable_bytes(kernel.cubin, kernel.ptx) == (35, 0)


@pytest.mark.parametrize("text", ["__device__ int a[1ull << 30];", "__device__ char a[3ull << 30], b[3ull << 30];"])
def test_variables_of_four_gigabytes_are_refused(text: str) -> None:
    """A section's size in the cubin is the sum modulo 4 GiB, so they would count with almost nothing."""
    source = KernelSource("k", f'{text}\nextern "C" __global__ void k(int i) {{ a[i] = i; }}', "k.cu", (), (32, 1, 1))
    with pytest.raises(DamagedCodeError, match=r"the variable '[ab]' of \d+ bytes exceeds its section of \d+ bytes"):
        compile_kernel(source, Target("sm_90a"))


def test_bytes_that_are_no_cubin_are_refused() -> None:
    with pytest.raises(MachineError, match="the machine code cannot be read: not an ELF image"):
        variable_bytes(b"no cubin")


@pytest.mark.parametrize(
    "code",
    [
        "st.global.u32 [n], 1;",
        "@%p1 st.global.v2.u32 [n+8], {%r1, %r2};",
        "mov.u64 %rd1, n; add.s64 %rd2, %rd1, 4; red.global.add.u32 [%rd2], 1;",
        "mov.b64 {%r1, %r2}, n; mov.b64 %rd1, {%r1, %r2}; st.u32 [%rd1], 1;",
        "L: bra M; M: { .reg .b64 n2; mov.b64 n2, n; { st.u32 [n2], 1; } }",
        "st.u64 [%rd9], n;",
        "{ .param .b64 p; st.param.b64 [p], n; mov.b64 %rd1, p; ld.u64 %rd2, [%rd1]; st.u32 [%rd2], 1; }",
        "{ .param .b64 p; st.param.b64 [p], n; call.uni vprintf, (p, p); call.uni f, (p); }",
        "{ .global .u64 q = n; ld.global.u64 %rd1, [q]; st.global.u32 [%rd1], 1; }",
        "st.local.u64 [%rd8], n; ld.local.u64 %rd1, [%rd7]; st.u32 [%rd1], 1;",
        "setp.eq.u64 %p1, n, %rd1; @%p1 bra L;",
        "tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], n;",
        "? n;",
        ".loc 1 2 3 st.global.u32 [n], 1;",
        ".loc 1\n2 3\tst.global.u32 [n], 1;",
        "L: .loc 1 2 3, function_name $L__info + 4, inlined_at 1 5 6 st.global.u32 [n], 1;",
        '.file 2 "b.cu", 7, 8 st.global.u32 [n], 1;',
        '.pragma "/*"; st.global.u32 [n], 1; .pragma "*/";',
        "{ .reg .b64 vprintf; mov.b64 vprintf, n; call f, (vprintf); }",
        "mov.b64 %rd1, n; call (%r1), %rd1, (%rd1), prototype;",
    ],
)
def test_code_that_may_write_a_variable(code: str) -> None:
    module = ".global .u32 n; .global .u32 m[2] = {1, 2};\n.visible .entry k(.param .u64 a) {\n%s ret;\n}\n"
    assert find_readonly_globals(module % code, {"n", "m"}) == {"m"}
    assert find_readonly_globals(module % re.sub(r"\bn\b", "m", code), {"n", "m"}) == {"n"}


@pytest.mark.parametrize(
    "code",
    [
        "mov.u64 %rd1, n; and.b64 %rd2, %rd1, 255; add.s64 %rd3, %rd2, %rd9; ld.global.u8 %r1, [%rd3];",
        "mov.u64 %rd1, n; shr.u64 %rd2, %rd1, 8; ld.const.u8 %r1, [%rd2];",
        "mov.u64 %rd1, n; sub.u64 %rd2, %rd9, %rd1; ld.global.u8 %r1, [%rd2];",
        "mov.u64 %rd1, n; add.s64 %rd2, %rd1, %rd1; ld.global.u8 %r1, [%rd2];",
        "mov.u64 %rd1, n; mov.u64 %rd2, table; add.u64 %rd3, %rd2, %rd1; ld.const.u8 %r1, [%rd3];",
        "ld.global.u32 %r1, [n+%rd4];",
        "cvt.u32.u64 %r2, n; add.cc.u32 %r1, %r2, %r3; addc.u32 %r4, 0, 0;",
        "mov.u64 %rd1, n; add.cc.u64 %rd2, %rd1, 1; addc.u64 %rd3, 0, 0;",
        "mov.u64 %rd1, n; mul.hi.u64 %rd2, %rd1, 3;",
        "mov.u64 %rd1, n; cvt.rn.f64.u64 %fd1, %rd1;",
        "mov.u64 %rd1, n; @%p1 prmt.b32 %r1, %r2, %r3, %rd1;",
        "mov.u64 %rd1, n; shfl.sync.idx.b32 %r1, %rd1, 0, 31, -1;",
        "mov.u64 %rd1, n; lop3.b32 %r1, %rd1, 1, 0, 1;",
        "mov.u64 %rd1, n; selp.u64 %rd2, 1, 0, %rd1;",
        "mov.u64 %rd1, n; brx.idx %rd1, L;",
        "mov.u64 %rd1, n; nanosleep.u32 %rd1;",
        "mov.u64 %rd1, n; tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [t, {%rd1}];",
        "mov.u64 %rd1, n; ld.global.L2::cache_hint.u32 %r1, [%rd4], %rd1;",
        "mov.u64 %rd1, n; ld.global.v2.u64 {%rd2, %rd3}, [%rd4], %rd1;",
        "mov.u64 %rd1, n; atom.global.add.u64 %rd2, [%rd4], %rd1;",
        "st.local.u64 [%rd8], n; ld.local.u8 %r1, [%rd7+3];",
        "st.local.u64 [%rd8], n; st.local.u8 [%rd8], 0; ld.local.u64 %rd1, [%rd7];",
        "st.local.v2.u64 [%rd8], {%rd3, n}; st.v4.u8 [%rd6], {%r1, %r1, %r1, %r1}; ld.u64 %rd1, [%rd7];",
        "st.local.u32 [%rd8], n;",
        "{ .param .b64 p; st.param.b64 [p], n; st.param.b8 [p+1], 0; ld.param.b64 %rd1, [p]; }",
        "{ .param .b64 p; st.param.b64 [p], n; ld.param.b8 %rd1, [p+2]; }",
        "ld.global.u8 %r1, [pointer+3];",
        "cp.async.ca.shared.global [%r1], [pointer], 8;",
        "cp.async.ca.shared.global [%r1], [%rd1], 8, n;",
    ],
)
def test_an_address_that_is_taken_apart_is_lost(code: str) -> None:
    """By way of a table, the carry flag, a predicate or part of a word it could come back whole."""
    variables = ".global .u32 n; .global .u64 pointer = generic(n); .const .b8 table[256];"
    found = find_readonly_globals(
        f"{variables}\n.entry k(.param .u64 a) {{\n{code} ret;\n}}\n", {"n", "pointer", "table"}
    )
    assert "n" not in found
    assert "pointer" in found


@pytest.mark.parametrize(
    "code",
    [
        "cvta.global.u64 %rd2, n; add.s64 %rd3, %rd9, %rd2; sub.s64 %rd4, %rd3, 8; ld.global.u32 %r1, [%rd4+4];",
        "mov.u64 %rd1, n; mad.wide.u32 %rd2, %r1, 4, %rd1; @%p1 ld.global.nc.v2.f32 {%f1, %f2}, [%rd2];",
        "mov.u64 %rd1, n+4; selp.b64 %rd2, %rd1, m, %p1; L: add.s64 %rd2, %rd2, 4; ld.u32 %r1, [%rd2]; bra L;",
        "st.local.u64 [%rd8], n; ld.local.u64 %rd1, [%rd7]; ld.global.u32 %r1, [%rd1]; add.cc.u32 %r2, %r1, %r1;",
        "{ .param .b64 p; st.param.b64 [p], n; ld.param.b64 %rd1, [p]; ld.u32 %r1, [%rd1]; }",
        "ld.global.u64 %rd1, [pointer]; ld.global.u32 %r1, [%rd1];",
        "prefetch.global.L2 [n+128];",
    ],
)
def test_an_address_that_stays_one_is_followed(code: str) -> None:
    variables = ".global .u32 n; .global .u32 m; .global .u64 pointer = generic(n);"
    found = find_readonly_globals(f"{variables}\n.entry k(.param .u64 a) {{\n{code} ret;\n}}\n", {"n", "m", "pointer"})
    assert found == {"n", "m", "pointer"}


def test_a_function_of_the_module_with_the_name_of_one_of_cudas_may_write() -> None:
    calls = ".entry k() { .param .b64 p; st.param.b64 [p], n; call (p), vprintf, (p, p); }"
    func = ".func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b)"
    assert find_readonly_globals(f".global .u32 n; .extern {func}; {calls}", {"n"}) == {"n"}
    assert find_readonly_globals(f".global .u32 n; {calls} {func} {{ ret; }}", {"n"}) == set()


def test_only_variables_of_the_module_are_known_to_be_safe() -> None:
    module = '.global .u32 n; // .global .u32 a;\n.entry k() { .global .u32 b; .loc 1 2 3, "; .global .u32 c;"\n ret; }'
    assert find_readonly_globals(module, {"n", "a", "b", "c", "d"}) == {"n"}


def test_a_variable_with_the_address_of_another() -> None:
    module = ".global .u32 n; .global .u64 p = generic(n); .entry k() { ld.global.u64 %rd1, [p]; st.u32 [%rd1], 1; }"
    assert find_readonly_globals(module, {"n", "p"}) == {"p"}
    assert find_readonly_globals(module, {"n"}) == set()  # p may be anything
