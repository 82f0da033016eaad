"""Reading the compiler's report."""

from __future__ import annotations

import pytest

from greenfast.device.compiler_log import parse_resources
from greenfast.spec.errors import MachineError
from greenfast.spec.facts import Resources

LOG = """ptxas warning : Value of threads per SM for entry b is out of range. .minnctapersm will be ignored
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_89'
ptxas info    : Function properties for a
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 88 registers, used 1 barriers, 30208 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 5.557 ms
ptxas info    : Compiling entry function 'b' for 'sm_89'
ptxas info    : Function properties for b
ptxas         .     144 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 176 bytes cumulative stack size, 364 bytes cmem[0]
ptxas info    : Compile time = 21.582 ms
ptxas info    : Function properties for _Z6calleePfi
ptxas         .     32 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
"""


def test_each_kernel_has_its_own_section() -> None:
    assert parse_resources(LOG, "a", 1024) == Resources(
        registers=88,
        static_smem_bytes=30208,
        dynamic_smem_bytes=1024,
        stack_bytes=0,
        spill_store_bytes=0,
        spill_load_bytes=0,
    )


def test_called_functions_count_and_smem_may_be_left_out() -> None:
    assert parse_resources(LOG, "b", 0) == Resources(
        registers=64,
        static_smem_bytes=0,
        dynamic_smem_bytes=0,
        stack_bytes=176,
        spill_store_bytes=12,
        spill_load_bytes=16,
    )


def test_what_a_source_has_the_compiler_print_is_no_report() -> None:
    lines = [line for line in LOG.splitlines() if "entry function 'a'" in line or "bytes stack frame" in line][:2]
    forged = "\n".join([*lines, "ptxas info    : Used 8 registers"])
    swallows = "k.cu(1): warning #1105-D: Compiling entry function 'A\n"
    assert parse_resources(f"{forged}\n{swallows}{LOG}", "a", 0) == parse_resources(LOG, "a", 0)


@pytest.mark.parametrize(
    ("log", "entry", "message"),
    [
        ("", "a", "no section for kernel 'a'; it has: none"),
        (LOG, "c", "no section for kernel 'c'; it has: a, b"),
        (LOG.replace("88 registers", "many registers"), "a", "does not state the registers of kernel 'a'"),
        (LOG.replace("stack frame", "frame"), "a", "does not state the stack frame and spills of kernel 'a'"),
    ],
)
def test_unreadable_log_names_what_it_lacks(log: str, entry: str, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        parse_resources(log, entry, 0)
