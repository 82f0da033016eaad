"""Capture of a Python function on CUDA tensors, such as PyTorch code or an extension (see ``capture``, ``recording``).

The launch's ``kernel`` is the function's name ("run" if there is no launch). ``args`` are its arguments: inputs, typed
scalars, and outputs that it writes. The default is the problem's inputs in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from greenfast.judge.solution.capture import capture
from greenfast.judge.solution.cuda_program import evaluate_constants, parse_scalar
from greenfast.judge.solution.cupti import LoadedCode
from greenfast.judge.solution.languages.compiled import import_family
from greenfast.judge.solution.languages.triton import own_cache
from greenfast.judge.solution.messages import Buffer
from greenfast.judge.solution.recording import Recording
from greenfast.judge.solution.schema import ResolvedSolution
from greenfast.spec.arch import Target
from greenfast.spec.errors import MachineError, UnsupportedError, UsageError, unknown
from greenfast.spec.extras import require
from greenfast.spec.kernel import Program
from greenfast.spec.problem import to_dtype

_FUNCTION = "run"

#: Created before any code is loaded onto the GPU; None without a GPU.
_CODE = LoadedCode() if torch.cuda.device_count() else None


def program(
    solution: ResolvedSolution, fmt: str, dims: Mapping[str, int], target: Target, buffers: Mapping[str, Buffer]
) -> Program:
    """Capture a function's launches as a program on this process's GPU.

    buffers: the buffers of the problem's case by name; inputs have example data.
    Without a GPU, the launches of its Triton kernels and extensions are recorded. Raises MachineError for functions
    that need a GPU, UsageError for a function that cannot be called or captured.
    """
    config = solution.config
    if len(config.launches) > 1:
        raise UsageError(f"{config.name}: launches: {len(config.launches)}; a callable has one")
    if _CODE is not None:
        return _capture(solution, dims, buffers, _CODE)
    try:
        with Recording(target.name) as recording, own_cache():
            return _capture(solution, dims, buffers, recording)
    except ModuleNotFoundError as e:
        if e.name == "triton":
            require("its Triton kernels (they run without a GPU)", "triton")
        raise
    except (MachineError, UnsupportedError) as e:
        raise MachineError(f"a callable is captured on a GPU, and there is none here: {e}") from None


def _capture(
    solution: ResolvedSolution, dims: Mapping[str, int], buffers: Mapping[str, Buffer], code: LoadedCode | Recording
) -> Program:
    """Return the program of a function, captured on a GPU (with its loaded code) or recorded."""
    function, given = _find_call(solution, buffers)
    inputs = {name: _example(buffer) for name, buffer in buffers.items() if buffer.path}
    outputs = {name: _like(buffer) for name, buffer in buffers.items() if buffer.output and name not in inputs}
    names = evaluate_constants(solution, dims)
    tensors = {**inputs, **outputs}
    arguments = [tensors[text] if text in tensors else parse_scalar(text, names).item() for text in given]
    in_place = {name: tensor for name, tensor in inputs.items() if buffers[name].output}
    outputs |= in_place
    try:
        if isinstance(code, Recording):
            return code.record(function, arguments, inputs, outputs)
        return capture(function, arguments, inputs, outputs, code)
    except UsageError as e:
        raise UsageError(f"{solution.config.name}: {getattr(function, '__name__', 'its function')}: {e}") from None


def _find_call(solution: ResolvedSolution, buffers: Mapping[str, Buffer]) -> tuple[Any, list[str]]:
    launch = solution.config.launches[0] if solution.config.launches else None
    name = launch.kernel if launch else _FUNCTION
    module = import_family(solution.folder, solution.config.file, "")
    function = getattr(module, name, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"function of {solution.config.file}", name, public)
    given = [text for text in launch.args if isinstance(text, str)] if launch else []
    if launch and len(given) < len(launch.args):
        raise UsageError(f"{solution.config.name}: launches[0].args: a callable takes buffers and typed scalars only")
    return function, given or [key for key, buffer in buffers.items() if buffer.path]


def _example(buffer: Buffer) -> torch.Tensor:
    bits = np.frombuffer(Path(buffer.path).read_bytes(), np.uint8).copy()
    return torch.from_numpy(bits).cuda().view(_torch_dtype(buffer)).reshape(buffer.shape)


def _like(buffer: Buffer) -> torch.Tensor:
    nbytes = int(np.prod(buffer.shape)) * to_dtype(buffer.dtype).itemsize
    return (
        torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cuda").view(_torch_dtype(buffer)).reshape(buffer.shape)
    )


def _torch_dtype(buffer: Buffer) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, buffer.dtype)  # NumPy, ml_dtypes and PyTorch use the same names
    return dtype
