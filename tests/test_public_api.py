"""The public API: tests/public_api.txt lists every public name with its parameters, and fails on any change.

    python -m tests.test_public_api --write    (renew the list, when a change is meant)

Listed are the names that ``greenfast`` exports, its module for FlashAttention's functions, the backend for vLLM, the
PyTorch operators, the names that documents and examples import, the command line, and the environment variables. Type
annotations are left out, as are internal modules: renaming an internal type or module changes nothing here.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import greenfast
from greenfast.cli.main import parser
from tests.serving import vllm_interface

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("public_api.txt")
RENEW = "python -m tests.test_public_api --write"
#: Files with code that users write or copy; what they import of greenfast is public.
USERS_CODE = ("examples", "src/greenfast/cli/scaffold")
SPECIAL = ("__call__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__torch_function__")


class Elided:
    """A default that cannot be listed."""

    def __repr__(self) -> str:
        return "..."


def public_api() -> str:
    """Return the list of all public names, in sections with a heading each."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("vllm") is None:
            vllm_interface.install(patch)
        backend = importlib.import_module("greenfast.vllm")
        sys.modules.pop("greenfast.vllm")
    sections = {
        "greenfast": describe(greenfast, exported_names(greenfast), "greenfast"),
        "greenfast.flash_attn": describe(greenfast.flash_attn, greenfast.flash_attn.__all__, "greenfast.flash_attn"),
        "greenfast.vllm": describe(backend, own_names(backend), "greenfast.vllm"),
        "PyTorch operators": operator_schemas(),
        "Names that documents and examples import": documented(),
        "Command line": sorted(command_line(parser())),
        "Environment variables": environment_variables(),
    }
    return "\n".join("\n".join((f"# {heading}", *lines, "")) for heading, lines in sections.items())


def exported_names(module: ModuleType) -> list[str]:
    """Return the public names of a package; modules below it are listed only where the package exports them."""
    names = [name for name in dir(module) if not name.startswith("_")]
    imported = {"annotations", "importlib", "TYPE_CHECKING", "Any"}
    return [name for name in names if name not in imported and not isinstance(getattr(module, name), ModuleType)]


def own_names(module: ModuleType) -> list[str]:
    """Return the public functions and classes that a module defines."""
    return [
        name
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def describe(module: ModuleType, names: list[str], prefix: str) -> list[str]:
    """Return the lines of some names of a module, and of the classes that they return."""
    exported = {getattr(module, name) for name in names if isinstance(getattr(module, name), type)}
    return [line for name in sorted(names) for line in _lines(f"{prefix}.{name}", getattr(module, name), exported)]


def _lines(name: str, value: Any, described: set[Any]) -> Iterator[str]:
    """Yield the lines of a class or function. described: classes that have lines of their own."""
    if isinstance(value, type):
        yield f"{name}{_signature(value) if _has_own_constructor(value) else ''}"
        yield from _members(name, value, described)
    elif callable(value):
        yield f"{name}{_signature(value)}"
        yield from _result(name, value, described)
    else:
        yield name


def _own_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.split(".")[0] == "greenfast"]


def _has_own_constructor(cls: type) -> bool:
    """Return whether this package decides a class's parameters, and not Python's version or another package."""
    if getattr(cls, "_is_protocol", False):
        return False
    return hasattr(cls, "__struct_fields__") or any(
        name in vars(base) for base in _own_bases(cls) for name in ("__init__", "__new__")
    )


def _members(name: str, cls: type, described: set[Any]) -> Iterator[str]:
    """Yield the lines of the members that a class, or a base class of this package, defines."""
    bases = _own_bases(cls)
    members = {key: value for base in reversed(bases) for key, value in vars(base).items()}
    fields = {key for base in bases for key in (*inspect.get_annotations(base), *_assigned(base))}
    for key in sorted({*members, *fields}):
        if key.startswith("_") and key not in SPECIAL:
            continue
        value = members.get(key)
        if isinstance(value, staticmethod | classmethod):
            value = getattr(cls, key)
        if inspect.isroutine(value):
            yield from _lines(f"{name}.{key}", value, described)
        else:
            yield f"{name}.{key}"
            getter = value.fget if isinstance(value, property) else getattr(value, "func", None)
            if isinstance(value, property | cached_property) and getter is not None:
                yield from _result(f"{name}.{key}", getter, described, call="")


def _assigned(cls: type) -> set[str]:
    """Return the attributes that a class's methods assign to ``self``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # made by a function, as NamedTuple's base
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _result(name: str, function: Callable[..., Any], described: set[Any], call: str = "()") -> Iterator[str]:
    """Yield the members of the classes of this package that a function returns, as ``name().member``."""
    try:
        returned = typing.get_type_hints(inspect.unwrap(function)).get("return")
    except (NameError, TypeError):  # a type that is imported for type checkers alone; a built-in function
        return
    for cls in _classes(returned):
        if cls.__module__.split(".")[0] == "greenfast" and cls not in described:
            yield from _members(name + call, cls, described | {cls})


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    for inner in typing.get_args(hint):
        yield from _classes(inner)


def _signature(function: Callable[..., Any]) -> str:
    """Return the parameters of a function with their defaults, without annotations."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in class
        return ""
    parameters = [
        p.replace(annotation=p.empty, default=_readable(p.default))
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _readable(default: Any) -> Any:
    """Return a default, or ``...`` for one with an address or a type in its text, such as a function."""
    return Elided() if default is not inspect.Parameter.empty and repr(default).startswith("<") else default


def operator_schemas() -> list[str]:
    """Return the schemas of ``torch.ops.greenfast``."""
    schemas = torch._C._jit_get_all_schemas()
    return sorted(str(schema) for schema in schemas if schema.name.startswith("greenfast::"))


def documented() -> list[str]:
    """Return the lines of the names that users' code imports from greenfast's modules, and that documents spell out."""
    names: set[tuple[str, str]] = set()
    for folder in USERS_CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            names |= set(imported_names(file.read_text()))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for module, name in re.findall(r"\b(greenfast(?:\.[a-z_]+)+)\.([A-Za-z_]+)\b", page.read_text()):
            if importlib.util.find_spec(module) and hasattr(importlib.import_module(module), name):
                names.add((module, name))
    modules: dict[str, list[str]] = {}
    for module, name in sorted(names):
        is_module = isinstance(getattr(importlib.import_module(module), name), ModuleType)
        if not is_module and module not in ("greenfast", "greenfast.flash_attn", "greenfast.vllm"):
            modules.setdefault(module, []).append(name)
    return [
        line for module, listed in modules.items() for line in describe(importlib.import_module(module), listed, module)
    ]


def imported_names(source: str) -> list[tuple[str, str]]:
    """Return (module, name) of every name that a source imports from greenfast."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "greenfast"
        for alias in node.names
    ]


def command_line(options: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a line for each verb and for each of its options."""
    for action in options._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield verb.prog
                yield from command_line(verb)
        elif "--help" not in action.option_strings:
            name = ", ".join(action.option_strings) or f"<{action.dest}>"
            choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
            yield f"{options.prog} {name}{choices}"


def environment_variables() -> list[str]:
    """Return the variables that the package reads."""
    sources = (ROOT / "src").rglob("*.py")
    return sorted({name for file in sources for name in re.findall(r"\bGREENFAST_[A-Z_]+\b", file.read_text())})


def difference(listed: str, today: str) -> str:
    """Return a unified diff with the command that renews the list; empty if there is no difference."""
    diff = list(difflib.unified_diff(listed.splitlines(), today.splitlines(), LIST.name, "today", lineterm="", n=0))
    if not diff:
        return ""
    return "\n".join(["the public API changed:", *diff, f"If that is meant, run: {RENEW}"])


def test_the_public_api_is_the_listed_one() -> None:
    changed = difference(LIST.read_text(encoding="utf-8"), public_api())
    if changed:
        pytest.fail(changed, pytrace=False)


class _Returned:
    __module__ = "greenfast.internal"
    rows: int


class _Exported:
    __module__ = "greenfast.internal"

    def __init__(self, width: int = 0) -> None:
        self.width = width

    def read(self, rows: int, *, clip: bool = False, order: Any = len) -> _Returned | None: ...

    def _hidden(self) -> None: ...


def test_a_class_is_listed_with_its_members_and_what_they_return() -> None:
    module = ModuleType("module")
    vars(module).update(Exported=_Exported, LIMIT=3)
    assert describe(module, ["Exported", "LIMIT"], "m") == [
        "m.Exported(width=0)",
        "m.Exported.read(rows, *, clip=False, order=...)",
        "m.Exported.read().rows",
        "m.LIMIT",
    ]


def test_a_change_is_shown_with_the_command_that_renews_the_list() -> None:
    lines = difference("# a\na.f(x, y=1)\na.g()\n", "# a\na.f(x, y=2)\na.g()\n").splitlines()
    assert {"-a.f(x, y=1)", "+a.f(x, y=2)"} < set(lines)
    assert lines[-1] == f"If that is meant, run: {RENEW}"
    assert difference("# a\n", "# a\n") == ""


def main() -> None:
    """Compare, or write the list with ``--write``."""
    options = argparse.ArgumentParser(description="Compare the public API with tests/public_api.txt.")
    options.add_argument("--write", action="store_true", help="write the list instead")
    today = public_api()
    if options.parse_args().write:
        LIST.write_text(today, encoding="utf-8")
    else:
        sys.exit(difference(LIST.read_text(encoding="utf-8"), today))


if __name__ == "__main__":
    main()
