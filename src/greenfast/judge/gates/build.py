"""BUILD: every variant compiles for the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from greenfast.judge.entrant import Entrant
from greenfast.judge.gates.sides import BuiltSide, build_side
from greenfast.judge.record import GateResult, Status
from greenfast.judge.task import Shape
from greenfast.spec.arch import Target
from greenfast.spec.errors import AbsentError, CompileError


def check(
    entrants: Mapping[str, Entrant], fmt: str, shapes: Sequence[Shape], target: Target
) -> tuple[GateResult, list[BuiltSide]]:
    """Compile each role's entrant; returns the sides that compiled, in order.

    PENDING where what an entrant's language needs is not here, as a GPU for a callable.
    """
    sides: list[BuiltSide] = []
    checks: list[tuple[str, str, str, Status]] = []
    reasons: list[str] = []
    absent: list[str] = []
    for role, entrant in entrants.items():
        variant = entrant.variant
        try:
            side = build_side(role, entrant.family, variant, fmt, shapes, target)
        except CompileError as e:
            checks.append((f"{role} {variant.name}", "compiles", "does not compile", "FAIL"))
            reasons.append(str(e))
            continue
        except AbsentError as e:
            checks.append((f"{role} {variant.name}", "compiles", "not here", "PENDING"))
            absent.append(str(e))
            continue
        sides.append(side)
        times = ", ".join(f"{k.compile_ms:.0f} ms{' from the cache' if k.from_cache else ''}" for _, k in side.distinct)
        checks.append((f"{role} {variant.name}", "compiles", f"{len(side.distinct)} kernel(s), {times}", "PASS"))
    if reasons:
        return GateResult(
            gate="BUILD", status="FAIL", summary="a variant does not compile", reasons=reasons, checks=checks
        ), sides
    if absent:
        summary = "; ".join(dict.fromkeys(absent))
        return GateResult(gate="BUILD", status="PENDING", summary=summary, checks=checks), sides
    compilers = dict.fromkeys(kernel.compiler for side in sides for _, kernel in side.distinct)
    summary = f"{', '.join(compilers)} for {target.name}"
    return GateResult(gate="BUILD", status="PASS", summary=summary, checks=checks), sides
