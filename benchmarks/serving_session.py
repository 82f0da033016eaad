"""The session of the serving comparison, with its own inputs, library and kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.backends import Backend, first_line
from benchmarks.comparison import BenchCell, Facts
from benchmarks.record_schema import HostRow
from benchmarks.serving_backends import BACKENDS, VLLM
from benchmarks.serving_cases import ServingCase, append_bytes
from benchmarks.serving_inputs import append_inputs, paged_inputs
from benchmarks.serving_kernels import timed_launches
from benchmarks.session import BenchSession
from greenfast.kernels.serving.attention import TARGET
from greenfast.ops.warmup import warm

_NO_LIBRARY = (
    "no library was given: --fa3-library takes the _vllm_fa3_C.abi3.so of vLLM's wheel, which loads into the torch "
    "that it was built for"
)


class ServingSession(BenchSession):
    """A BenchSession. fa3_library: file of vLLM's FlashAttention-3; empty for none. cases: to be measured."""

    backends: Mapping[str, Backend] = BACKENDS
    device = "cuda"

    def __init__(self, ordinal: int, fa3_library: str = "", cases: Sequence[ServingCase] = ()) -> None:
        super().__init__(ordinal)
        self._version, self._missing = load_library(fa3_library)
        self._cases = cases

    def facts(self, names: Sequence[str]) -> Facts:
        """Compile greenfast's kernels in parallel, then describe the backends."""
        warm(dict.fromkeys(source for source, _ in timed_launches(self._cases).values()), TARGET)
        found = super().facts(names)
        return replace(found, backends=[self._described(c) for c in found.backends])

    def _described(self, backend: Any) -> Any:
        if self.backends[backend.name].package != VLLM:
            return backend
        return msgspec.structs.replace(backend, version=self._version, missing=self._missing)

    def _draw(self, cell: BenchCell) -> tuple[Any, Any]:
        dims = cell.shape.dims
        if "BYTES" in dims:
            return torch.zeros(dims["BYTES"] // 4, device=self.device), None
        if "TOKENS" in dims:
            inputs: Any = append_inputs(cell.shape, cell.seed, self.device, append_bytes(dims))
        else:
            inputs = paged_inputs(cell.shape, cell.seed, self.device)
        return inputs, inputs.reference

    def host(self, cell: BenchCell) -> list[HostRow]:
        """Measure the host time of the available backends."""
        found = self.facts(cell.backends).backends
        return super().host(replace(cell, backends=tuple(c.name for c in found if not c.missing)))


def load_library(path: str) -> tuple[str, str]:
    """Load vLLM's FlashAttention-3; return (version, reason why it is missing); one of them is empty."""
    if not path:
        return "", _NO_LIBRARY
    try:
        with Path(path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except Exception as e:  # no such file, or a library for another torch
        return "", f"{path} cannot be loaded: {first_line(e)}"
    return f"FlashAttention-3 of vLLM ({Path(path).name}, SHA-256 {digest[:16]})", ""
