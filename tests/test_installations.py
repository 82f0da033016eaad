"""What works without extras, what a command says that lacks one, and what importing greenfast loads."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from greenfast.cli.options import VERBS
from greenfast.spec import extras
from greenfast.spec.errors import MachineError
from greenfast.spec.extras import EXTRAS, OLDEST

ROOT = Path(__file__).parents[1]
OPTIONAL = sorted({"transformers", *(module for modules in EXTRAS.values() for module in modules)})
#: Modules -> the packages that bring them, where the names differ.
PACKAGES = {"cutlass": "nvidia-cutlass-dsl", "markdown_it": "markdown-it-py", "ml_dtypes": "ml-dtypes"}
WITHOUT_EXTRAS = ("completion", "doctor", "init")
ARGUMENTS = {"emulate": ["kernel.cu", "--grid", "1", "--block", "32"], "report": ["run"], "list": []}

# A finder in front of all others: as if some modules were not installed.
LACKING = """
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {lacking!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Lacking())
"""
COMMAND = "from greenfast.cli.main import main\nsys.exit(main(sys.argv[1:]))"
SDPA = """
import greenfast, torch
q = torch.randn(1, 2, 100, 64, dtype=torch.bfloat16, requires_grad=True)
k, v = (torch.randn(1, 1, 130, 64, dtype=torch.bfloat16) for _ in range(2))
for precision in ("fp8", "int8"):
    out, lse = greenfast.sdpa(q, k, v, is_causal=True, enable_gqa=True, precision=precision, return_lse=True)
    assert out.shape == q.shape and lse.shape == (1, 2, 100) and out.isfinite().all()
greenfast.sdpa(q, k, v, enable_gqa=True).sum().backward()
assert q.grad.isfinite().all()
codes = greenfast.quantize(q.detach(), k, v)
assert greenfast.attention(codes).shape == q.shape
assert str(greenfast.explain(q, k, v, enable_gqa=True))
with greenfast.use():
    torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
"""


def run_lacking(modules: list[str], code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which modules cannot be imported."""
    text = LACKING.format(lacking=set(modules)) + code
    return subprocess.run([sys.executable, "-c", text, *args], cwd=ROOT, capture_output=True, text=True, check=False)


def requirements(table: str) -> set[str]:
    """The packages that a list of pyproject.toml names, without versions."""
    found = re.search(rf"^{table} = \[(.*?)\]\s*$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert found, table
    return set(re.findall(r'"([\w-]+(?:\[[\w,]+\])?)', found[1]))


def test_the_operator_works_without_extras_and_names_transformers() -> None:
    """In one process, which takes 2 s to import torch."""
    done = run_lacking(OPTIONAL, f"{SDPA}\nprint('works')\ngreenfast.register_with_transformers()")
    assert done.stdout == "works\n"
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1].endswith("pip install '.[transformers]' in a clone of greenfast")


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {*WITHOUT_EXTRAS}))
def test_a_command_names_its_extra(verb: str) -> None:
    done = run_lacking(OPTIONAL, COMMAND, verb, *ARGUMENTS.get(verb, ["fp8_sdpa"]))
    extra = "emulator" if verb in ("emulate", "run") else "judge"
    needs = f"greenfast: greenfast {verb} needs greenfast[{extra}]: pip install '.[{extra}]' in a clone of greenfast"
    assert done.stderr == f"{needs} (no module {', '.join(EXTRAS[extra])})\n"
    assert (done.returncode, done.stdout) == (3, "")


def test_one_missing_module_is_named_alone() -> None:
    done = run_lacking(["scipy"], COMMAND, "judge", "fp8_sdpa")
    assert done.returncode == 3
    assert done.stderr == (
        "greenfast: greenfast judge needs greenfast[judge]: pip install '.[judge]' in a clone of greenfast "
        "(no module scipy)\n"
    )


def test_commands_that_need_no_extra() -> None:
    library = run_lacking(OPTIONAL, COMMAND, "build", "--library", "--arch", "sm_80", "--head-dims", "64")
    assert library.returncode == 2
    assert "nothing can be compiled for sm_80" in library.stderr, "the operator's own answer"
    doctor = run_lacking(OPTIONAL, COMMAND, "doctor")
    assert (doctor.returncode, doctor.stderr) == (0, ""), "attention works without extras, so nothing is at fault"
    assert "MISSING" not in doctor.stdout
    assert "attention works here" in doctor.stdout
    extra = re.findall(r"^(.*?) +EXTRA +(.*)$", doctor.stdout, re.MULTILINE)
    assert [what for what, _ in extra] == ["extra judge"], "one row for the extra that is missing"
    assert extra[0][1].startswith("cannot be imported: "), "the packages are there, and this process refuses them"
    assert "pip install '.[judge]' in a clone of greenfast" in doctor.stdout
    assert re.search(r"^compile check +OK", doctor.stdout, re.MULTILINE)
    assert run_lacking(OPTIONAL, COMMAND, "--help").returncode == 0


def test_the_emulator_needs_its_own_extra_only(tmp_path: Path) -> None:
    kernel = tmp_path / "twice.cu"
    kernel.write_text('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }')
    others = sorted(set(OPTIONAL) - {*EXTRAS["emulator"]})
    arguments = ("--grid", "1", "--block", "32", "--arg", "inout:x=f32[32]:ones")
    done = run_lacking(others, COMMAND, "emulate", str(kernel), *arguments)
    assert done.returncode == 0, done.stderr


def test_extras_are_those_of_pyproject() -> None:
    packages = {name: {PACKAGES.get(m, m) for m in modules} for name, modules in EXTRAS.items()}
    assert requirements("emulator") == packages["emulator"]
    own = {"greenfast[emulator]", "nvidia-cuda-nvdisasm"}
    assert requirements("judge") - own == packages["judge"] - packages["emulator"]
    assert requirements("judge") >= own
    assert requirements("triton") == packages["triton"]
    assert requirements("cute") == packages["cute"]
    assert requirements("evolve") - {"greenfast[judge]"} == packages["evolve"]
    assert requirements("all") == {"greenfast[evolve,judge,transformers]"}
    assert requirements("compiled") == {"greenfast[emulator]", "llvmlite"}
    assert "greenfast[all,compiled,docs]" in requirements("dev")
    found = re.search(r'"triton>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert found
    assert OLDEST["triton"] == (int(found[1]), int(found[2]))
    assert not requirements("dependencies") & {*packages["judge"], "nvidia-cuda-nvdisasm"}


def test_an_old_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_installed", lambda module: True)
    for release, oldest in (("3.4.1", "3.5"), ("2.10.0+cu130", "3.5")):
        monkeypatch.setattr(importlib.metadata, "version", lambda module, release=release: release)
        with pytest.raises(MachineError, match=rf"triton {re.escape(release)} is too old, {oldest} is needed"):
            extras.require("a kernel", "triton")
    monkeypatch.setattr(importlib.metadata, "version", lambda module: "3.10.0")
    extras.require("a kernel", "triton")


def test_the_lock_has_all_that_extras_bring() -> None:
    locked = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    for table in ("dependencies", "emulator", "compiled", "judge", "evolve", "transformers", "docs", "dev"):
        assert {name for name in requirements(table) if "[" not in name} <= locked


def loaded_by(*codes: str) -> list[set[str]]:
    """Return, for each code that a process runs after ``import torch``, the modules loaded since then."""
    show = "print(*sorted(set(sys.modules) - before))"
    text = "\n".join(("import sys, torch; before = set(sys.modules)", *(f"{code}\n{show}" for code in codes)))
    lines = subprocess.check_output([sys.executable, "-c", text], cwd=ROOT, text=True).splitlines()
    return [set(line.split()) for line in lines]


def test_the_import_loads_nothing_else_and_the_operator_no_extra() -> None:
    """cuda.core is loaded for CUDA tensors only."""
    imported, loaded = loaded_by("import greenfast", "q = torch.ones(1, 1, 16, 64).half(); greenfast.sdpa(q, q, q)")
    assert imported == {"greenfast"}
    assert "greenfast.ops.sdpa" in loaded
    heavy = {*OPTIONAL, "cuda.core", "greenfast.ops.cuda"}
    assert {name for name in loaded if name in heavy or name.split(".")[0] in heavy} == set()


@pytest.mark.slow  # a busy machine may need more
@pytest.mark.parametrize(("what", "most"), [("import greenfast", 5), ("from greenfast import sdpa", 50)])
def test_import_costs_less_than_50_ms_beyond_torch(what: str, most: float, tmp_path: Path) -> None:
    """Milliseconds of this process alone, with what Python compiled in the first run."""
    code = f"import time, torch; t = time.process_time(); {what}; print((time.process_time() - t) * 1e3)"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", code]
    times = [float(subprocess.check_output(command, cwd=ROOT, text=True, env=environment)) for _ in range(7)]
    assert min(times[1:]) < most, times
