"""A solution's process, once it is confined: import the solution's code, and answer questions about it."""

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
from greenfast.judge.solution.languages.family import import_family
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
from greenfast.judge.solution.schema import CONFIG_NAME, ResolvedSolution, Solution
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, MachineError, UsageError, too_large
from greenfast.spec.kernel import Program, program_of

_LANGUAGES = "greenfast.judge.solution.languages"
#: From here on a dimension may be too large for any code; below, running out of memory is the code's own doing.
_HUGE = 2**31


def serve(questions: int, answers: int, sandbox: list[str]) -> None:
    """Answer until the pipe of the questions closes; an answer to each question, with its number."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RpcRequest)

    def say(number: int, said: Any) -> None:
        data = encoder.encode(RpcReply(number, said))
        view = memoryview(len(data).to_bytes(4, "little") + data)
        while view:
            view = view[os.write(answers, view) :]

    server = _Server()
    say(0, Ready(sandbox))
    while True:
        header = _read(questions, 4)
        if not header:
            os._exit(0)  # the judge has ended, or needs nothing more
        question = decoder.decode(_read(questions, int.from_bytes(header, "little")))
        say(question.number, server.answer(question.call))


def _read(pipe: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(pipe, size - len(data))
        if not part:
            break
        data += part
    return data


class _Server:
    """The solution's code, once it is loaded."""

    def __init__(self) -> None:
        self._folder = Path()
        self._solution: Solution | None = None
        self._module: ModuleType | None = None

    def answer(self, ask: Load | Render | Choose) -> Any:
        """The answer to a question; whatever the solution's code raises is one too."""
        try:
            if isinstance(ask, Load):
                return self._load(ask)
            if isinstance(ask, Choose):
                return self._choose(ask)
            return messages.encode_program(self._program(ask))
        except UsageError as e:
            return Rejected(str(e))
        except MachineError as e:
            return MissingDependency(str(e))
        except CompileError as e:
            return CompileFailed(str(e))
        except BaseException as e:  # also SystemExit: only an answer ends a question
            kind = type(e).__name__
            if isinstance(e, SystemExit):
                return ExceptionReply(f"sys.exit({e.code!r})", self._lines(e), exits=True)
            what = (self._solution and self._solution.file) or "family"
            if isinstance(ask, Render | Choose) and isinstance(e, Exception) and max(ask.dims.values()) >= _HUGE:
                error = too_large(f"{what}: at {ask.dims}", e)
                if error is not None:
                    return Rejected(str(error))
            return ExceptionReply(f"{kind}: {e}" if str(e) else kind, self._lines(e))

    def _load(self, ask: Load) -> messages.Loaded:
        self._folder, self._solution = Path(ask.folder), ask.solution
        if ask.solution.language == "family":
            self._module = import_family(self._folder, ask.solution.file, ask.module)
            return messages.Loaded([name for name, value in vars(self._module).items() if callable(value)])
        importlib.import_module(f"{_LANGUAGES}.{ask.solution.language}")
        return messages.Loaded(["program"])

    def _program(self, ask: Render) -> Program:
        assert self._solution is not None
        if self._module is not None:
            family: Any = self._module
            return program_of(family, ask.toggles, ask.format, ask.dims, instrumented=ask.instrumented)
        if ask.instrumented:
            raise UsageError(
                f"{self._solution.name}: a solution in {self._solution.language} has no instrumented build"
            )
        language: Callable[..., Program] = importlib.import_module(f"{_LANGUAGES}.{self._solution.language}").program
        target = Target(ask.target, ask.multiprocessors)
        config = self._folder / CONFIG_NAME
        where = config if config.is_file() else self._folder / self._solution.file
        found = ResolvedSolution(self._solution, self._folder, where)
        return language(found, ask.format, ask.dims, target, ask.buffers)

    def _choose(self, ask: Choose) -> messages.Chosen:
        choose: Callable[[Target, str, Mapping[str, int]], Any] = getattr(self._module, "choose")  # noqa: B009
        found = choose(Target(ask.target, ask.multiprocessors), ask.format, ask.dims)
        return messages.Chosen(found.rung, found.reason)

    def _lines(self, error: BaseException) -> list[str]:
        """Where an exception passed through the solution's files, as "kernel.py, line 3, in launch: text"."""
        found = []
        for frame in traceback.extract_tb(error.__traceback__):
            path = Path(frame.filename)
            if path.is_relative_to(self._folder):
                line = f": {frame.line}" if frame.line else ""
                found.append(f"{path.relative_to(self._folder)}, line {frame.lineno}, in {frame.name}{line}")
        return found
