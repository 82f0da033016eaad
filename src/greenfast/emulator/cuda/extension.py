"""CUDA's runtime library inside a Python process, for its extension modules: a function takes the library's calls."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from greenfast.emulator.cuda.server import REPLY, REQUEST, Runtime

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p))
#: cudaErrorUnknown.
_UNKNOWN = 999


class AttachedLibrary:
    """The runtime library (library.build_library) in this process; a runtime answers its calls.

    failure: an exception of the runtime. It cannot pass through C, so the caller of the extension raises it.
    """

    def __init__(self, path: Path, runtime: Runtime) -> None:
        # Extensions that are loaded later find the library by its name.
        self._library: Any = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        self._runtime = runtime
        self._handler = _HANDLER(self._handle)  # kept alive as long as the library can call it
        self._data = b""
        self.failure: BaseException | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the errors of earlier calls."""
        self.failure = None
        self._library.gf_attach(self._handler)

    def _handle(self, request: int, payload: int, reply: int, data: Any) -> None:
        operation, size, *values = REQUEST.unpack(ctypes.string_at(request, REQUEST.size))
        try:
            answer, self._data = self._runtime.answer(
                operation, values, ctypes.string_at(payload, size) if size else b""
            )
        except BaseException as e:
            self.failure = self.failure or e
            answer, self._data = REPLY.pack(_UNKNOWN, 0, *[0] * 6), b""
        ctypes.memmove(reply, answer, len(answer))
        data[0] = self._data
