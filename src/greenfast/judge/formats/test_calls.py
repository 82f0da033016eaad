"""Problems that are given by a test: each of its calls of the reference's functions is a shape.

The test runs once, with kernels in the emulator, and each call is recorded: the memory of its tensors, its other
arguments, and what it changes. A case of a call has the same arguments with the numbers that the test draws from
another seed. Numbers that the test fixes are multiplied by one between 3/4 and 1, so that no answer can be a table.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import math
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from greenfast.emulator.triton.activation import Activation, activate
from greenfast.emulator.triton.cuda_tensors import replace_attribute, without_modes
from greenfast.judge.formats.converted import (
    DEFAULT_TOLERANCE,
    PROGRAM,
    REFERENCE,
    SETTING,
    TEST,
    TOLERANCES,
    safe_name,
)
from greenfast.judge.formats.defined import build_tolerances, call, to_array
from greenfast.judge.task import import_file
from greenfast.spec.errors import GreenfastError, UsageError
from greenfast.spec.problem import Array, Case, OutputSpec, References

#: Infinity in an array of references, so that norms stay finite.
_INFINITY = 1e150
_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
)
_ENTRY = '''"""Makes the calls of the test. A call returns its results, gradients, and the memory that it writes."""

import torch
from torch.utils._pytree import tree_leaves

import program

def view(memory, shape, strides, offset, has_gradient=False):
    return memory.as_strided(shape, strides, offset).requires_grad_(has_gradient)


def fresh(size, dtype, zeros):
    return (torch.zeros if zeros else torch.empty)(size, dtype=dtype, device="cuda")


# The function, memory that is no input, the arguments, and the numbers of the memory that the call writes.
CALLS = [
{calls}]


def run(*arguments):
    *inputs, number = arguments
    name, made, arrange, written = CALLS[number - 1]
    memory = [*inputs, *made()]
    args, kwargs = arrange(memory)
    variables = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
    with torch.set_grad_enabled(bool(variables)):
        values = [x for x in tree_leaves(getattr(program, name)(*args, **kwargs)) if isinstance(x, torch.Tensor)]
        followed = [x for x in values if x.requires_grad]
        weights = [torch.cos(torch.arange(x.numel(), device="cuda")).to(x.dtype).view(x.shape) for x in followed]
        if followed:
            torch.autograd.backward(followed, weights)
    gradients = [x.grad for x in variables if x.grad is not None]
    return tuple(x.detach().contiguous() for x in (*values, *gradients, *(memory[n] for n in written)))
'''


class _LeftOutError(Exception):
    """A call cannot be judged, and why."""


@dataclass(eq=False)
class _CallMemory:
    """The memory of some arguments. flat: all of it; before: its contents, None if nothing has written it."""

    flat: torch.Tensor
    before: torch.Tensor | None
    is_left_unwritten: bool = False


@dataclass
class _Arguments:
    """The arguments of a call: their memory by address, and their text in Python, on a list ``m`` of it."""

    activation: Activation
    has_gradients: bool
    memory: dict[int, _CallMemory] = field(default_factory=dict)
    on_gpu: set[bool] = field(default_factory=set)

    def format(self, value: Any) -> str:
        """Return the text of an argument. Raises _LeftOutError for one that is no tensor and no plain value."""
        if isinstance(value, torch.Tensor):
            with without_modes():  # to query a tensor under the modes would count as writing to it
                return self._format_tensor(value)
        if type(value) is dict:
            return "{" + ", ".join(f"{key!r}: {self.format(item)}" for key, item in value.items()) + "}"
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list, torch.Size):
            items = [self.format(item) for item in value]
            return f"[{', '.join(items)}]" if isinstance(value, list) else f"({''.join(f'{i}, ' for i in items)})"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.memory_format)):
            return repr(value)
        raise _LeftOutError(f"an argument is a {type(value).__name__}")

    def _format_tensor(self, tensor: torch.Tensor) -> str:
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.dtype not in _DTYPES:
            raise _LeftOutError(f"an argument is a tensor of {tensor.dtype}, {tensor.layout}")
        tensors = self.activation.tensors
        assert tensors is not None
        self.on_gpu.add(tensors.mode.get_device(tensor).type == "cuda")
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.memory:
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
            unwritten = tensors.mode.unwritten.find(key, storage.nbytes())
            is_new = not storage.nbytes() or (unwritten is not None and bool(unwritten.all()))
            self.memory[key] = _CallMemory(flat, None if is_new else flat.clone())
        if self.memory[key].flat.dtype != tensor.dtype:
            raise _LeftOutError("tensors of different types share memory")
        where = f"{tuple(tensor.shape)}, {tensor.stride()}, {tensor.storage_offset()}"
        gradient = ", True" if self.has_gradients and tensor.requires_grad else ""
        return f"view(m[{list(self.memory).index(key)}], {where}{gradient})"

    def find_written(self) -> list[int]:
        """Return the numbers of the memory that was written since."""
        tensors = self.activation.tensors
        assert tensors is not None
        written = []
        for number, (key, memory) in enumerate(self.memory.items()):
            if memory.before is None:
                unwritten = tensors.mode.unwritten.find(key, memory.flat.nbytes)
                memory.is_left_unwritten = unwritten is not None
                is_written = memory.flat.nbytes > 0 and (unwritten is None or not unwritten.all())
            else:
                is_written = not torch.equal(memory.flat.view(torch.uint8), memory.before.view(torch.uint8))
            if is_written:
                written.append(number)
        return written


@dataclass(frozen=True)
class _TestCall:
    """A call that can be repeated. line: its line in the entry. inputs: the contents of its memory, flat.

    written: the numbers of the memory that it writes. result: its return value. after: all memory after it.
    """

    function: str
    line: str
    inputs: list[torch.Tensor]
    written: list[int]
    result: Any
    after: list[torch.Tensor]


class _Recorder:
    """Runs a test with a seed, and records its calls of the program's functions.

    former: the calls of an earlier run; they are not computed again.
    """

    def __init__(
        self, name: str, module: types.ModuleType, test: str, former: Sequence[_TestCall | str] | None = None
    ) -> None:
        self.calls: list[_TestCall | str] = []
        self._former = former
        self._name, self._module, self._test = name, module, test

    def run(self, seed: int) -> None:
        """Run the test; its exceptions pass through."""
        nodes = [node for node in ast.walk(ast.parse(self._test)) if isinstance(node, ast.Name)]
        assigned = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
        kinds = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.BuiltinMethodType)
        variables: dict[str, Any] = dict(vars(self._module))
        own = {name for name, value in variables.items() if isinstance(value, kinds) and _is_own(value, self._module)}
        with (
            activate("sm_90", cuda_tensors_as_cpu=True, formal=False) as activation,
            torch.random.fork_rng(devices=[]),
            contextlib.ExitStack() as stack,
        ):
            for name in {node.id for node in nodes} & own - assigned:
                if not name.startswith("test"):
                    variables[name] = self._wrap(name, variables[name], activation)
            variables["__name__"] = "__main__"
            program = types.ModuleType(self._name)  # the test may import it by the name of its file
            vars(program).update(variables)
            stack.enter_context(_imported(program, self._name))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            _seed_all(seed, stack)
            exec(compile(self._test, TEST, "exec"), variables)

    def _wrap(self, name: str, function: Callable[..., Any], activation: Activation) -> Callable[..., Any]:
        has_gradients = "backward(" in self._test or "autograd.grad" in self._test

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            former = None if self._former is None else self._former[len(self.calls)]
            arguments = _Arguments(activation, has_gradients)
            try:
                text = arguments.format((args, kwargs))
                if len(arguments.on_gpu) > 1:
                    raise _LeftOutError("its tensors are on the CPU and on the GPU")
            except _LeftOutError as e:
                former, text = None, str(e)
                self.calls.append(f"{name} ({e})")
                return function(*args, **kwargs)
            if isinstance(former, _TestCall):
                return self._repeat(former, arguments)
            state = torch.get_rng_state()
            result = function(*args, **kwargs)
            if not torch.equal(state, torch.get_rng_state()):
                self.calls.append(f"{name} (it draws random numbers)")
                return result
            self.calls.append(_finish(name, text, result, arguments))
            return result

        return call

    def _repeat(self, former: _TestCall, arguments: _Arguments) -> Any:
        """Return the recorded result of a call. Raises ValueError if its arguments have another form."""
        memory = list(arguments.memory.values())
        inputs = [m.before for m in memory if m.before is not None]
        forms = [[(x.dtype, x.shape) for x in some] for some in (inputs, former.inputs)]
        if forms[0] != forms[1] or len(memory) != len(former.after):
            raise ValueError("the test makes other calls with another seed")
        self.calls.append(replace(former, inputs=inputs))
        with without_modes():
            for m, content in zip(memory, former.after, strict=True):
                m.flat.copy_(content)
        return _copy(former.result)


@contextlib.contextmanager
def _imported(module: types.ModuleType, name: str) -> Iterator[None]:
    """Let ``import`` find a module by a name."""
    former = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if former is not None:
            sys.modules[name] = former


def _is_own(value: Any, module: types.ModuleType) -> bool:
    """Return whether a function is the program's own: not imported by it."""
    owner = getattr(value, "__self__", None)
    return (getattr(owner, "__module__", None) or getattr(value, "__module__", "")) == module.__name__


def _seed_all(seed: int, stack: contextlib.ExitStack) -> None:
    """Seed all generators, and keep the test from doing so."""
    generator = torch.manual_seed(seed)
    state, legacy = random.getstate(), np.random.get_state()
    stack.callback(random.setstate, state)
    stack.callback(np.random.set_state, legacy)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for owner in (torch, torch.random, torch.cuda, torch.cuda.random, random, np.random):
        for name in {"manual_seed", "manual_seed_all", "seed"} & vars(owner).keys():
            stack.enter_context(replace_attribute(owner, name, lambda *_, **__: generator))


def _finish(name: str, text: str, result: Any, arguments: _Arguments) -> _TestCall:
    """Return a call that ended. Memory that is no input has negative numbers in its entry: from the end of the list."""
    with without_modes():
        written = arguments.find_written()
        memory = list(arguments.memory.values())
        inputs, fresh = ([m for m in memory if (m.before is None) is is_new] for is_new in (False, True))
        places = [fresh.index(m) - len(fresh) if m.before is None else inputs.index(m) for m in memory]
        made = ", ".join(f"fresh({m.flat.numel()}, {m.flat.dtype}, {m.is_left_unwritten})" for m in fresh)
        ordered = ", ".join(f"m[{place}]" for place in places)
        changed = sorted(places[n] for n in written)
        line = f"({name!r}, lambda: [{made}], lambda m: (lambda m: {text})([{ordered}])"
        contents = [m.before for m in inputs if m.before is not None]
        return _TestCall(name, line, contents, changed, _copy(result), [m.flat.clone() for m in memory])


def _find_all_written(one: _TestCall, recorded: Sequence[tuple[int, _TestCall]]) -> list[int]:
    """Return the memory that a call writes, or that another call of its form does: adding 0 changes nothing."""
    form = one.function, len(one.inputs), len(one.after)
    same = [other for _, other in recorded if (other.function, len(other.inputs), len(other.after)) == form]
    return sorted({number for other in same for number in other.written})


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    return {key: _copy(item) for key, item in value.items()} if type(value) is dict else value


class CallProblem:
    """``greenfast.spec.problem.Problem`` of a folder with a program and its test; a shape for each call.

    Runs the test. entry: the text of the file that makes the calls. shapes: of the task. left_out: calls that cannot be
    judged, each with the reason. Raises UsageError if that is all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / REFERENCE / PROGRAM
        self._test = (folder / TEST).read_text(encoding="utf-8")
        self._name, self._label = folder.name, f"{folder.name}: its test"
        self._arrays: dict[tuple[int, int], list[torch.Tensor]] = {}
        recorder = _Recorder(folder.name, self._module, self._test)
        self.left_out: list[str] = []
        try:
            recorder.run(0)
        except Exception as e:
            lines = [line.strip() for line in str(e).splitlines() if line.strip()] or [""]
            text = lines[-1] if type(e).__name__ == "CompilationError" else lines[0]
            self.left_out.append(f"after {len(recorder.calls)} calls the test raises {type(e).__name__}: {text}"[:400])
        self._first = recorder.calls
        recorded = [(n, one) for n, one in enumerate(self._first, 1) if isinstance(one, _TestCall)]
        self.left_out += [f"call {n}, {text}" for n, text in enumerate(self._first, 1) if isinstance(text, str)]
        self._count = max((len(one.inputs) for _, one in recorded), default=0)
        recorded = [(n, replace(one, written=_find_all_written(one, recorded))) for n, one in recorded]
        lines = [f"    {one.line}, {one.written}),\n" for _, one in recorded]
        self.entry = _ENTRY.format(calls="".join(lines))
        self.arguments = [*(f"input{n}" for n in range(self._count)), f"int64({SETTING})"]
        self._places: list[int] = []  # of the judged calls among all
        self._outputs: list[dict[str, OutputSpec]] = []
        self.shapes: list[dict[str, Any]] = []
        for entry_number, (number, one) in enumerate(recorded, 1):
            try:
                self._outputs.append(self._specify(one, self._run(entry_number, one.inputs)))
            except (_LeftOutError, GreenfastError) as e:
                self._outputs.append({})
                self.left_out.append(f"call {number}, {one.function} ({e})"[:400])
            else:
                name, purpose = safe_name(f"{number}_{one.function}"), f"call {number} of its test"
                self.shapes.append({"name": name, "dims": {SETTING: entry_number}, "purpose": purpose})
            self._places.append(number - 1)
        if not self.shapes:
            reasons = "; ".join(self.left_out) or "it calls no function of the reference"
            raise UsageError(f"{self._label} has no call that can be judged: {reasons}")

    def make_case(self, dims: Mapping[str, int], seed: int, fmt: str) -> Case:
        """Return the memory of a call's arguments, flat, as input0, input1 ..., its results and the memory it writes.

        Calls with fewer arguments than others get a zero for each of the others.
        """
        number = dims[SETTING]
        inputs = [to_array(x) for x in self._inputs(number, seed)]
        inputs += [np.zeros(1, np.uint8)] * (self._count - len(inputs))
        return Case({f"input{n}": array for n, array in enumerate(inputs)}, self._outputs[number - 1])

    def references(self, dims: Mapping[str, int], seed: int, fmt: str) -> References:
        """Return the results of the reference, with kernels in the emulator, and the tolerance around them."""
        number = dims[SETTING]
        tensors = self._run(number, self._inputs(number, seed))
        names = [str(x.dtype).removeprefix("torch.") for x in tensors]
        exact = [_finite(x.double().numpy()).reshape(-1) for x in tensors]
        shares = [
            TOLERANCES.get(name, DEFAULT_TOLERANCE) * x.is_floating_point()
            for name, x in zip(names, tensors, strict=True)
        ]
        absolute = [share * _root_mean_square(x) + 1e-7 * bool(share) for share, x in zip(shares, exact, strict=True)]

        def spread(values: Sequence[float]) -> NDArray[np.float64]:
            return np.concatenate([np.full(x.size, value) for value, x in zip(values, exact, strict=True)])

        return build_tolerances(exact, spread(absolute), spread(shares), np.add)

    def decode(self, outputs: Mapping[str, Array], fmt: str) -> NDArray[np.float64]:
        """Return the outputs, flat, in their order."""
        order = sorted(outputs, key=lambda name: (name.startswith("input"), int(name.lstrip("inoutp"))))
        return np.concatenate([_finite(outputs[name].astype(np.float64)).reshape(-1) for name in order])

    @functools.cached_property
    def _module(self) -> types.ModuleType:
        try:
            with activate("sm_90", cuda_tensors_as_cpu=True, formal=False):
                return import_file(self._path)
        except Exception as e:
            raise UsageError(f"{self._label}: the reference cannot be imported: {type(e).__name__}: {e}") from e

    @functools.cached_property
    def _calls(self) -> Callable[..., Any]:
        """The function ``run`` of the entry, for the reference."""
        namespace: dict[str, Any] = {"__name__": "entry"}
        with _imported(self._module, "program"):
            exec(compile(self.entry, "entry.py", "exec"), namespace)
        function: Callable[..., Any] = namespace["run"]
        return function

    def _run(self, number: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs of a call of the reference."""
        padded = [*inputs, *[torch.zeros(1, dtype=torch.uint8)] * (self._count - len(inputs))]
        with activate("sm_90", cuda_tensors_as_cpu=True, formal=False) as activation:
            outputs = call(self._label, lambda: self._calls(*(x.clone().cuda() for x in padded), number))
            tensors = activation.tensors
            assert tensors is not None
            with without_modes():
                storages = [x.untyped_storage() for x in outputs]
                if any(tensors.mode.unwritten.find(s.data_ptr(), s.nbytes()) is not None for s in storages):
                    raise _LeftOutError("its reference leaves elements unwritten")
        return [x.detach() for x in outputs]

    def _specify(self, one: _TestCall, outputs: Sequence[torch.Tensor]) -> dict[str, OutputSpec]:
        """Return the outputs of a call by name. Raises _LeftOutError if they cannot be judged."""
        in_place = [n for n in one.written if n >= 0]
        names = [f"output{n}" for n in range(len(outputs) - len(in_place))] + [f"input{n}" for n in in_place]
        specs = {}
        for name, x in zip(names, outputs, strict=True):
            if x.layout != torch.strided or x.dtype not in _DTYPES:
                raise _LeftOutError(f"a result is a tensor of {x.dtype}, {x.layout}")
            if bool(x.double().isnan().any()):
                raise _LeftOutError("a result is NaN")
            specs[name] = OutputSpec(tuple(x.shape), str(x.dtype).removeprefix("torch."))
        if not sum(x.numel() for x in outputs):
            raise _LeftOutError("it returns and writes no element")
        return specs

    def _inputs(self, number: int, seed: int) -> list[torch.Tensor]:
        """Return the memory of a call's arguments, from the test with a seed."""
        if (number, seed) not in self._arrays:
            calls = self._first
            recorder = _Recorder(self._name, self._module, self._test, self._first)
            with contextlib.suppress(Exception):  # it compares, or needs, results that the former ones are not
                recorder.run(seed)
            if len(recorder.calls) == len(self._first):
                calls = recorder.calls
            for n, place in enumerate(self._places, 1):
                one, first = calls[place], self._first[place]
                assert isinstance(one, _TestCall)
                assert isinstance(first, _TestCall)
                self._arrays[n, seed] = self._vary(n, one.inputs, first.inputs, seed) if seed else first.inputs
        return self._arrays[number, seed]

    def _vary(
        self, number: int, inputs: Sequence[torch.Tensor], first: Sequence[torch.Tensor], seed: int
    ) -> list[torch.Tensor]:
        """Scale floating-point inputs that no seed changes, unless the results are NaN then."""
        factor = 1 - np.random.default_rng(seed).random() / 4
        varied = [
            (x.double() * factor).to(x.dtype) if x.is_floating_point() and torch.equal(x.double(), y.double()) else x
            for x, y in zip(inputs, first, strict=True)
        ]
        if any(x is not y for x, y in zip(varied, inputs, strict=True)) and self._outputs[number - 1]:
            try:
                if any(bool(x.double().isnan().any()) for x in self._run(number, varied)):
                    return list(inputs)
            except (GreenfastError, _LeftOutError):
                return list(inputs)
        return varied


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.nan_to_num(values, nan=np.nan, posinf=_INFINITY, neginf=-_INFINITY)


def _root_mean_square(values: NDArray[np.float64]) -> float:
    finite = values[np.abs(values) < _INFINITY]
    return math.sqrt(float(np.mean(np.square(finite)))) if finite.size else 0.0
