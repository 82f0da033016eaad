"""Turn a candidate into an implementation: toggles of a family, constants of a solution, and source edits."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import msgspec

from greenfast.evolve.proposal import Candidate, Edit
from greenfast.evolve.space import Region, Space, Value
from greenfast.judge.implementation import Implementation, build_rung_implementation, build_solution_implementation
from greenfast.judge.request import Request
from greenfast.judge.solution.files import collect_files
from greenfast.judge.solution.schema import CONFIG_NAME, ResolvedSolution, find_solution
from greenfast.judge.store import to_json, write_whole
from greenfast.judge.task import Rung, Variant
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.errors import MachineError, UsageError, unknown
from greenfast.spec.extras import EXTRAS, require
from greenfast.spec.kernel import Family, Program, render_program

#: Prefix of the families that a space may name. A user's own family belongs to a task.
_OWN = "greenfast.kernels."
#: Parameters of a Triton solution that are launch options and not constants.
_TRITON_OPTIONS = ("num_warps", "num_stages")
#: Files of a task: its config and its code.
_TASK_FILES = ("config_*.json", "*.py", "*.cu", "*.cuh", "kernels/*.py", "kernels/*.cuh")
#: A directive that reads a file or may do so (a comment can precede its keyword); and the allowed header names.
_READS = re.compile(r"(?:#|%:|\?\?=)[ \t\v\f\r]*(?:(?:include|include_next|import|embed)\b|(?=/\*))([^\n]*)")
_HEADER = re.compile(r"(?:<[\w.+-]+(?:/[\w.+-]+)*>|\"[\w.+-]+(?:/[\w.+-]+)*\")")


class Sources:
    """Makes candidates of a space into implementations.

    Raises UsageError if the space's parameters or regions do not exist in the family or solution, and MachineError if
    the solution's language is not installed.
    """

    def __init__(self, space: Space, space_folder: Path, request: Request, work: Path) -> None:
        """request: the task and the target. work: folder for solutions and edited sources."""
        self.space, self._request, self._work = space, request, work
        self._solution: ResolvedSolution | None = None
        self._files: dict[str, bytes] = {}
        #: The folders that the files of regions are searched in, in this order; by folder the name of its edited copy.
        self._folders = {KERNEL_DIR: "kernels"}
        if (own := request.task.folder / "kernels").is_dir():
            self._folders = {own: "task_kernels", **self._folders}
        #: The rung with budget and error limits for candidates that are no rung; None for a solution.
        self.rung: Rung | None = None
        if space.solution:
            if space.family or space.rung:
                raise UsageError(f"space {space.name}: `solution` excludes `family` and `rung`")
            self._solution = resolved = find_solution(space_folder / space.solution)
            self._folders, self._files = {resolved.folder: "solution"}, collect_files(resolved, request.out)
            if (language := resolved.config.language) in EXTRAS:  # else each candidate would fail with this error
                require(f"{space.solution}, a solution in {language},", language)
            options = dict.fromkeys(_TRITON_OPTIONS if resolved.config.language == "triton" else ())
            _check_names(space, "constant of the solution", {**resolved.config.constants, **options})
            _check_types(space, (int, str), "constants of a solution are whole numbers or expressions")
            return
        config = request.task.config
        if space.family:
            self._family = _import_family(space)
            toggles = vars(self._family).get("TOGGLES", space.parameters)
            _check_names(space, f"toggle of {space.family}", toggles)
            if missing := [name for name in toggles if name not in space.parameters]:
                raise UsageError(f"space {space.name}: declare {missing[0]} too, with one value to fix it")
        else:
            if not config.rungs:
                raise UsageError(f"space {space.name}: task {config.name} has no kernels; name a `solution`")
            _check_names(space, f"toggle of task {config.name}", config.toggles)
            for name, parameter in space.parameters.items():
                allowed = config.toggles[name].values
                if other := [value for value in parameter.values if value not in allowed]:
                    raise UsageError(f"space {space.name}: {name}={other[0]!r}: allowed by the task are {allowed}")
        _check_types(space, (int,), "toggles are whole numbers")
        rung = config.rung(space.rung or config.defaults.candidate)
        self.rung = msgspec.structs.replace(rung, only=space.only or rung.only, after=None, required_speedup=None)

    def digest(self) -> str:
        """Return 16 hexadecimal digits over the files that candidates are made from: task, solution, regions."""
        task = self._request.task.folder
        files = {path.name: path.read_bytes() for kind in _TASK_FILES for path in sorted(task.glob(kind))}
        files |= {f"region {name}": region.text.encode() for name, region in self.texts().items()}
        if self._solution is not None:
            files |= {f"solution {name}": data for name, data in self._files.items()}
        digest = hashlib.sha256()
        for name, data in sorted(files.items()):
            digest.update(f"{name} {len(data)} ".encode() + data)
        return digest.hexdigest()[:16]

    def texts(self) -> dict[str, Region]:
        """Return the regions with their current text. Raises UsageError if a region is not found."""
        return {
            name: msgspec.structs.replace(region, text=self._split(name, region)[1])
            for name, region in self.space.regions.items()
        }

    def implementation(self, candidate: Candidate) -> Implementation:
        """Return a candidate's implementation. Raises UsageError for a candidate outside the space."""
        complete = self.space.decode(candidate.parameters)
        edits = self._edited(candidate)
        if self._solution is not None:
            return self._write_solution(self._solution, candidate.key, complete, edits)
        config, toggles = self._request.task.config, {name: int(value) for name, value in complete.items()}
        if self.space.family:
            assert self.rung is not None
            implementation = Implementation(Variant(candidate.key, tuple(toggles.items())), self._family, self.rung)
        else:
            implementation = build_rung_implementation(self._request.task, config.toggle_variant(toggles))
            if implementation.rung is None and self.rung is not None:
                implementation = dataclasses.replace(implementation, requirements=self.rung)
        if not edits:
            return implementation
        copies = {folder: self._work / candidate.key / name for folder, name in self._folders.items()}
        for folder, copied in copies.items():
            copy_folder(folder, copied, "*.py", "__pycache__")
        for file, text in edits.items():
            write_whole(copies[self._find_folder(file)] / file, text)
        variant = Variant(f"{implementation.variant.name}+{candidate.key[:6]}", implementation.variant.toggles)
        return dataclasses.replace(
            implementation,
            variant=variant,
            rung=None,
            family=cast(Family, PatchedFamily(implementation.family, copies)),
        )

    def _write_solution(
        self, resolved: ResolvedSolution, key: str, complete: Mapping[str, Value], edits: Mapping[str, str]
    ) -> Implementation:
        """Write a copy of the solution with other constants and edits into a new folder; return its implementation."""
        folder = self._work / key / "solution"
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in self._files.items():
            write_whole(folder / name, data)
        for name, text in edits.items():
            write_whole(folder / name, text)
        path = folder / resolved.path.name
        solution = find_solution(path).config if edits else resolved.config
        constants = cast(dict[str, int | str], dict(complete))  # checked by _check_types
        options = {name: constants.pop(name) for name in _TRITON_OPTIONS if name in constants}
        changed = msgspec.structs.replace(
            solution,
            name=f"{resolved.config.name[:80]}-{key[:6]}",
            constants={**solution.constants, **constants},
            launches=[msgspec.structs.replace(launch, **options) for launch in solution.launches],
        )
        write_whole(folder / CONFIG_NAME, to_json(changed))
        request = self._request
        gpu = request.ordinal if isinstance(request.ordinal, int) else None
        return build_solution_implementation(request.task, find_solution(folder), request.target, gpu)

    def _edited(self, candidate: Candidate) -> dict[str, str]:
        """Return the new text of each edited file, by path."""
        files: dict[str, str] = {}
        names = [edit.region for edit in candidate.edits]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"region {twice[0]} is edited twice")
        for edit in candidate.edits:
            if edit.region not in self.space.regions:
                raise unknown(f"region of space {self.space.name}", edit.region, self.space.regions)
            region = self.space.regions[edit.region]
            before, replaced, after = self._split(edit.region, region, files.get(region.file))
            _check_reads(edit, replaced)
            text = edit.text if edit.text.endswith("\n") or not edit.text else f"{edit.text}\n"
            files[region.file] = before + text + after
        return files

    def _find_folder(self, file: str) -> Path:
        """Return the first folder with this file, or the last folder."""
        *first, last = self._folders
        return next((folder for folder in first if (folder / file).is_file()), last)

    def _split(self, name: str, region: Region, text: str | None = None) -> tuple[str, str, str]:
        """Split a region's file into the text before the region, in it, and after it."""
        folder = self._find_folder(region.file)
        path = folder / region.file
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"region {name}: {region.file} is outside of {folder}")
        if text is None:
            try:
                text = (self._files.get(region.file) or path.read_bytes()).decode()
            except (OSError, UnicodeDecodeError) as e:
                raise UsageError(f"region {name}: {path} cannot be read ({e})") from None
        if not region.begin and not region.end:
            return "", text, ""
        lines = text.splitlines(keepends=True)
        first = [n for n, line in enumerate(lines) if region.begin and region.begin in line]
        if len(first) != 1:
            raise UsageError(f"region {name}: {len(first)} lines of {region.file} contain {region.begin!r}, not one")
        last = next((n for n in range(first[0] + 1, len(lines)) if region.end and region.end in lines[n]), None)
        if last is None:
            raise UsageError(f"region {name}: no line of {region.file} after its begin contains {region.end!r}")
        parts = lines[: first[0] + 1], lines[first[0] + 1 : last], lines[last:]
        return "".join(parts[0]), "".join(parts[1]), "".join(parts[2])


class PatchedFamily:
    """A family with edited headers: its include folders are replaced by patched copies."""

    def __init__(self, family: Family, copies: Mapping[Path, Path]) -> None:
        """copies: by folder its copy."""
        self._family = family
        self._copies = {folder.resolve(): copied for folder, copied in copies.items()}

    def program(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> Program:
        """Return the family's program with the patched include folders."""
        made = render_program(self._family, toggles, fmt, dims, instrumented=instrumented)
        steps = []
        for step in made.steps:
            folders = tuple(self._copies.get(folder.resolve(), folder) for folder in step.kernel.include_dirs)
            steps.append(dataclasses.replace(step, kernel=dataclasses.replace(step.kernel, include_dirs=folders)))
        return dataclasses.replace(made, steps=tuple(steps))


def _check_names(space: Space, noun: str, allowed: Mapping[str, object]) -> None:
    for name in space.parameters:
        if name not in allowed:
            raise unknown(f"parameter of space {space.name}: no {noun} is called", name, allowed)


def copy_folder(source: Path, target: Path, *ignored: str) -> None:
    """Replace ``target`` by a copy of ``source``. Raises MachineError if it cannot be written."""
    try:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*ignored))
    except OSError as e:
        why = e.strerror or str(e.args[0][0][2])  # shutil lists the failures
        raise MachineError(f"{target} cannot be written ({why}); free space, then --resume") from e


def _check_reads(edit: Edit, replaced: str) -> None:
    """Refuse an edit that includes a file by its path; the compiler would quote it in its messages to a model."""
    known = _list_included_files(replaced)
    for named in _list_included_files(edit.text):
        header = _HEADER.match(named)
        if named not in known and (header is None or ".." in header[0].strip('<>"').split("/")):
            raise UsageError(
                f"edit of {edit.region}: includes {named[:80]!r}; allowed are headers by their names, without .. or a "
                "macro in place of one"
            )


def _list_included_files(text: str) -> list[str]:
    """List the names in the directives of a source that read files."""
    return [directive[1].strip() for directive in _READS.finditer(re.sub(r"(?:\\|\?\?/)[ \t]*\r?\n", "", text))]


def _check_types(space: Space, types: tuple[type, ...], rule: str) -> None:
    for name, parameter in space.parameters.items():
        if other := [value for value in parameter.values if not isinstance(value, types)]:
            raise UsageError(f"space {space.name}: {name}={other[0]!r}: {rule}")


def _import_family(space: Space) -> Family:
    """Import the family of a space. Raises UsageError for a name without a family."""
    try:
        family = importlib.import_module(space.family) if space.family.startswith(_OWN) else None
    except ImportError:
        family = None
    if not (hasattr(family, "kernel") or hasattr(family, "program")):
        raise UsageError(
            f"space {space.name}: family {space.family!r}: allowed are families below {_OWN[:-1]}, such as "
            f"{_OWN}attention.tuning_space"
        )
    return cast(Family, family)
