"""A tool that reads what others wrote has limits of memory, time and output, and reads and writes its folders alone."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import pytest

from greenfast.device import assembler, tool_process, toolchain
from greenfast.device.compiler import compile_kernel
from greenfast.device.sandbox import _scopes_signals
from greenfast.device.tool_process import Ended, ToolError, memory_for, run_tool
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError
from greenfast.spec.kernel import KernelSource

MIB = 1 << 20
#: A tool of each kind, in the shell's language: Python's modules are not where a tool may read.
ENDINGS = {
    "kill -ABRT $$": r"crashed \(SIGABRT\); it may use 64 MiB of memory",
    "kill -SEGV $$": r"crashed \(SIGSEGV\)",
    "exec head -c 3000000 /dev/zero": "writes more than 2 MiB",
    "exec head -c 3000000 /dev/zero > output": "writes more than 2 MiB",
    "exec sleep 600": "did not end within 1 s",
    "echo 'ptxas fatal: Memory allocation failure' >&2; exit 255": "needs more than the 64 MiB of memory",
}


def made(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tool = folder / "tool"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return tool


def run(tmp_path: Path, text: str, *arguments: str, seconds: int = 20) -> Ended:
    folder = tmp_path / "work"
    folder.mkdir(exist_ok=True)
    tool = made(tmp_path / "toolkit" / "bin", text)
    return run_tool(tool, arguments, folder, name="tool", memory_bytes=64 * MIB, seconds=seconds)


@pytest.mark.parametrize("text", list(ENDINGS))
def test_how_a_tool_can_end(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_process, "OUTPUT_BYTES", 2 * MIB)
    with pytest.raises(ToolError, match=ENDINGS[text]):
        run(tmp_path, text, seconds=1 if "sleep" in text else 20)


def test_memory(tmp_path: Path) -> None:
    """The tool holds all that it reads, as it has no lines."""
    hold = "head -c {} /dev/zero | tail -n 1 > held || {{ echo out of memory; exit 1; }}"
    assert run(tmp_path, hold.format(8_000_000)).exit_code == 0
    with pytest.raises(ToolError, match=r"64 MiB .* may use"):
        run(tmp_path, hold.format(80_000_000))


def test_what_a_tool_says_and_its_exit_code(tmp_path: Path) -> None:
    assert run(tmp_path, 'echo "$1"; echo no >&2; exit 3', "a b") == Ended(3, "a b\n", "no\n")


def test_what_it_starts_ends_with_it(tmp_path: Path) -> None:
    ended = run(tmp_path, "sleep 600 & echo $!")
    end = time.monotonic() + 10
    while Path(f"/proc/{ended.output.strip()}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{ended.output.strip()}").exists()


def test_it_reads_and_writes_its_folders_alone(tmp_path: Path) -> None:
    if not _scopes_signals():
        pytest.skip("no Landlock that is new enough")
    outside = tmp_path / "outside"
    outside.write_text("secret")
    assert run(tmp_path, "cat ../outside").exit_code == 1
    assert run(tmp_path, "echo x > ../outside").exit_code != 0
    assert run(tmp_path, "chmod 666 ../outside").exit_code == 1
    assert run(tmp_path, f"kill -0 {os.getpid()}").exit_code == 1
    assert run(tmp_path, "echo kept > here; cat here").output == "kept\n"
    assert outside.read_text() == "secret"
    os.kill(os.getpid(), signal.SIGCONT)  # this process is still there


def test_it_sees_nothing_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    assert "secret" not in run(tmp_path, "env").output


def test_memory_grows_with_the_input() -> None:
    assert memory_for(1000) < 1100 * MIB
    assert memory_for(MIB) == 2048 * MIB
    assert memory_for(1 << 40) == 8192 * MIB


PTX = ".version 8.0\n.target sm_90a\n.address_size 64\n{}\n.visible .entry k() {{ ret; }}\n"
TABLES = {
    "one": ".global .align 4 .b8 big[900000000] = {1};",
    "constant data of several": "\n".join(f".global .b32 t{n}[60000000] = {{1}};" for n in range(6)),
}


@pytest.mark.skipif(not toolchain.assemblers(), reason=assembler.MISSING)
@pytest.mark.parametrize("tables", TABLES)
def test_a_small_text_does_not_cost_gigabytes(tables: str) -> None:
    source = KernelSource("k", PTX.format(TABLES[tables]), "big.ptx", (), (1, 1, 1), language="ptx")
    with pytest.raises(CompileError, match=r"^big\.ptx: ptxas (needs|writes) more than .* for sm_90a; shorten"):
        compile_kernel(source, Target("sm_90a"), use_cache=False)
