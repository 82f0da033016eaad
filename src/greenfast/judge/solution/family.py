"""Adapters from solutions to kernel families, so that the same code builds, judges and profiles both."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from greenfast.judge.solution.client import ANSWER_S, SolutionProcess, sandbox_hint
from greenfast.judge.solution.cuda_program import build_declared_program
from greenfast.judge.solution.messages import (
    Buffer,
    Choose,
    Chosen,
    CompileFailed,
    ExceptionReply,
    Load,
    Loaded,
    MissingDependency,
    Rejected,
    Render,
    Rendered,
    decode_program,
)
from greenfast.judge.solution.schema import ResolvedSolution, SolutionConfig
from greenfast.spec.arch import Target
from greenfast.spec.errors import AbsentError, CompileError, GreenfastError, SolutionError, UsageError
from greenfast.spec.kernel import Choice, KernelSource, Launch, Program, Step
from greenfast.spec.problem import Problem

#: Seed of the inputs that a callable is captured with. No task uses it.
EXAMPLE_SEED = 987_654_321


class _Single:
    """Base class that derives ``kernel`` and ``launch`` from ``program``."""

    def program(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> Program:
        """Return the program for a shape."""
        raise NotImplementedError

    def kernel(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> KernelSource:
        """Return the kernel of a program with one launch. Raises UsageError for several launches."""
        return self._step(toggles, fmt, dims, instrumented).kernel

    def launch(self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
        """Return the launch of a program with one launch. Raises UsageError for several launches."""
        return self._step(toggles, fmt, dims, False).launch

    def _step(self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], instrumented: bool) -> Step:
        steps = self.program(toggles, fmt, dims, instrumented=instrumented).steps
        if len(steps) != 1:
            raise UsageError(f"the program has {len(steps)} launches, not one")
        return steps[0]


class NoFamily(_Single):
    """The family of a task without kernels of its own. The task only judges solutions."""

    def __init__(self, task: str) -> None:
        self._task = task

    def program(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> Program:
        """Raise UsageError."""
        raise UsageError(f"task {self._task} has no kernels; `greenfast judge SOLUTION --problem ...` judges yours")


class DeclaredFamily(_Single):
    """A solution in CUDA, PTX or as a cubin. None of its code runs on the host."""

    def __init__(self, solution: ResolvedSolution) -> None:
        self._solution = solution
        #: The protections against the solution's code.
        self.sandbox: list[str] = ["no code of the solution but its kernels is run"]

    def program(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> Program:
        """Return the program for a shape. Raises UsageError with the file and the key."""
        if instrumented:
            raise UsageError(f"{self._solution.config.name}: a solution has no instrumented build")
        return build_declared_program(self._solution, dims)


class RemoteFamily(_Single):
    """A family or solution in Python. Its code runs in a confined process and returns only data.

    Raises UsageError if the code cannot be imported, SolutionError if the process ends or does not answer.
    """

    def __init__(
        self,
        what: str,
        folder: Path,
        solution: SolutionConfig,
        *,
        module: str = "",
        target: Target | None = None,
        answer_s: float = ANSWER_S,
        problem: Problem | None = None,
        gpu: int | None = None,
    ) -> None:
        """Start the process and import the code.

        what: the name of the solution in errors.
        module: an importable module that replaces the solution's file.
        target: the compile target, for languages that need one.
        answer_s: time limit per reply in seconds.
        problem: the problem with the buffers that the solution receives.
        gpu: the ordinal of the GPU that captures a callable.
        """
        self._what = what
        self._target = target or Target("sm_90a")
        self._toggles = dict(solution.toggles)
        self._problem = problem
        self._with_data = solution.language == "callable"
        self._binaries: dict[bytes, bytes] = {}
        gpu = gpu if self._with_data else None
        self._process = SolutionProcess(what, folder, answer_s=answer_s, gpu=gpu, imports=bool(module))
        self.sandbox = self._process.sandbox
        reply = self._process.call(Load(solution, str(folder.resolve()), module))
        if isinstance(reply, ExceptionReply):
            self._process.close()
            if reply.exits:
                raise self._process.raised(reply)
            lines = "".join(f"\n  {line}" for line in reply.lines[-5:])
            raise UsageError(f"{what} cannot be imported: {reply.text}{lines}{sandbox_hint(reply.text)}")
        if isinstance(reply, Rejected):
            self._process.close()
            raise UsageError(f"{what}: {reply.text}")
        if not isinstance(reply, Loaded):
            raise self._convert_error(reply)
        #: The names of the solution's functions.
        self.functions = tuple(reply.functions)

    def program(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> Program:
        """Return the program for a shape. Raises UsageError if the solution rejects it, SolutionError if it fails."""
        target = self._target
        settings = {**self._toggles, **toggles}
        buffers = self._describe_buffers(fmt, dims)
        reply = self._process.call(
            Render(settings, fmt, dict(dims), target.name, target.multiprocessors, instrumented, buffers)
        )
        if not isinstance(reply, Rendered):
            raise self._convert_error(reply)
        try:
            program = decode_program(reply)
        except (ValueError, TypeError) as e:
            raise UsageError(f"{self._what}: {e}") from None
        self._require_readable(program)
        return replace(program, steps=tuple(map(self._share_binary, program.steps)))

    def _require_readable(self, program: Program) -> None:
        """Raise UsageError for an include folder that the solution may not read: the compiler would open it."""
        allowed = [Path(path).resolve() for path in (*self._process.readable, str(self._process.scratch))]
        folders: set[Path] = {folder for step in program.steps for folder in step.kernel.include_dirs}
        for folder in sorted(folders):
            if not any(folder.resolve().is_relative_to(path) for path in allowed):
                raise UsageError(f"{self._what}: include_dirs: {folder} is not the solution's; copy its headers there")

    def _share_binary(self, step: Step) -> Step:
        """Return the step with its machine code shared: each kernel of a library comes with the whole library."""
        code = step.kernel.binary
        return replace(step, kernel=replace(step.kernel, binary=self._binaries.setdefault(code, code)))

    def _describe_buffers(self, fmt: str, dims: Mapping[str, int]) -> dict[str, Buffer]:
        """Return the buffers of the problem's case. For a callable, each input has a file with example data."""
        if self._problem is None:
            return {}
        case = self._problem.make_case(dims, EXAMPLE_SEED, fmt)
        inputs = {
            name: Buffer(array.dtype.name, list(array.shape), name in case.outputs)
            for name, array in case.inputs.items()
        }
        if self._with_data:
            for number, (name, array) in enumerate(case.inputs.items()):
                path = self._process.write(f"input{number}", array.tobytes())
                inputs[name] = msgspec.structs.replace(inputs[name], path=str(path))
        outputs = {n: Buffer(spec.dtype, list(spec.shape), True) for n, spec in case.outputs.items() if n not in inputs}
        return inputs | outputs

    def __getattr__(self, name: str) -> Any:
        """Return ``choose`` if the family defines it."""
        if name == "choose" and "choose" in self.__dict__.get("functions", ()):
            return self._choose
        raise AttributeError(name)

    def _choose(self, target: Target, fmt: str, dims: Mapping[str, int]) -> Choice:
        reply = self._process.call(Choose(target.name, target.multiprocessors, fmt, dict(dims)))
        if not isinstance(reply, Chosen):
            raise self._convert_error(reply)
        return Choice(reply.rung, reply.reason)

    def _convert_error(self, reply: Any) -> GreenfastError:
        if isinstance(reply, MissingDependency):
            return AbsentError(f"{self._what}: {reply.text}")
        if isinstance(reply, Rejected):
            return UsageError(reply.text)
        if isinstance(reply, CompileFailed):
            return CompileError(reply.text)
        if isinstance(reply, ExceptionReply):
            return self._process.raised(reply)
        with contextlib.suppress(Exception):
            self._process.close()
        return SolutionError(f"{self._what}: the solution ended without a verdict: it answered another question")
