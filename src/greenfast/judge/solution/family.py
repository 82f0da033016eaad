"""Solutions as kernel families, so that all that builds, judges and profiles a family serves them too."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from greenfast.judge.solution.client import ANSWER_S, SolutionProcess, sandbox_hint
from greenfast.judge.solution.cuda_program import declared_program
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
from greenfast.judge.solution.schema import ResolvedSolution, Solution
from greenfast.spec.arch import Target
from greenfast.spec.errors import AbsentError, CompileError, GreenfastError, SolutionError, UsageError
from greenfast.spec.kernel import Choice, KernelSource, Launch, Program, Step
from greenfast.spec.problem import Problem

#: Of the inputs that a callable is captured with; none of a problem's own.
EXAMPLE_SEED = 987_654_321


class _Single:
    """``kernel`` and ``launch`` of a family that has ``program``."""

    def program(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> Program:
        """The program for a shape."""
        raise NotImplementedError

    def kernel(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> KernelSource:
        """The kernel of a program of one launch. Raises UsageError for another program."""
        return self._step(toggles, fmt, dims, instrumented).kernel

    def launch(self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
        """The launch of a program of one launch. Raises UsageError for another program."""
        return self._step(toggles, fmt, dims, False).launch

    def _step(self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], instrumented: bool) -> Step:
        steps = self.program(toggles, fmt, dims, instrumented=instrumented).steps
        if len(steps) != 1:
            raise UsageError(f"the program has {len(steps)} launches, not one")
        return steps[0]


class NoFamily(_Single):
    """The family of a task that has none: it is there to judge solutions."""

    def __init__(self, task: str) -> None:
        self._task = task

    def program(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> Program:
        """Raise UsageError."""
        raise UsageError(f"task {self._task} has no kernels; `greenfast judge SOLUTION --problem ...` judges yours")


class DeclaredFamily(_Single):
    """A solution in CUDA, PTX or as a cubin: nothing of it is run here."""

    def __init__(self, found: ResolvedSolution) -> None:
        self._found = found
        #: What protects from the solution's code.
        self.sandbox: list[str] = ["no code of the solution but its kernels is run"]

    def program(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> Program:
        """The program for a shape. Raises UsageError naming the file and the key."""
        if instrumented:
            raise UsageError(f"{self._found.solution.name}: a solution has no instrumented build")
        return declared_program(self._found, dims)


class RemoteFamily(_Single):
    """A family or solution whose Python code runs in a process of its kind only; data comes back.

    Raises UsageError where its code cannot be imported, SolutionError where it ends or does not answer.
    """

    def __init__(
        self,
        what: str,
        folder: Path,
        solution: Solution,
        *,
        module: str = "",
        target: Target | None = None,
        answer_s: float = ANSWER_S,
        problem: Problem | None = None,
        gpu: int | None = None,
    ) -> None:
        """Start the process and import the code.

        what: the solution in words, for errors. module: an importable module, in place of the solution's file.
        target: what the solution is compiled for where its language asks. answer_s: seconds for each answer.
        problem: whose buffers it is told of. gpu: the number of the one that a callable is captured on.
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
        said = self._process.ask(Load(solution, str(folder.resolve()), module))
        if isinstance(said, ExceptionReply):
            self._process.close()
            if said.exits:
                raise self._process.raised(said)
            lines = "".join(f"\n  {line}" for line in said.lines[-5:])
            raise UsageError(f"{what} cannot be imported: {said.text}{lines}{sandbox_hint(said.text)}")
        if isinstance(said, Rejected):
            self._process.close()
            raise UsageError(f"{what}: {said.text}")
        if not isinstance(said, Loaded):
            raise self._unexpected(said)
        #: The names of its functions.
        self.functions = tuple(said.functions)

    def program(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> Program:
        """The program for a shape. Raises UsageError where the solution refuses, SolutionError where it fails."""
        target = self._target
        given = {**self._toggles, **toggles}
        buffers = self._buffers(fmt, dims)
        said = self._process.ask(
            Render(given, fmt, dict(dims), target.name, target.multiprocessors, instrumented, buffers)
        )
        if not isinstance(said, Rendered):
            raise self._unexpected(said)
        try:
            program = decode_program(said)
        except (ValueError, TypeError) as e:
            raise UsageError(f"{self._what}: {e}") from None
        self._require_readable(program)
        return replace(program, steps=tuple(map(self._shared, program.steps)))

    def _require_readable(self, program: Program) -> None:
        """The compiler opens what lies in these folders, so a solution names none that it could not read itself."""
        allowed = [Path(path).resolve() for path in (*self._process.readable, str(self._process.scratch))]
        folders: set[Path] = {folder for step in program.steps for folder in step.kernel.include_dirs}
        for folder in sorted(folders):
            if not any(folder.resolve().is_relative_to(path) for path in allowed):
                raise UsageError(f"{self._what}: include_dirs: {folder} is not the solution's; copy its headers there")

    def _shared(self, step: Step) -> Step:
        """The step with its machine code held once: a library's, of many megabytes, comes with each of its kernels."""
        code = step.kernel.binary
        return replace(step, kernel=replace(step.kernel, binary=self._binaries.setdefault(code, code)))

    def _buffers(self, fmt: str, dims: Mapping[str, int]) -> dict[str, Buffer]:
        """The buffers of the problem's case; for a callable with an example of each input, in files."""
        if self._problem is None:
            return {}
        case = self._problem.make_case(dims, EXAMPLE_SEED, fmt)
        made = {
            name: Buffer(array.dtype.name, list(array.shape), name in case.outputs)
            for name, array in case.inputs.items()
        }
        if self._with_data:
            for number, (name, array) in enumerate(case.inputs.items()):
                path = self._process.write(f"input{number}", array.tobytes())
                made[name] = msgspec.structs.replace(made[name], path=str(path))
        outputs = {n: Buffer(spec.dtype, list(spec.shape), True) for n, spec in case.outputs.items() if n not in made}
        return made | outputs

    def __getattr__(self, name: str) -> Any:
        """``choose``, where the family has it."""
        if name == "choose" and "choose" in self.__dict__.get("functions", ()):
            return self._choose
        raise AttributeError(name)

    def _choose(self, target: Target, fmt: str, dims: Mapping[str, int]) -> Choice:
        said = self._process.ask(Choose(target.name, target.multiprocessors, fmt, dict(dims)))
        if not isinstance(said, Chosen):
            raise self._unexpected(said)
        return Choice(said.rung, said.reason)

    def _unexpected(self, said: Any) -> GreenfastError:
        if isinstance(said, MissingDependency):
            return AbsentError(f"{self._what}: {said.text}")
        if isinstance(said, Rejected):
            return UsageError(said.text)
        if isinstance(said, CompileFailed):
            return CompileError(said.text)
        if isinstance(said, ExceptionReply):
            return self._process.raised(said)
        with contextlib.suppress(Exception):
            self._process.close()
        return SolutionError(f"{self._what}: the solution ended without a verdict: it answered another question")
