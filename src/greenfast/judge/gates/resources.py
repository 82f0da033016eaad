"""RESOURCES: registers, shared memory, stack and spills against each rung's budget. Needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from greenfast.device import assembler
from greenfast.device.compiler import CompiledKernel
from greenfast.device.identity import state_variables
from greenfast.judge.gates.sides import BuiltSide, watched_variables
from greenfast.judge.record_schema import GateResult, Status
from greenfast.judge.task import Budget, Rung, Shape


def check(sides: Sequence[BuiltSide], asked: Mapping[str, Rung], shapes: Sequence[Shape]) -> GateResult:
    """Compare every kernel's resources with the budget of its side for the shape.

    asked: by role, what the budget is of. shapes: what was built for.
    """
    dims = {shape.name: shape.dims for shape in shapes}
    checks: list[tuple[str, str, str, Status]] = []
    reasons = []
    used = []
    unknown = [kernel for side in sides for _, kernel in side.distinct if kernel.reported is None]
    if unknown:
        return GateResult(
            gate="RESOURCES", status="PENDING", summary=f"{unknown[0].source.name} is PTX, and {assembler.MISSING}"
        )
    for side in sides:
        rung = asked[side.role]
        for shape, kernel in side.distinct:
            r = kernel.resources
            only = f" ({_place(side, shape, kernel)})" if len(side.distinct) > 1 else ""
            constant = f", {r.constant_bytes} bytes of __constant__" if r.constant_bytes else ""
            _, compared = _state_bytes(kernel)
            constant += f", {compared} bytes of variables, compared after its launches" if compared else ""
            used.append(f"{side.variant.name}{only} {r.registers} registers, {r.smem_bytes / 1024:.1f} KB{constant}")
        for shape, kernel, budget in _budgets(side, rung, dims):
            r, (state, _) = kernel.resources, _state_bytes(kernel)
            for what, limit, actual in (
                ("registers", budget.registers, r.registers),
                ("shared memory, bytes", budget.smem_bytes, r.smem_bytes),
                ("stack, bytes", budget.stack_bytes, r.stack_bytes),
                ("spills, bytes", budget.spill_bytes, r.spill_bytes),
                ("device variables, bytes", budget.global_bytes, state),
            ):
                held = actual <= limit
                name = f"{side.role} {side.variant.name} ({_place(side, shape, kernel)}): {what}"
                checks.append((name, f"<= {limit} ({rung.name})", str(actual), "PASS" if held else "FAIL"))
                if not held:
                    reasons.append(f"{name} is {actual}, the budget of {rung.name} allows {limit}")
    return GateResult(
        gate="RESOURCES", status="FAIL" if reasons else "PASS", summary="; ".join(used), reasons=reasons, checks=checks
    )


def _place(side: BuiltSide, shape: str, kernel: CompiledKernel) -> str:
    """The shape, with the kernel's name where several are for it."""
    return f"{shape}, {kernel.source.entry}" if len(side.programs[shape].kernels) > 1 else shape


def _budgets(
    side: BuiltSide, rung: Rung, dims: Mapping[str, dict[str, int]]
) -> list[tuple[str, CompiledKernel, Budget]]:
    """Each kernel with each budget that it has to meet, and the first shape for which it has."""
    found: dict[tuple[str, int], tuple[str, CompiledKernel, Budget]] = {}
    for shape, program in side.programs.items():
        budget = rung.budget_for(dims[shape])
        for kernel in program.kernels:
            found.setdefault((kernel.kernel_hash, id(budget)), (shape, kernel, budget))
    return list(found.values())


def _state_bytes(kernel: CompiledKernel) -> tuple[int, int]:
    """Bytes in which state could outlive a launch, and bytes that a device compares after the launches instead.

    Of a cubin, which may be a library's, what this kernel has of it; its tables cannot be told from state by its PTX.
    """
    found = kernel.resources.global_bytes
    if not found or kernel.source.language != "cubin":
        return found, 0
    compared = sum(state_variables(kernel)[name] for name in watched_variables(kernel))
    return min(found, sum(state_variables(kernel).values()) - compared), compared
