"""No process that the judge starts imports modules of the current folder, or of ``PYTHON*`` variables."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from greenfast.device.python_process import empty_folder, module_path

#: Each leaves a file when it is imported; Python looks for the first ones itself.
MODULES = (
    *("sitecustomize", "usercustomize", "multiprocessing", "json", "pickle", "numpy", "msgspec", "torch", "threading"),
    *("signal", "ctypes", "select", "tempfile", "nvtx"),
)
LEAVES = "open({file!r}, 'a').write(__name__ + chr(10))\n"

STARTS_ALL = """
import os, sys
import numpy as np
from greenfast.device import compiler_process, nvrtc
from greenfast.device.worker import Worker
from greenfast.evolve.workers import ProcessPool
from greenfast.judge.solution.client import SolutionProcess
from pathlib import Path

if __name__ == "__main__":
    # What Python adds for ``python -m``, and what a caller's environment may hold.
    sys.path.insert(0, "")
    sys.path.insert(0, os.getcwd())
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX"):
        os.environ[name] = os.getcwd()
    os.environ["PYTHONWARNINGS"] = "ignore::json.Evil"
    os.environ["PYTHONBREAKPOINT"] = "json.loads"
    from greenfast.judge.emulator_session import EmulatorSession
    with Worker(timeout_s=60, make_session=EmulatorSession) as worker:
        print(worker.info().kind)
    source = "extern \\"C\\" __global__ void k() {}"
    print(compiler_process.run(nvrtc.Job(source, "k.cu", (b"--gpu-architecture=sm_90",))).status)
    pool = ProcessPool([dict])
    print(pool.start(0, len)())
    pool.close()
    for imports in (False, True):
        process = SolutionProcess("it", Path("."), imports=imports)
        print(bool(process.sandbox))
        process.close()
"""


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A solution's folder with modules that must not run."""
    folder = tmp_path / "solution"
    (folder / "greenfast").mkdir(parents=True)
    leaves = LEAVES.format(file=str(tmp_path / "imported"))
    for name in (*MODULES, "greenfast/__init__", "greenfast/device"):
        (folder / f"{name}.py").write_text(leaves)
    (folder / "evil.pth").write_text(f"import sys; {leaves}")
    return folder


def test_the_trap_works(trapped: Path) -> None:
    subprocess.run([sys.executable, "-c", "import json"], cwd=trapped, check=False, capture_output=True)
    assert "json" in (trapped.parent / "imported").read_text()


def test_no_process_imports_the_current_folder(trapped: Path) -> None:
    program = trapped.parent / "program" / "starts_all.py"
    program.parent.mkdir()
    program.write_text(STARTS_ALL)
    done = subprocess.run([sys.executable, program], cwd=trapped, capture_output=True, text=True, timeout=120)
    assert not (trapped.parent / "imported").exists(), (trapped.parent / "imported").read_text()
    assert (done.stdout.split(), done.returncode) == (
        ["emulated", "NVRTC_SUCCESS", "0", "True", "True"], 0,
    ), done.stderr  # fmt: skip


def test_the_command_as_a_module_takes_the_current_folder_last(trapped: Path) -> None:
    shutil.rmtree(trapped / "greenfast")  # that one is found before any line of it runs
    done = subprocess.run(
        [sys.executable, "-m", "greenfast", "list"], cwd=trapped, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = (trapped.parent / "imported").read_text().split() if (trapped.parent / "imported").exists() else []
    assert set(found) <= {"sitecustomize", "usercustomize"}  # Python's own, before the command begins


def test_a_folder_of_that_name_that_is_not_empty_or_not_its_own_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = Path(empty_folder())
    assert (folder.parent, empty_folder()) == (tmp_path, str(folder))
    folder.chmod(0o700)
    assert empty_folder() != str(folder)
    (folder / "json.py").touch()
    folder.chmod(0o500)
    assert empty_folder() != str(folder)
    (folder / "json.py").unlink()
    folder.rmdir()
    folder.symlink_to("/")
    assert Path(empty_folder()).parent == tmp_path


def test_the_current_folder_comes_last_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greenfast").mkdir()  # a folder of the package's name does not let it in
    (tmp_path / "greenfast" / "__init__.py").touch()
    (tmp_path.parent / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for entry in (str(tmp_path), "", ".", str(tmp_path.parent / "link")):
        monkeypatch.setattr(sys, "path", [entry, *sys.path])
        assert not [folder for folder in module_path() if Path(folder).resolve() == tmp_path.resolve()]
        assert Path(module_path(current_last=True)[-1]) == tmp_path.resolve()
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry).resolve() != tmp_path.resolve()])
    assert str(tmp_path) not in module_path(current_last=True)
