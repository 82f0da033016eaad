"""Structs by value as kernel parameters, in every way that a launch may give them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from greenfast.emulator.grid import run_grid
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Argument, Launch, Struct
from tests.emulator.kernels import run

BEFORE = (
    "struct In { short a; float b[3]; }; "
    "struct S { char c; In in; double d; const int* p; unsigned char e; bool f; long long g; };"
)
BODY = (
    "y[0] = s.c; y[1] = s.in.a; y[2] = s.in.b[0] + 10 * s.in.b[2]; y[3] = s.d; y[4] = s.p[n]; y[5] = s.e; y[6] = s.f; "
    "y[7] = s.g;"
)
EXPECTED = [-5.0, 300.0, 31.5, 0.125, 13.0, 200.0, 1.0, -(2.0**40)]


class Inner(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int16), ("b", ctypes.c_float * 3)]


class Outer(ctypes.Structure):
    _fields_ = [
        ("c", ctypes.c_int8), ("inner", Inner), ("d", ctypes.c_double), ("p", ctypes.c_uint64), ("e", ctypes.c_uint8),
        ("f", ctypes.c_bool), ("g", ctypes.c_int64),
    ]  # fmt: skip


def launch(struct: Argument, before: str = BEFORE, body: str = BODY) -> list[float]:
    result = run(
        body,
        {"x": np.arange(10, 20, dtype=np.int32)},
        {"y": (8, "float64")},
        parameters="S s, int n, double* y, const int* x",
        args=(struct, np.int32(3), "y", "x"),
        threads=1,
        before=before,
    )
    return result.outputs["y"].tolist()  # type: ignore[no-any-return]


def test_by_its_fields() -> None:
    inner = Struct((np.int16(300), np.array([1.5, 2, 3], np.float32)))
    fields = (np.int8(-5), inner, np.float64(0.125), "x", np.uint8(200), np.bool_(True), np.int64(-(2**40)))
    assert launch(Struct(fields)) == EXPECTED


@pytest.mark.parametrize("form", ["ctypes", "bytes", "NumPy"])
def test_by_its_bytes(form: str) -> None:
    """The pointer in it is null, and nothing reads it."""
    supplied = Outer(-5, Inner(300, (1.5, 2, 3)), 0.125, 0, 200, True, -(2**40))
    dtype = np.dtype(
        [("c", "i1"), ("inner", [("a", "i2"), ("b", "f4", 3)]), ("d", "f8"), ("p", "u8"), ("e", "u1"), ("f", "?"),
         ("g", "i8")],
        align=True,
    )  # fmt: skip
    assert dtype.itemsize == ctypes.sizeof(Outer)
    forms: dict[str, Argument] = {
        "ctypes": supplied,
        "bytes": bytes(supplied),
        "NumPy": np.array([(-5, (300, (1.5, 2, 3)), 0.125, 0, 200, True, -(2**40))], dtype)[0],
    }
    result = launch(forms[form], body=BODY.replace("s.p[n]", "13 + (s.p != 0)"))
    assert result == EXPECTED


def test_a_struct_of_another_size_is_refused() -> None:
    with pytest.raises(UsageError, match="parameter k_param_0 has 56 bytes, its launch gives 24"):
        launch(bytes(24))
    with pytest.raises(UsageError, match="parameter k_param_0 has 56 bytes, its launch gives 4"):
        launch(np.int32(1))
    with pytest.raises(UsageError, match="'nothing' is not a buffer"):
        launch(Struct(("nothing",)))


def test_a_half_and_an_array_inside_a_struct_that_is_indexed() -> None:
    """An index that is not known when the kernel is compiled: the parameter's bytes are read through an address."""
    result = run(
        "for (int n = 0; n < 8; ++n) y[n] = s.v[(n * 3 + threadIdx.x) % 8] + __half2float(s.h);",
        {},
        {"y": (8, "float64")},
        parameters="S s, double* y",
        args=(Struct((np.float16(0.5), np.arange(8, dtype=np.int32))), "y"),
        threads=1,
        before="#include <cuda_fp16.h>\nstruct S { __half h; int v[8]; };",
    )
    assert result.outputs["y"].tolist() == [n * 3 % 8 + 0.5 for n in range(8)]


@pytest.mark.parametrize(
    ("structs", "message"),
    [
        ({"p": Struct((np.int64(1),))}, "the struct for input 'p' has 8 bytes, the input has 16 bytes"),
        ({"q": Struct((np.int64(1),))}, "structs name 'q'; allowed are the inputs: p"),
    ],
)
def test_a_struct_in_place_of_an_input_has_its_size(structs: dict[str, Struct], message: str) -> None:
    ptx = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p) { ret; }"
    inputs = {"p": np.zeros(16, np.uint8)}
    with pytest.raises(UsageError, match=message):
        run_grid(ptx, "k", (1, 1, 1), 0, Launch((1, 1, 1), ("p",)), inputs, {}, structs=structs)
