"""Kernels that are wrong, each in a different way, for the fake device."""

from __future__ import annotations

import ctypes

import numpy as np

from greenfast.device.gpu import GUARD_BYTES
from tests.fakes import Call, CrashError, HangError, right

#: More launches at one address than CORRECTNESS makes, and fewer than any timed run.
_LATER = 8


def _changed(call: Call, position: int, value: float) -> None:
    """The right result but for one element."""
    outputs = {name: array.copy() for name, array in call.right.items()}
    for array in outputs.values():
        array.flat[position] = value
    call.write_all(outputs)


def one_nan(call: Call) -> None:
    _changed(call, 5, np.nan)


def one_infinity(call: Call) -> None:
    _changed(call, -1, np.inf)


def one_wrong_element(call: Call) -> None:
    """Off by 0.02: well inside the gate on the error against full precision, far beyond what rounding explains."""
    (array,) = call.right.values()
    _changed(call, 100, float(array.flat[100]) + 0.02)


def all_zeros(call: Call) -> None:
    call.write_all({name: np.zeros_like(array) for name, array in call.right.items()})


def nothing_written(call: Call) -> None:
    pass


def last_row_unwritten(call: Call) -> None:
    for name, array in call.right.items():
        call.write(name, array[..., :-1, :].tobytes() if array.shape[0] == 1 else array[:-1].tobytes())


def changes_an_input(call: Call) -> None:
    right(call)
    call.write("k", b"\x01")


def writes_behind(call: Call) -> None:
    right(call)
    for name, array in call.right.items():
        call.write(name, b"\0", offset=array.nbytes + GUARD_BYTES - 1)


def writes_in_front(call: Call) -> None:
    right(call)
    call.write("q_scale", b"\0", offset=-1)


def races(call: Call) -> None:
    """The last bit of one element differs from launch to launch."""
    right(call)
    if call.serial % 2:
        for name, array in call.right.items():
            call.write(name, bytes([array.tobytes()[0] ^ 1]))


def right_for_one_seed(call: Call) -> None:
    """Whatever the input is, the result of the first seed: as from a cache that looks at shapes only."""
    call.write_all(call.other_seed())


def other_bits_later(call: Call) -> None:
    """Right as long as it is checked, and another last bit once it is timed."""
    right(call)
    if call.number >= _LATER:
        for name, array in call.right.items():
            call.write(name, bytes([array.tobytes()[0] ^ 1]))


def changes_an_input_later(call: Call) -> None:
    right(call)
    if call.number >= _LATER:
        call.write("v", b"\x01")


def crashes(call: Call) -> None:
    raise CrashError


def crashes_later(call: Call) -> None:
    right(call)
    if call.number >= _LATER:
        raise CrashError


def hangs(call: Call) -> None:
    raise HangError


def hangs_later(call: Call) -> None:
    right(call)
    if call.number >= _LATER:
        raise HangError


def writes_at_the_ends(call: Call) -> None:
    """Work on the first and on what was the last launch when each input had 341 launches, and on none in between."""
    if call.number in (0, 340):
        right(call)


def works_on_every_second_launch(call: Call) -> None:
    if call.number % 2 == 0:
        right(call)


def works_for_the_first_binding(call: Call) -> None:
    """Each address works once, the first one of a process for ever."""
    (name,) = call.right
    first = call.kept.setdefault("first", call.pointers[name])
    if call.number == 0 or call.pointers[name] == first:
        right(call)


def writes_the_previous_output(call: Call) -> None:
    """After the first launch at an address, the result of the launch before, whatever its input was."""
    call.write_all(call.right if call.number == 0 else call.kept["output"])
    call.kept["output"] = call.right


def keeps_results_by_address(call: Call) -> None:
    """Write the result of the launch with the nearest address, of those that computed one."""
    (name,) = call.right
    address = call.pointers[name]
    if call.number == 0:
        call.kept[address] = call.right
    call.write_all(call.kept[min(call.kept, key=lambda known: abs(known - address))])


def changes_an_input_in_between(call: Call) -> None:
    """Written on every second later launch, and restored on the one after."""
    right(call)
    if call.number >= 2:
        before = call.kept.setdefault("v", ctypes.string_at(call.pointers["v"], 1))
        call.write("v", before if call.number % 2 else bytes([before[0] ^ 1]))


def writes_behind_in_between(call: Call) -> None:
    """The guard band is written on every second later launch, and restored on the one after."""
    right(call)
    if call.number >= 2:
        for name, array in call.right.items():
            call.write(name, bytes([0xFF if call.number % 2 else 0]), offset=array.nbytes + 8)
