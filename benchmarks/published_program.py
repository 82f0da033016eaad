"""Run one program of a published collection with its test, in a confined process, and store the test's results.

The results of Triton's interpreter are the trial's independent ones. So they use nothing of greenfast's emulator, nor
its mapping of devices.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from greenfast.device.sandbox import confine
from greenfast.emulator.triton import activate

#: Names of the checkpoints that the program's text calls.
_BEGIN, _END = "__trial_begin__", "__trial_end__"
_MOST_ELEMENTS = 1 << 24


class CpuForCuda(TorchFunctionMode):
    """Run PyTorch's calls for a GPU on the CPU; a tensor's ``device`` is reported as ``cuda:0``.

    fill: the byte that uninitialised memory holds.
    """

    def __init__(self, fill: int) -> None:
        super().__init__()
        self._fill = fill

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with CPU devices in its arguments."""
        name = getattr(func, "__name__", "")
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0].clone() if func is torch.Tensor.cpu else args[0]
        if name == "__get__" and args:
            if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
                return True
            if func == torch.Tensor.device.__get__:
                return torch.device("cuda", 0)
        kwargs = {k: _as_cpu(v) for k, v in (kwargs or {}).items() if k != "pin_memory"}
        result = func(*[_as_cpu(a) for a in args], **kwargs)
        creates = func in (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
        if creates and result.dtype is not torch.bool:
            result.untyped_storage().fill_(self._fill)
        return result


def _as_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


@contextlib.contextmanager
def cpu_for_cuda(fill: int) -> Iterator[None]:
    """Pretend that a GPU exists, and keep its tensors in the memory of the CPU."""
    properties = types.SimpleNamespace(
        multi_processor_count=132, total_memory=80 << 30, major=9, minor=0, name="H100", warp_size=32
    )

    def module_to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return plain_to(self, *[_as_cpu(a) for a in args], **{k: _as_cpu(v) for k, v in kwargs.items()})

    plain_to = torch.nn.Module.to
    torch.nn.Module.to = module_to  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]

    class FakeEvent:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def record(self, *_: Any) -> None: ...
        def wait(self, *_: Any) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

        def elapsed_time(self, _: Any) -> float:
            return 1.0

    class FakeStream(FakeEvent):
        cuda_stream = 0
        wait_stream = wait_event = record_event = FakeEvent.record

    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "set_device": lambda *_: None,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: "NVIDIA H100",
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": lambda *_: None,
        "is_bf16_supported": lambda *_: True,
        "current_stream": lambda *_: FakeStream(),
        "default_stream": lambda *_: FakeStream(),
        "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
        "device_of": lambda *_: contextlib.nullcontext(),
        "Event": FakeEvent,
        "Stream": FakeStream,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
    }
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    with CpuForCuda(fill):
        yield


class TestRecorder:
    """What a test computes: the values of its variables, and the results of its calls of the program's functions."""

    def __init__(self, test: str, seed: int) -> None:
        self.values: dict[str, Any] = {}
        self.calls: list[Any] = []
        self.reached = ""
        self._test, self._seed = test, seed
        self._before: dict[str, Any] = {}
        self._depth = 0

    def begin(self, variables: dict[str, Any]) -> None:
        """Fix the random numbers before the test, and wrap the functions that it calls."""
        self.reached = "test"
        for name, value in list(variables.items()):
            own = isinstance(value, types.FunctionType) and value.__module__ == variables["__name__"]
            if own and name in self._test:
                variables[name] = self._wrap(value)
        self._before = dict(variables)
        torch.manual_seed(0)
        np.random.seed(0)
        __import__("random").seed(0)

    def end(self, variables: dict[str, Any]) -> None:
        """Keep the variables that the test set."""
        self.reached = "end"
        skipped = (types.FunctionType, types.ModuleType, type)
        for name, value in variables.items():
            if name.startswith("__") or isinstance(value, skipped) or self._before.get(name, self) is value:
                continue
            self.values[name] = value

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or function.__name__.startswith("test"):
                return function(*args, **kwargs)
            state = torch.get_rng_state()
            torch.manual_seed(self._seed)
            self._depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self._depth -= 1
                torch.set_rng_state(state)
            if len(self.calls) < 64:
                self.calls.append(_copy((result, args, kwargs)))
            return result

        call.__name__ = function.__name__
        return call


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [_copy(v) for v in value]
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value


def flatten(value: Any, path: str, arrays: dict[str, np.ndarray], facts: dict[str, Any], depth: int = 0) -> None:
    """Add the tensors below a value to arrays, and their dtypes and all plain values to facts, by path."""
    if isinstance(value, torch.Tensor):
        facts[path] = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.numel() > _MOST_ELEMENTS:
            facts[path] += " large"
            value = value.flatten()[:: value.numel() // _MOST_ELEMENTS + 1]
        grad = value.grad if value.is_leaf and value.requires_grad else None
        plain = value.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if plain.dtype in (torch.bfloat16,) or "float8" in str(plain.dtype):
            plain = plain.float()
        arrays[path] = plain.resolve_conj().numpy()
        if grad is not None:
            flatten(grad, f"{path}.grad", arrays, facts)
    elif isinstance(value, dict) and depth < 6:
        for key, item in value.items():
            flatten(item, f"{path}/{key}", arrays, facts, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 6:
        for index, item in enumerate(value):
            flatten(item, f"{path}/{index}", arrays, facts, depth + 1)
    elif isinstance(value, (bool, int, str, type(None))):
        facts[path] = value if not isinstance(value, str) else value[:200]
    elif isinstance(value, float):
        facts[path] = "float"
        arrays[path] = np.asarray(value)


@contextlib.contextmanager
def interpreted(outside: list[str], fill: int) -> Iterator[None]:
    """Let Triton's interpreter run kernels; note accesses outside of the tensors of the launch."""
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda self, *a, config, **k: [1.0, 1.0, 1.0]
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    ranges: list[tuple[int, int]] = []
    plain_call, plain_args = executor.__call__, executor._init_args_hst

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernels.append(getattr(self.fn, "__name__", "?"))
        return plain_call(self, *args, **kwargs)

    def hold(self: Any, args: Any, kwargs: Any) -> Any:
        host = plain_args(self, args, kwargs)
        ranges.clear()
        for value in (*host[0], *host[1].values()):
            value = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return host

    def check(name: str, pointers: Any, mask: Any) -> None:
        if len(outside) > 3:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.atleast_1d(pointers.data).astype(np.uint64)
        active = np.broadcast_to(np.atleast_1d(mask.data), addresses.shape) if mask is not None else True
        inside = np.zeros(addresses.shape, bool)
        for start, end in ranges:
            inside |= (addresses >= start) & (addresses + np.uint64(size) <= end)
        wrong = active & ~inside
        if wrong.any():
            outside.append(f"{name}: {int(wrong.sum())} elements outside of all tensors, kernel {kernels[-1]}")

    kernels = KERNELS
    executor.__call__, executor._init_args_hst = launch, hold
    for name, at in (("create_masked_load", 1), ("create_masked_store", 2)):
        plain = getattr(builder, name)

        def checked(self: Any, ptrs: Any, *rest: Any, _plain: Any = plain, _name: str = name, _at: int = at) -> Any:
            check(_name.split("_")[-1], ptrs, rest[_at - 1] if len(rest) >= _at else None)
            return _plain(self, ptrs, *rest)

        setattr(builder, name, checked)
    with cpu_for_cuda(fill):
        yield


KERNELS: list[str] = []


@contextlib.contextmanager
def emulated(faults: list[str], target: str = "sm_80") -> Iterator[None]:
    """Let greenfast's emulator run kernels; note all faults, also those that the program catches."""
    with activate(target, cuda_tensors_as_cpu=True, on_launch=lambda report: KERNELS.append(report.kernel)) as active:
        try:
            yield
        finally:
            faults += [f"{fault.kind}: {fault.message}"[:600] for fault in active.faults[:3]]


def run_program(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a program and its test; return the outcome. The arrays are written to the job's file."""
    text = f"{job['source']}\n\n{_BEGIN}(globals())\n{job['test']}\n\n{_END}(globals())\n"
    if job["mode"] == "interpreter":  # it does not know annotations that are texts
        text = re.sub(r":\s*(['\"])((?:tl|triton\.language)\.constexpr)\1", r": \2", text)
    path = folder / "program.py"
    path.write_text(text, encoding="utf-8")
    recorder = TestRecorder(job["test"], job["seed"])
    setattr(builtins, _BEGIN, recorder.begin)
    setattr(builtins, _END, recorder.end)
    fill = 0x55 if job["seed"] == 2 else 0
    outside: list[str] = []
    faults: list[str] = []
    outcome: dict[str, Any] = {"outside": outside, "faults": faults}
    contexts = {"interpreter": lambda: interpreted(outside, fill), "emulator": lambda: emulated(faults, job["target"])}
    module = types.ModuleType("program")
    module.__dict__["__file__"] = str(path)
    module.__name__ = "__main__" if "__main__" in job["test"] else "program"
    sys.modules["program"] = module
    sys.argv = [str(path)]
    os.chdir(folder)
    try:
        with contexts.get(job["mode"], lambda: cpu_for_cuda(fill))():
            exec(compile(text, str(path), "exec"), module.__dict__)
    except BaseException as error:
        lines = traceback.extract_tb(error.__traceback__)
        own = [f.lineno for f in lines if f.filename == str(path)]
        outcome |= {
            "error": type(error).__name__,
            "message": str(error)[:1500],
            "line": own[-1] if own else None,
            "where": f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else "",
            "in": recorder.reached or "import",
            "chain": [f"{type(e).__name__}: {str(e)[:400]}" for e in (error.__cause__, error.__context__) if e],
        }
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    for name, value in recorder.values.items():
        flatten(value, name, arrays, facts)
    if not arrays:
        for index, value in enumerate(recorder.calls):
            flatten(value, f"call {index}", arrays, facts)
    np.savez(job["arrays"], allow_pickle=False, **{str(i): a for i, a in enumerate(arrays.values())})
    return outcome | {"names": list(arrays), "facts": facts, "launches": len(KERNELS), "kernels": sorted(set(KERNELS))}


def warm_up(mode: str) -> None:
    """Import the programs' packages, so that each forked process has them."""
    torch.set_num_threads(1)
    for name in ("torch._dynamo", "torch.optim", "triton.language", "triton.runtime.autotuner"):
        importlib.import_module(name)
    if mode == "emulator":
        with emulated([]):
            pass


def run_confined(job: dict[str, Any], folder: Path, seconds: int) -> dict[str, Any]:
    """Fork a confined process that runs the job in a folder. Return its outcome, or how it ended.

    job: source, test, mode, seed and target. seconds: of processor time; three times as much may pass.
    """
    readable = [path for path in (*sys.path, sys.prefix, sys.base_prefix) if path and os.path.isdir(path)]
    result = folder / "outcome.json"
    result.unlink(missing_ok=True)
    started = time.monotonic()
    process = os.fork()
    if process == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))
            resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
            null = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(null, 1)
            os.dup2(null, 2)
            tempfile.tempdir = str(folder)  # an extension is built there
            applied = confine(readable, str(folder))
            outcome = run_program(job | {"arrays": str(folder / "arrays.npz")}, folder)
            result.write_text(json.dumps(outcome | {"sandbox": applied}), encoding="utf-8")
        except BaseException:
            (folder / "crash.txt").write_text(traceback.format_exc())
            os._exit(9)
        os._exit(0)
    status = None
    while time.monotonic() - started < 3 * seconds:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return {"ended": "time", "seconds": time.monotonic() - started}
    elapsed = round(time.monotonic() - started, 2)
    if result.is_file():
        return dict(json.loads(result.read_text(encoding="utf-8"))) | {"seconds": elapsed}
    ended = os.waitstatus_to_exitcode(status)
    name = "time" if ended in (-signal.SIGXCPU, -signal.SIGKILL) else f"exit {ended}"
    crash = folder / "crash.txt"
    return {"ended": name, "seconds": elapsed, "crash": crash.read_text()[-800:] if crash.is_file() else ""}
