"""What of a solution is judged: exactly what was read, hashed and kept, whatever becomes of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from greenfast.judge.gates.registry import GATES
from greenfast.judge.implementation import CANDIDATE, Implementation, build_solution_implementation
from greenfast.judge.pipeline import GateRun
from greenfast.judge.request import NullListener
from greenfast.judge.solution.files import collect_files
from greenfast.judge.solution.schema import find_solution
from greenfast.spec.arch import Target
from greenfast.spec.errors import SolutionError, UsageError
from greenfast.spec.kernel import Program
from tests.cheats.judging import task_of
from tests.fakes import request

KERNEL = """#include "factor.cuh"
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = FACTOR * x[i];
}
"""
LAUNCH = {"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}
#: Its factor is what a file next to it says.
FAMILY = """from pathlib import Path
import numpy as np
from greenfast.spec.kernel import KernelSource, Launch
HERE = Path(__file__).parent

def kernel(toggles, fmt, dims, *, instrumented=False):
    factor = (HERE / "weights" / "factor.bin").read_bytes()[0]
    return KernelSource("doubling", f"#define FACTOR {factor}.0f\\n" + SOURCE, "mine.cu", (HERE,), (256, 1, 1))

def launch(toggles, fmt, dims):
    return Launch((-(-dims["N"] // 256), 1, 1), ("x", "y", np.int32(dims["N"])))
"""
TARGET = Target("sm_90a")
TASK = task_of("doubling")


def cuda(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"name": "mine", "file": "kernel.cu", "launches": [LAUNCH], **changes}
    (folder / "solution.json").write_text(json.dumps(config))
    (folder / "kernel.cu").write_text(KERNEL)
    (folder / "factor.cuh").write_text("#define FACTOR 2.0f\n")
    return folder


def family(folder: Path, factor: int) -> Path:
    (folder / "weights").mkdir(parents=True)
    (folder / "solution.json").write_text('{"name": "mine", "language": "family", "file": "family.py"}')
    (folder / "family.py").write_text(FAMILY.replace("SOURCE", repr(KERNEL.split("\n", 1)[1])))
    (folder / "weights" / "factor.bin").write_bytes(bytes([factor]))
    return folder


def implementation(path: Path) -> Implementation:
    return build_solution_implementation(TASK, find_solution(path), TARGET)


def files(path: Path) -> dict[str, bytes]:
    return collect_files(find_solution(path))


def program(made: Implementation) -> Program:
    rendered = made.family.program(made.variant.values, "fp32", {"N": 5})  # type: ignore[attr-defined]
    assert isinstance(rendered, Program)
    return rendered


def sha256(made: Implementation) -> str:
    assert made.source is not None
    return made.source.sha256


def build(made: Implementation) -> GateRun:
    """The run of BUILD for one shape."""
    asked = request(Path(), task=TASK, shapes=("even",), fmt="fp32", arch=TARGET.name, whole=False)
    run = GateRun(asked, {CANDIDATE: made}, NullListener())
    run.run([GATES["BUILD"]])
    return run


def ptx(made: Implementation) -> str:
    run = build(made)
    assert run.status("BUILD") == "PASS"
    return run.sides[0].distinct[0][1].ptx


def test_a_header_and_a_source_that_change_after_they_were_read_are_judged_as_read(tmp_path: Path) -> None:
    made = implementation(cuda(tmp_path / "mine"))
    for name in ("kernel.cu", "factor.cuh"):
        (tmp_path / "mine" / name).write_text("#error changed\n")
    assert ptx(made) == ptx(implementation(cuda(tmp_path / "another")))
    assert made.files["factor.cuh"] == b"#define FACTOR 2.0f\n"
    assert program(made).steps[0].kernel.source == KERNEL


def test_the_config_that_is_kept_is_the_one_that_was_read(tmp_path: Path) -> None:
    found = find_solution(cuda(tmp_path / "mine"))
    then = found.path.read_bytes()
    cuda(tmp_path / "mine", name="another")
    assert collect_files(found)["solution.json"] == then


def test_code_that_changes_after_it_was_read_is_judged_as_read(tmp_path: Path) -> None:
    made = implementation(family(tmp_path / "mine", 2))
    (tmp_path / "mine" / "weights" / "factor.bin").write_bytes(b"\x03")
    assert program(made).steps[0].kernel.source.startswith("#define FACTOR 2.0f")
    assert made.files["weights/factor.bin"] == b"\x02"


def test_what_code_reads_next_to_it_is_in_its_digest(tmp_path: Path) -> None:
    """The digest of a record is over these."""
    two, three, again = (files(family(tmp_path / name, n)) for name, n in (("a", 2), ("b", 3), ("c", 2)))
    assert two == again
    assert {name for name in two if two[name] != three[name]} == {"weights/factor.bin"}


def test_code_reads_nothing_next_to_it_that_is_not_in_its_digest(tmp_path: Path) -> None:
    """A single file is judged alone; of a folder hidden files are left out."""
    alone = family(tmp_path / "a", 2) / "family.py"
    alone.write_text('GREENFAST = {"name": "mine", "language": "family"}\n' + alone.read_text())
    hidden = family(tmp_path / "b", 2)
    (hidden / "weights").rename(hidden / ".weights")
    (hidden / "family.py").write_text((hidden / "family.py").read_text().replace('"weights"', '".weights"'))
    for path in (alone, hidden):
        with pytest.raises(SolutionError, match=r"FileNotFoundError.*factor\.bin"):
            program(implementation(path))


def test_the_copy_goes_with_what_takes_part(tmp_path: Path) -> None:
    made = implementation(cuda(tmp_path / "mine"))
    assert made.solution is not None
    folder = made.solution.folder
    assert {path.name for path in folder.iterdir()} == {"solution.json", "kernel.cu", "factor.cuh"}
    del made
    assert not folder.exists()


def test_a_message_of_the_compiler_names_the_users_file(tmp_path: Path) -> None:
    made = implementation(cuda(tmp_path / "mine"))
    (tmp_path / "mine" / "factor.cuh").write_text("#error what\n")
    broken = implementation(tmp_path / "mine")
    (result,) = build(broken).gates
    assert f"\n{tmp_path / 'mine' / 'factor.cuh'}(1): " in result.reasons[0]
    assert "#error directive: what" in result.reasons[0]
    assert sha256(made) != sha256(broken)


@pytest.mark.parametrize(
    "text", ['#define H "other.cuh"\n#include H\n', '#include \\\n"other.cuh"\n', '# /**/ include "other.cuh"\n']
)
def test_every_way_to_include_a_file_is_followed(tmp_path: Path, text: str) -> None:
    folder = cuda(tmp_path / "mine")
    (folder / "factor.cuh").write_text(text)
    (folder / "other.cuh").write_text("#define FACTOR 2.0f\n")
    made = implementation(folder)
    assert made.files["other.cuh"] == b"#define FACTOR 2.0f\n"
    ptx(made)


def test_runs_and_caches_within_a_solutions_folder_are_none_of_it(tmp_path: Path) -> None:
    folder = family(tmp_path / "mine", 2)
    before = files(folder)
    for name in ("results/run/record.json", "__pycache__/family.pyc", ".git/index"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"x")
    assert collect_files(find_solution(folder), folder / "results") == before
    assert files(folder).keys() - before.keys() == {"results/run/record.json"}


def test_a_link_out_of_the_folder_gives_nothing_away(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = family(tmp_path / "mine", 2)
    (folder / "key").symlink_to(tmp_path / "secret")
    (folder / "again").symlink_to("weights/factor.bin")
    (folder / "circle").symlink_to("circle")
    found = files(folder)
    assert found["again"] == b"\x02"
    assert not {"key", "circle"} & set(found)


def test_a_file_that_cannot_be_named_is_refused(tmp_path: Path) -> None:
    folder = family(tmp_path / "mine", 2)
    (folder / "a\nb").write_text("")
    with pytest.raises(UsageError, match=r"solution\.json: 'a\\nb' in its folder is no name that can be shown") as e:
        collect_files(find_solution(folder))
    assert "\n" not in str(e.value)


def test_data_may_be_larger_than_a_source(tmp_path: Path) -> None:
    folder = family(tmp_path / "mine", 2)
    with (folder / "weights" / "large.bin").open("wb") as file:
        file.truncate(33 << 20)
    assert len(files(folder)["weights/large.bin"]) == 33 << 20


def test_a_folder_that_is_no_solutions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenfast.judge.solution.files._MAX_FILES", 3)
    folder = family(tmp_path / "mine", 2)
    collect_files(find_solution(folder))
    (folder / "one_more").write_text("")
    with pytest.raises(UsageError, match=r"solution\.json: more than 3 files or 256 MiB; keep a solution's folder to"):
        collect_files(find_solution(folder))
