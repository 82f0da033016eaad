"""Kernels given as PTX and as cubins: the same machine code and resources as from CUDA, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from greenfast.device import assembler, toolchain
from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.identity import code_hash
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, MachineError
from greenfast.spec.kernel import KernelSource

CUDA = KernelSource(
    entry="k",
    source="""extern "C" __global__ void k(float* y, int n) {
  __shared__ float s[64];
  float a[40];
  for (int i = 0; i < 40; i++) a[(i * n) % 40] = y[i];
  s[threadIdx.x % 64] = a[n % 40];
  __syncthreads();
  y[threadIdx.x] = s[(threadIdx.x + 1) % 64];
}
extern "C" __global__ void other(float* y) { y[0] = 1; }
""",
    name="k.cu",
    include_dirs=(),
    block=(64, 1, 1),
    dynamic_smem_bytes=512,
)
TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120")
needs_ptxas = pytest.mark.skipif(not toolchain.assemblers(), reason=assembler.MISSING)


def as_ptx(kernel: CompiledKernel, **changes: str) -> KernelSource:
    return replace(kernel.source, **{"source": kernel.ptx, "name": "k.ptx", "language": "ptx", **changes})  # type: ignore[arg-type]


def as_cubin(kernel: CompiledKernel, binary: bytes | None = None) -> KernelSource:
    binary = kernel.cubin if binary is None else binary
    return replace(kernel.source, source="", name="k.cubin", language="cubin", binary=binary)


@needs_ptxas
@pytest.mark.parametrize("target", TARGETS)
def test_ptx_is_the_kernel_that_it_came_from(target: str) -> None:
    compiled = compile_kernel(CUDA, Target(target))
    found = compile_kernel(as_ptx(compiled), Target(target))
    assert (found.resources, code_hash(found)) == (compiled.resources, code_hash(compiled))
    assert found.ptx == compiled.ptx
    assert found.compiler.startswith("ptxas ")
    again = compile_kernel(as_ptx(compiled), Target(target))
    assert again.from_cache
    assert again.cubin == found.cubin


@needs_ptxas
def test_an_assembler_of_another_name_reports_as_ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's ptxas-blackwell begins its lines with the name that it was called by."""
    tool = tmp_path / "ptxas-blackwell"
    tool.symlink_to(toolchain.assemblers()[0])
    compiled = compile_kernel(CUDA, Target("sm_90a"))
    monkeypatch.setattr(toolchain, "assemblers", lambda: [tool])
    found = compile_kernel(as_ptx(compiled), Target("sm_90a"), use_cache=False)
    assert found.resources == compiled.resources


@pytest.mark.parametrize("target", TARGETS)
def test_a_cubin_states_its_resources(target: str) -> None:
    compiled = compile_kernel(CUDA, Target(target))
    found = compile_kernel(as_cubin(compiled), Target(target))
    assert (found.resources, code_hash(found)) == (compiled.resources, code_hash(compiled))
    assert found.resources.stack_bytes >= 160
    assert found.resources.smem_bytes == 256 + 512
    assert found.ptx == ""


@needs_ptxas
def test_messages_of_the_assembler_name_the_file_and_the_line() -> None:
    compiled = compile_kernel(CUDA, Target("sm_90"))
    broken = compiled.ptx.replace("bar.sync", "bar.sink")
    line = next(n for n, text in enumerate(broken.splitlines(), 1) if "bar.sink" in text)
    with pytest.raises(CompileError, match=rf"k\.ptx does not assemble for sm_90:\nptxas k\.ptx, line {line}; error"):
        compile_kernel(as_ptx(compiled, source=broken), Target("sm_90"))
    with pytest.raises(CompileError, match=r"Missing \.version directive"):
        compile_kernel(as_ptx(compiled, source=""), Target("sm_90"))
    with pytest.raises(CompileError, match="no kernel 'missing', only: k, other"):
        compile_kernel(as_ptx(compiled, entry="missing"), Target("sm_90"))


def test_without_an_assembler_the_ptx_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_kernel(CUDA, Target("sm_90"))
    monkeypatch.setattr(toolchain, "assemblers", list)
    found = compile_kernel(as_ptx(compiled), Target("sm_90"))
    assert (found.ptx, found.cubin, found.reported, code_hash(found)) == (compiled.ptx, b"", None, "")
    with pytest.raises(MachineError, match="pip install nvidia-cuda-nvcc"):
        _ = found.resources


def test_bytes_that_are_no_cubin_are_refused() -> None:
    compiled = compile_kernel(CUDA, Target("sm_90"))
    for binary in (b"", b"\x7fELF", compiled.cubin[:900], b"\x7fELF\x02\x01" + b"\xff" * 100):
        with pytest.raises(CompileError, match=r"k\.cubin: not a cubin"):
            compile_kernel(as_cubin(compiled, binary), Target("sm_90"))
    with pytest.raises(CompileError, match=r"machine code for sm_90 does not run on sm_89"):
        compile_kernel(as_cubin(compiled), Target("sm_89"))
    with pytest.raises(CompileError, match="no kernel 'missing', only: "):
        compile_kernel(replace(as_cubin(compiled), entry="missing"), Target("sm_90"))


def tool(folder: Path, release: str) -> Path:
    """A program that says that it is the ptxas of this release."""
    path = folder / f"ptxas-{release}"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.12'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "release"),
    [("8.0", "12.6"), ("8.5", "12.6"), ("8.8", "12.9"), ("9.0", "13.0"), ("9.4", "13.4"), ("9.9", "12.6")],
)
def test_the_first_that_knows_the_version_of_ptx_is_taken(
    version: str, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = [tool(tmp_path, name) for name in ("12.6", "12.9", "13.0", "13.4")]
    monkeypatch.setattr(toolchain, "assemblers", lambda: tools)
    assert assembler.compiler(f"//\n.version {version}\n.target sm_90a\n") == f"ptxas {release}.12"
