"""PTX as text: literals, addresses, names and initial values, read as the PTX ISA defines them."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from greenfast.emulator.grid import run_grid
from greenfast.emulator.ptx.literals import initial
from greenfast.emulator.ptx.names import demangle, describe_element, read_shapes
from greenfast.spec.errors import UnsupportedError, UsageError
from greenfast.spec.kernel import Launch
from greenfast.spec.problem import OutputSpec

HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"


def run(
    body: str, words: int, before: str = "", threads: int = 32, inputs: dict[str, Any] | None = None, smem: int = 0
) -> list[int]:
    """Return the output words of a kernel; %out holds the generic address of the first."""
    inputs = inputs or {}
    parameters = ", ".join(f".param .u64 p{n}" for n in range(1 + len(inputs)))
    ptx = (
        f"{HEAD}{before}\n.visible .entry k({parameters})\n{{\n.reg .b64 %out, %rd<9>;\n.reg .b32 %r<9>;\n"
        f".reg .f32 %f<9>;\n.reg .f64 %d<9>;\n.reg .pred %p<9>;\nld.param.u64 %out, [p0];\n{body}\nret;\n}}\n"
    )
    outputs = {"y": OutputSpec((words,), "uint32")}
    plan = Launch((1, 1, 1), ("y", *inputs))
    return run_grid(ptx, "k", (threads, 1, 1), smem, plan, inputs, outputs).outputs["y"].tolist()  # type: ignore[no-any-return]


def test_literals_in_instructions() -> None:
    body = """
    mov.b32 %r1, 0777; st.global.b32 [%out], %r1;
    mov.b32 %r1, -0x10; st.global.b32 [%out+4], %r1;
    mov.b32 %r1, 0b1011; st.global.b32 [%out + 0x8], %r1;
    mov.f32 %f1, 1.5; st.global.f32 [%out+12], %f1;
    mov.f32 %f1, 0d4004000000000000; st.global.f32 [%out+16], %f1;
    mov.f32 %f1, 0f40200000; st.global.f32 [%out+20], %f1;
    mov.f32 %f1, -2.5e-1; st.global.f32 [%out+24], %f1;
    add.u64 %rd1, %out, 32; st.global.b32 [%rd1 + -4], %r1; st.global.b32 [%rd1-0], WARP_SZ;
    """
    singles = [struct.unpack("<I", struct.pack("<f", x))[0] for x in (1.5, 2.5, 2.5, -0.25)]
    assert run(body, 9) == [0o777, 2**32 - 16, 11, *singles, 11, 32]


@pytest.mark.parametrize(
    ("text", "kind", "size", "dims", "data"),
    [
        ("5", "u32", 4, (), "05000000"),
        ("{1, -1, 0x10, 017}", "s16", 2, (4,), "0100ffff10000f00"),
        ("{{1}, {2, 3}}", "u8", 1, (2, 3), "010000020300"),
        ("{1.5, 0f3F800000, 1e1}", "f32", 4, (3,), "0000c03f0000803f00002041"),
        ("{0d3FF0000000000000, -0.5}", "f64", 8, (2,), "000000000000f03f000000000000e0bf"),
        ("{}", "u8", 1, (2,), ""),
    ],
)
def test_initial_values(text: str, kind: str, size: int, dims: tuple[int, ...], data: str) -> None:
    assert initial(text, kind, size, dims) == (bytes.fromhex(data), ())


@pytest.mark.parametrize("text", ["{1, 2", "1}", "{a+b}", "{1;2}", "generic(a", "0xff(", "{1 2}", "", '"text"'])
def test_what_is_no_initial_value(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the initial value"):
        initial(text, "u32", 4, (2,))


def test_addresses_in_initial_values() -> None:
    """Check pointers to variables with digits in their names, the data at these pointers, and the pointers' bytes."""
    before = """
    .global .align 4 .u32 data_1x23[4] = {11, 22, 33, 44};
    .global .align 8 .u64 table9[4] = {generic(data_1x23)+4, data_1x23, generic(data_1x23) + 12, generic(data_1x23)-0};
    .global .align 8 .u64 twice[2] = {generic(table9), generic(table9)+8};
    .global .align 8 .u8 pieces[8] = {0xff(data_1x23), 0xff00(data_1x23), 0xff0000(data_1x23), 0xff000000(data_1x23),
      0xff00000000(data_1x23), 0xff0000000000(data_1x23), 0xff000000000000(data_1x23), 0xff00000000000000(data_1x23)};
    .global .align 16 .v4 .u32 four[2] = {{1, 2, 3, 4}, {5, 6}};
    """
    body = "mov.u64 %rd1, table9;"
    for n in range(4):
        body += f"ld.global.u64 %rd2, [table9+{8 * n}]; ld.u32 %r1, [%rd2]; st.global.u32 [%out+{4 * n}], %r1;"
    body += "ld.global.u64 %rd2, [twice+8]; ld.u64 %rd2, [%rd2]; ld.u32 %r1, [%rd2]; st.global.u32 [%out+16], %r1;"
    body += "ld.global.u64 %rd2, [pieces]; ld.u32 %r1, [%rd2+8]; st.global.u32 [%out+20], %r1;"
    body += "mov.u64 %rd2, data_1x23+12; ld.global.u32 %r1, [%rd2]; st.global.u32 [%out+24], %r1;"
    body += "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [four+16]; add.u32 %r1, %r1, %r2; st.global.u32 [%out+28], %r1;"
    body += "st.global.u32 [%out+32], %r3;"
    assert run(body, 9, before) == [22, 11, 44, 11, 11, 33, 44, 11, 0]


def test_an_address_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="initial value of table names nowhere, not a variable"):
        run("", 1, ".global .u64 table[1] = {nowhere};")


def test_names_like_those_of_special_registers() -> None:
    body = (
        ".reg .b32 %tidy, %clock_rate, %laneid2; mov.b32 %tidy, 1; mov.b32 %clock_rate, 2; mov.b32 %laneid2, 3; "
        "st.global.v2.b32 [%out], {%tidy, %clock_rate}; st.global.b32 [%out+8], %laneid2;"
    )
    assert run(body, 3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("mov.b32 %r1, 089;", UsageError, "089"),
        ("ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%out];", UnsupportedError, r"has \.v8"),
        ("ld.global.b32 %r1, [%out+x];", UsageError, r"cannot read the operand '\[%out\+x\]'"),
        ("ld.global.b32 %r1, [4096];", UnsupportedError, "has an address that is not known"),
        ("add.u32 %r1, %r2;", UnsupportedError, "has 2 operands in place of 3"),
        ("add.u32 5, %r2, %r3;", UnsupportedError, "writes to something that is not a register"),
        (".reg .b128 %q1;", UnsupportedError, "registers of a type that is not emulated: .reg .b128 %q1"),
        (".reg .v3 .f32 %v1;", UsageError, "registers of an unknown type"),
        ("@%p1;", UsageError, "cannot read '@%p1'"),
        ("shfl.sync.idx.b32 %r1, %r2, %r3;", UnsupportedError, "has 3 operands in place of 5"),
        ("cp.async.wait_group;", UnsupportedError, "has 0 operands in place of 1"),
    ],
)
def test_what_cannot_be_run_is_named(body: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(body, 1)


STORES = "mov.b32 %r1, 7; st.global.b32 [%out], %r1;"


@pytest.mark.parametrize(
    "body",
    [
        f".loc 1 5 0 {STORES}",
        f".loc 1 5 {STORES}",
        f".loc 1\n5\t0 {STORES}",
        f"L: .loc 1 5 0, function_name $L__info_string0 + 4, inlined_at 1 9 3 {STORES}",
        f'.pragma "/*"; {STORES} .pragma "*/";',
        f'.pragma "// nothing"; {STORES}',
    ],
)
def test_what_follows_a_directive_in_its_line_is_executed(body: str) -> None:
    assert run(body, 1) == [7]


@pytest.mark.parametrize("head", ['.file 1 "a.cu"', '.file 1 "a.cu", 12, 34', ".section .debug_str { .b8 1 }"])
def test_what_follows_a_directive_of_the_module_in_its_line_is_read(head: str) -> None:
    assert run("ld.const.u32 %r1, [c]; st.global.b32 [%out], %r1;", 1, f"{head} .const .u32 c = 7;") == [7]


def test_a_directive_that_is_not_known_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"a directive that is not emulated: \.newer 1"):
        run(f".newer 1; {STORES}", 1)


def test_a_function_with_the_name_of_one_of_cudas_is_the_modules_own() -> None:
    before = (
        ".func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b)"
        "{ .reg .b64 %a; ld.param.u64 %a, [a]; st.b32 [%a], 7; st.param.b32 [r], 0; ret; }"
    )
    body = (
        "{ .param .b64 p; .param .b64 q; .param .b32 r; st.param.b64 [p], %out; st.param.b64 [q], %out;"
        " call (r), vprintf, (p, q); }"
    )
    assert run(body, 1, before) == [7]


def test_a_register_that_nothing_has_set_is_no_zero() -> None:
    assert run("add.u32 %r1, %r2, 2; st.global.b32 [%out], %r1;", 1) == [1]
    assert run("add.f32 %f1, %f2, 0f3F800000; st.global.f32 [%out], %f1;", 1)[0] & 0x7FFFFFFF > 0x7F800000
    assert run("mov.b32 %r1, 7; @%p1 st.global.b32 [%out], %r1;", 1) == [7]


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_ZZ1kE2As", "As"),
        ("_ZZN2ns4tileIfLi16EEEvPKT_E3buf_0", "buf"),
        ("_ZN12_GLOBAL__N_15helloEv", "(anonymous)::hello"),
        ("_ZN2ns4RowsINS_5TypesILi64ELb1ELNS_4KindE12EEELi3EE4loadEPKvi", "ns::Rows::load"),
        ("_ZZN2ns4RowsILi64EE4loadEvENKUlvE_clEv", "ns::Rows::load::lambda"),
        ("plain", "plain"),
    ],
)
def test_names_without_their_mangling(symbol: str, name: str) -> None:
    assert demangle(symbol) == name


def test_elements_of_arrays_as_they_are_declared() -> None:
    source = "constexpr int N = 16; __shared__ float pad[3], As[M][N]; extern __shared__ half d[];"
    shapes = read_shapes([f"#define M 4\n{source}"])
    assert describe_element("_ZZ1kE2As", 130, 256, shapes) == "As[2][0] + 2"
    assert describe_element("_ZZ1kE3pad", 8, 12, shapes) == "pad[2]"
    assert describe_element("d", 6, 0, shapes) == "d[3]"
    assert describe_element("_ZZ1kE2As", 128, 512, shapes) == "As + 128"  # another array of that name
    assert describe_element("_ZZ1kE5other", 128, 512, shapes) == "other + 128"
