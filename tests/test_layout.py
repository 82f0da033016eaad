"""The architecture: imports go only down the floors and in the open, files are short, torch stays on two floors."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "greenfast"
FLOORS = {
    "spec": 0,
    "kernels": 0,  # CUDA sources, and the path to them
    "numerics": 1,
    "build": 1,
    "report": 1,
    "runtime": 2,
    "emulator": 3,
    "measure": 3,
    "families": 3,
    "operator": 4,
    "gates": 4,
    "pipeline": 5,
    "cli": 7,
}
TOP = {"__init__", "__main__"}
TORCH_FLOORS = {"numerics", "families", "operator"}
MAX_LINES = 400


@dataclass(frozen=True)
class Import:
    target: str  # dotted name of what is imported: a module, or a name in one
    line: int
    in_function: bool
    for_types: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: str
    lines: int
    imports: tuple[Import, ...]

    @property
    def floor(self) -> str:
        """The folder below the package, or the file's own name beside ``__init__.py``."""
        return self.path.split("/")[0].removesuffix(".py")


def read_modules(package: Path) -> dict[str, Module]:
    modules = {}
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        name = ".".join(("greenfast", *path.with_suffix("").parts)).removesuffix(".__init__")
        text = file.read_text()
        modules[name] = Module(name, path.as_posix(), len(text.splitlines()), _read_imports(ast.parse(text)))
    return modules


def _read_imports(tree: ast.Module) -> tuple[Import, ...]:
    in_function: set[ast.AST] = set()
    for_types: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            in_function.update(ast.walk(node))
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for_types.update(inner for statement in node.body for inner in ast.walk(statement))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [Import(target, node.lineno, node in in_function, node in for_types) for target in targets]
    return tuple(found)


def layout_faults(package: Path) -> list[str]:
    faults = []
    for module in read_modules(package).values():
        if module.lines > MAX_LINES:
            faults.append(f"{module.path}: {module.lines} lines, more than {MAX_LINES}")
        if module.floor not in FLOORS and module.floor not in TOP:
            faults.append(f"{module.path}: {module.floor!r} is no floor; the floors are {', '.join(FLOORS)}")
            continue
        for imported in module.imports:
            fault = _import_fault(module.floor, imported)
            if fault:
                faults.append(f"{module.path}:{imported.line}: {fault}")
    return faults


def _import_fault(floor: str, imported: Import) -> str | None:
    target = imported.target
    if target.startswith("."):
        return "relative import; write the whole name"
    if target.split(".")[0] != "greenfast":
        return None
    if imported.in_function:
        return f"hidden import of {target} inside a function"
    if floor in TOP or target == "greenfast.__version__":
        return None
    to = target.removeprefix("greenfast").removeprefix(".").split(".")[0]
    if to not in FLOORS:
        return f"{floor} imports {target}, which is on no floor"
    if to != floor and FLOORS[to] >= FLOORS[floor]:
        return f"{floor} (floor {FLOORS[floor]}) imports {to} (floor {FLOORS[to]}); only lower floors"
    if floor == "report" and to not in ("report", "spec"):
        return f"report imports {to}; only spec"
    return None


def torch_faults(package: Path) -> list[str]:
    """A chain of imports for each module that loads torch and is not on one of torch's floors."""
    modules = read_modules(package)
    chains = {name: _chain_to_torch(modules, name) for name, m in modules.items() if m.floor not in TORCH_FLOORS}
    return [" -> ".join(chain) for chain in chains.values() if chain]


def _chain_to_torch(modules: dict[str, Module], start: str) -> tuple[str, ...]:
    """The imports that lead from a module to torch; empty where none do."""
    queue: list[tuple[str, ...]] = [(start,)]
    seen = {start}
    for chain in queue:
        for imported in modules[chain[-1]].imports:
            if imported.for_types:
                continue
            if imported.target.split(".")[0] == "torch":
                return (*chain, imported.target)
            parts = imported.target.split(".")
            # importing a.b.c runs a, a.b and a.b.c
            for name in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
                if name in modules and name not in seen:
                    seen.add(name)
                    queue.append((*chain, name))
    return ()


def test_imports_go_down_in_the_open_and_files_are_short() -> None:
    assert layout_faults(PACKAGE) == []


def test_torch_is_loaded_only_by_numerics_and_attention() -> None:
    assert torch_faults(PACKAGE) == []


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("gates/a.py", "from greenfast.pipeline import run", "only lower floors"),
        ("gates/a.py", "import greenfast.cli.main", "only lower floors"),
        ("runtime/a.py", "from greenfast import measure", "only lower floors"),
        ("report/a.py", "from greenfast.build.cache import Cache", "only lower floors"),
        ("spec/a.py", "import greenfast", "on no floor"),
        ("spec/a.py", "from . import b", "relative import"),
        ("cli/a.py", "def f():\n    from greenfast.spec import task", "hidden import"),
        ("cli/a.py", "class A:\n    async def f(self):\n        import greenfast.spec", "hidden import"),
        ("extra/a.py", "", "is no floor"),
        ("extra.py", "", "is no floor"),
        ("spec/a.py", "\n" * 401, "401 lines"),
    ],
)
def test_checker_finds_a_fault(tmp_path: Path, path: str, text: str, fault: str) -> None:
    faults = layout_faults(_write(tmp_path, {path: text}))
    assert len(faults) == 1
    assert faults[0].startswith(path)
    assert fault in faults[0]


def test_checker_accepts_a_sound_tree(tmp_path: Path) -> None:
    tree = {
        "__init__.py": "from greenfast.cli import main",
        "gates/a.py": "from greenfast import __version__, spec\nfrom greenfast.gates.b import check",
        "gates/b.py": "def f():\n    import json",
        "spec/a.py": "\n" * 400,
    }
    assert layout_faults(_write(tmp_path, tree)) == []
    assert torch_faults(tmp_path) == []


def test_checker_follows_imports_to_torch(tmp_path: Path) -> None:
    tree = {
        "gates/a.py": "from greenfast.numerics.errors import stats",
        "gates/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "measure/a.py": "def f():\n    import torch.cuda",
        "numerics/__init__.py": "from torch import nn",
        "numerics/errors.py": "",
    }
    assert torch_faults(_write(tmp_path, tree)) == [
        "greenfast.gates.a -> greenfast.numerics -> torch.nn",
        "greenfast.measure.a -> torch.cuda",
    ]
