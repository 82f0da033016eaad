"""Comparison of recorded kernels with today's: machine code and launches."""

from __future__ import annotations

from functools import lru_cache

from greenfast.device.compiler import CompiledKernel, compile_kernel, compile_options, compiler_version, kernel_hash
from greenfast.device.identity import code_hash, launch_differences
from greenfast.judge.record_schema import Build, TimedKernel
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, UsageError
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.freshness import CANNOT_TELL, STALE, Freshness
from greenfast.spec.kernel import KernelSource


def of_build(
    what: str, then: Build | TimedKernel, now: KernelSource, compiled: CompiledKernel | None = None
) -> Freshness:
    """Whether a kernel of a record has the machine code that its source of today makes.

    Equal text under the same compiler and options makes equal code; other text is compiled and its code compared.
    what: the kernel in words, such as "the candidate kernel at mission". compiled: ``now``, where it is at hand.
    """
    compiler = compiled.compiler if compiled else compiler_version()
    if then.compiler != compiler:
        return Freshness(CANNOT_TELL, (f"it was compiled by {then.compiler}, and this is {compiler}",), True)
    try:
        target = Target.parse(then.arch)
        if then.kernel_hash == kernel_hash(now) and tuple(then.options) == compile_options(now, target):
            return Freshness()
        if not then.code_hash:
            return Freshness(
                CANNOT_TELL,
                (f"the source of {what} or the compiler's options differ, and the record has no hash of machine code",),
            )
        today = code_hash(compiled) if compiled else _code_of_today(kernel_hash(now), now, target)
    except (CompileError, UsageError) as e:
        return Freshness(STALE, (f"{what} cannot be built any more: {str(e).splitlines()[0].rstrip(':')}",))
    return Freshness() if today == then.code_hash else Freshness(STALE, (f"the machine code of {what} differs",))


@lru_cache(maxsize=1024)  # records share kernels, and shapes of a record do
def _code_of_today(text: str, now: KernelSource, target: Target) -> str:
    """Compile a kernel. text: hash of its source with all headers, as a cache key, because headers may change."""
    return code_hash(compile_kernel(now, target, isolated=True))


def of_launch(what: str, then: LaunchFacts | None, now: LaunchFacts | None = None) -> Freshness:
    """Whether a kernel is launched as it was. then: None for a record that does not say."""
    if then is None or now is None:
        return Freshness(CANNOT_TELL, (f"the record does not say how {what} was launched",))
    found = launch_differences(then, now)
    return Freshness(STALE, tuple(f"{difference} of {what} differs" for difference in found)) if found else Freshness()
