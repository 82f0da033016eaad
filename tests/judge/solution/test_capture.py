"""What a captured function allocates: placed among its steps, and overwritten there by the memory check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from greenfast.device.compiler import compile_kernel
from greenfast.device.session import Executable, KernelImage
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.judge.implementation import build_side
from greenfast.judge.solution import capture
from greenfast.judge.solution.messages import decode_program, encode_program
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Allocation, KernelSource, Launch, Packed, Program, Step, Workspace
from greenfast.spec.problem import Case, OutputSpec
from tests.cheats.cheats import doubling
from tests.fakes import Call, FakeDevice, Script, install, request, right

#: Nodes of a graph, and how many steps each is: the second one is only an event.
ORDER = {11: 1, 12: 0, 13: 2, 14: 1}


def place(monkeypatch: pytest.MonkeyPatch, *allocated: tuple[int, int, set[int] | None]) -> list[Allocation]:
    """The allocations of a graph with the nodes of ORDER and memory at 1000 (named) and 2000 (memory 0)."""
    monkeypatch.setattr(capture, "_ordered", lambda graph: list(ORDER))
    monkeypatch.setattr(capture, "_node_steps", lambda node, memory, code: [None] * ORDER[node])
    tensor = SimpleNamespace(data_ptr=lambda: 1000, nbytes=64)
    memory = capture._Memory(cast(Any, {"named": tensor}), found={2000: ("memory 0", 4096)})
    each = [capture._Allocated(at, size, None if nodes is None else frozenset(nodes)) for at, size, nodes in allocated]
    return list(capture._allocations(cast(Any, None), each, memory, cast(Any, None)))


def test_allocations_come_before_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(monkeypatch, (2000, 512, set()), (2512, 512, {11, 12}), (1000, 64, {11, 12, 13})) == [
        Allocation(0, "memory 0", 0, 512),
        Allocation(1, "memory 0", 512, 512),
        Allocation(3, "named", 0, 64),
    ]


def test_what_cannot_be_placed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its poison could overwrite what a node wrote."""
    unknown, gap, after_all, elsewhere = (2000, 8, {99}), (2000, 8, {11, 13}), (2000, 8, set(ORDER)), (7, 8, {11})
    assert place(monkeypatch, unknown, gap, after_all, elsewhere, (2000, 8, None)) == []


def test_what_freed_tensors_left_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_download", lambda address, nbytes: bytes([address % 256] * nbytes))
    blocks = [
        {"address": 512, "size": 4, "state": "inactive"},
        {"address": 517, "size": 2, "state": "active_allocated"},
        {"address": 519, "size": 1, "state": "active_awaiting_free"},
    ]
    assert capture._read_segment({"address": 512, "total_size": 8, "blocks": blocks}) == b"\xff" * 5 + b"\5\5\7"


def test_allocations_and_the_functions_time_travel_as_data() -> None:
    kernel = KernelSource("k", "", "k.cubin", (), (1, 1, 1), language="cubin")
    program = Program(
        (Step(kernel, Launch((1, 1, 1), ())),), {"memory 0": Workspace(64)}, (Allocation(0, "memory 0", 16, 32),), 12.5
    )
    decoded = decode_program(encode_program(program))
    assert (decoded.allocations, decoded.function_us) == (program.allocations, 12.5)


@pytest.mark.parametrize("reuses", [False, True])
def test_the_memory_check_overwrites_what_is_allocated(
    reuses: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second launch leaves the output as the first one left it in memory that was freed and taken again."""
    asked = request(tmp_path, task=doubling(), shapes=("tail",), fmt="fp32")

    def behave(call: Call) -> None:
        call.kept["launches"] = call.kept.get("launches", 0) + 1
        if call.kept["launches"] % 2 == 1 or not reuses:
            right(call)

    device = install(monkeypatch, FakeDevice(asked, {"good": Script(behave=behave)}))
    variant = asked.task.config.variant("good")
    side = build_side("candidate", asked.task.family, variant, "fp32", asked.shapes, asked.target)
    one = side.executable("tail")
    case = device.case(tuple(asked.shapes[0].dims.items()), 0)[0]
    twice = Executable((*one.steps, *one.steps), one.workspaces)
    worker = device.make_worker()
    assert worker.check_memory(twice, case).violations == []
    result = worker.check_memory(replace(twice, allocations=(Allocation(1, "y", 0, 1 << 20),)), case)
    assert bool(result.violations) == reuses
    ignored = (Allocation(1, "x", 0, 64), Allocation(1, "none", 0, 64), Allocation(1, "y", 1 << 20, 64))
    assert worker.check_memory(replace(twice, allocations=ignored), case).violations == []


@pytest.mark.parametrize(
    ("offset", "count", "shift"), [(0, 64, 0), (4, 300, 0), (20, 12, 16), (8, 4096, 3), (12, 0, 0), (0, 5, 1)]
)
def test_fills_and_copies_are_of_all_bytes(offset: int, count: int, shift: int) -> None:
    """At any alignment and size, 16 bytes at once in between."""
    source = np.random.default_rng(count).integers(1, 255, 8192, np.uint8)
    case = Case({"x": source}, {name: OutputSpec((8192,), "uint8", zeros=True) for name in ("y", "z")})

    def at(name: str, more: int) -> Packed:
        return Packed(bytes(8), ((0, name, more),))

    value, size = capture.uint(0xA1B2C3D4, 4), capture.uint(4, 4)
    launches = [
        (capture._FILL, capture._plain(count, (at("y", offset), value, size))),
        (capture._COPY, capture._plain(count, (at("x", offset + shift), at("z", offset)))),
    ]
    target = Target("sm_90a")
    images = [(compile_kernel(kernel, target), launch) for kernel, launch in launches]
    steps = tuple((KernelImage(k.cubin, k.source.entry, k.source.block, 0, ptx=k.ptx), plan) for k, plan in images)
    outputs = EmulatorSession().run(Executable(steps), case, 1).outputs
    filled, copied = np.zeros((2, 8192), np.uint8)
    filled[offset : offset + count] = np.tile(np.frombuffer(b"\xd4\xc3\xb2\xa1", np.uint8), count // 4 + 1)[:count]
    copied[offset : offset + count] = source[offset + shift : offset + shift + count]
    assert np.array_equal(outputs["y"], filled)
    assert np.array_equal(outputs["z"], copied)
