"""Whole CUDA programs: host code runs natively, kernels in the emulator. One program, compiled once, has many modes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from greenfast.cli.main import main
from greenfast.emulator.cuda.fatbinary import EmbeddedPtx, _decompress_lz4, choose_ptx
from greenfast.emulator.cuda.memory import DEVICE, DeviceMemory
from greenfast.emulator.cuda.program import compile_program
from greenfast.emulator.machine.tensormap import BoundMap, decode, encode
from greenfast.spec.errors import UnsupportedError

SOURCE = Path(__file__).parent / "cuda_program" / "modes.cu"
needs_nvcc = pytest.mark.skipif(not (shutil.which("nvcc") and shutil.which("gcc")), reason="needs nvcc and gcc")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "modes"
    compile_program(SOURCE, path, "sm_90a")
    return path


ILLEGAL = "cudaErrorIllegalAddress"
Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def run(program: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a mode of the program: exit code, report, and the program's own output."""

    def call(mode: str, *options: str) -> tuple[int, dict[str, Any], str]:
        code = main(["run", "--json", *options, str(program), mode])
        captured = capfd.readouterr()
        return code, json.loads(captured.out), captured.err

    return call


def find_line(text: str) -> int:
    """Return the number of the line of the program that holds a text."""
    (number,) = [n for n, line in enumerate(SOURCE.read_text().splitlines(), 1) if text in line]
    return number


@needs_nvcc
def test_a_right_program_gives_the_results_of_a_gpu(run: Run) -> None:
    code, report, output = run("right")
    assert output.splitlines() == [
        "scale 294 396",
        "count 67 managed 7",
        "walk 6",
        "reverse 63 0, time passed",
        "grid 2016 2016",
        "device 9.0 with 132, shared 256",
        "cudaSuccess: no error",
    ]
    assert (code, report["faults"]) == (0, [])
    assert {k["kernel"]: k["launches"] for k in report["launches"]} == dict.fromkeys(
        ("scale", "count", "walk", "reverse", "grid_sum"), 1
    )


@needs_nvcc
@pytest.mark.parametrize(
    ("mode", "kind", "text", "place", "output"),
    [
        ("beyond", "out-of-bounds", "'allocation 1' (24 bytes), from cudaMalloc at ", "x[threadIdx.x + n]", ILLEGAL),
        ("unwritten", "uninitialized-read", "nothing has written: byte 0 of", "y[threadIdx.x] = x", "cudaSuccess"),
        ("freed", "out-of-bounds", "which was freed", "y[threadIdx.x] = x", ILLEGAL),
        ("trap", "trap", "trap was executed", "if (n == 0) __trap", "cudaErrorLaunchFailure"),
        ("long", "out-of-bounds", "a copy of 32 bytes from memory beyond", "DeviceToHost) == cudaError", "1\n"),
        ("shared", "invalid-launch", "100000 bytes of dynamic", "", "invalid argument"),
    ],
)  # fmt: skip
def test_a_fault_is_found_and_the_program_gets_its_error(
    run: Run, mode: str, kind: str, text: str, place: str, output: str
) -> None:
    code, report, printed = run(mode)
    (fault,) = report["faults"]
    assert (fault["level"], fault["kind"]) == ("error", kind)
    assert text in fault["message"]
    if place:
        assert (Path(fault["file"]).name, fault["line"]) == ("modes.cu", find_line(place))
    assert output in printed
    assert code == 1


@needs_nvcc
def test_a_race_is_one_finding_with_a_count_and_the_program_goes_on(run: Run, tmp_path: Path) -> None:
    sarif = tmp_path / "out" / "findings.sarif"
    code, report, output = run("race", "--sarif", str(sarif))
    read, race = report["faults"]
    assert (read["kind"], read["count"], read["line"]) == ("uninitialized-read", 3, find_line("no __syncthreads"))
    assert (race["kind"], race["count"], race["line"]) == ("data-race", 3, find_line("tile[threadIdx.x] = threadIdx.x"))
    assert "cudaSuccess" in output
    assert code == 1
    results = json.loads(sarif.read_text())["runs"][0]["results"]
    assert [(r["ruleId"], r["occurrenceCount"]) for r in results] == [("uninitialized-read", 3), ("data-race", 3)]

    known = tmp_path / "known.txt"
    known.write_text("kernel=race file=modes.cu\n")
    code, report, _ = run("race", "--suppressions", str(known))
    assert (code, [f["suppressed"] for f in report["faults"]]) == (0, [True, True])
    assert run("race", "--error-exitcode", "42")[0] == 42


@needs_nvcc
def test_a_formal_finding_fails_the_program_unless_it_is_only_reported(run: Run) -> None:
    code, report, _ = run("same")
    (finding,) = report["faults"]
    place = find_line("both blocks wrote it")
    assert (finding["level"], finding["kind"], finding["line"]) == ("formal", "same-value-race", place)
    assert (code, run("same", "--formal", "report")[0]) == (1, 0)


@needs_nvcc
def test_the_example_of_the_page_has_the_race_that_the_page_names(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(Path(__file__).parents[2] / "examples" / "cuda-program" / "sum.cu")]) == 1
    captured = capfd.readouterr()
    assert re.match(r"\d+\n", captured.out)
    assert re.search(r"error: .*data race on byte \d+ of shared memory .* at sum.cu:\d+", captured.err)


@needs_nvcc
def test_calls_that_are_wrong_or_missing_are_named(run: Run) -> None:
    code, report, _ = run("twice")
    assert "cudaFree of 0x" in report["faults"][0]["message"]
    assert "which was freed" in report["faults"][0]["message"]
    assert (code, len(report["faults"])) == (1, 1)
    code, report, output = run("direction")
    assert output.splitlines()[0] == "cudaErrorInvalidMemcpyDirection"
    assert "a copy of 16 bytes with the cudaMemcpyKind 9; known are 0 to 4 at" in report["faults"][0]["message"]
    code, report, output = run("registered")
    assert output.splitlines()[:2] == ["cudaErrorNotSupported", "cudaErrorNotSupported: operation not supported"]
    assert "kernels cannot access memory of cudaHostRegister" in report["faults"][0]["message"]
    assert (code, report["faults"][0]["level"]) == (1, "unsupported")  # the program's own code
    code, report, output = run("large")
    assert output.startswith("720\n")
    assert "265 blocks; at most 264 of this size are resident" in report["faults"][0]["message"]
    assert code == 1
    code, report, output = run("missing")
    assert output.startswith("cudaErrorNotSupported")
    assert report["faults"][0]["message"].startswith("cudaIpcGetMemHandle is not emulated at modes.cu:")
    assert code == 3


@needs_nvcc
def test_graphs_run_their_nodes_at_each_launch(run: Run) -> None:
    code, report, output = run("graph")
    assert output.splitlines() == [
        "cudaErrorStreamCaptureUnsupported cudaErrorStreamCaptureImplicit 1 0",
        "11 16 17 0",
        "4 4",
        "cudaSuccess: no error",
    ]
    assert (code, report["faults"]) == (0, [])
    assert [(k["kernel"], k["launches"]) for k in report["launches"]] == [("increase", 3)]


@needs_nvcc
def test_host_code_that_reads_device_memory_ends_as_on_a_gpu(run: Run) -> None:
    code, report, _ = run("host")
    assert code == 128 + 11
    assert report["faults"][0]["message"].startswith(
        "host code reads or writes device memory: byte 0 of 'allocation 1'"
    )


@needs_nvcc
def test_lines_watches_and_a_trace_of_all_launches(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two launches of one kernel; together they execute both sides of its branch."""
    source, page, trace = tmp_path / "twice.cu", tmp_path / "lines.html", tmp_path / "trace.txt"
    (tmp_path / "factor.h").write_text("constexpr int kFactor = 3;\n")
    source.write_text(
        textwrap.dedent("""\
        #include "factor.h"
        __global__ void choose(int* x, int odd) {
            int i = threadIdx.x;
            if (odd)
                x[i] = 2 * i;
            else
                atomicAdd(x + i, kFactor);
        }
        int main() {
            int* x;
            cudaMallocManaged(&x, 256);
            for (int n = 0; n < 2; n++) choose<<<1, 64>>>(x, n);
            cudaDeviceSynchronize();
        }
        """)
    )
    options = ("--lines-html", str(page), "--watch", "4:i,i+odd", "--trace", str(trace), "--trace-warp", "0,0,0:1")
    assert main(["run", "--json", *options, str(source)]) == 0
    observed = json.loads(capfd.readouterr().out)["observed"]
    threads = {line["line"]: line["threads"] for line in observed["lines"] if line["file"] == "twice.cu"}
    assert (threads[3], threads[5], threads[7]) == (128, 64, 64)
    assert [(s["warp"], s["values"]["i+odd"][:2]) for s in observed["watched"]] == [
        (0, [0, 1]),
        (1, [32, 33]),
        (0, [1, 2]),
        (1, [33, 34]),
    ]
    traced = trace.read_text()
    assert observed["trace"] == []
    assert traced.count("mov.u32") == 2
    assert "twice.cu:5" in traced
    assert "atomicAdd(x + i, kFactor);" in page.read_text()
    assert main(["run", "--watch", "4:missing", str(source)]) == 1
    assert "its lines must be in kernels" in capfd.readouterr().err


@needs_nvcc
def test_output_of_kernels_and_the_exit_code_are_the_programs(run: Run) -> None:
    assert run("printf")[2].splitlines()[:2] == ["thread 0 of a kernel", "thread 1 of a kernel"]
    assert run("code")[0] == 7


@needs_nvcc
def test_a_program_that_cannot_run_is_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    static = tmp_path / "static"
    source = tmp_path / "empty.cu"
    source.write_text("__global__ void k() {} int main() { k<<<1, 1>>>(); }")
    command = ["nvcc", "-gencode", "arch=compute_90,code=compute_90", "-cudart", "static", str(source)]
    subprocess.run([*command, "-o", str(static)], check=True)
    assert main(["run", str(static)]) == 2
    assert "linked statically" in capsys.readouterr().err
    source.write_text("int main() { return nothing; }")
    assert main(["run", str(source)]) == 1
    assert "empty.cu(1): error" in capsys.readouterr().err
    source.write_text("#include <cufft.h>\nint main() {}")
    assert main(["run", str(source)]) == 3
    assert "empty.cu: uses cuFFT (cufft.h). Its kernels have no PTX" in capsys.readouterr().err
    source.write_text("#include <curand_nothing.h>\nint main() {}")
    assert main(["run", str(source)]) == 3
    assert "curand_nothing.h was not found; install with pip: nvidia-curand" in capsys.readouterr().err
    source.write_text('extern "C" int ncclGetVersion(int*); int main() { return ncclGetVersion(nullptr); }')
    assert main(["run", str(source)]) == 3
    assert "uses NCCL (ncclGetVersion)" in capsys.readouterr().err
    (tmp_path / "library.c").write_text("int curandCreateGenerator(void) { return 0; }")
    shared = ["-shared", "-fPIC", "-Wl,-soname,libcurand.so.10", "-o", str(tmp_path / "libcurand.so")]
    subprocess.run(["gcc", str(tmp_path / "library.c"), *shared], check=True)
    source.write_text('extern "C" int curandCreateGenerator(); int main() { return curandCreateGenerator(); }')
    assert main(["run", f"--nvcc=-L{tmp_path}", "--nvcc=-lcurand", str(source)]) == 3
    assert "uses cuRAND's host API (libcurand.so)" in capsys.readouterr().err
    source.write_text("__global__ void k() { k<<<1, 1>>>(); } int main() {}")
    assert main(["run", str(source)]) == 3
    assert "dynamic parallelism" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "missing")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["run", "--watch", "1:x", sys.executable]) == 2
    assert "--watch are for a CUDA source" in capsys.readouterr().err
    assert main(["run", sys.executable, "--version"]) == 0  # a program without CUDA runs too


def test_a_tensor_map_survives_cutlass() -> None:
    """CUTLASS clears bit 21 of the second word, as a workaround for drivers."""
    bound = BoundMap(0, 2, (64, 8), (2, 128), (64, 8), 128)
    words = bytearray(encode(bound, 4096))
    words[8 + 21 // 8] &= ~(1 << 21 % 8)
    assert decode(bytes(words), 4096) == bound


def test_lz4_blocks() -> None:
    """Literals, a match that overlaps itself, and long lengths, encoded by hand from the format's description."""
    assert _decompress_lz4(b"\x54hello\x05\x00\x00", 13) == b"hellohellohel"
    assert _decompress_lz4(b"\x1fa\x01\x00\xff\x05\x00", 1 + 4 + 15 + 255 + 5) == b"a" * 280


def test_the_newest_ptx_that_the_device_runs_is_chosen() -> None:
    texts = [EmbeddedPtx("a", 80), EmbeddedPtx("b", 90), EmbeddedPtx("c", 120)]
    assert choose_ptx(texts) == "b"
    with pytest.raises(UnsupportedError, match=r"no PTX for compute_90 or below \(it has compute_120\)"):
        choose_ptx(texts[2:])
    with pytest.raises(UnsupportedError, match="none, only machine code"):
        choose_ptx([])


def test_device_memory_finds_freed_and_reuses_exhausted_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenfast.emulator.cuda.memory._QUARANTINE", 4000)
    memory = DeviceMemory(1 << 20)
    try:
        blocks = [memory.allocate(1000, DEVICE) for _ in range(6)]
        for block in blocks[:5]:
            assert block is not None
            memory.free(block)
        first = blocks[0]
        assert first is not None
        assert memory.find(memory.base + first.start) is None
        assert "freed" in memory.describe(first.start)
        again = memory.allocate(1000, DEVICE)  # more than the quarantine is free
        assert again is not None
        assert again.start == first.start
        assert memory.describe(again.start) == "byte 0 of 'allocation 7' (1000 bytes)"
        assert memory.allocate(1 << 20, DEVICE) is None
    finally:
        os.close(memory.file)
