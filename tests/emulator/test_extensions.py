"""PyTorch extensions with CUDA kernels on a machine without a GPU. One extension, built once, has many functions."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ctypes
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import cpp_extension

from greenfast.cli.main import main
from greenfast.emulator.cuda.extension import AttachedLibrary
from greenfast.emulator.cuda.library import build_library
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.triton import activate
from greenfast.emulator.triton.cuda_tensors import CudaTensors
from greenfast.emulator.triton.extensions import CudaMode, ExtensionMemory, _chosen
from greenfast.judge.solution.recording import Recording
from greenfast.spec.errors import CompileError, UnsupportedError, UsageError

SOURCE = r"""
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>

__device__ int calls, last[3];
__device__ float *place;
__constant__ float factor;

__global__ void add(const float* x, const float* y, float* z, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) z[i] = x[i] + y[i];
}
__global__ void count(int by) { calls += by; last[by] = calls; }
__global__ void remember(float* x) { place = x; }
__global__ void add_calls(int* to) { *to = calls + last[1]; calls = 0; }
__global__ void use(float* x) { *x = factor; }

torch::Tensor sum(torch::Tensor x, torch::Tensor y) {
    TORCH_CHECK(x.is_cuda() && y.device().is_cuda(), "CUDA tensors only");
    const c10::cuda::OptionalCUDAGuard guard(device_of(x));
    torch::Tensor z = at::detail::empty_cuda(x.sizes(), x.scalar_type(), std::nullopt, std::nullopt);
    int n = x.numel();
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "sum", [&] {
        add<<<(n + 63) / 64, 64, 0, at::cuda::getCurrentCUDAStream()>>>(
            x.data_ptr<float>(), y.data_ptr<float>(), z.data_ptr<float>(), n);
    });
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return z;
}
// Operations of PyTorch, views, memory of cudaMalloc, copies in both directions.
std::vector<torch::Tensor> mixed(torch::Tensor x, c10::optional<torch::Tensor> bias, int64_t rows) {
    auto y = sum(x.view({-1}), torch::ones({x.numel()}, x.options())).view({rows, -1}).mul_(2);
    auto other = at::empty({rows}, x.options().dtype(at::kInt)).fill_(7);
    float *work;
    cudaMalloc(&work, x.numel() * 4);
    cudaMemcpyAsync(work, y.data_ptr<float>(), x.numel() * 4, cudaMemcpyDeviceToDevice, 0);
    cudaMemset(work, 0, 4);
    auto z = torch::zeros_like(y);
    add<<<1, 256>>>(work, y.slice(0, 1).data_ptr<float>(), z.slice(0, 1).data_ptr<float>(), y.numel() - y.size(1));
    cudaFree(work);
    return {y, z + 0.5, other, bias.has_value() ? torch::softmax(bias.value(), -1) : torch::Tensor(y.sum())};
}
torch::Tensor beyond(torch::Tensor x) {
    add<<<1, 64>>>(x.data_ptr<float>(), x.data_ptr<float>(), x.data_ptr<float>(), x.numel() + 1);
    return x;
}
double first(torch::Tensor x) {
    float value;
    cudaMemcpy(&value, x.data_ptr<float>(), 4, cudaMemcpyDeviceToHost);
    return value;
}
void large(torch::Tensor x) { add<<<1, 2048>>>(x.data_ptr<float>(), x.data_ptr<float>(), x.data_ptr<float>(), 1); }
// A variable that launches change: later launches, copies and memory at its address have its value.
std::vector<int64_t> counted(torch::Tensor x) {
    int value = 0, three[3];
    count<<<1, 1>>>(1);
    count<<<1, 1>>>(2);
    cudaMemcpyFromSymbol(&value, calls, 4);
    cudaMemcpyFromSymbol(three, last, 12);
    void* address;
    cudaGetSymbolAddress(&address, calls);
    cudaMemset(address, 1, 1);
    add_calls<<<1, 1>>>(x.data_ptr<int>());
    count<<<1, 1>>>(1);
    count<<<1, 1>>>(1);
    add_calls<<<1, 1>>>(x.data_ptr<int>() + 1);
    return {value, three[1], three[2]};
}
void both(torch::Tensor x) {
    void* address;
    cudaGetSymbolAddress(&address, calls);
    add_calls<<<1, 1>>>((int*)address);
}
void kept(torch::Tensor x) { remember<<<1, 1>>>(x.data_ptr<float>()); }
void constant(torch::Tensor x, double value) {
    float content = value;
    cudaMemcpyToSymbol(factor, &content, 4);
    use<<<1, 1>>>(x.data_ptr<float>());
}
void array() { cudaArray_t a; cudaMallocArray(&a, nullptr, 1); }
"""
NAMES = ["sum", "mixed", "first", "beyond", "large", "counted", "constant", "array", "both", "kept"]
DECLARATIONS = """
torch::Tensor sum(torch::Tensor, torch::Tensor);
std::vector<torch::Tensor> mixed(torch::Tensor, c10::optional<torch::Tensor>, int64_t);
torch::Tensor beyond(torch::Tensor);
double first(torch::Tensor);
void large(torch::Tensor);
std::vector<int64_t> counted(torch::Tensor);
void both(torch::Tensor);
void kept(torch::Tensor);
void constant(torch::Tensor, double);
void array();
"""
needs_nvcc = pytest.mark.skipif(not (shutil.which("nvcc") and shutil.which("g++")), reason="needs nvcc and g++")


@pytest.fixture(scope="module")
def built() -> Any:
    with activate(cuda_tensors_as_cpu=True):
        return cpp_extension.load_inline(
            "mine", [DECLARATIONS], [SOURCE], functions=NAMES, extra_cuda_cflags=["-arch=sm_80"]
        )


@pytest.fixture
def extension(built: Any) -> Iterator[Any]:
    """The functions, for one more activation, as a test has after another one."""
    with activate(cuda_tensors_as_cpu=True):
        yield cpp_extension._import_module_from_library("mine", str(Path(built.__file__).parent), True)


@needs_nvcc
@pytest.mark.slow  # the headers of PyTorch take a minute to compile
def test_kernels_and_operations_of_pytorch(extension: Any) -> None:
    x = torch.randn(4, 16, device="cuda")
    for view in (x, x[1:3]):  # a view in the middle of its storage
        result = extension.sum(view, view)
        assert torch.equal(result, 2 * view)
        assert result.device == torch.device("cuda", 0)
    y, z, other, total = extension.mixed(x, None, 4)
    assert torch.equal(y, 2 * (x + 1))
    expected = torch.zeros_like(y)
    expected[1:] = y[:-1] + y[1:]
    expected[1, 0] = y[1, 0]  # cudaMemset
    assert torch.equal(z, expected + 0.5)
    assert extension.first(x[1:]) == x[1, 0]
    assert other.tolist() == [7] * 4
    assert torch.equal(total, y.sum())
    assert torch.equal(extension.mixed(x, x[0], 2)[3], x[0].softmax(-1))
    for value in (2.5, -3.0):  # cudaMemcpyToSymbol
        extension.constant(x, value)
        assert x[0, 0] == value
    numbers = torch.zeros(2, dtype=torch.int32, device="cuda")
    for before in (0, 0):
        assert extension.counted(numbers) == [before + 3, before + 1, before + 3]
        assert numbers.tolist() == [1 + 1, 2 + 2]
    with pytest.raises(RuntimeError, match="CUDA tensors only"):
        extension.sum(torch.ones(4), torch.ones(4))


@needs_nvcc
@pytest.mark.slow
def test_what_goes_wrong_is_named(extension: Any) -> None:
    x = torch.zeros(16, device="cuda")
    with pytest.raises(KernelFaultError, match=r"0 bytes past the end of 'parameter 1' \(64 bytes\) at cuda\.cu:\d+"):
        extension.beyond(x)
    with pytest.raises(KernelFaultError, match=r"blocks of \(2048, 1, 1\)"):
        extension.large(x)
    with pytest.raises(UnsupportedError, match="uses the variable calls and gets its address too"):
        extension.both(x)
    with pytest.raises(UnsupportedError, match="stores an address in the variable place"):
        extension.kept(x)
    with pytest.raises(UnsupportedError, match="cudaMallocArray is not emulated"):
        extension.array()
    assert torch.equal(extension.sum(x, x), x), "an error does not stay"
    with pytest.raises(CompileError, match="no_such_name"):
        cpp_extension.load_inline("wrong", ["int f() { return no_such_name; }"], functions=["f"])


@needs_nvcc
@pytest.mark.slow
def test_a_recording_has_the_launches_of_an_extension(built: Any) -> None:
    with Recording("sm_90a") as recording:
        module = cpp_extension._import_module_from_library("mine", str(Path(built.__file__).parent), True)
        x, y = torch.randn(64).cuda(), torch.empty(64, device="cuda")
        program = recording.record(lambda x: module.mixed(x, None, 4)[1].view(64), [x], {"x": x}, {"y": y})
        assert [step.kernel.entry for step in program.steps] == ["_Z3addPKfS0_Pfi"] * 2
        names = [operation.name for operation in program.operations]
        with pytest.raises(UsageError, match="copies a tensor that depends on its inputs to the host"):
            recording.record(lambda x: x * module.first(x), [x], {"x": x}, {"y": y})
        assert {"aten.copy_.default", "aten.sum.default"} <= set(names), names


def test_libraries_without_ptx_are_refused(tmp_path: Path) -> None:
    source = "#include <torch/extension.h>\n#include <cublas_v2.h>\n"
    with activate(cuda_tensors_as_cpu=True), pytest.raises(UnsupportedError, match=r"cublas_v2\.h: cuBLAS is not"):
        cpp_extension.load_inline("blas", [""], [source], functions=["f"], build_directory=str(tmp_path))


def test_options_that_choose_a_target_are_left_out() -> None:
    options = ["", "-O3 -arch=sm_80", "-gencode", "arch=compute_80,code=sm_80", "--use_fast_math", "-std=c++17"]
    assert _chosen(options) == ["-O3", "--use_fast_math"]


def test_tensors_of_an_extension_share_memory_with_pytorch() -> None:
    """Operations on them run on the CPU tensors, in the same storage."""
    with CudaTensors(90) as tensors:
        mode = CudaMode(tensors.mode, ExtensionMemory())
        base = torch.arange(12.0, device="cuda")
        x = mode.to_cuda(base.view(3, 4)[1:])
        assert x.is_cuda
        with mode:
            y = torch.zeros_like(x) + x.t().mul(1).t()  # copy_ would need the guard that a built extension brings
            x.add_(y)
            z = torch.ops.aten._to_copy.default(torch.cat([x, y]), device="cpu")
            with pytest.raises(UnsupportedError, match=r"aten\.resize_"):
                x.resize_(1)
        assert z.device.type == "cpu"
        assert np.array_equal(base.cpu().numpy(), [*range(4), *(2 * np.arange(4, 12))])
        assert torch.equal(mode.to_cpu(x), base.view(3, 4)[1:])
        assert mode.to_cpu(x).untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


@needs_nvcc
@pytest.mark.slow
def test_run_of_a_script_with_an_extension(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        from torch.utils.cpp_extension import load_inline
        source = "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }\\n"
        source += "void run(torch::Tensor x) { twice<<<1, 64>>>(x.data_ptr<float>()); }"
        module = load_inline("twice", ["void run(torch::Tensor x);"], [source], functions=["run"])
        x = torch.ones(64, device="cuda")
        module.run(x)
        print(x.sum().item())
        module.run(x[1:])
        """)
    )
    assert main(["run", str(script)]) == 1
    captured = capfd.readouterr()
    assert "128.0" in captured.out
    assert "error: _Z5twicePf: 4-byte read out of bounds: 0 bytes past the end of 'parameter 1'" in captured.err


def test_an_exception_of_the_runtime_is_kept(tmp_path: Path) -> None:
    """It cannot pass through C."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")

    class Failing:
        def answer(self, operation: int, values: list[int], payload: bytes) -> tuple[bytes, bytes]:
            raise KeyError(operation)

    (path,) = (path for path in build_library().iterdir() if path.name.startswith("libcudart.so."))
    library = AttachedLibrary(path, Failing())  # type: ignore[arg-type]
    assert library._library.cudaMalloc(None, 0) == 1
    pointer = ctypes.c_void_p()
    assert library._library.cudaMalloc(ctypes.byref(pointer), 4) == 999
    assert isinstance(library.failure, KeyError)
    library.reset()
    assert library.failure is None
