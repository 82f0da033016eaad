"""Triton kernels on CPU tensors: launches, views, CUDA tensors, autotuning, faults, ``greenfast run``."""

from __future__ import annotations

import json
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.language.extra import libdevice  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found, import-untyped, unused-ignore]

from greenfast.cli.main import main
from greenfast.emulator import KernelFaultError, Observe
from greenfast.emulator.triton import activate
from greenfast.spec.errors import UnsupportedError, UsageError

pytest_plugins = ["greenfast.emulator.pytest_plugin"]
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, attr-defined, unused-ignore"


@triton.jit
def add(x, y, z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def add_unmasked(x, y, z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n)
    tl.store(z + i, value)  # the faulty line


def test_views_of_one_storage_share_memory() -> None:
    values = torch.arange(300, dtype=torch.float32)
    with activate() as activation:
        add[(2,)](values[:100], values[100:200], values[200:], 100, BLOCK=64)
        add[(2,)](values, values, values, 64, BLOCK=32)  # in place, by three arguments
    assert torch.equal(values[:64], 2 * torch.arange(64))
    assert torch.equal(values[200:], torch.arange(100) + torch.arange(100, 200))
    assert [launch.kernel for launch in activation.launches] == ["add", "add"]


def test_a_fault_names_the_line_of_the_triton_source() -> None:
    line = add_unmasked.starting_line_number + 4
    x, z = torch.ones(100), torch.zeros(100)
    with activate() as activation:
        with pytest.raises(KernelFaultError, match=rf"write out of bounds.* of 'z'|end of 'z'.*test_triton.py:{line}"):
            add_unmasked[(2,)](x, x, z, 100, BLOCK=64)
        assert activation.faults[0].kind == "out-of-bounds"
        assert (activation.faults[0].file, activation.faults[0].line) == ("test_triton.py", line)
    assert not z.any(), "a faulty launch changed the tensors"


def test_cuda_tensors_are_labelled_cpu_tensors(emulate_triton: Any) -> None:
    x = torch.randn(100, device="cuda")
    y = torch.randn(100).cuda()
    z = torch.empty_like(x)
    assert x.device == y.device == z[3:].device == (x + y).device == torch.device("cuda", 0)
    assert x.is_cuda
    assert not x.cpu().is_cuda
    assert torch.zeros(3).device.type == "cpu"
    assert (torch.cuda.get_device_capability(x.device), torch.cuda.current_device()) == ((9, 0), 0)
    add[(2,)](x, y, z, 100, BLOCK=64)
    assert torch.equal(z, x + y)
    with pytest.raises(TypeError, match="convert cuda:0"):
        z.numpy()
    with torch.cuda._DeviceGuard(0):  # as in the code that Inductor writes
        assert torch._C._dynamo.guards._empty_strided_cuda((2, 3), (3, 1), torch.float16).is_cuda
    layer = torch.nn.Linear(100, 2).to("cuda")
    layer(z).sum().backward()
    assert layer.weight.device.type == layer.weight.grad.device.type == "cuda"  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match="CUDAGraph"):
        torch.cuda.CUDAGraph()


def test_tensors_of_two_devices_are_refused_as_on_a_gpu(emulate_triton: Any) -> None:
    x, host = torch.ones(10, device="cuda"), torch.ones(10)
    attend = torch.nn.functional.scaled_dot_product_attention
    row, host_row = x[None, None], host[None, None]
    for mix in (
        *(lambda: x + host, lambda: x.mul_(host), lambda: torch.cat([x, host]), lambda: host @ x),
        lambda: attend(row, row, host_row),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mix()
    assert (x + torch.tensor(2.0)).is_cuda
    assert x[torch.tensor([1])].is_cuda
    assert x.copy_(host).is_cuda
    copied = torch.as_tensor(host, device="cuda")
    assert copied.is_cuda
    assert not host.is_cuda
    with pytest.raises(ValueError, match=r"Pointer argument \(at 1\) cannot be accessed from Triton \(cpu tensor\?\)"):
        add[(1,)](x, host, x, 10, BLOCK=16)
    add[(1,)](x, host.pin_memory(), x, 10, BLOCK=16)
    assert x.tolist() == [2.0] * 10
    with pytest.raises(RuntimeError, match=r"invalid argument \(a grid of \(1, 70000, 1\)"):
        add[(1, 70000)](x, x, x, 10, BLOCK=16)
    layer = torch.nn.Linear(10, 1)  # on the host
    layer(host).sum().backward()
    optimizer = torch.optim.Adam(layer.parameters())
    optimizer.step()
    assert not (layer.weight - layer.weight.grad.clone()).is_cuda  # type: ignore[union-attr]


def test_threads_have_cuda_tensors_too(emulate_triton: Any) -> None:
    x = torch.ones(10, device="cuda")

    def run() -> torch.Tensor:
        y = torch.empty(10, device="cuda")
        add[(1,)](x, x, y, 10, BLOCK=16)
        y.record_stream(torch.cuda.Stream())  # type: ignore[arg-type]
        return y

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result().tolist() == [2.0] * 10


def test_pytorch_is_restored() -> None:
    before = torch.cuda.is_available(), torch.Generator, torch.compile, triton.runtime.driver._active
    with activate(cuda_tensors_as_cpu=True):
        assert torch.cuda.is_available()
    assert (torch.cuda.is_available(), torch.Generator, torch.compile, triton.runtime.driver._active) == before
    assert torch.ones(3).device.type == "cpu"


@triton.autotune(
    [triton.Config({"BLOCK": 64}, num_warps=64), triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"]
)
@triton.jit
def scan(x, z, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(z + i, tl.cumsum(tl.load(x + i, mask=i < n, other=0.0)), mask=i < n)


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})
@triton.jit
def double(x, n, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def add_by_pointers(pointers, z, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(2):
        x = tl.load(pointers + k).to(tl.pointer_type(tl.float32))
        total += tl.load(x + i, mask=i < n, other=0.0)
    tl.store(z + i, total, mask=i < n)


def test_pointers_in_memory(emulate_triton: Any) -> None:
    x, y = torch.randn(50, device="cuda"), torch.randn(60, device="cuda")[10:]
    pointers = torch.tensor([x.data_ptr(), y.data_ptr()], device="cuda")
    before, z = pointers.clone(), torch.zeros(50, device="cuda")
    add_by_pointers[(1,)](pointers, z, 50, BLOCK=64)
    assert torch.equal(z, x + y)
    assert torch.equal(pointers, before)


@triton.jit
def double_tile(descriptor, z, ROWS: tl.constexpr, COLS: tl.constexpr):
    i = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(z + i, 2 * descriptor.load([0, 0]))


@triton.jit
def arcsine_of_first(pair, z, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + i, libdevice.asin(tl.load(pair[0] + i)) * pair[1])


def test_a_descriptor_of_a_view() -> None:
    view, z = torch.randn(40, 32)[8:], torch.zeros(16, 32)
    with activate():
        double_tile[(1,)](TensorDescriptor.from_tensor(view, [16, 32]), z, 16, 32)
    assert torch.equal(z, 2 * view[:16])


@pytest.mark.parametrize("options", [{}, {"num_ctas": 2}, {"launch_cooperative_grid": True}])
def test_tuples_libdevice_and_options_of_launches(options: dict[str, Any]) -> None:
    x, z = torch.rand(512), torch.zeros(512)
    with activate():
        arcsine_of_first[(2,)]((x, 3), z, 256, **options)
    torch.testing.assert_close(z, 3 * x.asin())


def test_registers_are_those_of_ptxas() -> None:
    x = torch.ones(64)
    with activate():
        kernel = add[(1,)](x, x, x, 64, BLOCK=64)
        assert 8 <= kernel.n_regs <= 32


def test_heuristics_and_scalars() -> None:
    x = torch.arange(10, dtype=torch.float64)
    with activate("sm_80"):
        double[(1,)](x, 10, 2.5)
        double[(1,)](x, 10, 2**40)
    assert torch.equal(x, torch.arange(10, dtype=torch.float64) * 2.5 * 2**40)


@pytest.mark.parametrize(("autotune", "runs"), [("first", [64]), ("all", [64, 128, 64])])
def test_autotuning_runs_configurations_that_fit(autotune: str, runs: list[int]) -> None:
    """The first of the three needs more threads than a block has."""
    scan.cache.clear()
    x, z = torch.ones(40), torch.zeros(40)
    with activate(autotune=autotune) as activation:
        scan[(1,)](x, z, 40)
    assert torch.equal(z, torch.arange(1.0, 41.0))
    assert len(activation.launches) == len(runs)
    assert scan.best_config.kwargs == {"BLOCK": runs[-1]}


def test_memory_that_nothing_has_written_is_found(emulate_triton: Any) -> None:
    """Byte by byte: a kernel writes a part. Any function of PyTorch that may write to a tensor writes all of it."""
    x, z = torch.randn(64, device="cuda"), torch.empty(64, device="cuda")
    y = torch.empty_like(x)
    with pytest.raises(KernelFaultError, match=r"nothing has written: byte 0 of 'y' \(256 bytes\)"):
        add[(1,)](x, y, z, 64, BLOCK=64)
    add[(1,)](x, x, y, 32, BLOCK=64)
    add[(1,)](x, y, z, 32, BLOCK=64)
    assert torch.equal(z[:32], 3 * x[:32])
    with pytest.raises(KernelFaultError, match="byte 128 of 'y'"):
        add[(1,)](x, y.view(64), z, 33, BLOCK=64)
    for write in (
        lambda t: t.fill_(1),
        lambda t: t.__setitem__(slice(0, 64), 1),
        lambda t: torch.add(x, x, out=t),
        lambda t: t.view(8, 8).copy_(x.view(8, 8)),
        lambda t: torch._foreach_zero_([t]),
        lambda t: torch.nn.init.normal_(torch.nn.Parameter(t)),
    ):
        y = torch.empty(64, device="cuda")
        with torch.no_grad():
            write(y)
        add[(1,)](x, y, z, 64, BLOCK=64)
        assert torch.equal(z, x + y)
    host = torch.empty(64)
    host.numpy()[:] = 2
    add[(1,)](x, host.cuda(), z, 64, BLOCK=64)
    assert torch.equal(z, x + 2)


def test_results_of_several_tensors_have_the_label_of_their_operand() -> None:
    with activate(cuda_tensors_as_cpu=True):
        for x in (torch.ones(2, 3), torch.ones(2, 3, device="cuda")):
            for result in (x.max(dim=0), x.cummax(0), x.sort()):
                assert {tensor.device for tensor in result} == {x.device}
        assert torch.from_numpy(np.ones(3)).cummax(0)[0].numpy().tolist() == [1, 1, 1]
        assert torch.frombuffer(bytearray(4), dtype=torch.uint8).device.type == "cpu"


def test_wrong_requests() -> None:
    with pytest.raises(UsageError, match=r"sm_75.*allowed: sm_80"):
        activate("sm_75")
    with pytest.raises(UsageError, match="autotune='best'"):
        activate(autotune="best")


def test_the_documented_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(Path(__file__).parents[2] / "examples" / "triton_script.py")]) == 0
    assert "NVIDIA H100 80GB HBM3 (emulated): the softmax of (8, 100) is right" in capsys.readouterr().out


def test_run_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent("""
        import sys, torch, triton, triton.language as tl

        @triton.jit
        def copy(x, y, n, BLOCK: tl.constexpr):
            i = tl.arange(0, BLOCK)
            tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)

        x = torch.randn(100, device="cuda")
        y = torch.empty_like(x)
        try:
            copy[(1,)](x, y, int(sys.argv[1]), BLOCK=128)
        except Exception:
            print("caught")
        else:
            assert torch.equal(x, y)
            print("equal")
        """)
    )
    assert main(["run", str(script), "100"]) == 0
    assert "equal" in capsys.readouterr().out
    assert main(["run", "--json", str(script), "101"]) == 1, "a fault that the script catches is reported"
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert "caught" in err
    assert [(f["kind"], f["file"], f["line"]) for f in report["faults"]] == [("out-of-bounds", "mine.py", 7)]
    script.write_text("import torch\ntorch.cuda.CUDAGraph()\n")
    assert main(["run", str(script)]) == 3
    assert "greenfast: torch.cuda.CUDAGraph is not emulated" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "other.py")]) == 2


def test_lines_of_a_kernel_are_observed() -> None:
    x, y, z = torch.arange(100.0), torch.ones(100), torch.zeros(100)
    with activate("sm_80", observe=Observe(lines=True)) as run:
        add[(2,)](x, y, z, 100, BLOCK=64, num_warps=1)
    observed = run.launches[0].observed
    assert torch.equal(z, x + 1)
    assert observed is not None
    (line,) = [line for line in observed.lines if line.global_loads.requests]
    assert line.file == "test_triton.py"
    # A thread loads its two neighbours one by one. A load of 32 floats has every second one of 8 sectors, and would
    # fill 4; one of the last 18 floats has 5 sectors, and would fill 3.
    assert (line.global_loads.transactions, line.global_loads.ideal) == (2 * 2 * (8 + 5), 2 * 2 * (4 + 3))
    assert (line.global_stores.transactions, line.global_stores.ideal) == (2 * (8 + 5), 2 * (4 + 3))
    with activate("sm_80", observe=Observe(lines=True)) as run:
        for n in (100, 20):
            add[(1,)](x, y, z, n, BLOCK=64, num_warps=1)
    assert run.observer is not None
    (both,) = [line for line in run.observer.observed().lines if line.global_loads.requests]
    single = [launch.observed.lines for launch in run.launches if launch.observed]
    (first, second) = ([line for line in lines if line.line == both.line] for lines in single)
    assert both.global_loads.transactions == sum(line.global_loads.transactions for line in (*first, *second))
    assert both.threads == 64
    assert both.code == first[0].code
    with pytest.raises(UsageError, match=r"observe\.watch is for CUDA sources"):
        activate("sm_80", observe=Observe(watch=["1:x"]))
