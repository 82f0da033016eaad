"""Convert a Python callable to a program: capture its GPU work in a CUDA graph and read the graph's nodes.

The result is data: cubins, grids, and argument bytes with the positions of addresses. Another process launches it on
other memory. The callable itself does not run there, so streams, threads, caches, deferred work and patched timers have
no effect: only work that was launched during the capture is repeated.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cuda.bindings import driver
from torch.cuda import _gpu_trace

from greenfast.device.bound_launch import check
from greenfast.judge.solution.cupti import LoadedCode
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Allocation, KernelSource, Launch, Packed, Program, Step, Workspace

_NODE = driver.CUgraphNodeType
_ATTRIBUTE = driver.CUlaunchAttributeID
#: Calls before the capture: compilers and libraries choose and load their kernels in these.
WARM_UP = 3
#: Direct calls of the function that are timed, and for how many cycles the GPU is kept busy before each.
TIMED_CALLS, BUSY_CYCLES = 21, 1_000_000
#: Maximum bytes of other memory that becomes part of the program, such as weights.
MAX_STATE_BYTES = 256 << 20
#: Content of the program's memory at the positions of freed tensors.
_FREED = 0xFF

_FILL = KernelSource(
    entry="fill",
    source="""extern "C" __global__ void
fill(unsigned char* to, unsigned value, unsigned size, unsigned long long count) {
  // Byte i % size of a value of 1, 2 or 4 bytes; `to` is a multiple of `size`. 16 bytes at once between ragged ends.
  const unsigned word = size == 1 ? (value & 255) * 0x01010101u : size == 2 ? (value & 65535) * 0x00010001u : value;
  const unsigned long long first = blockIdx.x * 256ull + threadIdx.x, step = gridDim.x * 256ull;
  const unsigned long long to_16 = -reinterpret_cast<unsigned long long>(to) & 15, head = to_16 < count ? to_16 : count;
  const unsigned long long vectors = (count - head) / 16, tail = head + 16 * vectors;
  uint4* middle = reinterpret_cast<uint4*>(to + head);
  for (unsigned long long i = first; i < vectors; i += step) middle[i] = make_uint4(word, word, word, word);
  if (first < head) to[first] = value >> 8 * (first % size);
  if (first < count - tail) to[tail + first] = value >> 8 * ((tail + first) % size);
}
""",
    name="fill.cu",
    include_dirs=(),
    block=(256, 1, 1),
)
_COPY = KernelSource(
    entry="copy",
    source="""extern "C" __global__ void
copy(const unsigned char* from, unsigned char* to, unsigned long long count) {
  // 16 bytes at once between ragged ends, where both addresses allow it.
  const unsigned long long first = blockIdx.x * 256ull + threadIdx.x, step = gridDim.x * 256ull;
  const unsigned long long target = reinterpret_cast<unsigned long long>(to);
  if ((target - reinterpret_cast<unsigned long long>(from)) & 15) {
    for (unsigned long long i = first; i < count; i += step) to[i] = from[i];
    return;
  }
  const unsigned long long to_16 = -target & 15, head = to_16 < count ? to_16 : count;
  const unsigned long long vectors = (count - head) / 16, tail = head + 16 * vectors;
  const uint4* source = reinterpret_cast<const uint4*>(from + head);
  uint4* middle = reinterpret_cast<uint4*>(to + head);
  for (unsigned long long i = first; i < vectors; i += step) middle[i] = source[i];
  if (first < head) to[first] = from[first];
  if (first < count - tail) to[tail + first] = from[tail + first];
}
""",
    name="copy.cu",
    include_dirs=(),
    block=(256, 1, 1),
)


@dataclass
class _Memory:
    """The memory of this process, by its buffer names in the program."""

    named: dict[str, torch.Tensor]
    found: dict[int, tuple[str, int]] = field(default_factory=dict)  # base address -> name, bytes
    workspaces: dict[str, Workspace] = field(default_factory=dict)
    snapshots: Mapping[int, bytes] = field(default_factory=dict)

    def place(self, address: int) -> tuple[str, int] | None:
        """Return the buffer of an address and its offset there; None for a number that is no device address."""
        if named := self._named_place(address):
            return named
        status, base, nbytes = driver.cuMemGetAddressRange(address)
        if status:
            return None
        base, nbytes = int(base), int(nbytes)
        if base not in self.found:
            name = f"memory {len(self.found)}"
            self.found[base] = (name, nbytes)
            self.workspaces[name] = Workspace(nbytes, data=self.snapshots.get(base, b""))
        return self.found[base][0], address - base

    def known_place(self, address: int) -> tuple[str, int] | None:
        """Do as ``place``, but return None for memory that no node of the graph refers to."""
        known = (
            (name, address - base) for base, (name, nbytes) in self.found.items() if base <= address < base + nbytes
        )
        return self._named_place(address) or next(known, None)

    def _named_place(self, address: int) -> tuple[str, int] | None:
        for name, tensor in self.named.items():
            start = tensor.data_ptr()
            if start <= address < start + tensor.nbytes:
                return name, address - start
        return None


def capture(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    code: LoadedCode,
) -> Program:
    """Return the program of ``function(*arguments)``. The function returns its outputs in order, or writes ``outputs``.

    inputs, outputs: CUDA tensors by the buffers' names; for an output only shape and dtype count where the function
    returns it. code: has watched this process since before it loaded any kernel.
    Raises UsageError for a result of another shape, dtype or layout, and for work that is not kernels, fills and
    copies on the device.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            function(*arguments)
    torch.cuda.synchronize()
    snapshots = _snapshots({tensor.data_ptr() for tensor in (*inputs.values(), *outputs.values())})
    graph, returned, allocated = _captured(side, lambda: function(*arguments))
    results = match_results(returned, outputs)
    if any(_served_before(tensor, allocated) for tensor in results.values()):
        # Another tensor used the memory before: its values would land in the output's buffer. So results are copied.
        held = {name: torch.empty_like(tensor) for name, tensor in results.items()}

        def copied() -> None:
            for tensor, result in zip(
                held.values(), match_results(function(*arguments), outputs).values(), strict=True
            ):
                tensor.copy_(result)

        graph, _, allocated = _captured(side, copied)
        results = held
    memory = _Memory({**outputs, **inputs, **results}, snapshots=snapshots)
    raw = driver.CUgraph(graph.raw_cuda_graph())
    steps = _steps(raw, memory, code)
    if not steps:
        raise UsageError("it launched nothing on the GPU while it was captured")
    allocations = _allocations(raw, allocated, memory, code)
    # Last, because these calls may change memory that the program begins with.
    return Program(tuple(steps), memory.workspaces, allocations, _time(lambda: function(*arguments), side))


def _time(call: Callable[[], Any], stream: torch.cuda.Stream) -> float:
    """Return the median device time of direct calls, in microseconds.

    The GPU is busy before each call, so that the host queues the call's launches before the first one starts.
    """
    pairs: list[tuple[Any, Any]] = []
    with torch.cuda.stream(stream):
        for _ in range(TIMED_CALLS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            start.record(stream)
            call()
            end.record(stream)
            pairs.append((start, end))
    stream.synchronize()
    return 1e3 * statistics.median(float(start.elapsed_time(end)) for start, end in pairs)


@dataclass(frozen=True)
class _Allocated:
    """An allocation during a capture: its address and size, and the graph's nodes at that moment if they are known."""

    address: int
    nbytes: int
    nodes: frozenset[int] | None = None


@dataclass
class _Watch:
    """Records each allocation of PyTorch: its address, and the nodes of the graph that is being captured."""

    stream: torch.cuda.Stream | None = None
    seen: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    is_registered: bool = False

    def start(self, stream: torch.cuda.Stream) -> None:
        if not self.is_registered:
            torch._C._activate_gpu_trace()
            _gpu_trace.register_callback_for_memory_allocation(self.note)
            self.is_registered = True
        self.stream, self.seen = stream, []

    def note(self, address: int) -> None:
        if self.stream is None:
            return
        info = check(driver.cuStreamGetCaptureInfo(self.stream.cuda_stream))
        if info[0] == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            self.seen.append((address, frozenset(map(int, _nodes(info[2])))))


_WATCH = _Watch()


def _captured(stream: torch.cuda.Stream, call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any, list[_Allocated]]:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    _WATCH.start(stream)
    # Without clear_history the events of the capture before this one are returned too.
    torch.cuda.memory._record_memory_history(context=None, clear_history=True)
    try:
        with torch.cuda.graph(graph, stream=stream):
            returned = call()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    except RuntimeError as e:
        raise UsageError(f"its calls cannot be captured in a CUDA graph: {str(e).splitlines()[0]}") from None
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        _WATCH.stream = None
    made = [(event["addr"], event["size"]) for event in events if event["action"] == "alloc"]
    recorded = _WATCH.seen
    # The first ones are made before the capture begins, such as the state of random numbers, and are not recorded.
    before = len(made) - len(recorded)
    if before < 0 or [address for address, _ in made[before:]] != [
        address for address, _ in recorded
    ]:  # unknown positions
        return graph, returned, [_Allocated(*each) for each in made]
    placed = [_Allocated(*each, nodes) for each, (_, nodes) in zip(made[before:], recorded, strict=True)]
    return graph, returned, [*(_Allocated(*each) for each in made[:before]), *placed]


def _allocations(
    graph: driver.CUgraph, allocated: Sequence[_Allocated], memory: _Memory, code: LoadedCode
) -> tuple[Allocation, ...]:
    """Return the allocations with the number of the next step.

    Allocations with an uncertain position among the nodes, and unused ones, are left out.
    """
    order = _ordered(graph)
    places = {int(node): n for n, node in enumerate(order)}
    counts = [0, *itertools.accumulate(len(_node_steps(node, memory, code)) for node in order)]
    found = []
    for each in allocated:
        if each.nodes is None or not each.nodes <= places.keys():
            continue
        before = 1 + max((places[node] for node in each.nodes), default=-1)
        place = memory.known_place(each.address)
        if before != len(each.nodes) or place is None or counts[before] == counts[-1]:
            continue
        found.append(Allocation(counts[before], *place, each.nbytes))
    return tuple(found)


def _served_before(result: torch.Tensor, allocated: Sequence[_Allocated]) -> bool:
    """Return whether another tensor of the call used the memory of a result, as the allocator reuses freed memory."""
    start, end = result.data_ptr(), result.data_ptr() + result.nbytes
    return sum(each.address < end and start < each.address + each.nbytes for each in allocated) > 1


def match_results(returned: Any, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the returned tensors by the names of the outputs; empty if the call wrote to the outputs."""
    if returned is None:
        return {}
    tensors = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(tensors) != len(outputs):
        raise UsageError(f"it returned {len(tensors)} values; the problem has the outputs {', '.join(outputs)}")
    for tensor, (name, wanted) in zip(tensors, outputs.items(), strict=True):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
            kind = f"a tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise UsageError(f"output {name!r}: it returned {kind}, a CUDA tensor is needed")
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype) or not tensor.is_contiguous():
            layout = "" if tensor.is_contiguous() else ", not contiguous"
            raise UsageError(
                f"output {name!r}: it returned {tensor.dtype} {tuple(tensor.shape)}{layout}; "
                f"the problem requires {wanted.dtype} {tuple(wanted.shape)}, contiguous"
            )
    return dict(zip(outputs, tensors, strict=True))


def _snapshots(known: set[int]) -> dict[int, bytes]:
    """Return the contents of allocations from before the capture, by address: weights and libraries' workspaces."""
    contents: dict[int, bytes] = {}
    total = 0
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        live = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        if not any(block["address"] not in known for block in live):
            continue
        total += segment["total_size"]
        if total > MAX_STATE_BYTES:
            raise UsageError(f"it keeps more than {MAX_STATE_BYTES >> 20} MiB on the GPU beyond the problem's buffers")
        contents[segment["address"]] = _read_segment(segment)
    return contents


def _read_segment(segment: Mapping[str, Any]) -> bytes:
    """Return the contents of a segment, with poison in place of freed tensors."""
    data = bytearray([_FREED]) * segment["total_size"]
    for block in segment["blocks"]:
        if block["state"] != "inactive":
            start = block["address"] - segment["address"]
            data[start : start + block["size"]] = _download(block["address"], block["size"])
    return bytes(data)


def _download(address: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    check(driver.cuMemcpyDtoH((ctypes.c_char * nbytes).from_buffer(data), address, nbytes))
    return bytes(data)


def _steps(graph: driver.CUgraph, memory: _Memory, code: LoadedCode) -> list[Step]:
    return [step for node in _ordered(graph) for step in _node_steps(node, memory, code)]


def _node_steps(node: Any, memory: _Memory, code: LoadedCode) -> list[Step]:
    kind = check(driver.cuGraphNodeGetType(node))
    if kind == _NODE.CU_GRAPH_NODE_TYPE_KERNEL:
        return [_kernel(node, memory, code)]
    if kind == _NODE.CU_GRAPH_NODE_TYPE_MEMSET:
        return [_fill(node, memory)]
    if kind == _NODE.CU_GRAPH_NODE_TYPE_MEMCPY:
        return [_copy(node, memory)]
    if kind == _NODE.CU_GRAPH_NODE_TYPE_GRAPH:
        return _steps(check(driver.cuGraphChildGraphNodeGetGraph(node)), memory, code)
    if kind not in (_NODE.CU_GRAPH_NODE_TYPE_EMPTY, _NODE.CU_GRAPH_NODE_TYPE_EVENT_RECORD):
        name = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        raise UsageError(f"its graph has a {name} node; kernels, fills and copies on the device can be replayed")
    return []


def _nodes(graph: driver.CUgraph) -> list[Any]:
    _, count = check(driver.cuGraphGetNodes(graph))
    return list(check(driver.cuGraphGetNodes(graph, count))[0]) if count else []


def _ordered(graph: driver.CUgraph) -> list[Any]:
    """Return the nodes of a graph: each after its dependencies, otherwise in the order of their capture."""
    nodes = _nodes(graph)
    count = len(nodes)
    numbers = {int(node): n for n, node in enumerate(nodes)}
    waits: dict[int, set[int]] = {n: set() for n in range(count)}
    edges = check(driver.cuGraphGetEdges(graph))[-1]
    if edges:
        before, after, *_ = check(driver.cuGraphGetEdges(graph, edges))
        for first, then in zip(before, after, strict=True):
            waits[numbers[int(then)]].add(numbers[int(first)])
    done: list[int] = []
    while len(done) < count:
        done.append(min(n for n in waits if n not in done and waits[n] <= set(done)))
    return [nodes[n] for n in done]


def _kernel(node: Any, memory: _Memory, code: LoadedCode) -> Step:
    params = check(driver.cuGraphKernelNodeGetParams(node))
    function = params.func if int(params.func) else check(driver.cuKernelGetFunction(params.kern))
    name = check(driver.cuFuncGetName(function)).decode()
    source = KernelSource(
        entry=name,
        source="",
        name=f"{name}.cubin",
        include_dirs=(),
        block=(params.blockDimX, params.blockDimY, params.blockDimZ),
        dynamic_smem_bytes=params.sharedMemBytes,
        language="cubin",
        binary=code.with_kernel(name),
    )
    x, y, z = (_attribute(node, "CLUSTER_DIMENSION", "clusterDim", axis) for axis in "xyz")
    launch = Launch(
        grid=(params.gridDimX, params.gridDimY, params.gridDimZ),
        args=tuple(_packed(data, memory) for data in _argument_bytes(params, function)),
        cluster=(x or 1, y or 1, z or 1),
        cooperative=bool(_attribute(node, "COOPERATIVE", "cooperative")),
    )
    return Step(source, launch)


def _attribute(node: Any, name: str, *fields: str) -> int:
    status, value = driver.cuGraphKernelNodeGetAttribute(node, getattr(_ATTRIBUTE, f"CU_LAUNCH_ATTRIBUTE_{name}"))
    if status:
        return 0
    for part in fields:
        value = getattr(value, part)
    return int(value)


def _argument_bytes(params: Any, function: Any) -> list[bytes]:
    """Return the bytes of each argument, from an array of pointers or from one packed buffer (as cuBLAS uses)."""
    places: list[tuple[int, int]] = []
    while True:
        status, offset, size = driver.cuFuncGetParamInfo(function, len(places))
        if status:
            break
        places.append((int(offset), int(size)))
    if not places:
        return []
    if int(params.kernelParams):
        pointers = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
        return [ctypes.string_at(pointers[i], size) for i, (_, size) in enumerate(places)]
    extra = ctypes.cast(int(params.extra), ctypes.POINTER(ctypes.c_void_p))
    options = {extra[i]: extra[i + 1] for i in range(0, 4, 2)}
    buffer = options[1]  # CU_LAUNCH_PARAM_BUFFER_POINTER
    assert buffer is not None
    return [ctypes.string_at(buffer + offset, size) for offset, size in places]


def _packed(data: bytes, memory: _Memory) -> Packed:
    """Find the addresses in an argument: all aligned 8 bytes that are an address of this process's allocations."""
    pointers = []
    for at in range(0, len(data) - 7, 8):
        place = memory.place(int.from_bytes(data[at : at + 8], "little"))
        if place is not None:
            pointers.append((at, *place))
    zeroed = bytearray(data)
    for at, *_ in pointers:
        zeroed[at : at + 8] = bytes(8)
    return Packed(bytes(zeroed), tuple(pointers))


def _fill(node: Any, memory: _Memory) -> Step:
    params = check(driver.cuGraphMemsetNodeGetParams(node))
    if params.height > 1:
        raise UsageError("its graph fills a two-dimensional area; only plain fills can be replayed")
    size, count = int(params.elementSize), int(params.elementSize) * int(params.width)
    return Step(_FILL, _plain(count, (_address(int(params.dst), memory), uint(int(params.value), 4), uint(size, 4))))


def _copy(node: Any, memory: _Memory) -> Step:
    params = check(driver.cuGraphMemcpyNodeGetParams(node))
    device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    unified = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    if not {params.srcMemoryType, params.dstMemoryType} <= {device, unified}:
        raise UsageError("its graph copies from or to the host; only copies on the device can be replayed")
    if params.Height > 1 or params.Depth > 1:
        raise UsageError("its graph copies a two-dimensional area; only plain copies can be replayed")
    source = _address(int(params.srcDevice) + int(params.srcXInBytes), memory)
    to = _address(int(params.dstDevice) + int(params.dstXInBytes), memory)
    return Step(_COPY, _plain(int(params.WidthInBytes), (source, to)))


def _plain(count: int, args: tuple[Packed, ...]) -> Launch:
    """Return the launch of _FILL or _COPY for a number of bytes."""
    return Launch((max(1, min(1024, -(-count // 4096))), 1, 1), (*args, uint(count, 8)))


def _address(address: int, memory: _Memory) -> Packed:
    place = memory.place(address)
    if place is None:
        raise UsageError(f"its graph writes to {address:#x}: not memory of this device")
    return Packed(bytes(8), ((0, *place),))


def uint(value: int, size: int) -> Packed:
    """Return a number of ``size`` bytes as an argument."""
    return Packed(value.to_bytes(size, "little"))
