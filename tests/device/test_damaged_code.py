"""Damaged machine code is its author's mistake: an error that says so, whatever was changed in the file."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import pytest

from greenfast.device import identity
from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.cubin import Image, ImageError, block_fault, read_cubin
from greenfast.device.identity import check_code, state_variables
from greenfast.device.machine_code import disassemble
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError
from greenfast.spec.kernel import KernelSource

SOURCES = (
    'extern "C" __global__ void k(float* x) { x[threadIdx.x] *= 2.0f; }',
    """__device__ int table[40] = {1, 2, 3}; __device__ int* to = table + 3; __constant__ float c[8];
    extern "C" __global__ void __launch_bounds__(128) k(float* x, int n) {
      __shared__ float s[64]; s[threadIdx.x & 63] = c[n & 7]; __syncthreads();
      if (n > 7) printf("%d\\n", n);
      x[threadIdx.x] = s[n & 63] + table[n] + *to;
    }
    extern "C" __global__ void other(int* y) { *y = *to; }""",
)
#: A damaged field holds one of these more often than another number.
EXTREMES = (0, 1, 3, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)


@pytest.fixture(scope="module")
def originals() -> list[tuple[bytes, str]]:
    """Cubins and their listings."""
    targets = ("sm_90a", "sm_89")
    made = [
        compile_kernel(KernelSource("k", text, "k.cu", (), (64, 1, 1)), Target(target)).cubin
        for text in SOURCES
        for target in targets
    ]
    return [(cubin, disassemble(cubin, "k")) for cubin in made]


def mutants(cubin: bytes, seed: int) -> Iterator[bytes]:
    """Changed copies without end: single fields and bytes, missing, repeated and moved parts."""
    draw = random.Random(seed)
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<2H", cubin, 0x3A)
    while True:
        data = bytearray(cubin)
        for _ in range(draw.choice((1, 1, 1, 2, 8))):
            kind = draw.randrange(7)
            at = draw.randrange(len(data)) if data else 0
            if kind == 0:  # of a section's header
                at = table + size * draw.randrange(count) + 4 * draw.randrange(16)
            elif kind == 1:
                at = draw.randrange(64)
            if kind <= 2 and at < len(data):
                width = draw.choice((1, 2, 4, 8))
                value = draw.choice((*EXTREMES, len(data), table, draw.getrandbits(64)))
                data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")[: len(data) - at]
            elif kind == 3 and data:
                data[at] ^= 1 << draw.randrange(8)
            elif kind == 4:
                del data[at:]
            elif kind == 5:
                length = draw.randrange(1, 256)
                data[at:at] = data[at : at + length]
            elif data:
                length, to = draw.randrange(1, 256), draw.randrange(len(data))
                data[to : to + length] = data[at : at + length]
        yield bytes(data)


def read_all(cubin: bytes, target: str = "sm_90a") -> CompiledKernel:
    """What BUILD and RESOURCES read of a cubin."""
    source = KernelSource("k", "", "k.cubin", (), (64, 1, 1), language="cubin", binary=cubin)
    kernel = compile_kernel(source, Target(target))
    check_code(kernel)
    block_fault(read_cubin(cubin, "k.cubin"), "k", (64, 1, 1))
    return kernel


def refuses(mutant: bytes, target: str = "sm_90a") -> bool:
    """Whether a mutant is refused, with a short error for its author; all other exceptions pass through."""
    try:
        read_all(mutant, target)
    except CompileError as e:
        if e.exit_code != 1 or len(str(e)) > 5000:
            raise AssertionError(f"{type(e).__name__} of {len(str(e))} characters") from e
        return True
    return False


def sweep(originals: list[tuple[bytes, str]], each: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Read mutants; returns how many were refused. nvdisasm, a process for each, is left out here."""
    refused = 0
    for number, (cubin, listing) in enumerate(originals):
        monkeypatch.setattr(identity, "disassemble", lambda *_, listing=listing: listing)
        target = ("sm_90a", "sm_89")[number % 2]
        assert read_all(cubin, target).reported is not None
        for n, mutant in zip(range(each), mutants(cubin, seed + number), strict=False):
            try:
                refused += refuses(mutant, target)
            except Exception as e:
                pytest.fail(f"cubin {number}, mutant {n} of seed {seed}: {type(e).__name__}: {e}")
    return refused


def test_mutants_are_read_or_refused(originals: list[tuple[bytes, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep(originals, 250, 1, monkeypatch) > 300


@pytest.mark.slow
def test_many_mutants_are_read_or_refused(originals: list[tuple[bytes, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep(originals, 4_000, 1000, monkeypatch) > 5_000


def test_mutants_in_nvdisasm(originals: list[tuple[bytes, str]]) -> None:
    assert any([refuses(mutant) for _, mutant in zip(range(12), mutants(originals[2][0], 7), strict=False)])


def test_a_small_file_does_not_become_gigabytes(originals: list[tuple[bytes, str]]) -> None:
    """Every section is the whole file."""
    data = bytearray(originals[0][0] + bytes(1 << 20))
    (table,) = struct.unpack_from("<Q", data, 0x28)
    header = bytearray(data[table + 64 : table + 128])
    struct.pack_into("<I", header, 4, 1)
    struct.pack_into("<2Q", header, 24, 0, len(data))
    struct.pack_into("<Q", data, 0x28, len(data))
    struct.pack_into("<3H", data, 0x3A, 64, 60_000, 0)
    with pytest.raises(ImageError, match="60000 sections of"):
        Image(bytes(data) + bytes(header) * 60_000)


def test_variables_that_refer_to_each_other_deeply_are_no_damage() -> None:
    """A list of 1,500 pointers, each to the next."""
    links = "\n".join(f"__device__ void* p{n} = &p{n - 1};" if n else "__device__ void* p0 = 0;" for n in range(1500))
    text = f'{links}\nextern "C" __global__ void k(void** x) {{ *x = &p1499; }}'
    kernel = compile_kernel(KernelSource("k", text, "k.cu", (), (64, 1, 1)), Target("sm_90a"))
    check_code(kernel)
    assert sum(state_variables(kernel).values()) == 1500 * 8
