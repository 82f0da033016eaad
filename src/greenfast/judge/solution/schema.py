"""The schema of solution.json. A solution in a single file has the same JSON in its first comment.

msgspec checks every key and type against the types below. ``expressions`` defines the expressions.
"""

from __future__ import annotations

import ast
import codecs
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from greenfast.judge.store import decode, once
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.files import read_file

CONFIG_NAME = "solution.json"

Language = Literal["cuda", "ptx", "cubin", "triton", "cute", "family", "callable"]
#: Languages without Python code: their kernels and launches are read, never run, in the judge's process.
DECLARED = ("cuda", "ptx", "cubin")
_LANGUAGE_BY_SUFFIX: dict[str, Language] = {".cu": "cuda", ".ptx": "ptx", ".cubin": "cubin"}

# Patterns end with \Z, because $ also matches before a newline.
Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z", max_length=200)]
#: A kernel's compiled name.
Entry = Annotated[str, Meta(pattern=r"^[A-Za-z_$%.][\w$.]*\Z", max_length=1000)]
#: A solution's name also names its folder of results.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*\Z", max_length=100)]
#: A toggle's value. Messages to a solution's process have 64-bit integers.
Toggle = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
#: A whole number, or an expression in the shape's dimensions and the constants.
Expression = int | str

#: How many launches a program may have, and how many arguments a launch.
MAX_LAUNCHES, MAX_ARGUMENTS = 1024, 4096
_MAX_CONFIG = 1 << 20
_MAX_SOURCE = 32 << 20


class _StrictConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class TensorMapSpec(_StrictConfig, frozen=True, kw_only=True):
    """A tensor map over a buffer, for TMA copies; the fields are as in ``spec.kernel.TensorMap``."""

    buffer: Identifier
    dtype: str
    shape: list[Expression]
    strides: list[Expression]
    box: list[Expression]
    swizzle: int = 0


class LaunchSpec(_StrictConfig, frozen=True, kw_only=True):
    """One launch.

    kernel: the compiled name; for a callable the name of the function.
    grid, block: up to three extents. A callable has no grid. Triton's block follows from num_warps.
    shared: bytes of dynamic shared memory.
    args: in the order of the kernel's parameters; each is a buffer's name, a typed scalar such as "int32(R)", a list of
        those for a struct by value, or a tensor map.
    early, cooperative: as in ``spec.kernel.Launch``.
    num_warps, num_stages: for Triton.
    """

    kernel: Entry
    grid: Annotated[list[Expression], Meta(max_length=3)] = []
    block: Annotated[list[Expression], Meta(min_length=1, max_length=3)] | None = None
    shared: Expression = 0
    args: Annotated[list[str | list[str] | TensorMapSpec], Meta(max_length=MAX_ARGUMENTS)] = []
    early: bool = False
    cooperative: bool = False
    cluster: Annotated[list[Expression], Meta(max_length=3)] = []
    num_warps: Expression = 4
    num_stages: Expression = 3


class WorkspaceSpec(_StrictConfig, frozen=True, kw_only=True):
    """A scratch buffer: its size, and its initial content (zeros if ``zeros``, else NaN)."""

    bytes: Expression
    zeros: bool = False


class SolutionConfig(_StrictConfig, frozen=True, kw_only=True):
    """The content of solution.json.

    name: the solution's name in reports.
    problem: the task that it solves, used if ``--problem`` is missing.
    file: the source, relative to the folder. Quoted includes resolve in the folder.
    target: the only supported target, such as "sm_90a"; empty for any.
    constants: macros in CUDA, constexpr in Triton. Each may use the constants before it.
    toggles: the toggles of a ``family``.
    """

    name: Name
    problem: str = ""
    author: str = ""
    description: str = ""
    language: Language = "cuda"
    file: str = ""
    target: str = ""
    constants: dict[Identifier, Expression] = {}
    launches: Annotated[list[LaunchSpec], Meta(max_length=MAX_LAUNCHES)] = []
    workspaces: dict[Identifier, WorkspaceSpec] = {}
    toggles: dict[Identifier, Toggle] = {}


@dataclass(frozen=True)
class ResolvedSolution:
    """A solution with its files.

    folder: the base of quoted includes and of the source's path.
    path: the file with the JSON, for messages.
    content: the bytes of this file.
    """

    config: SolutionConfig
    folder: Path
    path: Path
    content: bytes = b""

    @property
    def file(self) -> Path:
        """The path of the source."""
        return Path(os.path.normpath(self.folder / self.config.file))

    @property
    def is_code(self) -> bool:
        """True if the solution is Python code that the judge must run."""
        return self.config.language not in DECLARED


def is_solution(path: Path) -> bool:
    """Return True if a path names a solution: a folder with solution.json, that file, or a source file."""
    if path.is_dir():
        return (path / CONFIG_NAME).is_file()
    return path.is_file() and path.suffix in (*_LANGUAGE_BY_SUFFIX, ".py", ".json")


def find_solution(path: Path) -> ResolvedSolution:
    """Read and check a solution: a folder with solution.json, that file, or a source with the JSON in its header.

    Raises UsageError with the file, the key and the allowed values.
    """
    if path.is_dir():
        path = path / CONFIG_NAME
    if path.suffix == ".json":
        content = read_bytes(path, _MAX_CONFIG)
        config = _decode_config(content.removeprefix(codecs.BOM_UTF8), path, {})
    else:
        content = b"" if path.suffix == ".cubin" else read_bytes(path)
        config = _read_header(path, content)
    solution = ResolvedSolution(_normalize_target(config, path), path.parent, path, content)
    _check(solution)
    return solution


def _normalize_target(config: SolutionConfig, path: Path) -> SolutionConfig:
    """Replace the target by its canonical name. Raises UsageError for an unknown target."""
    try:
        name = Target.parse(config.target).name if config.target else ""
    except UsageError as e:
        raise UsageError(f"{path}: target: {e}") from None
    return msgspec.structs.replace(config, target=name)


def read_text(path: Path) -> str:
    """Read a source. Raises UsageError if it cannot be read, is too large, or is not UTF-8."""
    return _decode_text(path, read_bytes(path))


def _decode_text(path: Path, content: bytes) -> str:
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as e:
        raise UsageError(f"{path}: byte {e.start} is not UTF-8; save the file as UTF-8") from None


def read_bytes(path: Path, max_bytes: int = _MAX_SOURCE) -> bytes:
    """Read a file. Raises UsageError if it cannot be read or has more than ``max_bytes`` bytes."""
    try:
        return read_file(path, max_bytes)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        hint = f"; a solution's folder holds a {CONFIG_NAME}" if path.name == CONFIG_NAME else ""
        raise UsageError(f"{path}: cannot be read ({reason}){hint}") from None


def _read_header(path: Path, content: bytes) -> SolutionConfig:
    text = _decode_text(path, content)
    if path.suffix == ".py":
        return _decode_config(_parse_python_header(text, path), path, {"file": path.name})
    if path.suffix not in _LANGUAGE_BY_SUFFIX or path.suffix == ".cubin":
        raise UsageError(
            f"{path}: a solution is a folder with {CONFIG_NAME}, or a .cu, .ptx or .py file with the JSON in its header"
        )
    header = _parse_comment_header(text)
    if header is None:
        example = '{"name": "mine", "launches": [{"kernel": ..., "grid": [...], "block": [...], "args": [...]}]}'
        raise UsageError(
            f"{path}: its first comment does not begin with `greenfast: `; write /* greenfast: {example} */"
        )
    return _decode_config(header.encode(), path, {"file": path.name, "language": _LANGUAGE_BY_SUFFIX[path.suffix]})


_BLOCK = re.compile(r"\s*/\*\s*greenfast:(.*?)\*/", re.DOTALL)
_LINES = re.compile(r"\s*//\s*greenfast:[^\n]*(?:\n[ \t]*//[^\n]*)*")


def _parse_comment_header(text: str) -> str | None:
    """Return the JSON of the first comment: a block or lines that begin with `greenfast:`. None if there is none."""
    if block := _BLOCK.match(text):
        return block[1].strip()
    comment = _LINES.match(text)
    if comment is None:
        return None
    lines = (line.strip().removeprefix("//") for line in comment[0].strip().splitlines())
    return "\n".join(lines).strip().removeprefix("greenfast:").strip()


def _parse_python_header(text: str, path: Path) -> bytes:
    """Return the literal GREENFAST of a Python file as JSON, without running the file."""
    example = 'GREENFAST = {"name": "mine", "language": "triton", "launches": [...]}'
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as e:
        line = getattr(e, "lineno", None)
        raise UsageError(f"{path}: not Python{f', line {line}' if line else ''}: {str(e).splitlines()[0]}") from None
    assignments = [s for s in body if isinstance(s, ast.Assign) and "GREENFAST" in map(ast.unparse, s.targets)]
    if not assignments:
        raise UsageError(f"{path}: has no GREENFAST at the top level, nor a class ModelNew; write {example}")
    where = f"{path}: line {assignments[-1].lineno}: GREENFAST"
    if len(assignments) > 1:
        raise UsageError(f"{where} is assigned twice; assign it once")
    try:
        config = ast.literal_eval(assignments[0].value)
        _require_distinct_keys(assignments[0].value, where)
        return msgspec.json.encode(config)
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise UsageError(f"{where} is not a literal of JSON's types; it is read without running the file") from None


def _require_distinct_keys(literal: ast.expr, where: str) -> None:
    """Raise UsageError for a duplicate key in a dict. Python silently uses the last value."""
    for part in ast.walk(literal):
        try:
            once([(key.value, None) for key in getattr(part, "keys", ()) if isinstance(key, ast.Constant)])
        except msgspec.DecodeError as e:
            raise UsageError(f"{where}: {e}") from None


def _decode_config(text: bytes, path: Path, implied: Mapping[str, str]) -> SolutionConfig:
    """Decode a JSON text. implied: the keys that follow from the file itself."""
    try:
        raw = decode(text)
        if isinstance(raw, dict):
            for key, value in implied.items():
                if raw.setdefault(key, value) != value:
                    raise UsageError(f"{path}: {key}: {raw[key]!r}, but this file is {value!r}; leave the key out")
            if "language" not in raw and isinstance(raw.get("file"), str):
                language = _LANGUAGE_BY_SUFFIX.get(Path(raw["file"]).suffix)
                if language is None:
                    allowed = ", ".join(get_args(Language))
                    raise UsageError(f"{path}: language: missing, and {raw['file']} does not tell; one of {allowed}")
                raw["language"] = language
        return msgspec.convert(raw, SolutionConfig)
    except msgspec.ValidationError as e:
        raise UsageError(f"{path}: {e}{_list_allowed(str(e))}") from None
    except (msgspec.DecodeError, RecursionError) as e:
        raise UsageError(f"{path}: not JSON: {e}") from None


def _list_allowed(message: str) -> str:
    kinds: dict[str, type[msgspec.Struct]] = {"launches": LaunchSpec, "workspaces": WorkspaceSpec}
    key = re.search(r"\$\.(\w+)", message)
    kind = kinds.get(key[1], SolutionConfig) if key else SolutionConfig
    if "unknown field" in message or "missing required field" in message:
        return f"; its keys are {', '.join(kind.__struct_fields__)}"
    if "Invalid enum value" in message:
        return f"; allowed: {', '.join(get_args(Language))}"
    return ""


def _check(resolved: ResolvedSolution) -> None:
    solution, where = resolved.config, resolved.path
    if not solution.file:
        raise UsageError(f"{where}: file: missing; name the solution's source, such as kernel.cu")
    if not solution.file.isprintable():
        raise UsageError(f"{where}: file: {solution.file!r} is no path that can be shown; rename the file")
    try:
        inside = resolved.file.resolve().is_relative_to(resolved.folder.resolve())
        there = resolved.file.is_file()
    except (OSError, ValueError, RuntimeError) as e:
        raise UsageError(f"{where}: file: {solution.file!r} is no path ({e})") from None
    if not inside:
        raise UsageError(f"{where}: file: {solution.file} is outside of the solution's folder; copy it there")
    if not there:
        raise UsageError(f"{where}: file: {resolved.file} does not exist")
    if solution.language != "callable":
        for number, launch in enumerate(solution.launches):
            if not launch.grid:
                raise UsageError(f"{where}: launches[{number}].grid: missing; give the blocks of the grid")
    if solution.language in DECLARED:
        if not solution.launches:
            raise UsageError(f"{where}: launches: missing; name each kernel with its grid, block and args")
        for number, launch in enumerate(solution.launches):
            if launch.block is None:
                raise UsageError(f"{where}: launches[{number}].block: missing; give the threads of a block")
    if solution.language != "cuda" and solution.language in DECLARED and solution.constants:
        used = set(re.findall(r"\w+", str(msgspec.to_builtins([solution.launches, solution.workspaces]))))
        if unused := sorted(solution.constants.keys() - used):
            raise UsageError(f"{where}: constants: {', '.join(unused)} not used; {solution.language} takes no macros")
