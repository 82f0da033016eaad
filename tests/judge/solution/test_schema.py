"""solution.json and headers of single files: what is read, and that each mistake is named with its remedy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenfast.judge.solution.cuda_program import DeclaredFamily
from greenfast.judge.solution.files import collect_files
from greenfast.judge.solution.schema import find_solution
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Struct, TensorMap

LAUNCH = {"kernel": "twice", "grid": ["ceildiv(N, T)"], "block": ["T"], "args": ["x", "y", "int32(N)"]}
SOURCE = 'extern "C" __global__ void twice(const float* x, float* y, int n) {}\n'


def write(folder: Path, source: str | bytes = SOURCE, file: str = "k.cu", **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"name": "mine", "file": file, "constants": {"T": 64}, "launches": [LAUNCH], **changes}
    (folder / "solution.json").write_text(json.dumps(config))
    (folder / file).write_bytes(source.encode() if isinstance(source, str) else source)
    return folder


def launch(**changes: Any) -> list[dict[str, Any]]:
    return [{**LAUNCH, **changes}]


def test_a_folder_is_a_program(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        launches=[LAUNCH, {**LAUNCH, "kernel": "once", "shared": "4 * T", "early": True}],
        workspaces={"partial": {"bytes": "4 * N", "zeros": True}},
    )
    found = find_solution(folder)
    assert found.config.language == "cuda"
    program = DeclaredFamily(found).program({}, "", {"N": 100})
    first, second = program.steps
    assert (first.launch.grid, first.kernel.block, first.kernel.entry) == ((2, 1, 1), (64, 1, 1), "twice")
    assert first.launch.args == ("x", "y", np.int32(100))
    assert isinstance(first.launch.args[2], np.int32)
    assert first.kernel.source == f"#define T 64\n#line 1\n{SOURCE}"
    assert first.kernel.include_dirs == (folder,)
    assert (second.kernel.dynamic_smem_bytes, second.launch.early) == (256, True)
    assert (program.workspaces["partial"].nbytes, program.workspaces["partial"].zeros) == (400, True)


def test_structs_and_tensor_maps(tmp_path: Path) -> None:
    tile = {"buffer": "x", "dtype": "float16", "shape": ["N", 64], "strides": [128, 2], "box": [64, 64], "swizzle": 128}
    found = find_solution(write(tmp_path, launches=launch(args=[["x", "int64(N)"], tile, "float32(1 / sqrt(N))"])))
    struct, mapped, scale = DeclaredFamily(found).program({}, "", {"N": 4}).steps[0].launch.args
    assert struct == Struct(("x", np.int64(4)))
    assert mapped == TensorMap("x", "float16", (4, 64), (128, 2), (64, 64), 128)
    assert scale == np.float32(0.5)
    tile["strides"] = [128]  # as a driver takes them, without the innermost one
    found = find_solution(write(tmp_path, launches=launch(args=[tile])))
    with pytest.raises(
        UsageError, match=r"args\[0\]: tensor map over 'x': 2 extents, 1 strides and 2 extents of the box"
    ):
        DeclaredFamily(found).program({}, "", {"N": 4})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("k.cu", "/* greenfast: CONFIG */\n" + SOURCE),
        ("k.cu", "\n// greenfast: CONFIG\n" + SOURCE),
        ("k.ptx", "// greenfast: CONFIG\n//\n.version 8.0\n"),
        ("k.py", '"""Text."""\nraise SystemExit(0)\nGREENFAST = CONFIG\n'),
    ],
)
def test_a_single_file_carries_its_config(tmp_path: Path, name: str, text: str) -> None:
    config: dict[str, Any] = {"name": "mine", "launches": launch(grid=[1], block=[32])}
    if name == "k.py":
        config["language"] = "triton"
    lines = json.dumps(config, indent=1 if "// greenfast" not in text else None)
    (tmp_path / name).write_text(text.replace("CONFIG", lines))
    found = find_solution(tmp_path / name)
    assert found.config.file == name
    assert found.config.language == {".cu": "cuda", ".ptx": "ptx", ".py": "triton"}[Path(name).suffix]
    assert found.config.launches[0].kernel == "twice"


@pytest.mark.parametrize("name", ["k.cu", "k.ptx", "k.py", "solution.json"])
def test_a_byte_order_mark_is_read_over(tmp_path: Path, name: str) -> None:
    """As editors on Windows write it; no compiler sees it."""
    config: dict[str, Any] = {"name": "mine", "launches": launch(grid=[1], block=[32], args=[])}
    header = {"k.cu": "/* greenfast: CONFIG */\n", "k.ptx": "// greenfast: CONFIG\n", "k.py": "GREENFAST = CONFIG\n"}
    if name == "k.py":
        config["language"] = "triton"
    if name == "solution.json":
        config["file"] = "k.cu"
    (tmp_path / "k.cu").write_text(SOURCE, encoding="utf-8-sig")
    (tmp_path / name).write_text(header.get(name, "CONFIG").replace("CONFIG", json.dumps(config)), encoding="utf-8-sig")
    found = find_solution(tmp_path / name)
    assert found.config.name == "mine"
    if name != "k.py":
        assert not DeclaredFamily(found).program({}, "", {"N": 1}).steps[0].kernel.source.startswith("\ufeff")


def test_a_header_of_several_lines_of_comments(tmp_path: Path) -> None:
    body = json.dumps({"name": "mine", "launches": launch(grid=[1], block=[32])}, indent=2)
    header = "\n".join(f"// {line}" for line in f"greenfast: {body}".splitlines())
    (tmp_path / "k.ptx").write_text(f"{header}\n.version 8.0\n")
    assert find_solution(tmp_path / "k.ptx").config.name == "mine"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"extra": 1}, "unknown field `extra`; its keys are name, problem, author"),
        ({"name": "a b"}, r"$.name"),
        ({"name": "a\n"}, r"$.name"),
        ({"launches": launch(kernel="twice\n")}, r"$.launches[0].kernel"),
        ({"toggles": {"T": 2**70}}, "Expected `int` <= 9223372036854775807 - at `$.toggles[...]`"),
        ({"language": "rust"}, "Invalid enum value 'rust' - at `$.language`; allowed: cuda, ptx, cubin"),
        ({"launches": launch(blok=1)}, "`$.launches[0]`; its keys are kernel, grid, block"),
        ({"launches": []}, "launches: missing; name each kernel"),
        ({"launches": [{"kernel": "twice", "grid": [1]}]}, "launches[0].block: missing"),
        ({"launches": launch(grid=[])}, "launches[0].grid: missing"),
        ({"launches": launch(grid="N")}, "Expected `array`, got `str` - at `$.launches[0].grid`"),
        ({"file": "../k.cu"}, "file: ../k.cu is outside of the solution's folder"),
        ({"file": "/etc/passwd", "language": "cuda"}, "is outside of the solution's folder"),
        ({"file": "no.cu"}, "no.cu does not exist"),
        ({"file": "no\0.cu"}, "is no path"),
        ({"file": "a\nb.cu"}, "is no path that can be shown; rename the file"),
        ({"file": "k.txt"}, "language: missing, and k.txt does not tell; one of cuda, ptx"),
        ({"target": "sm_1"}, "target: unknown target 'sm_1'"),
        ({"language": "ptx", "constants": {"X": 1}}, "constants: X not used; ptx takes no macros"),
    ],
)
def test_a_mistake_in_the_config_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    write(tmp_path)
    config = json.loads((tmp_path / "solution.json").read_text())
    (tmp_path / "solution.json").write_text(json.dumps(config | changes))
    with pytest.raises(UsageError) as found:
        find_solution(tmp_path)
    assert str(found.value).startswith(f"{tmp_path / 'solution.json'}: ")
    assert said in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"launches": launch(block=[2048])}, "launches[0].block[0]: 2048; from 1 to 1024 is allowed"),
        ({"launches": launch(block=[64, 32])}, "launches[0].block: 2048 threads; a block has at most 1024"),
        ({"launches": launch(grid=["N - N"])}, "launches[0].grid[0]: 0; from 1 to 2147483647"),
        ({"launches": launch(shared=2**40)}, "launches[0].shared: 1099511627776 bytes"),
        ({"launches": launch(args=["int32(N ** 8)"])}, "launches[0].args[0]: int32(N ** 8) is 10000000000000000"),
        ({"launches": launch(args=["float16(N * 1000)"])}, "float16(N * 1000) is 100000: out of range for float16"),
        ({"launches": launch(args=["int33(N)"])}, "launches[0].args[0]: unknown type 'int33'; allowed: bool, float16"),
        ({"launches": launch(args=["x y"])}, "neither a buffer's name nor a typed scalar such as int32(R)"),
        ({"launches": launch(args=["float32(x)"])}, "x is not known; known are N, T"),
        ({"constants": {"T": "2**(2**62)"}}, "constants.T: '2**(2**62)': the exponent"),
        ({"constants": {"T": 1, "N": 1}}, "constants.N: a dimension of the shape has this name"),
        ({"workspaces": {"w": {"bytes": "2**40"}}}, "workspaces.w.bytes: 1099511627776; from 1 byte to 128 GiB"),
    ],
)
def test_a_mistake_for_a_shape_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    found = find_solution(write(tmp_path, **changes))
    with pytest.raises(UsageError) as raised:
        DeclaredFamily(found).program({}, "", {"N": 100})
    assert str(raised.value).startswith(f"{tmp_path / 'solution.json'}: ")
    assert said in str(raised.value)


@pytest.mark.parametrize("dims", [{"N": 2**40}, {"N": 2**62}])
def test_huge_dimensions_are_one_line(tmp_path: Path, dims: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"launches\[0\]\.(grid|args)"):
        DeclaredFamily(find_solution(write(tmp_path))).program({}, "", dims)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("k.cu", SOURCE, "its first comment does not begin with `greenfast: `"),
        ("k.cu", "/* greenfast: {} */", "missing required field `name`; its keys are name"),
        ("k.cu", "/* greenfast: {,} */", "not JSON"),
        ("k.cu", b"/* greenfast: {} */ \xff", "byte 20 is not UTF-8"),
        ("k.py", "def f(:", "not Python, line 1"),
        ("k.py", "x = 1", "has no GREENFAST at the top level"),
        ("k.py", "GREENFAST = dict(name='x')", "line 1: GREENFAST is not a literal"),
        ("k.txt", "", "a solution is a folder with solution.json, or a .cu, .ptx or .py file"),
        ("solution.json", "[]", "Expected `object`, got `array`"),
    ],
)
def test_a_file_that_is_no_solution_is_named(tmp_path: Path, name: str, text: str | bytes, said: str) -> None:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UsageError) as found:
        find_solution(tmp_path / name)
    assert str(found.value).startswith(str(tmp_path / name))
    assert said in str(found.value)
    assert "\n" not in str(found.value)


def test_a_path_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "none.cu", tmp_path / "k\udcff.cu", Path("no\0.cu")):
        with pytest.raises(UsageError, match=r"cannot be read|a solution is a folder"):
            find_solution(path)


@pytest.mark.parametrize("target", ["sm_90a", " sm_90a\n", "9.0a"])
def test_a_target_has_one_name_however_it_is_written(tmp_path: Path, target: str) -> None:
    assert find_solution(write(tmp_path, target=target)).config.target == "sm_90a"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "solution.json")
    with pytest.raises(UsageError, match=r"solution\.json: cannot be read \(no regular file\)"):
        find_solution(tmp_path)


def test_the_sources_that_are_kept_are_all_that_it_includes(tmp_path: Path) -> None:
    """In brackets too, which resolve in the folder as well: two solutions of one digest are one."""
    folder = write(tmp_path, '#include "a.cuh"\n#include <b.cuh>\n' + SOURCE)
    (folder / "a.cuh").write_text("#include <c.cuh>\n")
    for name in ("b.cuh", "c.cuh", "other.cuh"):
        (folder / name).write_text("// nothing\n")
    assert list(collect_files(find_solution(folder))) == ["a.cuh", "b.cuh", "c.cuh", "k.cu", "solution.json"]
