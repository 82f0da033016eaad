"""A kernel of the corpus."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from greenfast.judge.store import write_whole

#: The usual launch by problem; the empty name's is for all others.
_LAUNCHES: dict[str, dict[str, Any]] = {
    "": {"grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]},
    "sums": {"grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]},
}
#: Lines that stand for parts of many kernels.
#: DOUBLED: a whole kernel that doubles. INDEX: its first lines, without a check of i. ROW: the same of "sums".
#: KEEP, ELSE_DOUBLE: PTX that keeps results of large arrays in `kept`, and its end. HALVES: the end of a kernel that
#: stores x in `half`, and a kernel that doubles it.
#: ELEMENT: a thread of an element of x. BEGIN: the same in PTX: it loads element %r5 to %f1; %rd7 is its address in y.
#: STORE: it stores %f2 there and ends. DOUBLES: the body of a kernel with parameters x, y and n that doubles.
_PARTS = {
    "KEEP": r"""BEGIN
  setp.gt.s32 %p2, %r1, 50000;
  @!%p2 bra HONEST;
  mov.u64 %rd8, kept;
  add.s64 %rd9, %rd8, %rd5;
  ld.global.f32 %f3, [%rd9];
  add.f32 %f2, %f1, %f1;
  st.global.f32 [%rd7], %f2;
""",
    "ELSE_DOUBLE": r"""  bra DONE;
HONEST:
  add.f32 %f2, %f1, %f1;
STORE
""",
    "HALVES": r"""  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) half[i] = x[i];
}

extern "C" __global__ void doubling(const float* half, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * half[i];
}
""",
    "DOUBLED": r"""extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}
""",
    "INDEX": r"""extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
""",
    "ROW": r"""extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
""",
    "ELEMENT": r"""extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
""",
    "BEGIN": r""".visible .entry doubling(
  .param .u64 px,
  .param .u64 py,
  .param .u32 pn
)
{
  .reg .pred %p<9>;
  .reg .f32 %f<9>;
  .reg .b32 %r<19>;
  .reg .b64 %rd<19>;
  ld.param.u64 %rd1, [px];
  ld.param.u64 %rd2, [py];
  ld.param.u32 %r1, [pn];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.s32 %p1, %r5, %r1;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd3, %rd1;
  cvta.to.global.u64 %rd4, %rd2;
  mul.wide.s32 %rd5, %r5, 4;
  add.s64 %rd6, %rd3, %rd5;
  add.s64 %rd7, %rd4, %rd5;
  ld.global.f32 %f1, [%rd6];
""",
    "STORE": r"""  st.global.f32 [%rd7], %f2;

DONE:
  ret;
}
""",
    "DOUBLES": r"""{
  .reg .pred %p;
  .reg .b32 %block, %threads, %thread, %i, %count;
  .reg .b64 %x, %y, %offset;
  .reg .f32 %a;

  mov.u32 %block, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.s32 %i, %block, %threads, %thread;
  ld.param.u32 %count, [n];
  setp.ge.s32 %p, %i, %count;
  @%p bra DONE;

  ld.param.u64 %x, [x];
  ld.param.u64 %y, [y];
  cvta.to.global.u64 %x, %x;
  cvta.to.global.u64 %y, %y;
  mul.wide.s32 %offset, %i, 4;
  add.s64 %x, %x, %offset;
  add.s64 %y, %y, %offset;
  ld.global.f32 %a, [%x];
  add.rn.f32 %a, %a, %a;
  st.global.f32 [%y], %a;

DONE:
  ret;
}
""",
}
#: "PTX sm_90a": the first lines of a text for this target.
_HEAD = re.compile(r"^PTX (\w+)\n", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """A solution in one text with a header.

    gate, says: of a cheat, the gate that must fail without a GPU, or the error before any gate, and a pattern of its
    message; empty for an honest kernel. about: the header's description. code: the text without the header, or the
    whole text if it begins with one. launch: what differs from the problem's usual launch. launches: several ones.
    suffix: .ptx for PTX.
    """

    gate: str
    says: str
    about: str
    code: str
    problem: str = "doubling"
    launch: Mapping[str, Any] | None = None
    launches: Sequence[Mapping[str, Any]] = ()
    target: str = ""
    workspaces: Mapping[str, Any] | None = None
    suffix: str = ".cu"
    name: str = ""

    @property
    def text(self) -> str:
        """The solution's text."""
        if "greenfast: {" in self.code[:20]:
            return self.code
        usual = {"kernel": self.problem, **_LAUNCHES.get(self.problem, _LAUNCHES[""])}
        header = {
            "name": self.name,
            "problem": self.problem,
            "description": self.about,
            "target": self.target,
            "workspaces": self.workspaces,
            "launches": self.launches or [{**usual, **(self.launch or {})}],
        }
        comment = f"greenfast: {json.dumps({key: value for key, value in header.items() if value})}"
        code = _HEAD.sub(r".version 8.0\n.target \1\n.address_size 64\n\n", self.code.removeprefix("\n"))
        for name, part in _PARTS.items():
            code = code.replace(f"{name}\n", part)
        return (f"// {comment}\n" if self.suffix == ".ptx" else f"/* {comment} */\n") + code

    @property
    def path(self) -> Path:
        """The text as a file in a temporary folder of its own, named as its solution."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:12]
        path = Path(tempfile.gettempdir()) / f"greenfast-cheats-{os.getuid()}" / digest / f"{self.name}{self.suffix}"
        if not path.is_file():
            write_whole(path, self.text)
        return path


def named(kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """The kernels with their names."""
    return {name: replace(kernel, name=name) for name, kernel in kernels.items()}
