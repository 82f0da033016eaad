"""Kernel arguments as text: parsed values, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from greenfast.emulator.arguments import read_arguments
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import TensorMap, find_pointers, find_tensor_maps
from greenfast.spec.problem import OutputSpec


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("i32:-128", np.int32(-128)),
        ("int32:128", np.int32(128)),
        ("u64:0xffffffffffffffff", np.uint64(2**64 - 1)),
        ("i8:-128", np.int8(-128)),
        ("f32:0.125", np.float32(0.125)),
        ("f16:-2", np.float16(-2)),
        ("f64:1e-300", np.float64(1e-300)),
        ("f32:-inf", np.float32(-np.inf)),
    ],
)
def test_a_number_is_of_its_type(text: str, value: np.number) -> None:
    (result,) = read_arguments([text], 0).launch
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("f16[2,3]:zeros", np.zeros((2, 3), np.float16)),
        ("u8[4]:ones", np.ones(4, np.uint8)),
        ("int64[2,2]:arange", np.arange(4).reshape(2, 2)),
        ("f32[3]:0.5", np.full(3, 0.5, np.float32)),
        ("f32[3]:-inf", np.full(3, -np.inf, np.float32)),
        ("i32[3]:-7", np.full(3, -7, np.int32)),
    ],
)
def test_a_buffer_is_filled_as_it_says(spec: str, expected: np.ndarray) -> None:
    for role in ("in", "inout"):
        result = read_arguments([f"{role}:x={spec}"], 0)
        assert result.launch == ["x"]
        assert result.inputs["x"].dtype == expected.dtype
        assert np.array_equal(result.inputs["x"], expected)
        assert result.outputs == ({"x": OutputSpec(expected.shape, expected.dtype.name)} if role == "inout" else {})


def test_random_elements_are_of_the_seed_and_the_name_alone() -> None:
    def made(*texts: str, seed: int = 0) -> np.ndarray:
        return read_arguments(texts, seed).inputs["x"]

    x = made("in:x=f32[4000]:normal")
    assert np.array_equal(x, made("i32:1", "in:x=f32[4000]:normal"))
    assert not np.array_equal(x, made("in:x=f32[4000]:normal", seed=1))
    assert not np.array_equal(x, read_arguments(["in:y=f32[4000]:normal"], 0).inputs["y"])
    assert (abs(x.mean()) < 0.1, abs(x.std() - 1) < 0.1) == (True, True)
    uniform = made("in:x=f64[4000]:uniform")
    assert (uniform.min() >= 0, uniform.max() < 1, abs(uniform.mean() - 0.5) < 0.05) == (True, True, True)
    whole = made("in:x=i16[4000]:uniform:-2:2")
    assert np.unique(whole).tolist() == [-2, -1, 0, 1, 2]


def test_a_buffer_comes_from_a_file(tmp_path: Path) -> None:
    data = np.arange(6, dtype=">f4").reshape(2, 3).T  # of another byte order, columns first
    np.save(tmp_path / "x.npy", data)
    result = read_arguments([f"in:x={tmp_path / 'x.npy'}"], 0).inputs["x"]
    assert np.array_equal(result, data)
    assert result.dtype == np.float32
    assert result.flags.c_contiguous


def test_a_buffer_is_passed_again_by_its_name() -> None:
    result = read_arguments(["inout:x=f32[4]:ones", "x", "out:y=f32[4]"], 0)
    assert result.launch == ["x", "x", "y"]
    assert set(result.inputs) == {"x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("128", "allowed are TYPE:NUMBER, in:NAME=..., out:NAME=..., inout:NAME=..., the NAME of a buffer"),
        ("x", "the NAME of a buffer given before"),
        ("bf16:1", "types are i8, i16, i32, i64, u8, u16, u32, u64, f16, f32, f64"),
        ("i32:1.5", "'1.5' is not a whole number"),
        ("i32:", "'' is not a whole number"),
        ("f32:many", "'many' is not a number"),
        ("i8:128", "int8 holds -128 to 127"),
        ("u32:-1", "uint32 holds 0 to 4294967295"),
        ("f16:1e5", "float16 holds -65504.0 to 65504.0"),
        ("in:x", "give in:NAME=..., the name in letters, digits and _"),
        ("in:../x=f32[4]:ones", "the name in letters, digits and _"),
        ("in:x=f32", "give TYPE[SHAPE], such as f32[8,64]"),
        ("in:x=bf16[4]:ones", "give TYPE[SHAPE], such as f32[8,64]; types are i8"),
        ("in:x=f32[]:ones", "[] is not a shape; give whole numbers from 1 up"),
        ("in:x=f32[0]:ones", "[0] is not a shape"),
        ("in:x=f32[4,a]:ones", "[4,a] is not a shape"),
        ("in:x=f64[1000000000]:ones", "too large to emulate; a buffer may have up to 1 GiB"),
        ("in:x=f32[4]", "name the fill: zeros, ones, arange, normal, uniform, uniform:LOW:HIGH or a number"),
        ("in:x=f32[4]:random", "name the fill"),
        ("in:x=f32[4]:uniform:1", "name the fill"),
        ("in:x=i32[4]:normal", "normal makes no whole numbers, and uniform needs its limits for them"),
        ("in:x=i32[4]:uniform", "uniform needs its limits"),
        ("in:x=i32[4]:uniform:5:1", "5 is above 1"),
        ("in:x=i32[4]:0.5", "'0.5' is not a whole number"),
        ("in:x=i8[200]:arange", "int8 holds -128 to 127"),
        ("out:y=f32[4]:zeros", "out holds nothing at first; use inout:f32[4]:zeros"),
        ("in:x=no.npy", "no.npy: No such file or directory"),
    ],
)
def test_what_makes_no_argument_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as e:
        read_arguments([text], 0)
    assert str(e.value).startswith(f"--arg {text!r}: ")
    assert message in str(e.value)
    assert "\n" not in str(e.value)


def test_a_buffer_has_one_meaning() -> None:
    with pytest.raises(UsageError, match="there is a buffer 'x' already; give its name alone to pass it again"):
        read_arguments(["in:x=f32[4]:ones", "out:x=f32[4]"], 0)


@pytest.mark.parametrize("data", [np.array(["a"]), np.array([1 + 2j]), np.array([], np.float32), np.array([None])])
def test_a_file_of_anything_but_numbers_is_refused(tmp_path: Path, data: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", data, allow_pickle=True)
    with pytest.raises(UsageError, match=r"x\.npy( holds .*; allowed are int8|: not a \.npy file of numbers)"):
        read_arguments([f"in:x={tmp_path / 'x.npy'}"], 0)


def test_a_file_that_is_no_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_text("1, 2, 3")
    with pytest.raises(UsageError, match=r"x\.npy: not a \.npy file of numbers"):
        read_arguments([f"in:x={tmp_path / 'x.npy'}"], 0)


def test_tensor_maps_over_buffers() -> None:
    texts = ["map:x[4,32]:64", "struct:i32=5,map=x[8,32]", "in:p=struct:x,map=x[1,4]"]
    result = read_arguments(texts, 0, ["in:x=f32[8,32]:zeros"])
    assert result.launch[0] == TensorMap("x", "float32", (8, 32), (128, 4), (4, 32), 64)
    assert [start for start, _ in find_tensor_maps(result.launch[1])] == [64]
    assert (result.inputs["p"].nbytes, find_pointers(result.structs["p"])) == (192, ((0, "x"),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("map:z[4]", "'z': no earlier argument is this buffer"),
        ("map:x[4]", "a box of 1 dimensions, 'x' has 2"),
        ("map:x", r"give a tensor map as NAME\[BOX\]"),
        ("out:p=struct:map=x[1,4]", "a struct in global memory is an input; give in:p"),
    ],
)
def test_wrong_tensor_maps(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_arguments([text], 0, ["in:x=f32[8,32]:zeros"])
    with pytest.raises(UsageError, match="--buffer 'i32:4': allowed are in:NAME="):
        read_arguments([], 0, ["i32:4"])
