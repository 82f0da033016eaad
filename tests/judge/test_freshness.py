"""Kept records and real kernels: a clean-up of the sources leaves a record current, a change of what runs does not."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from greenfast import kernels
from greenfast.device.compiler import compile_kernel, compiler_version, kernel_hash
from greenfast.device.identity import code_hash, list_launches
from greenfast.judge.record_io import check_freshness, load_record_family, read_record
from greenfast.judge.record_schema import AnyRecord, BenchRecord, Build, Record, Side
from greenfast.kernels import KERNEL_DIR
from greenfast.kernels.attention import hopper
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Launch, render_program
from tasks.fp8_sdpa_stage_c_wmma.kernels import family as ladder
from tests.kernels.ladder_task import SMALL, toggles

EVIDENCE = Path(__file__).parents[2] / "evidence"
#: A record of each kernel family, and the shape whose kernels are compared.
KEPT = {"hopper": "h200/fp8_attention-int8-hopper", "ladder": "h100/fp8_sdpa-e4m3-stage3b"}


def of_today(record: AnyRecord, side: Side, build: Build) -> Build:
    """With the hashes of today's machine code, also where the kept record is stale."""
    name, then = next(iter(build.launches.items()))
    program = render_program(*load_record_family(record, side)[1:], record.format, then.dims)
    source, _ = list_launches(program, name.partition(" launch ")[0], then.dims)[name]
    compiled = compile_kernel(source, Target.parse(build.arch))
    return msgspec.structs.replace(build, code_hash=code_hash(compiled), kernel_hash=kernel_hash(source))


def kept(name: str) -> AnyRecord:
    """The record, with the kernels of one shape alone."""
    record = read_record(EVIDENCE / KEPT[name])

    def small(side: Side) -> Side:
        builds = [of_today(record, side, b) for b in side.builds if "b1_h8_s512_d64" in b.shapes]
        return msgspec.structs.replace(side, builds=builds)

    if isinstance(record, Record):
        return msgspec.structs.replace(record, baseline=small(record.baseline), candidate=small(record.candidate))
    assert isinstance(record, BenchRecord)
    return msgspec.structs.replace(record, side=small(record.side))


@pytest.fixture(params=list(KEPT))
def record(request: pytest.FixtureRequest) -> AnyRecord:
    found = kept(request.param)
    side = found.candidate if isinstance(found, Record) else found.side
    assert side.builds
    if side.builds[0].compiler != compiler_version():
        pytest.skip(f"{compiler_version()} is not the record's {side.builds[0].compiler}")
    return found


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of greenfast's headers and, in a folder of it, of the ladder's; the families read these."""
    copy = tmp_path / "kernels"
    shutil.copytree(KERNEL_DIR, copy)
    shutil.copytree(ladder.FOLDER, copy / "ladder")
    monkeypatch.setattr(ladder, "FOLDER", copy / "ladder")
    for module in (kernels, ladder):
        monkeypatch.setattr(module, "KERNEL_DIR", copy)
    return copy


def rewrite(folder: Path, change: Callable[[str], str]) -> int:
    """Change every header; returns in how many that made a difference."""
    changed = 0
    for path in folder.rglob("*.cuh"):
        before = path.read_text()
        path.write_text(after := change(before))
        changed += after != before
    return changed


@pytest.mark.parametrize("record", [pytest.param("hopper", marks=pytest.mark.slow), "ladder"], indirect=True)
def test_nothing_is_stale_after_a_clean_up(record: AnyRecord, headers: Path) -> None:
    """Structs renamed, headers moved, comments written anew, and two twins joined: all at once."""
    text = "\n".join(path.read_text() for path in headers.rglob("*.cuh"))
    structs = set(re.findall(r"^\s*(?:template.*> )?struct (?:alignas\(.*?\) )?(?!alignas)(\w+)", text, re.MULTILINE))
    rendered = ladder.kernel(toggles("stage2"), "e4m3", SMALL).source
    structs -= {"TensorMap", *re.findall(r"\w+", rendered)}  # the rendered sources name these
    assert len(structs) > 20
    renamed = re.compile(rf"\b({'|'.join(structs)})\b(?!\.cuh)")
    assert rewrite(headers, lambda t: renamed.sub(r"\1Renamed", t)) > 10
    assert rewrite(headers, lambda t: "// A new first line.\n\n" + re.sub(r"//.*", "// as it says", t)) > 10
    (headers / "ptx").rename(headers / "instructions")
    assert rewrite(headers, lambda t: t.replace('"ptx/', '"instructions/')) > 10
    twins = [headers / "instructions" / name for name in ("math.cuh", "store.cuh")]
    (headers / "special.cuh").write_text("\n".join(["#pragma once", *(path.read_text() for path in twins)]))
    for path in twins:
        path.unlink()
    joined = re.compile(r'"instructions/(math|store)\.cuh"')
    assert rewrite(headers, lambda t: joined.sub('"special.cuh"', t)) > 1
    assert str(check_freshness(record)) == "current"


@pytest.mark.parametrize(
    ("record", "old", "new"),
    [
        pytest.param("hopper", "ex2.approx.ftz.f32", "ex2.approx.f32", id="an instruction", marks=pytest.mark.slow),
        pytest.param("ladder", "1.4426950408889634f", "1.4416950408889634f", id="a constant"),
    ],
    indirect=["record"],
)
def test_a_change_of_the_machine_code_is_named(record: AnyRecord, headers: Path, old: str, new: str) -> None:
    assert rewrite(headers, lambda text: text.replace(old, new)) > 0
    answer = check_freshness(record)
    assert answer.status == "stale"
    assert re.fullmatch(
        r"the machine code of the (candidate )?kernel at .*b1_h8_s512_d64.* differs", answer.reasons[-1]
    )


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda launch: {"grid": (1, *launch.grid[1:])}, r"the grid \(\d+x\d+x1, now 1x\d+x1\)"),
        (lambda launch: {"args": (*launch.args[:4], launch.args[3], *launch.args[5:])}, r"argument 4 \(buffer 4, now"),
        (lambda launch: {"args": tuple(map(doubled, launch.args))}, r"argument \d+ \(\w+ [\d.]+, now \w+ [\d.]+\)"),
        (lambda launch: {"early": True}, r"the early launch \(no, now yes\)"),
    ],
)
def test_a_change_of_the_launch_is_named(
    record: AnyRecord, monkeypatch: pytest.MonkeyPatch, change: Callable[[Launch], dict[str, Any]], differs: str
) -> None:
    for family in (hopper, ladder):
        plan = family.launch
        monkeypatch.setattr(
            family, "launch", lambda *given, plan=plan, **more: with_changes(plan(*given, **more), change)
        )
    answer = check_freshness(record)
    assert answer.status == "stale"
    said = [reason for reason in answer.reasons if reason.endswith("kernel at b1_h8_s512_d64 differs")]
    assert re.match(differs, said[0])


def test_a_shape_with_a_dimension_that_the_task_dropped_is_left_out() -> None:
    record = kept("hopper")
    assert isinstance(record, BenchRecord)
    (build,) = record.side.builds
    launches = {f"{n}_paged": dataclasses.replace(f, dims={**f.dims, "PAGED": 1}) for n, f in build.launches.items()}
    dropped = msgspec.structs.replace(build, code_hash="0" * 16, launches=launches)

    def answer(*builds: Build) -> str:
        return str(check_freshness(msgspec.structs.replace(record, side=replace_builds(builds))))

    def replace_builds(builds: tuple[Build, ...]) -> Side:
        return msgspec.structs.replace(record.side, builds=list(builds))

    if build.compiler == compiler_version():
        assert answer(dropped, build) == "current"
    assert answer(dropped) == "stale: the task no longer has any shape of the kernel"


def with_changes(launch: Launch, change: Callable[[Launch], dict[str, Any]]) -> Launch:
    return dataclasses.replace(launch, **change(launch))


def doubled(argument: Any) -> Any:
    """Of a number, twice that; everything else as it is."""
    return type(argument)(argument * 2) if isinstance(argument, np.number) else argument
