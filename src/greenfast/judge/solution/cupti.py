"""The machine code that a process loads on its GPU, as CUPTI reports it: the only place that still has it.

A CUDA graph knows the function that it launches, and the driver gives no image back for a function. CUPTI calls back
for each module with its cubin (CUPTI documentation, "Resource Callbacks").
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from greenfast.spec.errors import MachineError

_RESOURCE_DOMAIN, _MODULE_LOADED = 3, 6  # CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_MODULE_LOADED
#: Where the library is: with PyTorch's wheels, or with the toolkit.
_PATTERNS = ("nvidia/cu13/lib/libcupti.so*", "nvidia/cuda_cupti/lib/libcupti.so*")
_TOOLKIT = "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"


class _Module(ctypes.Structure):
    """CUpti_ModuleResourceData."""

    _fields_ = (("id", ctypes.c_uint32), ("size", ctypes.c_size_t), ("cubin", ctypes.c_void_p))


class _Resource(ctypes.Structure):
    """CUpti_ResourceData."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("handle", ctypes.c_void_p),
        ("descriptor", ctypes.POINTER(_Module)),
    )


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)


class LoadedCode:
    """The cubins of all modules that are loaded from now on in this process.

    Raises MachineError where CUPTI is missing or refuses, as it does while another tool uses it.
    """

    def __init__(self) -> None:
        self.cubins: list[bytes] = []
        self._callback = _CALLBACK(self._loaded)  # kept: CUPTI holds only its address
        library = _library()
        subscriber = ctypes.c_void_p()
        for status in (
            library.cuptiSubscribe(ctypes.byref(subscriber), self._callback, None),
            library.cuptiEnableCallback(1, subscriber, _RESOURCE_DOMAIN, _MODULE_LOADED),
        ):
            if status:
                raise MachineError(f"CUPTI error {status}: is a profiler attached to this process?")

    def _loaded(self, _: int, domain: int, what: int, data: int) -> None:
        if (domain, what) == (_RESOURCE_DOMAIN, _MODULE_LOADED):
            module = ctypes.cast(data, ctypes.POINTER(_Resource)).contents.descriptor.contents
            self.cubins.append(ctypes.string_at(module.cubin, module.size))

    def with_kernel(self, name: str) -> bytes:
        """The last cubin that was loaded with this kernel. Raises MachineError where there is none."""
        section = b"\0.text." + name.encode() + b"\0"
        for cubin in reversed(self.cubins):
            if section in cubin:
                return cubin
        raise MachineError(f"the machine code of {name} was not seen when it was loaded")


def _library() -> ctypes.CDLL:
    found = [file for folder in sys.path for pattern in _PATTERNS for file in sorted(Path(folder).glob(pattern))]
    for name in (*map(str, found), _TOOLKIT, "libcupti.so.13", "libcupti.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MachineError("CUPTI is missing: it comes with PyTorch's CUDA wheels (nvidia-cuda-cupti) and with the toolkit")
