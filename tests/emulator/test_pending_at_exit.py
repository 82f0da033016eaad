"""Operations that may be in flight at the end of a kernel, found in its PTX."""

from __future__ import annotations

import pytest

from greenfast.device.compiler import to_ptx
from greenfast.emulator.pending_at_exit import find_unawaited
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource

STORE = 'asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 64;" :: "l"(y), "r"(tile) : "memory");'
REDUCE = (
    'asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], 64;"'
    ' :: "l"(y), "r"(tile) : "memory");'
)
TENSOR = (
    'asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0, {%1}], [%2];"'
    ' :: "l"(map), "r"(0), "r"(tile) : "memory");'
)
COMMIT = 'asm volatile("cp.async.bulk.commit_group;" ::: "memory");'
WAIT = 'asm volatile("cp.async.bulk.wait_group{} {};" ::: "memory");'
WAIT_ALL, WAIT_READ, WAIT_ONE = WAIT.format("", 0), WAIT.format(".read", 0), WAIT.format("", 1)


def unawaited(body: str) -> list[str]:
    source = f"""extern "C" __global__ void k(int* y, const void* map, int n, const int* x) {{
        __shared__ __align__(128) int words[64];
        const unsigned tile = __cvta_generic_to_shared(words);
        words[threadIdx.x % 64] = n;
        __syncthreads();
        {body}
    }}"""
    kernel = KernelSource("k", source, "k.cu", (), (128, 1, 1))
    return [str(result) for result in find_unawaited(to_ptx(kernel, Target("sm_90a"), assemble=False), "k")]


@pytest.mark.parametrize(
    "body",
    [
        STORE + COMMIT + WAIT_ALL,
        STORE + COMMIT + WAIT_READ,
        f"if (threadIdx.x == 0) {{ {STORE} {COMMIT} {WAIT_READ} }}",
        # the same thread waits later, after a barrier
        f"if (threadIdx.x == 0) {{ {STORE} {COMMIT} }} __syncthreads(); y[n] = 3; if (threadIdx.x == 0) {WAIT_ALL}",
        f"if (threadIdx.x) y[99] = 1; else {{ {STORE} {COMMIT} }} __syncthreads(); if (threadIdx.x == 0) {WAIT_ALL}",
        # a pipeline of two stages, with one wait for all at the end
        f"for (int i = 0; i < n; ++i) {{ if (threadIdx.x == 0) {{ {WAIT_ONE} {STORE} {COMMIT} }} __syncthreads(); }}"
        f"if (threadIdx.x == 0) {{ {WAIT_READ} }}",
        f"const bool leads = threadIdx.x / 32 == 3 && threadIdx.x % 32 == 0; if (leads && n > 5) {{ {STORE} {COMMIT} }}"
        f"__syncthreads(); if (leads) {{ {WAIT_ALL} }}",
        f"if (n > 7) {{ {STORE} {COMMIT} }} else if (n > 3) {{ {TENSOR} {COMMIT} }} {WAIT_ALL}",
        STORE + STORE + COMMIT + REDUCE + COMMIT + WAIT_ONE + WAIT_ALL,
        f'{STORE} {COMMIT} if (n == 12345) asm volatile("trap;"); {WAIT_ALL}',
        "y[0] = x[0];",
    ],
)
def test_what_is_awaited_is_not_reported(body: str) -> None:
    assert unawaited(body) == []


NO, SOME = "no path from it to the end of the kernel waits", "not every path from it to the end of the kernel waits"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"if (threadIdx.x == 0) {{ {STORE} {COMMIT} }}", NO),
        (f"if (n != 4194304) {{ y[0] = 1; return; }} {STORE} {COMMIT}", NO),
        (STORE, NO),
        (STORE + WAIT_ALL, SOME),  # nothing was committed
        (TENSOR + COMMIT, NO),
        (REDUCE + COMMIT, NO),
        (STORE + COMMIT + WAIT_ONE, NO),
        (STORE + COMMIT + STORE + COMMIT + WAIT_ONE, NO),
        (STORE + COMMIT + WAIT_ALL + STORE + COMMIT, NO),
        (f"{STORE} {COMMIT} if (n != 4194304) {{ {WAIT_ALL} }}", SOME),
        (f"if (threadIdx.x == 0) {{ {STORE} {COMMIT} }} __syncthreads(); if (threadIdx.x == 1) {{ {WAIT_ALL} }}", SOME),
        (f"for (int i = 0; i < n; ++i) {{ {WAIT_READ} {STORE} {COMMIT} }}", SOME),
        (f"{STORE} {COMMIT} if (x[n] == 0) return; {WAIT_ALL}", SOME),
        # the condition has changed since
        (f"if (x[0]) {{ {STORE} {COMMIT} }} __threadfence(); if (((volatile const int*)x)[0]) {{ {WAIT_ALL} }}", SOME),
    ],
)
def test_what_is_not_awaited_is_reported(body: str, message: str) -> None:
    result = unawaited(body)
    assert result
    assert message in result[-1], result
    assert result[-1].startswith("cp."), result


def test_a_copy_to_shared_memory_that_nothing_waits_for_is_reported() -> None:
    load = (
        'asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 64, [%2];"'
        ' :: "r"(tile), "l"(x), "r"(tile + 128) : "memory");'
    )
    wait = (
        'asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra L; }"'
        ' :: "r"(tile + 128) : "memory");'
    )
    assert len(unawaited(load)) == 1
    assert unawaited(load + wait) == []
