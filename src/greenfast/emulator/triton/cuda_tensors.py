"""CUDA tensors of PyTorch on a machine without a GPU: they are CPU tensors with a label.

Scripts for a GPU allocate with ``device="cuda"`` and query ``torch.cuda``. While ``CudaTensors`` is active, such
tensors are in the host's memory and report ``device='cuda:0'``. The label belongs to the storage, so views and results
keep it. The queries are answered for the GPU of the target. Features without a meaning here, such as CUDA graphs, are
refused by name.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from greenfast.emulator.triton.storage import StorageMap, UnwrittenBytes
from greenfast.spec.errors import UnsupportedError

_CUDA, _CPU = torch.device("cuda", 0), torch.device("cpu")


@dataclass(frozen=True)
class DeviceProperties:
    """The result of ``torch.cuda.get_device_properties`` for the GPU of a target."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    warp_size: int = 32
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    gcnArchName: str = ""  # noqa: N815 (as PyTorch spells it)


#: The GPUs of the targets, by compute capability (NVIDIA's data sheets).
DEVICES = {
    80: DeviceProperties("NVIDIA A100-SXM4-80GB (emulated)", 8, 0, 80 << 30, 108, 40 << 20, 163 << 10, 164 << 10),
    90: DeviceProperties("NVIDIA H100 80GB HBM3 (emulated)", 9, 0, 80 << 30, 132, 50 << 20, 227 << 10, 228 << 10),
    100: DeviceProperties("NVIDIA B200 (emulated)", 10, 0, 180 << 30, 148, 126 << 20, 227 << 10, 228 << 10),
}


class Labels:
    """The devices of storages. A storage without a label counts as CUDA's: code below Python made it."""

    def __init__(self) -> None:
        self._labels = StorageMap[torch.device]()

    def get(self, tensor: torch.Tensor) -> torch.device:
        """Return the device of a tensor."""
        label = self.find(tensor)
        return _CUDA if label is None else label

    def find(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the device of a tensor, None if it has no label."""
        return self._labels.get(_storage(tensor)._cdata) if tensor.layout == torch.strided else None

    def put(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Label the storage of a tensor."""
        if tensor.layout == torch.strided:
            storage = _storage(tensor)
            self._labels.put(storage._cdata, storage, device)


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


def parse_device(value: Any) -> torch.device | None:
    """Return the device that an argument names, None if it names none. An index is a CUDA device's."""
    if isinstance(value, torch.device):
        device = value
    elif isinstance(value, str):
        try:
            device = torch.device(value)
        except RuntimeError:
            return None
    elif isinstance(value, int) and not isinstance(value, bool):
        device = torch.device("cuda", value)
    else:
        return None
    if device.type == "cuda":
        if device.index not in (None, 0):
            raise RuntimeError(f"CUDA error: invalid device ordinal (device={device.index}); there is one device here")
        return _CUDA
    return device


#: Functions that return uninitialised tensors.
_EMPTY = {
    *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
    *(torch.Tensor.new_empty, torch.Tensor.new_empty_strided),
}
#: Names of functions that take tensors of one device. Numbers, tensors without dimensions, may be on another.
_ONE_DEVICE = frozenset(
    (
        *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "remainder"),
        *("fmod", "pow", "maximum", "minimum", "atan2", "lerp", "where", "addcmul", "addcdiv", "eq", "ne", "lt"),
        *("le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor"),
        *("masked_fill", "matmul", "mm", "bmm", "mv", "dot", "vdot", "outer", "addmm", "addmv", "addbmm", "baddbmm"),
        *("einsum", "tensordot", "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d"),
        *("conv_transpose2d", "conv_transpose3d", "cat", "concat", "stack", "hstack", "vstack", "dstack"),
        *("embedding", "gather", "scatter", "scatter_add", "index_select", "index_add", "layer_norm", "rms_norm"),
        *("batch_norm", "group_norm", "instance_norm", "cross_entropy", "nll_loss", "mse_loss", "l1_loss"),
        *("smooth_l1_loss", "binary_cross_entropy", "kl_div", "cdist", "allclose", "isclose", "equal"),
        "scaled_dot_product_attention",
    )
)
#: Names of functions that write nothing to their arguments: properties, facts and views.
_READING = frozenset(
    (
        *("__get__", "__getitem__", "__len__", "as_strided", "chunk", "contiguous", "detach", "diagonal", "dim"),
        *("element_size", "expand", "expand_as", "flatten", "is_complex", "is_contiguous", "is_floating_point"),
        *("movedim", "narrow", "ndimension", "nelement", "numel", "permute", "requires_grad_", "reshape", "reshape_as"),
        *("select", "size", "split", "squeeze", "storage_offset", "stride", "swapaxes", "t", "transpose", "unbind"),
        *("unflatten", "unsqueeze", "view", "view_as"),
    )
)


class LabelMode(TorchFunctionMode):
    """Replaces CUDA devices in calls by the CPU, and labels their results."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = Labels()
        #: CPU tensors in pinned memory.
        self.pinned = Labels()
        #: The sizes of storages with addresses that were read.
        self.addressed = StorageMap[int]()
        #: Bytes that nothing has written, of tensors made by torch.empty and the like.
        self.unwritten = UnwrittenBytes()
        #: Called with a CUDA tensor before it is copied to the host.
        self.before_host_copy: Callable[[torch.Tensor], None] = lambda tensor: None
        self._handlers: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: lambda t: self.get_device(t),
            torch.Tensor.is_cuda.__get__: lambda t: self.get_device(t).type == "cuda",  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: lambda t: self.get_device(t).type == "cpu",  # type: ignore[attr-defined]
            torch.Tensor.get_device: lambda t: 0 if self.get_device(t).type == "cuda" else -1,
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: lambda t, device=None, non_blocking=False, memory_format=None: self._move(t, _CUDA),
            torch.Tensor.cpu: lambda t, memory_format=None: self._move(t, _CPU),
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.pin_memory: self._pin,
            torch.Tensor.is_pinned: lambda t, device=None: self.pinned.find(t) is not None,
            torch.Tensor.data_ptr: self._data_ptr,
        }

    def get_device(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that a tensor reports."""
        device = tensor.device
        return self.labels.get(tensor) if device.type == "cpu" else device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch with CUDA replaced, and label its results."""
        kwargs = dict(kwargs or {})
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        device = parse_device(kwargs["device"]) if kwargs.get("device") is not None else None
        if device is not None and device.type == "cuda":
            kwargs["device"] = _CPU
        is_pinned = bool(kwargs.get("pin_memory"))
        if is_pinned:
            kwargs["pin_memory"] = False
        if func.__name__.strip("_") in _ONE_DEVICE or func.__name__[:3] in ("__r", "__i"):
            self._require_one_device((args, kwargs))
        result = func(*args, **kwargs)
        if device is not None and _is_host(result) and self.labels.find(result) not in (None, device):
            result = self._move(result, device)  # as_tensor gives its argument
        if is_pinned and _is_host(result):
            self.pinned.put(result, _CPU)
        if func in _EMPTY:
            self.unwritten.add(result)
        elif func.__name__ not in _READING:  # it may write to its arguments
            for tensor in tree_iter((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self.unwritten.discard(tensor)
        if isinstance(result, (torch.Tensor, tuple, list, dict)):
            self._label(result, device, args, kwargs)
        return result

    def _label(self, result: Any, device: torch.device | None, args: Any, kwargs: Any) -> None:
        """Label new storages of results: with the device that the call names, else with the device of its tensors."""
        values = tuple(result) if isinstance(result, tuple) else result  # torch.max returns a subclass of tuple
        new = [t for t in tree_iter(values) if _is_host(t) and self.labels.find(t) is None]
        if not new:
            return
        if device is None:
            given = {self.labels.find(t) for t in tree_iter((args, kwargs)) if _is_host(t)}
            if None in given and _CUDA not in given:  # such as gradients: no call made them
                return
            device = _CUDA if _CUDA in given else _CPU
        for tensor in new:
            self.labels.put(tensor, device)

    def _require_one_device(self, values: Any) -> None:
        """Raise RuntimeError, as PyTorch does, for tensors of several devices."""
        given = {self.labels.find(t) for t in tree_iter(values) if _is_host(t) and t.ndim}
        if {_CPU, _CUDA} <= given:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            )

    def _pin(self, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        result = tensor.clone()
        for labels in (self.labels, self.pinned):
            labels.put(result, _CPU)
        return result

    def is_accessible(self, tensor: torch.Tensor) -> bool:
        """Return whether a kernel on the GPU can access a tensor: not one on the host, unless its memory is pinned."""
        return self.labels.find(tensor) != _CPU or self.pinned.find(tensor) is not None

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Do as Tensor.to: to a device, a dtype, both, or another tensor's device and dtype."""
        target: torch.device | None = None
        values = list(args)
        if values and isinstance(values[0], torch.Tensor):
            other = values.pop(0)
            target = self.get_device(other)
            values.insert(0, other.dtype)
        elif values and (device := parse_device(values[0])) is not None:
            target = device
            values.pop(0)
        elif values and values[0] is None:
            values.pop(0)
        if (other := kwargs.pop("other", None)) is not None:
            target, kwargs["dtype"] = self.get_device(other), other.dtype
        if kwargs.get("device") is not None:
            target = parse_device(kwargs["device"])
        kwargs.pop("device", None)
        dtype = kwargs.pop("dtype", None)
        if values and (isinstance(values[0], torch.dtype) or values[0] is None):
            dtype = values.pop(0)
        for name, value in zip(("non_blocking", "copy"), values, strict=False):
            kwargs[name] = value
        kwargs.pop("non_blocking", None)
        source = self.get_device(tensor)
        if target is not None and target.type not in ("cpu", "cuda"):
            return tensor.to(target, dtype or tensor.dtype, **kwargs)
        moves = target is not None and target.type != source.type
        if moves:
            kwargs["copy"] = True
            if target == _CPU:
                self.before_host_copy(tensor)
        result = tensor.to(dtype or tensor.dtype, **kwargs)
        if result is not tensor:
            self.labels.put(result, target if target is not None else source)
        return result

    def _move(self, tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
        return self._to(tensor, target)

    def _data_ptr(self, tensor: torch.Tensor) -> int:
        """Return the address, and remember its storage: a kernel may get the address through memory."""
        if tensor.dtype != torch.int64:
            storage = tensor.untyped_storage()
            self.addressed.put(storage.data_ptr(), storage, storage.nbytes())
        return tensor.data_ptr()

    def find_addressed(self) -> list[tuple[int, int]]:
        """Return start and end of the living storages with addresses that were read."""
        return [(start, start + size) for start, _, size in self.addressed.list_living()]

    def _numpy(self, tensor: torch.Tensor, *, force: bool = False) -> Any:
        if self.get_device(tensor).type == "cuda" and not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        self.unwritten.discard(tensor)  # it may be written through the array
        return tensor.numpy(force=force)


def _is_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


class _Device(contextlib.AbstractContextManager["_Device"]):
    """torch.cuda.device and torch.cuda.device_of."""

    def __init__(self, device: Any = None) -> None:
        if not isinstance(device, torch.Tensor):
            parse_device(device)
        self.idx = 0

    def __exit__(self, *error: object) -> None:
        return None


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing: all work is done."""


class CudaStream:
    """torch.cuda.Stream: launches run at once and in order, so there is nothing to wait for."""

    cuda_stream = 0
    device_index = 0
    device = _CUDA

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of torch.cuda.Stream."""

    def __enter__(self) -> CudaStream:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream)

    def __hash__(self) -> int:
        return 0

    synchronize = wait_stream = wait_event = _ignore

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def record_event(self, event: Any = None) -> CudaEvent:
        """Return an event."""
        return event or CudaEvent()


class CudaEvent:
    """torch.cuda.Event. The time between two events is NaN: the emulator cannot measure time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of torch.cuda.Event."""

    record = wait = synchronize = _ignore

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Return NaN."""
        return float("nan")


class _Generator(torch._C.Generator):
    """torch.Generator, of the CPU for every device."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{name} is not emulated")

    return refuse


#: The method that a new thread runs first, also if its class overrides ``run``.
_BEGIN = "_bootstrap_inner"


def _eager(model: Any = None, **options: Any) -> Any:
    """Return the function itself, in place of torch.compile: it computes the same."""
    return (lambda function: function) if model is None else model


class CudaTensors:
    """Context in which CUDA tensors are labelled CPU tensors, for the GPU of a compute capability, such as 90."""

    def __init__(self, capability: int) -> None:
        self.properties = DEVICES.get(capability, DEVICES[90])
        self.mode = LabelMode()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CudaTensors:
        for owner, names in self._replacements():
            for name, value in names.items():
                self._stack.enter_context(replace_attribute(owner, name, value))
        self._stack.enter_context(self.mode)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _on_host(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a function that labels its result as a CPU tensor. The mode does not see these functions."""

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            self.mode.labels.put(tensor, _CPU)
            return tensor

        return call

    def _wrap_thread_start(self, begin: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a begin of a thread that enters the mode. PyTorch keeps modes per thread."""

        def run(thread: Any) -> None:
            with self.mode:
                begin(thread)

        return run

    def _replacements(self) -> list[tuple[Any, dict[str, Any]]]:
        p, stream = self.properties, CudaStream()
        zero, seed = (lambda *_, **__: 0), (lambda value: torch.default_generator.manual_seed(int(value)))
        empty_strided = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda")  # noqa: E731
        cuda: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": _ignore,
            "_lazy_init": _ignore,
            "_is_compiled": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: parse_device(device) and None,
            "device": _Device,
            "device_of": _Device,
            "_DeviceGuard": _Device,  # this and _empty_strided_cuda are in the code that Inductor writes
            "synchronize": _ignore,
            "get_device_name": lambda device=None: p.name,
            "get_device_capability": lambda device=None: (p.major, p.minor),
            "get_device_properties": lambda device=None: p,
            "get_arch_list": lambda: [f"sm_{p.major}{p.minor}"],
            "is_bf16_supported": lambda *_, **__: True,
            "mem_get_info": lambda device=None: (p.total_memory, p.total_memory),
            **dict.fromkeys(
                ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), zero
            ),
            **dict.fromkeys(("reset_peak_memory_stats", "empty_cache", "ipc_collect"), _ignore),
            "memory_stats": lambda device=None: {},
            **dict.fromkeys(("memory_summary", "memory_snapshot"), lambda *_, **__: "no memory is counted here"),
            **dict.fromkeys(("manual_seed", "manual_seed_all"), seed),
            "seed": lambda: torch.default_generator.seed(),
            "seed_all": lambda: torch.default_generator.seed(),
            "initial_seed": lambda: torch.default_generator.initial_seed(),
            "get_rng_state": lambda device=None: torch.default_generator.get_state(),
            "set_rng_state": lambda state, device=None: torch.default_generator.set_state(state),
            "Stream": CudaStream,
            "ExternalStream": CudaStream,
            "Event": CudaEvent,
            "current_stream": lambda device=None: stream,
            "default_stream": lambda device=None: stream,
            "stream": lambda stream=None: CudaStream(),
            "set_stream": _ignore,
            "is_current_stream_capturing": lambda: False,
            # a class, because annotations name it: CUDAGraph | None
            "CUDAGraph": type("CUDAGraph", (), {"__init__": _refuse("torch.cuda.CUDAGraph")}),
            "graph": _refuse("torch.cuda.graph"),
            "make_graphed_callables": _refuse("torch.cuda.make_graphed_callables"),
            "cudart": _refuse("torch.cuda.cudart"),
        }
        return [
            (torch.cuda, cuda),
            (torch, {"Generator": _Generator, "compile": _eager}),
            (torch, {name: self._on_host(getattr(torch, name)) for name in ("from_numpy", "frombuffer")}),
            (torch.Tensor, {"record_stream": _ignore}),  # its parser would refuse CudaStream
            (threading.Thread, {_BEGIN: self._wrap_thread_start(getattr(threading.Thread, _BEGIN))}),
            (torch.version, {"cuda": "13.0"}),
            (torch._C, {"_cuda_getCurrentRawStream": zero}),
            (torch._C._dynamo.guards, {"_empty_strided_cuda": empty_strided}),
            (torch.cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark"), _ignore)),
        ]


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Run without the modes of PyTorch that change tensors' operations."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, and restore it, or its absence, at the end."""
    absent = object()
    before = vars(owner).get(name, absent)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
