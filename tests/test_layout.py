"""The architecture: imports go down the floors, openly, in no circle; torch has its rooms; files are not too long."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "greenfast"
#: A package above all rooms: it imports anything of greenfast, and no file below src imports it.
BENCHMARKS = ROOT / "benchmarks"
#: Folders of the checkout that the installed package does not have.
NOT_INSTALLED = ("benchmarks", "scripts", "tests")
#: Rooms by the modules that they hold, lowest floor first: a room imports only from itself and from lower floors.
ROOMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "spec": (0, ("spec",)),
    "kernels": (1, ("kernels",)),
    "toolchain": (
        1,
        tuple(
            f"device.{name}"
            for name in (
                "assembler",
                "cache",
                "compiler",
                "compiler_log",
                "compiler_process",
                "cubin",
                "directives",
                "identity",
                "machine_code",
                "module_variables",
                "nvrtc",
                "python_process",
                "sandbox",
                "tool_process",
                "toolchain",
            )
        ),
    ),
    "device": (2, ("device",)),
    "numerics": (2, ("numerics",)),
    "library": (3, ("ops", "serving", "integrations", "parallel", "flash_attn", "vllm")),
    "emulator ptx": (2, ("emulator.ptx",)),
    "emulator machine": (3, ("emulator.machine",)),
    "emulator instructions": (4, ("emulator.instructions",)),
    "emulator": (5, ("emulator",)),
    "judge data": (4, ("judge.record_schema", "judge.store")),
    "judge text": (5, tuple(f"judge.report.{name}" for name in ("facts", "formatting"))),
    "judge solution": (6, ("judge.solution",)),
    "judge task": (7, ("judge.task", "judge.timing")),
    "judge pipeline": (
        8,
        tuple(f"judge.{name}" for name in ("check_plan", "emulator_session", "implementation", "pipeline", "request")),
    ),
    "judge gates": (9, ("judge.gates", "judge.error_metrics")),
    "judge report": (10, ("judge.report",)),
    "judge": (11, ("judge",)),
    "evolve": (12, ("evolve",)),
    "cli": (13, ("cli",)),
}
#: Rooms that import from these rooms alone.
EMULATOR = {"emulator", "emulator ptx", "emulator machine", "emulator instructions"}
ONLY = {
    "judge text": {"judge data", "spec"},
    "judge report": {"judge data", "judge text", "judge gates", "spec"},
    "kernels": {"spec"},
    **{room: {*EMULATOR, "toolchain", "kernels", "spec"} for room in EMULATOR},
}
TOP = {"__init__", "__main__"}
TORCH_ROOMS = {"numerics", "library"}
#: Modules that only a problem, or the process of a solution, loads.
TORCH_MODULES = (
    "greenfast.emulator.triton",
    *(
        f"greenfast.judge.{name}"
        for name in (
            "formats.defined",
            "formats.models",
            "formats.test_calls",
            "solution.capture",
            "solution.languages",
            "solution.recording",
            "solution.tensor_operations",
        )
    ),
)
MAX_LINES = 1000
#: Class names that still have several definitions. The list only shrinks.
DUPLICATE_CLASSES = {"Program"}
#: Modules with a name of the standard library: `greenfast profile` is a verb of the command line.
STANDARD_NAMES = {"cli/profile.py"}


def room_of(module: str) -> str | None:
    """The room of a module by its dotted name below the package, by the longest prefix that has one."""
    found = [
        (len(name), room) for room, (_, names) in ROOMS.items() for name in names if f"{module}.".startswith(f"{name}.")
    ]
    return max(found)[1] if found else None


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
    def room(self) -> str | None:
        """The room that the file is in; None for one in the package's own folder, and for one that has no room."""
        return room_of(self.path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))


def read_modules(package: Path, top: str = "greenfast") -> dict[str, Module]:
    """Return the modules of a package by their dotted names. top: the package's name."""
    modules = {}
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        name = ".".join((top, *path.with_suffix("").parts)).removesuffix(".__init__")
        modules[name] = Module(name, path.as_posix(), *_read_file(file.read_text())[:2])
    return modules


@cache
def _read_file(text: str) -> tuple[int, tuple[Import, ...], tuple[str, ...]]:
    """Return the number of lines of a file, its imports, and the names of its classes."""
    tree = ast.parse(text)
    classes = tuple(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return len(text.splitlines()), _read_imports(tree), classes


def _read_imports(tree: ast.Module) -> tuple[Import, ...]:
    in_function: set[ast.AST] = set()
    for_types: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            in_function.update(n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom))
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
    modules = read_modules(package)
    lengths = {module.path: module.lines for module in modules.values()}
    lengths |= {
        file.relative_to(package).as_posix(): len(file.read_text().splitlines())
        for file in sorted(package.rglob("*.cuh"))
    }
    faults += [f"{path}: {lines} lines, more than {MAX_LINES}" for path, lines in lengths.items() if lines > MAX_LINES]
    for module in modules.values():
        if module.room is None and module.path.removesuffix(".py") not in TOP:
            faults.append(f"{module.path}: in no room; the rooms are {', '.join(ROOMS)}")
            continue
        for imported in module.imports:
            fault = _import_fault(module.room, imported)
            if fault:
                faults.append(f"{module.path}:{imported.line}: {fault}")
    return [*faults, *(f"circle of imports: {' -> '.join(circle)}" for circle in circles(modules))]


def _import_fault(room: str | None, imported: Import) -> str | None:
    target = imported.target
    if target.startswith("."):
        return "relative import; write the whole name"
    if target.split(".")[0] in NOT_INSTALLED:
        return f"import of {target}, which is not installed"
    if target.split(".")[0] != "greenfast":
        return None
    if imported.in_function:
        return f"hidden import of {target} inside a function"
    if room is None or target == "greenfast.__version__":
        return None
    to = room_of(target.removeprefix("greenfast").removeprefix("."))
    if to is None:
        return f"{room} imports {target}, which is in no room"
    if to != room and ROOMS[to][0] >= ROOMS[room][0]:
        return f"{room} (floor {ROOMS[room][0]}) imports {to} (floor {ROOMS[to][0]}); only lower floors"
    if to != room and to not in ONLY.get(room, {to}):
        return f"{room} imports {to}; only {', '.join(sorted(ONLY[room]))}"
    return None


def benchmark_faults(package: Path) -> list[str]:
    """The faults of the package benchmarks: hidden and relative imports, imports of scripts, circles, long files."""
    modules = read_modules(package, "benchmarks")
    faults = [f"{m.path}: {m.lines} lines, more than {MAX_LINES}" for m in modules.values() if m.lines > MAX_LINES]
    for module in modules.values():
        for imported in module.imports:
            top = imported.target.split(".")[0]
            if not top:
                faults.append(f"{module.path}:{imported.line}: relative import; write the whole name")
            elif top == "scripts":
                faults.append(f"{module.path}:{imported.line}: import of {imported.target}; scripts import benchmarks")
            elif imported.in_function and top in ("greenfast", "benchmarks"):
                faults.append(f"{module.path}:{imported.line}: hidden import of {imported.target} inside a function")
    return [*faults, *(f"circle of imports: {' -> '.join(circle)}" for circle in circles(modules))]


def circles(modules: dict[str, Module]) -> list[tuple[str, ...]]:
    """Modules that import each other, also for types: one way round for each pair that is found first."""
    needs = {
        name: {t for i in m.imports for t in (i.target, i.target.rpartition(".")[0]) if t in modules}
        for name, m in modules.items()
    }
    try:
        graphlib.TopologicalSorter({name: found - {name, "greenfast"} for name, found in needs.items()}).prepare()
    except graphlib.CycleError as e:
        return [tuple(e.args[1])]
    return []


def torch_faults(package: Path) -> list[str]:
    """A chain of imports for each module that loads torch and is not in one of torch's rooms."""
    modules = read_modules(package)
    theirs = {n for n, m in modules.items() if m.room in TORCH_ROOMS or n.startswith(TORCH_MODULES)}
    chains = {name: _chain_to_torch(modules, name) for name in modules if name not in theirs}
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


def find_duplicate_classes(*packages: Path) -> dict[str, list[str]]:
    """Return the class names with several definitions in the packages, with the files that define them."""
    files = defaultdict(list)
    for package in packages:
        for file in sorted(package.rglob("*.py")):
            for name in _read_file(file.read_text())[2]:
                files[name].append(file.relative_to(package).as_posix())
    return {name: paths for name, paths in files.items() if len(paths) > 1}


def find_standard_names(package: Path) -> set[str]:
    """Return the modules and packages with the name of a module of the standard library."""
    paths = [path for path in package.rglob("*") if path.is_dir() or path.suffix == ".py"]
    return {path.relative_to(package).as_posix() for path in paths if path.stem in sys.stdlib_module_names}


def test_each_class_name_has_one_definition() -> None:
    duplicates = find_duplicate_classes(PACKAGE, BENCHMARKS)
    assert set(duplicates) == DUPLICATE_CLASSES, duplicates


def test_no_module_has_a_name_of_the_standard_library() -> None:
    assert find_standard_names(PACKAGE) == STANDARD_NAMES


def test_imports_go_down_in_the_open_and_files_are_short() -> None:
    assert layout_faults(PACKAGE) == []


def test_benchmarks_import_in_the_open_and_files_are_short() -> None:
    assert benchmark_faults(BENCHMARKS) == []


def test_torch_is_loaded_only_in_its_rooms() -> None:
    assert torch_faults(PACKAGE) == []


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


_IF_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
_FOR_TYPES = f"{_IF_TYPES}from greenfast.emulator import program"


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("judge/gates/a.py", "from greenfast.judge import validate", "only lower floors"),
        ("judge/gates/a.py", "import greenfast.cli.main", "only lower floors"),
        ("device/a.py", "from greenfast import judge", "only lower floors"),
        ("judge/report/a.py", "from greenfast.device.cache import Cache", "only judge data, judge gates"),
        ("judge/pipeline.py", "from greenfast.judge.gates import build", "only lower floors"),
        ("judge/record_schema.py", "from greenfast.judge.record_io import write", "only lower floors"),
        ("kernels/a.py", "import greenfast.numerics", "only lower floors"),
        ("emulator/machine/a.py", _FOR_TYPES, "only lower floors"),
        ("emulator/a.py", "from greenfast.device import session", "only emulator"),
        ("emulator/a.py", "from greenfast.numerics import formats", "only emulator"),
        ("spec/a.py", "import greenfast", "in no room"),
        ("spec/a.py", "from . import b", "relative import"),
        ("judge/gates/a.py", "import benchmarks.session", "which is not installed"),
        ("cli/a.py", "def f():\n    from greenfast.spec import task", "hidden import"),
        ("cli/a.py", "class A:\n    async def f(self):\n        import greenfast.spec", "hidden import"),
        ("extra/a.py", "", "in no room"),
        ("extra.py", "", "in no room"),
        ("spec/a.py", "\n" * (MAX_LINES + 1), f"{MAX_LINES + 1} lines"),
        ("kernels/a.cuh", "\n" * (MAX_LINES + 1), f"{MAX_LINES + 1} lines"),
    ],
)
def test_checker_finds_a_fault(tmp_path: Path, path: str, text: str, fault: str) -> None:
    faults = layout_faults(_write(tmp_path, {path: text}))
    assert len(faults) == 1
    assert faults[0].startswith(path)
    assert fault in faults[0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("from scripts import corpus", "scripts import benchmarks"),
        ("from . import b", "relative import"),
        ("def f():\n    import greenfast.spec", "hidden import"),
        ("import benchmarks.a", "circle of imports"),
        ("\n" * (MAX_LINES + 1), "lines"),
    ],
)
def test_checker_finds_a_fault_of_benchmarks(tmp_path: Path, text: str, fault: str) -> None:
    _write(tmp_path, {"a.py": "from benchmarks import b\nfrom greenfast import cli", "b.py": ""})
    assert benchmark_faults(tmp_path) == []
    (found,) = benchmark_faults(_write(tmp_path, {"b.py": text}))
    assert fault in found


def test_checker_finds_names_with_two_meanings(tmp_path: Path) -> None:
    tree = {
        "spec/a.py": "class Case: ...",
        "cli/b.py": "def f():\n    class Case: ...",
        "cli/operator.py": "class Other: ...",
        "queue/__init__.py": "",
    }
    _write(tmp_path, tree)
    assert find_duplicate_classes(tmp_path) == {"Case": ["cli/b.py", "spec/a.py"]}
    assert find_standard_names(tmp_path) == {"cli/operator.py", "queue"}


@pytest.mark.parametrize("last", ["import greenfast.spec.a", f"{_IF_TYPES}from greenfast.spec import a"])
def test_checker_finds_a_circle(tmp_path: Path, last: str) -> None:
    tree = {
        "spec/a.py": "from greenfast.spec.b import f",
        "spec/b.py": "from greenfast.spec import c",
        "spec/c.py": last,
    }
    (fault,) = layout_faults(_write(tmp_path, tree))
    assert fault.startswith("circle of imports: ")
    assert {"greenfast.spec.a", "greenfast.spec.b", "greenfast.spec.c"} <= set(fault.split(": ")[1].split(" -> "))


def test_checker_accepts_a_sound_tree(tmp_path: Path) -> None:
    tree = {
        "__init__.py": "from greenfast.cli import main",
        "judge/gates/a.py": "from greenfast import __version__, spec\nfrom greenfast.judge.gates.b import check",
        "judge/gates/b.py": "def f():\n    import json",
        "spec/a.py": f"{_IF_TYPES}from greenfast.spec import b",
        "spec/b.py": "\n" * 397,
    }
    assert layout_faults(_write(tmp_path, tree)) == []
    assert torch_faults(tmp_path) == []


def test_checker_follows_imports_to_torch(tmp_path: Path) -> None:
    tree = {
        "judge/gates/a.py": "from greenfast.numerics.errors import stats",
        "judge/gates/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "device/a.py": "def f():\n    import torch.cuda",
        "numerics/__init__.py": "from torch import nn",
        "numerics/errors.py": "",
    }
    assert sorted(torch_faults(_write(tmp_path, tree))) == [
        "greenfast.device.a -> torch.cuda",
        "greenfast.judge.gates.a -> greenfast.numerics -> torch.nn",
    ]
