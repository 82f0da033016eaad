"""BUILD: every implementation compiles for the target, and a GPU of the target can launch what was compiled."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from greenfast.device.cubin import block_fault, read_cubin
from greenfast.device.identity import check_code
from greenfast.judge.gates.sides import BASELINE, BuiltSide, build_side
from greenfast.judge.implementation import Implementation
from greenfast.judge.record_schema import GateResult, Status
from greenfast.judge.task import Shape
from greenfast.spec.arch import Target
from greenfast.spec.errors import AbsentError, CompileError, UsageError
from greenfast.spec.limits import launch_faults


def check(
    implementations: Mapping[str, Implementation],
    fmt: str,
    shapes: Sequence[Shape],
    target: Target,
    examined: Collection[str] = (),
) -> tuple[GateResult, list[BuiltSide]]:
    """Compile each role's implementation; returns the sides that can be launched, in order.

    PENDING where what an implementation's language needs is not here, as a GPU for a callable.

    examined: the names of shapes that no option or default names and the exam asks. A candidate must compute them; a
    baseline need not, and is then compared on those that it computes.
    Raises UsageError for an implementation that refuses any other shape.
    """
    sides: list[BuiltSide] = []
    checks: list[tuple[str, str, str, Status]] = []
    reasons: list[str] = []
    absent: list[str] = []
    for role, implementation in implementations.items():
        variant = implementation.variant
        what = f"{role} {variant.name}"
        refused: dict[str, str] = {}
        try:
            side = build_side(role, implementation.family, variant, fmt, shapes, target, refused=refused)
            for _, kernel in side.distinct:
                if kernel.source.language == "cubin":
                    check_code(kernel)
        except CompileError as e:
            checks.append((what, "compiles", "does not compile", "FAIL"))
            reasons.append(implementation.named(str(e)))
            continue
        except AbsentError as e:
            checks.append((what, "compiles", "not here", "PENDING"))
            absent.append(str(e))
            continue
        if chosen := [name for name in refused if name not in examined or not side.programs]:
            raise UsageError(refused[chosen[0]])
        faults = _faults(side, target)
        if refused and role != BASELINE:
            shapes_of: dict[str, list[str]] = {}
            for name, why in refused.items():
                shapes_of.setdefault(why, []).append(name)
            faults += [
                f"refuses {', '.join(names)}, which the task asks of every kernel: {why}"
                for why, names in shapes_of.items()
            ]
        reasons += [f"{variant.name} {fault}" for fault in faults]
        times = ", ".join(f"{k.compile_ms:.0f} ms{' from the cache' if k.from_cache else ''}" for _, k in side.distinct)
        checks.append((what, "compiles", f"{len(side.distinct)} kernel(s), {times}", "PASS"))
        if faults:
            checks.append((what, "computes every shape, within CUDA's limits", f"{len(faults)} fault(s)", "FAIL"))
            continue
        if refused:
            computed = f"{len(side.programs)}; not {', '.join(refused)}"
            checks.append((what, f"computes some of {len(shapes)} shapes", computed, "PASS"))
        sides.append(side)
    if reasons:
        some = any(check[1] == "compiles" and check[3] == "FAIL" for check in checks)
        summary = "a variant does not compile" if some else "a variant cannot be launched for every shape"
        return GateResult(gate="BUILD", status="FAIL", summary=summary, reasons=reasons, checks=checks), sides
    if absent:
        summary = "; ".join(dict.fromkeys(absent))
        return GateResult(gate="BUILD", status="PENDING", summary=summary, checks=checks), sides
    compilers = dict.fromkeys(kernel.compiler for side in sides for _, kernel in side.distinct)
    summary = f"{', '.join(compilers)} for {target.name}"
    return GateResult(gate="BUILD", status="PASS", summary=summary, checks=checks), sides


def _faults(side: BuiltSide, target: Target) -> list[str]:
    """What no GPU can launch, each fault once, at the first shape that has it."""
    found: dict[str, str] = {}
    for shape, program in side.programs.items():
        for kernel, step in zip(program.kernels, program.program.steps, strict=True):
            faults = launch_faults(kernel.source, step.launch, kernel.reported, target)
            if kernel.cubin:
                image = read_cubin(kernel.cubin, kernel.source.name)
                faults += filter(None, [block_fault(image, kernel.source.entry, kernel.source.block)])
            for fault in faults:
                found.setdefault(fault, shape)
    return [f"cannot be launched at {shape}: {fault}" for fault, shape in found.items()]
