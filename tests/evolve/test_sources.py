"""Candidates as what the judge takes: toggles, a solution's constants, and edits of named regions."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenfast.evolve.manifest import Manifest
from greenfast.evolve.proposal import Candidate, Edit
from greenfast.evolve.sources import Sources
from greenfast.evolve.space import Space, read_space
from greenfast.evolve.stages import hash_programs
from greenfast.judge.implementation import Implementation, build_side
from greenfast.judge.request import Request
from greenfast.judge.task import load
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.kernel import render_program
from tests.cheats.kernels import KERNELS
from tests.fakes import request

SOLUTION = """/* greenfast: {
  "name": "mine", "problem": "doubling", "constants": {"THREADS": 128, "HALF": "THREADS // 2"}, "launches": [
    {"kernel": "twice", "grid": ["ceildiv(N, THREADS)"], "block": ["THREADS"], "args": ["x", "y", "int32(N)"]}
  ]}
*/
extern "C" __global__ void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * THREADS + threadIdx.x;
  // begin: body
  if (i < n) y[i] = 2.0f * x[i];
  // end: body
}
"""
SHIPPED = sorted((Path(__file__).parents[2] / "tasks").glob("*/space*.json"))
REGIONS = {"body": {"file": "mine.cu", "begin": "// begin: body", "end": "// end: body"}, "all": {"file": "mine.cu"}}


def space_of(**fields: Any) -> Space:
    return msgspec.convert({"name": "s", **fields}, Space)


@pytest.fixture
def asked(tmp_path: Path) -> Request:
    return request(tmp_path, device=None)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.cu").write_text(SOLUTION)
    return tmp_path / "mine"


def of_solution(asked: Request, mine: Path, **fields: Any) -> Sources:
    return Sources(space_of(solution="mine.cu", **fields), mine, asked, mine.parent / "work")


def read_source(implementation: Implementation) -> str:
    return render_program(implementation.family, {}, "fp32", {"N": 100}).steps[0].kernel.source


def test_constants_of_a_solution(asked: Request, mine: Path) -> None:
    sources = of_solution(asked, mine, parameters={"THREADS": {"values": [64, 128]}})
    implementation = sources.implementation(Candidate(parameters={"THREADS": 64}))
    assert implementation.solution is not None
    found = implementation.solution
    assert found.config.constants == {"THREADS": 64, "HALF": "THREADS // 2"}  # in their order: one uses the other
    (step,) = render_program(implementation.family, {}, "fp32", {"N": 100}).steps
    assert (step.kernel.block, step.launch.grid) == ((64, 1, 1), (2, 1, 1))
    assert (mine / "mine.cu").read_text() == SOLUTION  # the user's own is as it was


def test_candidates_are_of_the_solution_that_the_search_began_with(asked: Request, mine: Path) -> None:
    """Its digest stands in the search's folder; a file that is saved meanwhile is another solution."""
    sources = of_solution(asked, mine, regions=REGIONS, parameters={"THREADS": {"values": [64, 128]}})
    before = sources.digest()
    (mine / "mine.cu").write_text(SOLUTION.replace("2.0f", "3.0f"))
    assert sources.digest() == before
    assert "2.0f" in sources.texts()["body"].text
    implementation = sources.implementation(Candidate(parameters={"THREADS": 64}))
    assert "2.0f" in read_source(implementation)


def test_an_edit_replaces_its_region_alone(asked: Request, mine: Path) -> None:
    sources = of_solution(asked, mine, regions=REGIONS)
    assert sources.texts()["body"].text == "  if (i < n) y[i] = 2.0f * x[i];\n"
    implementation = sources.implementation(
        Candidate(parameters={}, edits=(Edit("body", "  if (i < n) y[i] = x[i] + x[i];"),))
    )
    source = read_source(implementation)
    assert "x[i] + x[i];\n  // end: body" in source
    assert "2.0f" not in source
    whole = sources.implementation(Candidate(parameters={}, edits=(Edit("all", SOLUTION.replace("2.0f", "3.0f")),)))
    assert "3.0f" in read_source(whole)


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        (
            Candidate(parameters={}, edits=(Edit("nobody", ""),)),
            "unknown region of space s 'nobody'; allowed: all, body",
        ),
        (Candidate(parameters={}, edits=(Edit("body", ""), Edit("body", ""))), "region body is edited twice"),
        (Candidate(parameters={"THREADS": 1}), "unknown parameter"),
        (Candidate(parameters={}, edits=(Edit("all", "no kernel"),)), "its first comment does not begin with"),
    ],
)
def test_a_candidate_outside_of_the_space(asked: Request, mine: Path, candidate: Candidate, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        of_solution(asked, mine, regions=REGIONS).implementation(candidate)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"parameters": {"SPEED": {"values": [1]}}},
            "no constant of the solution is called 'SPEED'; allowed: HALF, THREADS",
        ),
        ({"regions": {"r": {"file": "../x.cu"}}}, "is outside of"),
        ({"regions": {"r": {"file": "none.cu"}}}, "cannot be read"),
        (
            {"regions": {"r": {"file": "mine.cu", "begin": "nowhere", "end": "}"}}},
            "0 lines of mine.cu contain 'nowhere'",
        ),
        ({"regions": {"r": {"file": "mine.cu", "begin": "// end", "end": "// begin"}}}, "after its begin"),
        ({"family": "os.path"}, "excludes"),
    ],
)
def test_a_space_that_does_not_fit_its_solution(asked: Request, mine: Path, fields: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        of_solution(asked, mine, **fields).texts()


def test_a_language_that_is_not_installed_is_named_once(
    asked: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its candidates would end with it, and the search with no kernel and no reason."""
    monkeypatch.setattr("greenfast.spec.extras._installed", lambda module: module != "triton")
    folder = Path(__file__).parents[2] / "examples" / "solutions"
    space = space_of(solution="triton_matmul.py", parameters={"BLOCK_M": {"values": [64]}})
    with pytest.raises(MachineError, match=r"triton_matmul.py, a solution in triton, needs greenfast\[triton\]: pip"):
        Sources(space, folder, asked, tmp_path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_spaces_that_ship_make_kernels_of_their_tasks(path: Path, tmp_path: Path) -> None:
    space, task = read_space(path), load(path.parent.name)
    shape = next(s for s in task.config.shapes if all(s.dims.get(n, 0) in v for n, v in space.only.items()))
    asked = request(tmp_path, task=task, shapes=(shape.name,), fmt=task.config.defaults.format, device=None)
    sources = Sources(space, path.parent, asked, tmp_path)
    sources.texts()
    for point in itertools.islice(space.listed(), 60):
        implementation = sources.implementation(Candidate(parameters=point))
        assert render_program(implementation.family, implementation.variant.values, asked.format, shape.dims).steps


def test_each_setting_of_the_serving_space_is_a_rung(tmp_path: Path) -> None:
    task = load("serving_attention")
    space = read_space(task.folder / "space.json")
    asked = request(tmp_path, task=task, shapes=("b2_q1_s130_h4_hk1_d64",), fmt="e4m3", device=None)
    sources = Sources(space, task.folder, asked, tmp_path)
    rungs = [sources.implementation(Candidate(parameters=point)).rung for point in space.listed()]
    assert [rung.name for rung in rungs if rung] == ["narrow_rows", "few_rows", "wide_rows"]


@pytest.mark.parametrize(
    ("family", "parameters", "says"),
    [
        (
            "os.path",
            {},
            r"allowed are families below greenfast\.kernels, such as greenfast\.kernels\.attention\.tuning_space",
        ),
        ("greenfast.kernels.none", {}, "family 'greenfast.kernels.none': allowed are"),
        ("greenfast.kernels.attention.config", {}, "allowed are families"),
        ("greenfast.kernels.attention.tuning_space", {"BLOCK": [1]}, "no toggle of .*tuning_space is called 'BLOCK'"),
        (
            "greenfast.kernels.attention.tuning_space",
            {"BLOCK_N": [128]},
            "declare CONSUMERS too, with one value to fix it",
        ),
    ],
)
def test_a_space_that_does_not_fit_its_family(
    asked: Request, tmp_path: Path, family: str, parameters: dict[str, list[int]], says: str
) -> None:
    given = {name: {"values": values} for name, values in parameters.items()}
    with pytest.raises(UsageError, match=says):
        Sources(space_of(family=family, parameters=given), tmp_path, asked, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '#include "/etc/passwd"',
        "#include </etc/passwd>",
        '#include "../secret.cuh"',
        '#include "a/../../secret.cuh"',
        '# /* a comment */ include /* over\n lines */ "/etc/passwd"',
        '#inc\\\nlude "/etc/passwd"',
        '#inc\\ \r\nlude "/etc/passwd"',
        '%:include "/etc/passwd"',
        '#define HIDDEN "/etc/passwd"\n#include HIDDEN',
        '#include_next "/etc/passwd"',
        '#embed "/etc/passwd"',
        'const char* a = "/*";\n#include "/etc/passwd"\nconst char* b = "*/";',
        '#\vinclude\f"/etc/passwd"',
        '#/* a comment */include "/etc/passwd"',
        "#include /* a comment */ </etc/passwd>",
        "#include",
        "#/*" * 60_000,
    ],
    ids=range(17),
)
def test_an_edit_reads_no_other_file(asked: Request, mine: Path, line: str) -> None:
    """A compiler's message quotes what it cannot read as C++, and a language model would be told it."""
    sources = of_solution(asked, mine, regions=REGIONS)
    with pytest.raises(UsageError, match=r"edit of all: includes .* allowed are headers by their names"):
        sources.implementation(Candidate(parameters={}, edits=(Edit("all", f"{SOLUTION}{line}\n"),)))


def test_an_edit_includes_headers_and_what_stood_there(asked: Request, mine: Path) -> None:
    old = SOLUTION + '#if 0\n#include "../own.cuh"\n#endif\n'
    (mine / "mine.cu").write_text(old)
    sources = of_solution(asked, mine, regions=REGIONS)
    more = '#include <cuda_fp16.h>\n#include "common/formats.cuh"  // why\n#include <cuda/std/type_traits>\n'
    implementation = sources.implementation(Candidate(parameters={}, edits=(Edit("all", old + more),)))
    assert more in read_source(implementation)


def test_an_edit_of_greenfasts_own_kernels(asked: Request, tmp_path: Path) -> None:
    """A rung with an edited header, in a copy of the headers."""
    region = {"file": "stage3b.cuh", "begin": "#pragma once", "end": "namespace greenfast {"}
    sources = Sources(space_of(regions={"top": region}), tmp_path, asked, tmp_path / "work")
    text = sources.texts()["top"].text
    plain = sources.implementation(Candidate(parameters={}))
    edited = sources.implementation(Candidate(parameters={}, edits=(Edit("top", f"{text}#define EDITED 1\n"),)))
    (step,) = render_program(edited.family, edited.variant.values, "e4m3", asked.shapes[0].dims).steps
    of_task, of_greenfast = step.kernel.include_dirs
    assert "#define EDITED 1" in (of_task / "stage3b.cuh").read_text()
    assert (of_greenfast / "ptx" / "mma.cuh").is_relative_to(tmp_path)
    assert (of_greenfast / "ptx" / "mma.cuh").is_file()
    assert plain.rung is not None
    assert edited.rung is None  # what a rung promises is no promise of an edit


def test_a_disk_that_is_full_while_an_edit_is_written(
    asked: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the machine, after which the run resumes, and none of the candidate."""
    region = {"file": "stage3b.cuh", "begin": "#pragma once", "end": "namespace greenfast {"}
    sources = Sources(space_of(regions={"top": region}), tmp_path, asked, tmp_path / "work")

    def copy(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for failing in ("shutil.copyfile", "shutil.os.makedirs"):
        with monkeypatch.context() as patched:
            patched.setattr(failing, copy)
            with pytest.raises(MachineError, match=r"kernels cannot be written \(.*No space left on device"):
                sources.implementation(Candidate(parameters={}, edits=(Edit("top", "#define EDITED 1"),)))


def test_scratch_buffers_and_swapped_arguments_are_other_kernels(asked: Request) -> None:
    """Equal machine code and launch facts; what differs is which buffer is which."""
    found = []
    for kind, name in (("honest", "doubles"), ("launch", "swapped_arguments")):
        path = KERNELS[kind][name].path
        task = shutil.copy(path, asked.out / path.name)
        sources = Sources(
            space_of(solution=path.name, regions={"all": {"file": path.name}}), Path(task).parent, asked, asked.out
        )
        implementation = sources.implementation(Candidate(parameters={}))
        shape = msgspec.structs.replace(asked.shapes[0], dims={"N": 1024})
        side = build_side("candidate", implementation.family, implementation.variant, "fp32", [shape], asked.target)
        found.append(hash_programs(side, {shape.name: shape.dims}))
    assert found[0] != found[1]


def test_a_manifest_tells_settings_apart_and_not_budgets() -> None:
    plain = Manifest(created="", task="t", space=space_of(regions={"r": {"file": "f"}}), space_folder="", proposer="p")
    assert plain.digest == msgspec.structs.replace(plain, created="now", command="x").digest
    assert plain.digest != msgspec.structs.replace(plain, seed=1).digest
