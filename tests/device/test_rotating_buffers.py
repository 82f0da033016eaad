"""A program in rotation: where its buffers lie, what is queued around each launch, and that every launch is checked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from greenfast.device.gpu import GUARD_BYTES, PAGE_BYTES, POISON, Gpu
from greenfast.device.helper_kernels import Instruments
from greenfast.device.rotating_buffers import (
    NUM_BUFFER_SETS,
    SHIFTS,
    WRONG_BITS,
    WRONG_FAR,
    WRONG_MEMORY,
    WRONG_VARIABLES,
    Layout,
    Rotation,
)
from greenfast.device.session import Executable, KernelImage
from greenfast.spec.kernel import Launch, Workspace
from greenfast.spec.problem import Array, Case, OutputSpec
from tests.fakes import HostInstrument, HostLaunch, Stamp
from tests.host_driver import HostDriver

PAGE = 1 << 15
IMAGE = KernelImage(b"", "solution", (32, 1, 1), 0)


def at(pointer: int, count: int) -> Array:
    """Device memory as floats."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(pointer))


def works(pointers: Mapping[str, int], number: int) -> None:
    """y = x + x + a workspace of zeros; z += x, and s counts from 0 to 4."""
    x = at(pointers["x"], 4)
    at(pointers["w"], 4)[:] += x
    at(pointers["y"], 4)[:] = x + at(pointers["w"], 4)
    at(pointers["z"], 4)[:] += x
    at(pointers["s"], 1)[:] += 4


@dataclass
class OneKernelGpu:
    """A Gpu whose solution is a Python function of its buffers and the number of the launch at these addresses."""

    memory: HostDriver
    solution: Callable[[Mapping[str, int], int], None] = works
    us: float = 0.0
    seen: list[Mapping[str, int]] = field(default_factory=list)
    held: dict[str, bytes] = field(default_factory=dict)  # by variable of its module
    capability: tuple[int, int] = (8, 9)

    def __post_init__(self) -> None:
        properties = SimpleNamespace(multiprocessor_count=2, l2_cache_size=64, max_shared_memory_per_block_optin=1024)
        self.device = SimpleNamespace(properties=properties, device_id=0)
        self.stream = SimpleNamespace(sync=lambda: None, handle=0)
        self.fake = SimpleNamespace(memory=self.memory)

    def load(self, image: KernelImage) -> Any:
        return self if image is IMAGE else HostInstrument(self, image.entry)  # type: ignore[arg-type]

    def launch(self, plan: Launch, pointers: Mapping[str, int], number: int) -> None:
        self.memory.note("launch")
        self.seen.append(pointers)
        self.us += 7.0
        self.solution(pointers, number)

    def prepare(self, executable: Executable, pointers: Mapping[str, int]) -> list[Any]:
        return Gpu.prepare(self, executable, pointers)  # type: ignore[arg-type]

    def variables(self, executable: Executable) -> dict[str, bytes]:
        return dict(self.held)

    def mark(self) -> Stamp:
        self.memory.note("stamp")
        return Stamp(self.us)

    def clocks(self) -> dict[str, float]:
        return {"sm_mhz": 1000.0}


@pytest.fixture(params=["read-only inputs", "inputs like the rest"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OneKernelGpu:
    memory = HostDriver()
    memory.refuses_read_only = request.param != "read-only inputs"
    monkeypatch.setattr("greenfast.device.gpu.PAGE_BYTES", PAGE)  # a driver's pages would take long on the host
    monkeypatch.setattr("greenfast.device.virtual_memory.driver", memory)
    for module in ("gpu", "helper_kernels", "rotating_buffers"):
        monkeypatch.setattr(f"greenfast.device.{module}.driver", memory)
        monkeypatch.setattr(f"greenfast.device.{module}.BoundLaunch", HostLaunch)
    return OneKernelGpu(memory)


def case(start: float) -> Case:
    inputs = {"x": np.arange(start, start + 4, dtype=np.float32), "z": np.full(4, start, np.float32)}
    outputs = {
        "y": OutputSpec((2, 2), "float32"),
        "z": OutputSpec((4,), "float32"),
        "s": OutputSpec((1,), "float32", zeros=True),
    }
    return Case(inputs, outputs)


CASES = (case(0), case(10), case(20))
EXECUTABLE = Executable(((IMAGE, Launch((1, 1, 1), ("x", "y", "z", "s", "w"))),), {"w": Workspace(16, zeros=True)})


def rotation(gpu: OneKernelGpu) -> Rotation:
    return Rotation(gpu, Instruments(gpu), EXECUTABLE, CASES)  # type: ignore[arg-type]


def test_buffers_lie_apart_inputs_first() -> None:
    larger = Case({"x": np.zeros(1000, np.float32), "z": np.zeros(4, np.float32)}, CASES[0].outputs)
    layout = Layout.for_cases([*CASES, larger], EXECUTABLE.workspaces)
    assert list(layout.offsets) == ["x", "y", "z", "s", "w"]
    assert layout.sizes == {"x": 4000, "y": 16, "z": 16, "s": 4, "w": 16}
    ends = [layout.offsets[name] + layout.sizes[name] for name in layout.offsets]
    starts = [*list(layout.offsets.values())[1:], layout.end]
    assert all(after - end >= GUARD_BYTES for end, after in zip(ends, starts, strict=True))
    assert all(offset % 512 == 0 for offset in layout.offsets.values())
    assert layout.offsets["x"] >= GUARD_BYTES
    assert layout.offsets["x"] < layout.changed <= layout.offsets["y"]
    assert layout.offsets["s"] < layout.scratch <= layout.offsets["w"]
    (start, end), rest = layout.bands()
    assert start == layout.offsets["w"] + 16
    assert (start % 16, end) == (0, layout.end)
    assert (rest[0], rest[1] % PAGE_BYTES, rest[1] - rest[0] < PAGE_BYTES) == (layout.end, 0, True)


def test_an_image_is_what_a_launch_finds() -> None:
    layout = Layout.for_cases(CASES, EXECUTABLE.workspaces)
    image = layout.initial_bytes(CASES[1])
    assert layout.slice_buffer(image, "x", 16).view(np.float32).tolist() == [10, 11, 12, 13]
    assert layout.slice_buffer(image, "z", 16).view(np.float32).tolist() == [10] * 4  # in place
    assert layout.slice_buffer(image, "s", 4).tolist() == [0] * 4
    assert layout.slice_buffer(image, "y", 16).tolist() == [POISON] * 16
    held = {"x": 16, "z": 16, "s": 4}
    assert (np.delete(image, [layout.offsets[n] + i for n, size in held.items() for i in range(size)]) == POISON).all()


def test_what_the_first_launches_left_is_told(gpu: OneKernelGpu) -> None:
    found = rotation(gpu)
    assert found.wrong is None
    assert [list(outputs) for outputs in found.outputs] == [["y", "z", "s"]] * 3
    assert found.outputs[1]["y"].tolist() == [[20, 22], [24, 26]]
    assert found.outputs[1]["z"].tolist() == [20, 21, 22, 23]
    assert found.outputs[2]["s"].tolist() == [4]


def test_a_program_can_only_read_its_inputs(gpu: OneKernelGpu) -> None:
    """A write is an illegal address even if it is undone; what it changes in place and its outputs it can write."""
    may_write: dict[str, set[bool]] = {}

    def notes(pointers: Mapping[str, int], number: int) -> None:
        for name, pointer in pointers.items():
            may_write.setdefault(name, set()).add(gpu.memory.may_write(pointer, 4))
        if not gpu.memory.refuses_read_only:
            first = pointers["x"] - GUARD_BYTES
            assert not gpu.memory.may_write(first, 4)
            assert not any(gpu.memory.holds(first - far, 4) for far in (512 * SHIFTS, 1024 * SHIFTS))
        works(pointers, number)

    gpu.solution = notes
    found = rotation(gpu)
    assert found.time(5, 30, cold=False, seed=1)[2] is None
    assert may_write["x"] == {gpu.memory.refuses_read_only}
    assert all(may_write[name] == {True} for name in "yzsw")
    before = gpu.memory.allocations
    found.free()
    assert gpu.memory.allocations < before


def test_every_launch_draws_a_case_and_addresses_that_none_had(gpu: OneKernelGpu) -> None:
    """So that what a kernel knows of its addresses says nothing about what lies there."""
    cases = set()

    def notes(pointers: Mapping[str, int], number: int) -> None:
        cases.add(float(at(pointers["x"], 1)[0]))
        works(pointers, number)

    gpu.solution = notes
    found = rotation(gpu)
    samples, clocks, wrong = found.time(5, 60, cold=False, seed=1)
    assert samples == pytest.approx([7.0] * 60)
    assert (clocks, wrong) == ({"sm_mhz": 1000.0}, None)
    assert len(cases) == len(CASES)
    assert len(gpu.seen) == 3 + 65
    for name in EXECUTABLE.steps[0][1].args:
        addresses = [pointers[str(name)] for pointers in gpu.seen]
        assert len(set(addresses)) == len(addresses)
        assert {address % 16 for address in addresses} == {0}
    places = found._buffer_sets
    assert all(len(place.unused) < SHIFTS for place in places)
    assert sum(len(place.unused) for place in places) == NUM_BUFFER_SETS * SHIFTS - len(gpu.seen)


def test_addresses_come_back_when_all_were_drawn(gpu: OneKernelGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenfast.device.rotating_buffers.SHIFTS", 2)
    assert rotation(gpu).time(0, 20, cold=False, seed=1)[2] is None
    assert len({pointers["x"] for pointers in gpu.seen}) == NUM_BUFFER_SETS * 2


def test_an_address_inside_a_buffer_moves_with_it(gpu: OneKernelGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class Inside(HostLaunch):
        def __init__(self, kernel: Any, block: object, smem: int, plan: Launch, pointers: Mapping[str, int],
                     *rest: Any, **names: Any) -> None:  # fmt: skip
            moved = {name: address + 16 * (name == "w") for name, address in pointers.items()}
            super().__init__(kernel, block, smem, plan, moved, *rest, **names)

    monkeypatch.setattr("greenfast.device.gpu.BoundLaunch", Inside)
    space = {"w": Workspace(32, zeros=True)}
    found = Rotation(gpu, Instruments(gpu), Executable(EXECUTABLE.steps, space), CASES)  # type: ignore[arg-type]
    assert found.time(0, 20, cold=False, seed=1)[2] is None
    assert len({pointers["w"] - pointers["y"] for pointers in gpu.seen}) == 1


@pytest.mark.parametrize(
    ("cold", "between"),
    [(False, ["digest", "clobber_smem", "spin"]), (True, ["clobber_smem", f"fill {PAGE - 2 * GUARD_BYTES} bytes"])],
)
def test_what_is_queued_around_a_launch(gpu: OneKernelGpu, cold: bool, between: list[str]) -> None:
    """Between the two stamps there is the launch and nothing else."""
    found = rotation(gpu)
    gpu.memory.watched = True
    found.time(1, 1, cold=cold, seed=0)
    memory, inputs = found._buffer_sets[0].memory, found._buffer_sets[0].inputs
    wipe = [f"fill {memory.nbytes} bytes", *([f"fill {inputs.nbytes} bytes"] if inputs else [])]
    assert gpu.memory.refuses_read_only == (inputs is None)
    restore = ["copy"] * (2 if inputs else 1)  # the inputs, and what a launch may change
    digests = ["digest"] * 2  # of four ranges each
    one = [*restore, "fill 16 bytes", *between, "stamp", "launch", "stamp", *digests, *wipe]
    queued = gpu.memory.queued[1 : 2 * len(one) + 2 * len(digests) + 1]  # the first is that of the sums
    assert queued == [*one, *one, *digests, *digests]


def only_first(pointers: Mapping[str, int], number: int) -> None:
    if number == 0:
        works(pointers, number)


def poke(name: str, offset: int, byte: int = 0) -> Callable[[Mapping[str, int], int], None]:
    """Works, and from its second launch at an address on writes a byte."""

    def solution(pointers: Mapping[str, int], number: int) -> None:
        works(pointers, number)
        if number:
            ctypes.memset(pointers[name] + offset, byte, 1)

    return solution


@pytest.mark.parametrize(
    ("solution", "what"),
    [
        (only_first, WRONG_BITS),
        (poke("y", 0, 0x77), WRONG_BITS),
        (poke("y", 16), WRONG_BITS),  # right behind it
        (poke("s", 4), WRONG_BITS),
        (poke("z", 15, 0x77), WRONG_BITS),
        (poke("x", 0, 0x77), WRONG_MEMORY),
        (poke("x", 16), WRONG_MEMORY),
        (poke("x", -GUARD_BYTES), WRONG_MEMORY),
        (poke("y", -1), WRONG_MEMORY),
        (poke("w", 16), WRONG_MEMORY),
        (poke("w", 16 + GUARD_BYTES - 1), WRONG_MEMORY),
        (poke("w", 2 * GUARD_BYTES), WRONG_MEMORY),  # behind all buffers, in what is left of the page
    ],
)
def test_every_launch_is_checked(
    gpu: OneKernelGpu, solution: Callable[[Mapping[str, int], int], None], what: str
) -> None:
    gpu.solution = solution
    found = rotation(gpu)
    assert found.wrong is None
    wrong = found.time(0, 20, cold=True, seed=3)[2]
    assert wrong is not None
    assert str(wrong) == f"launch {wrong.number} of 20 {what}"
    assert wrong.number == 1
    assert wrong.case in range(3)


@pytest.mark.parametrize("end", ["first", "last"])
def test_memory_for_later_launches_is_checked(gpu: OneKernelGpu, end: str) -> None:
    found = rotation(gpu)
    memories = [place.memory for place in found._buffer_sets]

    def keeps(pointers: Mapping[str, int], number: int) -> None:
        works(pointers, number)
        (memory,) = [each for each in memories if 0 <= pointers["w"] - each.pointer < each.nbytes]
        ctypes.memset(memory.pointer + (0 if end == "first" else memory.nbytes - 1), 1, 1)

    gpu.solution = keeps
    wrong = found.time(0, 20, cold=True, seed=3)[2]
    assert str(wrong) == f"launch 1 of 20 {WRONG_MEMORY}"


def test_a_workspace_may_hold_anything_after_a_launch(gpu: OneKernelGpu) -> None:
    gpu.solution = poke("w", 5, 0x33)
    assert rotation(gpu).time(0, 20, cold=True, seed=3)[2] is None


def test_a_first_launch_that_writes_elsewhere_is_wrong(gpu: OneKernelGpu) -> None:
    def solution(pointers: Mapping[str, int], number: int) -> None:
        works(pointers, number)
        ctypes.memset(pointers["s"] + 4, 1, 1)

    gpu.solution = solution
    wrong = rotation(gpu).wrong
    assert wrong is not None
    assert (wrong.case, str(wrong)) == (0, f"launch 1 of 1 {WRONG_MEMORY}")


def test_a_variable_that_a_launch_changes_is_state(gpu: OneKernelGpu) -> None:
    """Of a library's kernel, of which only machine code is there, it cannot be told before."""
    gpu.held = {"solution: calls": bytes(4), "solution: table": b"pi"}
    found = rotation(gpu)
    assert found.time(3, 5, cold=False, seed=0)[2] is None

    def counts(pointers: Mapping[str, int], number: int) -> None:
        works(pointers, number)
        gpu.held["solution: calls"] = number.to_bytes(4, "little")

    gpu.solution = counts
    wrong = found.time(3, 5, cold=False, seed=0)[2]
    assert str(wrong) == f"launch 8 of 8 {WRONG_VARIABLES}"


def test_what_launches_are_checked_with_is_checked_too(gpu: OneKernelGpu) -> None:
    found = rotation(gpu)
    flushed = found._instruments.flushed.pointer
    for pointer in (*(m.pointer + 100 for m in found._before), flushed):
        reached = ctypes.c_ubyte.from_address(pointer)
        reached.value ^= 0x55
        wrong = found.time(0, 5, cold=False, seed=0)[2]
        assert wrong is not None
        reached.value ^= 0x55
        assert found.time(0, 5, cold=False, seed=0)[2] is None
    assert str(wrong) == f"launch 5 of 5 {WRONG_FAR}"


def test_no_result_of_an_earlier_launch_lies_anywhere(gpu: OneKernelGpu) -> None:
    """A kernel could look for it in the other places, or in what launches are compared with."""
    found = rotation(gpu)
    results = [outputs["y"].tobytes() for outputs in found.outputs]

    def looks(pointers: Mapping[str, int], number: int) -> None:
        for memory in found._allocated:
            held = ctypes.string_at(memory.pointer, memory.nbytes)
            assert not any(result in held for result in results)
        works(pointers, number)

    gpu.solution = looks
    assert found.time(0, 20, cold=False, seed=0)[2] is None


def test_its_memory_is_given_back(gpu: OneKernelGpu) -> None:
    instruments = Instruments(gpu)  # type: ignore[arg-type]
    before = gpu.memory.allocations
    found = Rotation(gpu, instruments, EXECUTABLE, CASES)  # type: ignore[arg-type]
    found.time(0, 100, cold=False, seed=0)
    found.free()
    assert gpu.memory.allocations == before


def test_equal_seeds_draw_the_same(gpu: OneKernelGpu) -> None:
    found = rotation(gpu)
    unused = [list(place.unused) for place in found._buffer_sets]
    drawn = []
    for seed in (1, 1, 2):
        gpu.seen.clear()
        for place, shifts in zip(found._buffer_sets, unused, strict=True):
            place.unused[:] = shifts
        found.time(0, 20, cold=False, seed=seed)
        drawn.append([pointers["x"] for pointers in gpu.seen])
    assert drawn[0] == drawn[1] != drawn[2]
