"""What the wheel holds: everything that an installed greenfast needs, and nothing else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from greenfast import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(folder), str(ROOT)], check=True)
    return folder / f"greenfast-{__version__}-py3-none-any.whl"  # the name that README.md installs


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def _files(folder: str, *patterns: str) -> set[Path]:
    return {path.relative_to(ROOT / folder) for pattern in patterns for path in (ROOT / folder).rglob(pattern)}


def test_package_and_kernels_are_in_the_wheel(wheel_names: set[str]) -> None:
    expected = {path.as_posix() for path in _files("src", "*.py", "*.cu", "*.cuh", "*.jinja", "*.css", "py.typed")}
    assert any(name.endswith(".cuh") for name in expected)
    assert "greenfast/py.typed" in expected
    assert expected <= wheel_names


def test_tasks_are_in_the_wheel_under_the_package(wheel_names: set[str]) -> None:
    expected = {f"greenfast/tasks/{path.as_posix()}" for path in _files("tasks", "*.json", "*.py", "*.cuh")}
    expected = {name for name in expected if not name.endswith("/runner.py")}  # a door of the checkout alone
    assert "greenfast/tasks/fp8_sdpa_stage_c_wmma/kernels/scalar.cuh" in expected
    assert expected <= wheel_names


def test_nothing_else_is_in_the_wheel(wheel_names: set[str]) -> None:
    outside = {name for name in wheel_names if name.split("/")[0] != "greenfast" and ".dist-info/" not in name}
    assert outside == set()
    unwanted = ("tests", "results", "evidence", "benchmarks", "runner.py", "__pycache__")
    assert {name for name in wheel_names if any(part in unwanted for part in name.split("/"))} == set()


def test_the_wheel_installs_and_its_command_makes_a_kernel(wheel: Path, tmp_path: Path) -> None:
    """The line of README.md that installs it, next to the packages of this environment, and the first command."""
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    target = tmp_path / "installed"
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(wheel)], check=True)
    run = f"import sys; sys.path.insert(0, {str(target)!r}); from greenfast.cli.main import main; sys.exit(main())"
    for words in (["init", "my_kernel"], ["list", "--json"]):
        done = subprocess.run([sys.executable, "-c", run, *words], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert "fp8_sdpa" in done.stdout, "the tasks are below the package"
    assert (tmp_path / "my_kernel/solution/kernel.cu").is_file()
    assert (target / "bin/greenfast").is_file()


def test_wheel_and_sdist_have_the_same_bits_again(tmp_path: Path) -> None:
    hashes = []
    for name in ("first", "second"):
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / name)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment)
        built = sorted((tmp_path / name).iterdir())
        assert [file.name for file in built] == [
            f"greenfast-{__version__}-py3-none-any.whl", f"greenfast-{__version__}.tar.gz"
        ]  # fmt: skip
        hashes.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in built])
    assert hashes[0] == hashes[1]
