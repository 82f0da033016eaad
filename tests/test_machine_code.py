"""scripts/machine_code.py: a renamed kernel is equal to the listed one, and another constant is a difference.

Some of the kernels that tests/machine_code.txt lists are compared with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from greenfast.device.compiler import compiler_version
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.errors import CompileError, UsageError
from greenfast.spec.kernel import KernelSource
from scripts import machine_code

LIST = Path(__file__).with_name("machine_code.txt")
HEADER = """
struct Extents { static constexpr int kRows = 8; };
__device__ const float table[4] = {1, 2, 3, 4};
__device__ __noinline__ float scaled(float x) { return table[threadIdx.x & 3] * x; }
template <class Cfg> __device__ void scale(float* x) {
  __shared__ float tile[64];
  for (int row = 0; row < Extents::kRows; ++row) tile[threadIdx.x] += scaled(x[row * Cfg::kColumns + threadIdx.x]);
  x[threadIdx.x] = tile[threadIdx.x];
}
"""
RENAMED = {
    "kRows": "kTileRows",
    "Extents": "Tile",
    "table": "factors",
    "scaled": "apply_factor",
    "void scale(": "void run(",
}


def kernel(folder: Path, columns: int, header: str = "rows.cuh", entry: str = "scale_rows") -> KernelSource:
    source = f"""#include "{header}"
struct Cfg {{
  static constexpr int kColumns = {columns};
}};
extern "C" __global__ void __launch_bounds__(64) {entry}(float* x) {{ scale<Cfg>(x); }}
"""
    return KernelSource(entry, source, f"{entry}.cu", (folder,), (64, 1, 1))


@pytest.fixture
def two_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes two kernels all that there is, of the header's text."""

    def show(header: str = HEADER, name: str = "rows.cuh", entry: str = "scale_rows", second: int = 128) -> None:
        (tmp_path / name).write_text(header)

        def kernels() -> Iterator[machine_code.Entry]:
            for columns in (64, 64, second):
                source = kernel(tmp_path, columns, name, entry)
                yield source, machine_code.HOPPER, "label"

        monkeypatch.setattr(machine_code, "GROUPS", {"tiny": kernels})

    return show


def write(file: Path) -> None:
    wanted = machine_code.configurations(["tiny"])
    machine_code.write_list(file, wanted, machine_code.code_of_all(wanted))


def check(file: Path, sample: int | None = None) -> list[str]:
    return machine_code.check(file, sample=sample)


def test_other_names_make_the_same_code_and_another_constant_does_not(
    two_kernels: Callable[..., None], tmp_path: Path
) -> None:
    file = tmp_path / "list.txt"
    two_kernels()
    write(file)
    first, *lines = file.read_text().splitlines()
    assert first == f"# compiler: {compiler_version()}"
    assert [line.split(" # ")[1] for line in lines] == ["sm_90a label 64", "sm_90a label 128"]
    assert check(file) == []

    header = HEADER
    for old, new in RENAMED.items():
        assert old in header
        header = header.replace(old, new)
    source = header + "template <class Cfg> __device__ void scale(float* x) { run<Cfg>(x); }\n"
    two_kernels(source, "moved.cuh", "another_entry")
    assert check(file) == []
    two_kernels(HEADER.replace("kRows = 8", "kRows = 7"))
    assert [line.split(":")[0] for line in check(file)] == ["tiny/000", "tiny/001"]
    assert len(check(file, sample=1)) == 1
    two_kernels(second=256)
    assert [line.split(":")[0] for line in check(file)] == ["tiny/001"]
    two_kernels(second=64)  # the second kernel is now the first
    assert check(file) == [f"tiny/001: {lines[1].split(' ', 1)[1].split(' # ')[0]} -> no such kernel today"]
    file.write_text("\n".join([first, lines[0]]))
    two_kernels()
    (new,) = check(file)
    assert new.startswith("tiny/001: not in the list -> ")


def test_a_kernel_that_does_not_compile_is_a_difference(two_kernels: Callable[..., None], tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    two_kernels()
    write(file)
    two_kernels(HEADER.replace("kRows = 8", "kRows = rows"))
    assert all("does not compile" in line for line in check(file))
    with pytest.raises(CompileError, match="tiny/000 does not compile"):
        write(file)


def test_a_list_of_another_compiler_is_refused(two_kernels: Callable[..., None], tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    two_kernels()
    file.write_text("# compiler: NVRTC 1.0\n")
    with pytest.raises(UsageError, match=r"it was made by NVRTC 1\.0, and this is"):
        check(file)
    with pytest.raises(UsageError, match="--write makes it"):
        check(tmp_path / "none.txt")


def test_kernels_have_the_listed_machine_code() -> None:
    """Compare two kernels of the tasks; other sources draw other ones."""
    compiler, _ = machine_code.read_list(LIST)
    if compiler != compiler_version():
        pytest.skip(f"{LIST.name} is of {compiler}, and this is {compiler_version()}")
    folders = (KERNEL_DIR, LIST.parents[1] / "tasks")
    texts = b"".join(file.read_bytes() for folder in folders for file in sorted(folder.rglob("*.cuh")))
    seed = int.from_bytes(hashlib.sha256(texts).digest(), "big")
    changed = machine_code.check(LIST, ["tasks"], sample=2, seed=seed)
    if changed:
        renew = f"python -m scripts.machine_code --groups 3 --write tests/{LIST.name}"
        pytest.fail("\n".join([*changed, f"If a change of machine code is meant, run: {renew}"]), pytrace=False)
