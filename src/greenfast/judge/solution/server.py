"""The RPC server in a solution's confined process. It imports the solution's code and answers the judge's requests."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from greenfast.judge.solution import messages
from greenfast.judge.solution.languages.compiled import import_family
from greenfast.judge.solution.messages import (
    Choose,
    CompileFailed,
    ExceptionReply,
    Load,
    MissingDependency,
    Ready,
    Rejected,
    Render,
    RpcReply,
    RpcRequest,
)
from greenfast.judge.solution.schema import CONFIG_NAME, ResolvedSolution, SolutionConfig
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, MachineError, UnsupportedError, UsageError, too_large
from greenfast.spec.kernel import Program, render_program

_LANGUAGES = "greenfast.judge.solution.languages"
#: A dimension of this size may be too large for any code. Below it, running out of memory is the code's fault.
_HUGE = 2**31


def serve(questions: int, answers: int, sandbox: list[str]) -> None:
    """Answer each request, with its number, until the pipe of requests closes."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RpcRequest)

    def send(number: int, reply: Any) -> None:
        data = encoder.encode(RpcReply(number, reply))
        view = memoryview(len(data).to_bytes(4, "little") + data)
        while view:
            view = view[os.write(answers, view) :]

    server = _Server()
    send(0, Ready(sandbox))
    while True:
        header = _read(questions, 4)
        if not header:
            os._exit(0)  # The judge closed the pipe.
        request = decoder.decode(_read(questions, int.from_bytes(header, "little")))
        send(request.number, server.answer(request.call))


def _read(pipe: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(pipe, size - len(data))
        if not part:
            break
        data += part
    return data


class _Server:
    """The solution's code and the handlers of requests to it."""

    def __init__(self) -> None:
        self._folder = Path()
        self._solution: SolutionConfig | None = None
        self._module: ModuleType | None = None

    def answer(self, call: Load | Render | Choose) -> Any:
        """Return the reply to a request. An exception of the solution's code becomes a reply too."""
        try:
            if isinstance(call, Load):
                return self._load(call)
            if isinstance(call, Choose):
                return self._choose(call)
            return messages.encode_program(self._render(call))
        except UsageError as e:
            return Rejected(str(e))
        except (MachineError, UnsupportedError) as e:
            return MissingDependency(str(e))
        except CompileError as e:
            return CompileFailed(str(e))
        except BaseException as e:  # Includes SystemExit: every request needs a reply.
            kind = type(e).__name__
            if isinstance(e, SystemExit):
                return ExceptionReply(f"sys.exit({e.code!r})", self._lines(e), exits=True)
            name = (self._solution and self._solution.file) or "family"
            if isinstance(call, Render | Choose) and isinstance(e, Exception) and max(call.dims.values()) >= _HUGE:
                error = too_large(f"{name}: at {call.dims}", e)
                if error is not None:
                    return Rejected(str(error))
            return ExceptionReply(f"{kind}: {e}" if str(e) else kind, self._lines(e))

    def _load(self, call: Load) -> messages.Loaded:
        self._folder, self._solution = Path(call.folder), call.solution
        if call.solution.language == "family":
            self._module = import_family(self._folder, call.solution.file, call.module)
            return messages.Loaded([name for name, value in vars(self._module).items() if callable(value)])
        importlib.import_module(f"{_LANGUAGES}.{call.solution.language}")
        return messages.Loaded(["program"])

    def _render(self, call: Render) -> Program:
        assert self._solution is not None
        if self._module is not None:
            family: Any = self._module
            return render_program(family, call.toggles, call.format, call.dims, instrumented=call.instrumented)
        if call.instrumented:
            raise UsageError(
                f"{self._solution.name}: a solution in {self._solution.language} has no instrumented build"
            )
        language: Callable[..., Program] = importlib.import_module(f"{_LANGUAGES}.{self._solution.language}").program
        target = Target(call.target, call.multiprocessors)
        config = self._folder / CONFIG_NAME
        path = config if config.is_file() else self._folder / self._solution.file
        solution = ResolvedSolution(self._solution, self._folder, path)
        return language(solution, call.format, call.dims, target, call.buffers)

    def _choose(self, call: Choose) -> messages.Chosen:
        choose: Callable[[Target, str, Mapping[str, int]], Any] = getattr(self._module, "choose")  # noqa: B009
        choice = choose(Target(call.target, call.multiprocessors), call.format, call.dims)
        return messages.Chosen(choice.rung, choice.reason)

    def _lines(self, error: BaseException) -> list[str]:
        """Return the traceback's lines in the solution's files, such as "kernel.py, line 3, in launch: text"."""
        lines = []
        for frame in traceback.extract_tb(error.__traceback__):
            path = Path(frame.filename)
            if path.is_relative_to(self._folder):
                line = f": {frame.line}" if frame.line else ""
                lines.append(f"{path.relative_to(self._folder)}, line {frame.lineno}, in {frame.name}{line}")
        return lines
