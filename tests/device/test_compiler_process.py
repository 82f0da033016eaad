"""NVRTC in a separate process: a crash is an error like others, and no process is started or left without need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from greenfast.device import compiler_process
from greenfast.device.compiler import compile_kernel, to_ptx
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, MachineError
from greenfast.spec.kernel import KernelSource
from tests.device.compilers import end
from tests.device.processes import is_alive

pytestmark = pytest.mark.usefixtures("cache_folder")

ADA = Target("sm_89")
SIMPLE = 'extern "C" __global__ void k(float* out) { out[threadIdx.x] = 1.0f; }\n'
# A program that compiles once, prints its compiler's process id, and goes on as its argument selects.
PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
from greenfast.device import compiler_process, nvrtc
from tests.device.compilers import interrupt
compiler_process._SERVE = interrupt
compiler = compiler_process._COMPILER
print(compiler_process.run(nvrtc.Job("text", "k.cu", ())).log, compiler._process.pid, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "forks":
    if not os.fork():
        print(compiler_process.run(nvrtc.Job("child", "k.cu", ())).log, flush=True)
        sys.exit()
    os.wait()
    print(compiler_process.run(nvrtc.Job("parent", "k.cu", ())).log, flush=True)
if sys.argv[1] == "interrupted":
    try:
        compiler_process.run(nvrtc.Job("", "k.cu", ()))
    except KeyboardInterrupt:
        print(compiler_process.run(nvrtc.Job("again", "k.cu", ())).log, flush=True)
"""


def source(text: str) -> KernelSource:
    return KernelSource("k", text, "k.cu", (), (128, 1, 1))


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a process fails the test."""
    monkeypatch.setattr(compiler_process, "_COMPILER", compiler_process._Compiler())
    monkeypatch.setattr(compiler_process, "PythonProcess", lambda *_, **__: pytest.fail("a process is started"))


@pytest.mark.usefixtures("crashing_compiler")
def test_a_crash_is_a_compile_error_and_the_next_compile_works() -> None:
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            compile_kernel(source(SIMPLE + "// crash"), ADA, isolated=True)
        message = str(caught.value)
        assert message.startswith("k.cu: kernel 'k': the compiler, NVRTC ")
        assert "crashed (SIGSEGV) while it compiled for sm_89" in message
        assert "nvcc" in message
        kernel = compile_kernel(source(SIMPLE), ADA, use_cache=False, isolated=True)
        here = compile_kernel(source(SIMPLE), ADA, use_cache=False)
        assert (kernel.cubin, kernel.ptx, kernel.resources) == (here.cubin, here.ptx, here.resources)


def test_a_compile_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_process, "COMPILE_S", 0.5)
    endless = f"template <class... T> struct P;\n{_DOUBLING}B<60, int>::t bomb;\n"
    with pytest.raises(CompileError, match=r"crashed \(it did not end within 0\.5 s\)"):
        compile_kernel(source(endless), ADA, use_cache=False, isolated=True)


#: Twice as many instances with each step.
_DOUBLING = """
template <int D, class... T> struct B {
  typedef typename B<D - 1, T..., P<T...>>::t t;
  typedef typename B<D - 1, T..., P<T..., int>>::t u;
};
template <class... T> struct B<0, T...> { typedef int t; };
"""


@pytest.mark.usefixtures("crashing_compiler")
def test_one_process_serves_all_compiles_and_reports_the_same_errors() -> None:
    processes = set()
    for text, target in ((SIMPLE, ADA), ("#error no", ADA), (SIMPLE, Target("sm_1"))):
        said = []
        for isolated in (True, False):
            try:
                said.append(to_ptx(source(text), target, use_cache=False, isolated=isolated))
            except (CompileError, MachineError) as e:
                said.append(repr(e))
        assert said[0] == said[1] != ""
        process = compiler_process._COMPILER._process
        assert process is not None
        processes.add(process.pid)
    assert len(processes) == 1


@pytest.mark.usefixtures("no_start")
def test_no_process_is_started_for_a_cached_kernel_or_without_isolation() -> None:
    assert not compile_kernel(source(SIMPLE), ADA).from_cache
    assert compile_kernel(source(SIMPLE), ADA, isolated=True).from_cache
    with pytest.raises(pytest.fail.Exception, match="a process is started"):
        compile_kernel(source(SIMPLE), ADA, use_cache=False, isolated=True)


@pytest.mark.parametrize("attribute", ["executable", "child"])
def test_without_a_process_it_compiles_in_this_one(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_process, "_COMPILER", compiler_process._Compiler())
    if attribute == "executable":
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    else:
        monkeypatch.setattr(compiler_process, "_SERVE", end)
    assert compile_kernel(source(SIMPLE), ADA, isolated=True).cubin
    assert compiler_process._COMPILER._process is None


def start(how: str) -> subprocess.Popen[str]:
    """PROGRAM, leading a process group."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("how", "code", "lines"),
    [
        ("ends", 0, []),
        ("killed", -signal.SIGKILL, []),
        ("forks", 0, ["child", "parent"]),
        ("interrupted", 0, ["again"]),
    ],
)
def test_the_process_ends_with_the_program(how: str, code: int, lines: list[str]) -> None:
    program = start(how)
    assert program.stdout is not None
    text, pid = program.stdout.readline().split()
    out, err = program.communicate(timeout=20)
    assert (program.returncode, text, out.split(), err) == (code, "text", lines, "")
    deadline = time.monotonic() + 10
    while is_alive(int(pid)):
        assert time.monotonic() < deadline, "the compiler's process is left over"
        time.sleep(0.01)
