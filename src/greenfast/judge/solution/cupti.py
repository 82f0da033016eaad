"""Recording of the machine code that a process loads on its GPU, through CUPTI.

A CUDA graph contains the launched functions, but the driver does not return a function's image. CUPTI calls back with
the cubin of each loaded module (CUPTI documentation, "Resource Callbacks").
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from greenfast.spec.errors import MachineError

_RESOURCE_DOMAIN, _MODULE_LOADED = 3, 6  # CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_MODULE_LOADED
#: Locations of the library: PyTorch's wheels and the toolkit.
_PATTERNS = ("nvidia/cu13/lib/libcupti.so*", "nvidia/cuda_cupti/lib/libcupti.so*")
_TOOLKIT = "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"


class _Module(ctypes.Structure):
    """CUpti_ModuleResourceData."""

    _fields_ = (("id", ctypes.c_uint32), ("size", ctypes.c_size_t), ("cubin", ctypes.c_void_p))


class _Resource(ctypes.Structure):
    """CUpti_ResourceData."""

    _fields_ = (("context", ctypes.c_void_p), ("handle", ctypes.c_void_p), ("descriptor", ctypes.POINTER(_Module)))


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)


class LoadedCode:
    """The cubins of all modules that this process loads from now on.

    Raises MachineError if CUPTI is missing or already in use by another tool.
    """

    def __init__(self) -> None:
        self.cubins: list[bytes] = []
        self._callback = _CALLBACK(self._loaded)  # Keep a reference: CUPTI has only the address.
        library = _library()
        subscriber = ctypes.c_void_p()
        for status in (
            library.cuptiSubscribe(ctypes.byref(subscriber), self._callback, None),
            library.cuptiEnableCallback(1, subscriber, _RESOURCE_DOMAIN, _MODULE_LOADED),
        ):
            if status:
                raise MachineError(f"CUPTI error {status}: is a profiler attached to this process?")

    def _loaded(self, _: int, domain: int, callback: int, data: int) -> None:
        if (domain, callback) == (_RESOURCE_DOMAIN, _MODULE_LOADED):
            module = ctypes.cast(data, ctypes.POINTER(_Resource)).contents.descriptor.contents
            self.cubins.append(ctypes.string_at(module.cubin, module.size))

    def with_kernel(self, name: str) -> bytes:
        """Return the last loaded cubin with this kernel. Raises MachineError if there is none."""
        section = b"\0.text." + name.encode() + b"\0"
        for cubin in reversed(self.cubins):
            if section in cubin:
                return cubin
        raise MachineError(f"the machine code of {name} was not seen when it was loaded")


def _library() -> ctypes.CDLL:
    files = [file for folder in sys.path for pattern in _PATTERNS for file in sorted(Path(folder).glob(pattern))]
    for name in (*map(str, files), _TOOLKIT, "libcupti.so.13", "libcupti.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MachineError("CUPTI is missing: it comes with PyTorch's CUDA wheels (nvidia-cuda-cupti) and with the toolkit")
