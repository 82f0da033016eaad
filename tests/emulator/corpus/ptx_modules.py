"""Whole modules: memory, variables, calls, branches, warps, barriers, matrices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.emulator.corpus.cuda_products import small
from tests.emulator.corpus.entry import (
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Args,
    Builder,
    Entry,
    Extent,
    InOut,
    Out,
    Rng,
    declare,
)  # fmt: skip

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"

T = "\n  .reg .b32 %t;\n  mov.u32 %t, %tid.x;\n"


def kernel(body: str, params: int = 2, before: str = "") -> str:
    """Return a kernel of pointers; %p0, %p1, ... are its parameters as global addresses and %t the thread."""
    listed = ", ".join(f".param .u64 a{n}" for n in range(params))
    loads = "".join(f"  ld.param.u64 %p{n}, [a{n}];\n  cvta.to.global.u64 %p{n}, %p{n};\n" for n in range(params))
    return f"{before}\n.visible .entry k({listed})\n{{\n  .reg .b64 %p<{params}>;{T}{loads}{body}\n  ret;\n}}"


def module(source: str, grid: Extent = 1, block: Extent = 32, refused: str = "") -> Callable[[Builder], Entry]:
    """Declare a whole module, without its header."""
    return declare("ptx", HEADER + source.lstrip("\n"), grid, block, refused=refused)


@module(
    kernel(
        r"""
  .reg .b64 %at, %to; .reg .b32 %r<4>; .reg .f32 %f<4>; .reg .b16 %h<4>;
  mad.wide.u32 %at, %t, 16, %p0; mad.wide.u32 %to, %t, 16, %p1;
  ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%at];
  st.global.v2.f32 [%to], {%f3, %f2}; st.global.v2.f32 [%to+8], {%f1, %f0};
  ld.global.v4.u8 {%h0, %h1, %h2, %h3}, [%at+4];
  mad.wide.u32 %to, %t, 4, %p2;
  st.global.v4.u8 [%to], {%h3, %h2, %h1, %h0};""",
        3,
    )
)
def vector_loads_and_stores(rng: Rng) -> Args:
    x = rng.standard_normal((32, 4)).astype(F32)
    return x, Out(x[:, ::-1].copy()), Out(np.ascontiguousarray(x.view(U8).reshape(32, 16)[:, 7:3:-1]))


@module(
    kernel(
        r"""
  .reg .b64 %at, %to, %w; .reg .b32 %r<5>; .reg .b16 %h;
  mad.wide.u32 %at, %t, 8, %p0; mad.wide.u32 %to, %t, 24, %p1;
  ld.global.s8 %r0, [%at]; ld.global.u8 %r1, [%at+1]; ld.global.s16 %r2, [%at+2]; ld.global.u16 %r3, [%at+4];
  ld.global.s32 %w, [%at+4];
  st.global.u32 [%to], %r0; st.global.u32 [%to+4], %r1; st.global.u32 [%to+8], %r2; st.global.u32 [%to+12], %r3;
  st.global.u64 [%to+16], %w;"""
    )
)
def narrow_loads_into_wide_registers(rng: Rng) -> Args:
    x = rng.integers(0, 256, (32, 8)).astype(U8)
    y = np.zeros((32, 6), U32)
    y[:, 0], y[:, 1] = x[:, 0].view(I8).astype(I32).view(U32), x[:, 1]
    y[:, 2] = x.view(I16)[:, 1].astype(I32).view(U32)
    y[:, 3] = x.view(U16)[:, 2]
    y[:, 4:] = x.view(I32)[:, 1].astype(I64)[:, None].view(U32)
    return x, Out(y)


@module(
    kernel(
        r"""
  .reg .b64 %at, %to; .reg .b32 %r, %s; .reg .b64 %d;
  mad.wide.u32 %at, %t, 8, %p0; mad.wide.u32 %to, %t, 8, %p1;
  ld.volatile.global.u32 %r, [%at]; ld.relaxed.gpu.global.u32 %s, [%at+4];
  add.u32 %r, %r, %s;
  st.relaxed.sys.global.u32 [%to], %r;
  fence.acq_rel.gpu; membar.cta; fence.sc.sys; membar.gl;
  ld.acquire.cta.global.u32 %s, [%to];
  st.release.gpu.global.u32 [%to+4], %s;
  ld.weak.global.b64 %d, [%to]; st.volatile.global.b64 [%to], %d;"""
    )
)
def ordered_loads_and_stores(rng: Rng) -> Args:
    x = rng.integers(0, 2**31, (32, 2)).astype(U32)
    return x, Out(np.repeat(x.sum(1, dtype=U32), 2).reshape(32, 2))


@module(
    kernel(
        r"""
  .reg .b64 %a, %to; .reg .b32 %r, %s; .reg .f32 %f; .reg .f64 %d; .reg .b16 %h;
  mul.wide.u32 %to, %t, 4; add.u64 %to, %to, %p0;
  and.b32 %r, %t, 3;
  mul.wide.u32 %a, %r, 4; mov.u64 %p1, table; add.u64 %a, %a, %p1;
  ld.const.s32 %s, [%a]; st.global.u32 [%to], %s;
  ld.const.f32 %f, [numbers+4]; st.global.f32 [%to+128], %f;
  ld.const.u8 %h, [letters+2]; cvt.u32.u16 %r, %h; st.global.u32 [%to+256], %r;
  ld.const.f64 %d, [wide]; cvt.rn.f32.f64 %f, %d; st.global.f32 [%to+384], %f;
  ld.const.u32 %r, [matrix+12]; st.global.u32 [%to+512], %r;
  ld.const.u32 %r, [matrix+16]; st.global.u32 [%to+640], %r;""",
        2,
        """
.const .align 4 .s32 table[4] = {-1, 0x7fffffff, 017, 0b101};
.const .f32 numbers[3] = {1.5, 0f40490fdb, -2.0};
.const .align 1 .b8 letters[4] = {104, 101, 0x6C, 108};
.const .f64 wide = 0d4000000000000000;
.const .u32 matrix[3][2] = {{1, 2}, {3, 4}};
""",
    )
)
def constant_arrays_in_every_notation(rng: Rng) -> Args:
    table = np.array([-1, 0x7FFFFFFF, 0o17, 5], I32)[np.arange(32) & 3]
    pi, two = np.full(32, np.pi, F32).view(I32), np.full(32, 2, F32).view(I32)
    y = np.concatenate([table, pi, np.full(32, 108), two, np.full(32, 4), np.zeros(32)])
    return Out(y.astype(I32)), np.zeros(1, U8)


@module(
    kernel(
        r"""
  .reg .b64 %a, %b, %to; .reg .b32 %r; .reg .pred %q;
  ld.global.u64 %a, [pointer]; ld.u32 %r, [%a]; st.global.u32 [%p0], %r;
  ld.global.u64 %a, [offset]; ld.u32 %r, [%a]; st.global.u32 [%p0+4], %r;
  ld.global.u64 %a, [list+8]; ld.global.u32 %r, [%a]; st.global.u32 [%p0+8], %r;
  mov.u64 %b, data; cvta.global.u64 %b, %b; ld.global.u64 %a, [pointer];
  setp.eq.u64 %q, %a, %b; selp.u32 %r, 1, 0, %q; st.global.u32 [%p0+12], %r;
  mov.u64 %b, data+8; ld.global.u32 %r, [%b]; st.global.u32 [%p0+16], %r;""",
        1,
        """
.global .align 4 .u32 data[4] = {10, 20, 30, 40};
.global .u64 pointer = generic(data);
.global .u64 offset = generic(data)+12;
.global .align 8 .u64 list[2] = {data, data+4};
""",
    ),
    block=1,
)
def initialisers_that_hold_addresses(rng: Rng) -> Args:
    return (Out(np.array([10, 40, 20, 1, 30], U32)),)


@module(
    kernel(
        r"""
  .reg .b64 %a, %g, %to; .reg .b32 %r, %s, %o; .reg .pred %q<5>;
  .local .align 16 .b8 depot[64];
  .shared .align 8 .b8 area[256];
  mov.u64 %a, depot; cvta.local.u64 %g, %a;
  mul.lo.u32 %r, %t, 3; st.local.u32 [depot+4], %r; st.u32 [%g+8], %t;
  ld.u32 %s, [%g+4]; ld.local.u32 %r, [%a+8]; add.u32 %r, %r, %s;
  mov.u64 %a, area; cvta.shared.u64 %g, %a;
  mul.wide.u32 %to, %t, 4; add.u64 %to, %to, %g; st.u32 [%to], %r;
  bar.sync 0;
  xor.b32 %o, %t, 31; shl.b32 %o, %o, 2; mov.u32 %s, area; add.u32 %o, %o, %s; ld.shared.u32 %s, [%o];
  isspacep.shared %q0, %g; isspacep.global %q1, %g; isspacep.local %q2, %p0; isspacep.global %q3, %p0;
  selp.u32 %r, 1, 0, %q0; @%q1 add.u32 %r, %r, 10; @%q2 add.u32 %r, %r, 100; @%q3 add.u32 %r, %r, 1000;
  mul.wide.u32 %to, %t, 8; add.u64 %to, %to, %p0;
  st.global.v2.u32 [%to], {%s, %r};""",
        1,
    )
)
def generic_addresses_of_every_space(rng: Rng) -> Args:
    t = np.arange(31, -1, -1)
    return (Out(np.stack([t * 4, np.full(32, 1001)], 1).astype(U32)),)


@module(
    r"""
.visible .entry k(.param .align 8 .b8 s[24], .param .u64 out, .param .s8 small, .param .f64 wide)
{
  .reg .b64 %p, %d; .reg .b32 %r<4>; .reg .f32 %f; .reg .f64 %x; .reg .b16 %h;
  ld.param.u64 %p, [out]; cvta.to.global.u64 %p, %p;
  ld.param.v2.u32 {%r0, %r1}, [s+8]; ld.param.f32 %f, [s]; ld.param.u8 %h, [s+20];
  ld.param.s8 %r2, [small]; ld.param.f64 %x, [wide];
  st.global.u32 [%p], %r0; st.global.u32 [%p+4], %r1; st.global.f32 [%p+8], %f;
  cvt.u32.u16 %r3, %h; st.global.u32 [%p+12], %r3; st.global.u32 [%p+16], %r2;
  cvt.rzi.s32.f64 %r3, %x; st.global.u32 [%p+20], %r3;
  ret;
}
""",
    block=1,
)
def parameters_of_every_kind(rng: Rng) -> Args:
    s = np.zeros(
        (),
        np.dtype(
            {"names": ["f", "a", "b", "c"], "formats": [F32, U32, U32, U8], "offsets": [0, 8, 12, 20], "itemsize": 24}
        ),
    )
    s["f"], s["a"], s["b"], s["c"] = 2.5, 7, 0xFFFFFFFF, 200
    y = np.array([7, 0xFFFFFFFF, np.array(2.5, F32).view(U32), 200, 2**32 - 5, 1234567], U32)
    return s, Out(y), np.int8(-5), F64(1234567.9)


@module(
    r"""
.func (.reg .b32 %result) square_plus(.reg .b32 %a, .reg .b32 %b)
{
  mad.lo.s32 %result, %a, %a, %b;
  ret;
}
.func (.reg .b32 low, .reg .b32 high) split(.param .b64 v);
.visible .entry k(.param .u64 out)
{
  .reg .b64 %p, %w; .reg .b32 %t, %r<4>;
  ld.param.u64 %p, [out]; cvta.to.global.u64 %p, %p;
  mov.u32 %t, %tid.x;
  call (%r0), square_plus, (%t, 100);
  {
    .param .b64 given;
    mul.wide.u32 %w, %r0, 1000000; st.param.b64 [given], %w;
    call.uni (%r1, %r2), split, (given);
  }
  add.u32 %r1, %r1, %r2;
  mul.wide.u32 %w, %t, 4; add.u64 %p, %p, %w; st.global.u32 [%p], %r1;
  ret;
}
.func (.reg .b32 low, .reg .b32 high) split(.param .b64 v)
{
  .reg .b64 %v;
  ld.param.b64 %v, [v];
  mov.b64 {low, high}, %v;
  ret;
}
"""
)
def calls_with_registers_and_several_results(rng: Rng) -> Args:
    w = (np.arange(32, dtype=U64) ** 2 + 100) * 1000000
    return (Out((w + (w >> np.uint64(32))).astype(U32)),)


@module(
    kernel(
        r"""
  .reg .b64 %w; .reg .b32 %r, %i; .reg .pred %q;
  rem.u32 %i, %t, 4; mov.u32 %r, 0;
ways: .branchtargets zero, one, two, three;
  brx.idx %i, ways;
zero: mov.u32 %r, 100; bra.uni end;
one: add.u32 %r, %r, 1;   // falls through
two: add.u32 %r, %r, 20; bra end;
three:
  { .reg .b32 %n; mov.u32 %n, 0;
again: add.u32 %r, %r, 7; add.u32 %n, %n, 1; setp.lt.u32 %q, %n, %t; @%q bra again; }
end:
  mul.wide.u32 %w, %t, 4; add.u64 %w, %w, %p0; st.global.u32 [%w], %r;""",
        1,
    )
)
def branch_by_a_table(rng: Rng) -> Args:
    t = np.arange(32)
    return (Out(np.choose(t % 4, [np.full(32, 100), np.full(32, 21), np.full(32, 20), 7 * t]).astype(U32)),)


@module(
    kernel(
        r"""
  .reg .b64 %w; .reg .b32 %r, %s, %m; .reg .pred %q, %v;
  mul.wide.u32 %w, %t, 4; add.u64 %w, %w, %p0; ld.global.u32 %r, [%w];
  setp.gt.s32 %q, %r, 50;
  vote.sync.ballot.b32 %m, %q, -1; st.global.u32 [%w+128], %m;
  vote.sync.all.pred %v, %q, -1; selp.u32 %s, 1, 0, %v; vote.sync.any.pred %v, !%q, -1; @%v add.u32 %s, %s, 2;
  vote.sync.uni.pred %v, %q, -1; @%v add.u32 %s, %s, 4;
  st.global.u32 [%w+256], %s;
  activemask.b32 %m; st.global.u32 [%w+384], %m;
  rem.u32 %s, %r, 3; match.any.sync.b32 %m, %s, -1; st.global.u32 [%w+512], %m;
  shfl.sync.up.b32 %s|%v, %r, 3, 0, -1; @!%v neg.s32 %s, %s; st.global.u32 [%w+640], %s;
  shfl.sync.idx.b32 %s|%v, %r, 5, 0x181f, -1; st.global.u32 [%w+768], %s;
  redux.sync.max.s32 %s, %r, -1; st.global.u32 [%w+896], %s;
  elect.sync %m|%v, -1; selp.u32 %s, 1, 0, %v; add.u32 %s, %s, %m; st.global.u32 [%w+1024], %s;""",
        1,
    )
)
def a_warp_at_work(rng: Rng) -> Args:
    x = rng.integers(0, 100, 32).astype(U32)
    q = x > 50
    ballot = sum(1 << i for i in range(32) if q[i])
    peers = [sum(1 << j for j in range(32) if x[j] % 3 == v % 3) for v in x]
    up = np.where(np.arange(32) < 3, -x.astype(I64), np.roll(x, 3).astype(I64))
    rows = [x, [ballot] * 32, [2] * 32, [2**32 - 1] * 32, peers, up % 2**32, np.repeat(x.reshape(4, 8)[:, 5], 8)]
    rows += [[x.max()] * 32, [1] + [0] * 31]
    first = np.zeros((9, 32), U32)
    first[0] = x
    assert q.any()
    assert not q.all()
    return (InOut(first, Out(np.array(rows, I64).astype(U32))),)


@module(
    kernel(
        r"""
  .reg .b32 %r, %s; .reg .b64 %w, %d; .reg .f32 %f; .reg .f64 %x; .reg .b16 %h;
  atom.global.add.u32 %r, [%p0], %t; atom.global.min.s32 %r, [%p0+4], %t; atom.global.inc.u32 %r, [%p0+8], 20;
  atom.global.dec.u32 %r, [%p0+12], 9; red.global.or.b32 [%p0+16], %t; atom.global.xor.b32 %r, [%p0+20], %t;
  cvt.u64.u32 %w, %t; red.global.add.u64 [%p0+24], %w; atom.global.max.u64 %d, [%p0+32], %w;
  red.global.add.f32 [%p0+40], 0f3F800000; mov.f64 %x, 0d3FE0000000000000; atom.global.add.f64 %x, [%p0+48], %x;
  atom.relaxed.gpu.global.and.b32 %r, [%p0+44], 0xff; setp.eq.u32 %q, %t, 5; @%q atom.cas.b32 %r, [%p0+56], 77, %t;
  @%q atom.exch.b32 %s, [%p0+60], %r;""".replace(".reg .b32 %r, %s;", ".reg .b32 %r, %s; .reg .pred %q;"),
        1,
    ),
    block=64,
)
def atomics_on_global_memory(rng: Rng) -> Args:
    start = np.zeros(16, U32)
    start[1], start[11], start[14] = 50, 0xFFFFFFFF, 77
    end = start.copy()
    end[0], end[1], end[2] = 2016, 0, 64 % 21
    dec = 0
    for _ in range(64):
        dec = 9 if dec == 0 or dec > 9 else dec - 1
    end[3], end[4], end[5] = dec, 63, 0
    end[6:8], end[8:10] = np.array([2016], U64).view(U32), np.array([63], U64).view(U32)
    end[10] = np.array(64, F32).view(U32)
    end[11], end[14], end[15] = 0xFF, 5, 77
    end[12:14] = np.array([32.0]).view(U32)
    return (InOut(start, Out(end)),)


@module(
    kernel(
        r"""
  .reg .b32 %r; .reg .b64 %w; .reg .b16 %h, %g;
  .shared .align 4 .b8 s[16];
  .reg .pred %q; setp.eq.u32 %q, %t, 0;
  @%q st.shared.v2.u32 [s], {0, 0}; @%q st.shared.v2.u32 [s+8], {0, 0};
  bar.sync 0;
  mov.b32 %r, 0x3C003800; // halves 0.5 and 1
  red.shared.add.noftz.f16x2 [s], %r; mov.b32 %r, 0x3F803F80; red.global.add.noftz.bf16x2 [%p0+4], %r;
  cvt.u16.u32 %h, %t; atom.global.cas.b16 %g, [%p0+8], 0, 7; atom.shared.add.u32 %r, [s+8], 3;
  bar.sync 0;
  @%q ld.shared.u32 %r, [s]; @%q st.global.u32 [%p0], %r; @%q ld.shared.u32 %r, [s+8];
  @%q st.global.u32 [%p0+12], %r;""",
        1,
    )
)
def atomics_on_halves(rng: Rng) -> Args:
    y = np.array([np.array([16, 32], F16).view(U32)[0], 0x42004200, 7, 96], U32)
    return (InOut(np.zeros(4, U32), Out(y)),)


@module(
    kernel(
        r"""
  .reg .b64 %w; .reg .f32 %f<4>;
  mul.wide.u32 %w, %t, 16; add.u64 %w, %w, %p0; ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%w];
  red.global.v4.f32.add [%p1], {%f0, %f1, %f2, %f3};"""
    )
)
def vectors_of_atomics(rng: Rng) -> Args:
    x = rng.integers(-9, 9, (32, 4)).astype(F32)
    return x, InOut(np.ones(4, F32), Out(x.sum(0) + 1))


@module(
    kernel(
        r"""
  .reg .b32 %r, %s; .reg .b64 %w; .reg .pred %q, %v;
  mul.wide.u32 %w, %t, 4; add.u64 %w, %w, %p0; ld.global.u32 %r, [%w];
  setp.gt.s32 %q, %r, 0;
  bar.red.popc.u32 %r, 0, %q; barrier.cta.red.and.pred %v, 1, 96, %q; selp.u32 %s, 1, 0, %v;
  bar.cta.red.or.pred %v, 2, %q; @%v add.u32 %s, %s, 2;
  barrier.sync 3; barrier.cta.sync.aligned 4, 96; bar.warp.sync -1;
  mad.lo.u32 %r, %r, 10, %s; st.global.u32 [%w], %r;""",
        1,
    ),
    block=96,
)
def barriers_that_reduce(rng: Rng) -> Args:
    x = rng.integers(-9, 9, 96, I32)
    return (InOut(x, Out(np.full(96, (x > 0).sum() * 10 + 2, I32))),)


@module(
    kernel(
        r"""
  .reg .b32 %r; .reg .b64 %w, %s; .reg .pred %q;
  .shared .align 8 .b64 bar; .shared .align 4 .b8 data[128];
  setp.eq.u32 %q, %t, 0;
  @%q mbarrier.init.shared.b64 [bar], 32;
  bar.sync 0;
  shl.b32 %r, %t, 2; mov.u32 %x, data; add.u32 %x, %x, %r; mul.lo.u32 %r, %t, 11; st.shared.u32 [%x], %r;
  mbarrier.arrive.shared.b64 %s, [bar];
wait: mbarrier.test_wait.shared.b64 %q, [bar], %s; @!%q bra wait;
  xor.b32 %r, %t, 5; shl.b32 %r, %r, 2; mov.u32 %x, data; add.u32 %x, %x, %r; ld.shared.u32 %r, [%x];
  mul.wide.u32 %w, %t, 4; add.u64 %w, %w, %p0; st.global.u32 [%w], %r;
  mbarrier.pending_count.b64 %x, %s; setp.gt.u32 %q, %x, 0; selp.u32 %x, 1, 0, %q; st.global.u32 [%w+128], %x;
  bar.sync 0;
  setp.eq.u32 %q, %t, 0; @%q mbarrier.inval.shared.b64 [bar];""".replace(".reg .b32 %r;", ".reg .b32 %r, %x;"),
        1,
    )
)
def mbarrier_with_states(rng: Rng) -> Args:
    t = np.arange(32) ^ 5
    return (Out(np.concatenate([t * 11, np.ones(32)]).astype(U32)),)


@module(
    kernel(
        r"""
  .reg .b32 %r<4>, %x, %y; .reg .b64 %w;
  .shared .align 16 .b8 s[512];
  mov.u32 %x, s; shl.b32 %y, %t, 4; add.u32 %x, %x, %y;
  mul.wide.u32 %w, %t, 16; add.u64 %w, %w, %p0;
  ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%w]; st.shared.v4.u32 [%x], {%r0, %r1, %r2, %r3};
  bar.warp.sync -1;
  ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r0, %r1, %r2, %r3}, [%x];
  bar.warp.sync -1;
  stmatrix.sync.aligned.m8n8.x2.shared.b16 [%x], {%r2, %r3}; // rows of the first 16 threads
  movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r0;
  bar.warp.sync -1;
  mul.wide.u32 %w, %t, 20; add.u64 %w, %w, %p1; st.global.u32 [%w], %r0;
  ld.shared.v4.u32 {%r0, %r1, %r2, %r3}, [%x]; st.global.u32 [%w+4], %r0; st.global.u32 [%w+8], %r1;
  st.global.u32 [%w+12], %r2; st.global.u32 [%w+16], %r3;"""
    )
)
def matrices_of_halves(rng: Rng) -> Args:
    x = rng.integers(0, 65536, (4, 8, 8)).astype(U16)
    y = np.zeros((32, 5), U32)
    y[:, 0] = x[0].view(U32).ravel()
    after = x.copy()
    after[0], after[1] = x[2].T, x[3].T
    y[:, 1:] = after.reshape(32, 8).view(U32)
    return x, Out(y)


@module(
    kernel(
        r"""
  .reg .b32 %s, %h, %n; .reg .b64 %w, %g; .reg .f32 %f; .reg .pred %q;
  .shared .align 16 .b8 s[512];
  mov.u32 %s, s; shl.b32 %n, %t, 4; add.u32 %s, %s, %n; mul.wide.u32 %w, %t, 16; add.u64 %w, %w, %p0;
  setp.lt.u32 %q, %t, 20;
  @%q cp.async.ca.shared.global.L2::64B [%s], [%w], 16;
  @!%q cp.async.ca.shared.global [%s], [%w], 16, 0;
  cp.async.commit_group; cp.async.wait_group 0;
  ld.shared.f32 %f, [%s+12]; mul.wide.u32 %w, %t, 4; add.u64 %w, %w, %p1; st.global.f32 [%w], %f;"""
    )
)
def asynchronous_copy_with_a_guard(rng: Rng) -> Args:
    x = rng.standard_normal((32, 4)).astype(F32)
    return x, Out(np.where(np.arange(32) < 20, x[:, 3], 0))


@module(
    kernel(
        r"""
  .reg .b32 %r<6>; .reg .b64 %w; .reg .f32 %c<4>;
  mul.wide.u32 %w, %t, 16; add.u64 %w, %w, %p0; ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%w];
  mul.wide.u32 %w, %t, 8; add.u64 %w, %w, %p1; ld.global.v2.u32 {%r4, %r5}, [%w];
  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%c0, %c1, %c2, %c3}, {%r0, %r1, %r2, %r3}, {%r4, %r5},
    {0f3F800000, 0f3F800000, 0f3F800000, 0f3F800000};
  mul.wide.u32 %w, %t, 16; add.u64 %w, %w, %p2; st.global.v4.f32 [%w], {%c0, %c1, %c2, %c3};""",
        3,
    )
)
def product_with_constants_as_addends(rng: Rng) -> Args:
    a, b = small(rng, 16, 16), small(rng, 16, 8)
    g, t = np.arange(32) // 4, np.arange(32) % 4
    pairs = [(0, 0), (8, 0), (0, 8), (8, 8)]
    ra = np.stack([a[g + r][np.arange(32)[:, None], (2 * t + c)[:, None] + [0, 1]] for r, c in pairs], 1)
    rb = np.stack([b.T[g][np.arange(32)[:, None], (2 * t + c)[:, None] + [0, 1]] for c in (0, 8)], 1)
    d = a @ b + 1
    out = np.stack([d[g + r, 2 * t + c] for r in (0, 8) for c in (0, 1)], 1)

    def words(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray((x.astype(F32).view(U32) >> 16).astype(U16)).view(U32)

    return words(ra), words(rb), Out(out)


@module(
    kernel(
        r"""
  .reg .b32 %r, %s; .reg .b64 %w, %d; .reg .pred %q;
  mov.u32 %r, %ntid.x; mov.u32 %s, %nctaid.y; mad.lo.u32 %r, %r, 100, %s;
  mov.u32 %s, %ctaid.y; mad.lo.u32 %r, %r, 10, %s;
  mov.u32 %s, WARP_SZ; add.u32 %r, %r, %s;
  mul.wide.u32 %w, %t, 4; add.u64 %w, %w, %p0; mov.u32 %s, %ctaid.y; mad.wide.u32 %w, %s, 128, %w;
  st.global.u32 [%w], %r;
  mov.u64 %d, %clock64; nanosleep.u32 10; mov.u32 %r, %clock; mov.u64 %d, %globaltimer; pmevent 3;
  prefetch.global.L1 [%w]; prefetchu.L1 [%w];
  griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u64 %d, %gridid; mov.u32 %r, %nwarpid;
  mov.u32 %r, %nsmid;""",
        1,
    ),
    grid=(1, 2),
)
def special_registers_and_advice(rng: Rng) -> Args:
    return (Out(np.repeat((3202 * 10 + np.arange(2) + 32)[:, None], 32, 1).astype(U32)),)


@module(
    kernel(
        r"""
  .reg .b64 %at, %w; .reg .b32 %n, %r, %i; .reg .pred %q;
  add.u32 %n, %t, 1; shl.b32 %n, %n, 2; cvt.u64.u32 %w, %n;
  stacksave.u64 %at;
  alloca.u64 %w, %w, 8;
  mov.u32 %i, 0; mov.u32 %r, 0;
fill: mad.wide.u32 %d, %i, 4, %w; st.local.u32 [%d], %i; add.u32 %i, %i, 1; setp.le.u32 %q, %i, %t; @%q bra fill;
sum: sub.u32 %i, %i, 1; mad.wide.u32 %d, %i, 4, %w; ld.local.u32 %n, [%d]; add.u32 %r, %r, %n;
setp.gt.u32 %q, %i, 0; @%q bra sum;
  stackrestore.u64 %at;
  mul.wide.u32 %w, %t, 4; add.u64 %w, %w, %p0; st.global.u32 [%w], %r;""".replace(
            ".reg .b64 %at, %w;", ".reg .b64 %at, %w, %d;"
        ),
        1,
    ),
    refused="stacksave",
)
def stack_that_grows(rng: Rng) -> Args:
    t = np.arange(32)
    return (Out((t * (t + 1) // 2).astype(U32)),)


@module(
    kernel(
        r"""
  .reg .b32 %s, %m, %r, %k; .reg .b64 %w, %g; .reg .pred %q;
  .shared .align 16 .b8 s[128];
  mov.u32 %s, s; mov.u32 %k, %cluster_ctarank; mapa.shared::cluster.u32 %m, %s, %k;
  getctarank.shared::cluster.u32 %r, %m;
  shl.b32 %k, %t, 2; add.u32 %m, %m, %k; add.u32 %k, %k, %r; st.shared::cluster.u32 [%m], %k;
  barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
  xor.b32 %k, %t, 1; shl.b32 %k, %k, 2; add.u32 %s, %s, %k; ld.shared::cta.u32 %r, [%s];
  mov.u32 %k, %cluster_nctarank; add.u32 %r, %r, %k; mov.u32 %k, %nclusterid.x; mad.lo.u32 %r, %k, 1000, %r;
  mul.wide.u32 %w, %t, 4; add.u64 %w, %w, %p0; st.global.u32 [%w], %r;""",
        1,
    )
)
def cluster_of_one_block(rng: Rng) -> Args:
    return (Out(((np.arange(32) ^ 1) * 4 + 1001).astype(U32)),)


@module(
    kernel(
        r"""
  .reg .b64 %g; .reg .b32 %r; .reg .pred %q;
  mov.u64 %g, table; cvta.const.u64 %g, %g; isspacep.const %q, %g; selp.u32 %r, 1, 0, %q;
  isspacep.const %q, %p0; @%q add.u32 %r, %r, 2;
  st.global.u32 [%p0], %r;""",
        1,
        ".const .u32 table[2] = {1, 2};",
    ),
    block=1,
    refused="isspacep.const",
)
def generic_addresses_of_constants(rng: Rng) -> Args:
    return (Out(np.ones(1, U32)),)


@module(
    kernel(
        r"""
  .reg .b128 %q, %old; .reg .b64 %lo, %hi, %w;
  mul.wide.u32 %w, %t, 16; add.u64 %w, %w, %p0;
  ld.global.b128 %q, [%w]; mov.b128 {%lo, %hi}, %q; mov.b128 %q, {%hi, %lo};
  atom.global.exch.b128 %old, [%w], %q;
  mov.b128 {%lo, %hi}, %old; add.u64 %lo, %lo, %hi;
  mul.wide.u32 %w, %t, 8; add.u64 %w, %w, %p1; st.global.u64 [%w], %lo;"""
    ),
    refused=".b128",
)
def words_of_128_bits(rng: Rng) -> Args:
    x = rng.integers(0, 2**63, (32, 2)).astype(U64)
    return InOut(x, Out(x[:, ::-1].copy())), Out(x.sum(1, dtype=U64))
