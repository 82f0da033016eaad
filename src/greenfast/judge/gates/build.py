"""BUILD: every variant compiles for the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from greenfast.judge.gates.sides import BuiltSide, build_side
from greenfast.judge.record import GateResult, Status
from greenfast.judge.task import Shape
from greenfast.judge.variant import Variant
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError
from greenfast.spec.kernel import Family


def check(
    variants: Mapping[str, Variant], family: Family, fmt: str, shapes: Sequence[Shape], target: Target
) -> tuple[GateResult, list[BuiltSide]]:
    """Compile each role's variant; returns the sides that compiled, in order."""
    sides: list[BuiltSide] = []
    checks: list[tuple[str, str, str, Status]] = []
    reasons = []
    for role, variant in variants.items():
        try:
            side = build_side(role, family, variant, fmt, shapes, target)
        except CompileError as e:
            checks.append((f"{role} {variant.name}", "compiles", "does not compile", "FAIL"))
            reasons.append(str(e))
            continue
        sides.append(side)
        times = ", ".join(f"{k.compile_ms:.0f} ms{' from the cache' if k.from_cache else ''}" for _, k in side.distinct)
        checks.append((f"{role} {variant.name}", "compiles", f"{len(side.distinct)} kernel(s), {times}", "PASS"))
    if reasons:
        return GateResult(
            gate="BUILD", status="FAIL", summary="a variant does not compile", reasons=reasons, checks=checks
        ), sides
    compiler = sides[0].distinct[0][1].compiler
    return GateResult(gate="BUILD", status="PASS", summary=f"{compiler} for {target.name}", checks=checks), sides
