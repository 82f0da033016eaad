"""RESOURCES: registers, shared memory, stack and spills against each rung's budget. Needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from greenfast.device import assembler
from greenfast.device.compiler import CompiledKernel
from greenfast.device.identity import state_variables
from greenfast.device.module_variables import read_only_variables
from greenfast.judge.implementation import BuiltSide, watched_variables
from greenfast.judge.pipeline import Gate, GateRun, conclude_checks
from greenfast.judge.record_schema import BenchRecord, GateResult, Record, Run, Status
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.formatting import Section
from greenfast.judge.task import Budget, Rung

_MOST_NAMED = 3  # variables in a message


def check_budgets(run: GateRun) -> GateResult:
    """Check the resources of every kernel against the budget for its shape."""
    sides = run.sides
    dims = {shape.name: shape.dims for shape in run.request.built_shapes}
    checks: list[tuple[str, str, str, Status]] = []
    reasons = []
    used = []
    unknown = [kernel for side in sides for _, kernel in side.distinct if kernel.reported is None]
    if unknown:
        return GateResult(
            gate="RESOURCES", status="PENDING", summary=f"{unknown[0].source.name} is PTX, and {assembler.MISSING}"
        )
    for side in sides:
        rung = run.implementations[side.role].requirements
        if not side.distinct:
            used.append(f"{side.variant.name} has no kernel of its own")
        for shape, kernel in side.distinct:
            r = kernel.resources
            label = f" ({_name_kernel(side, shape, kernel)})" if len(side.distinct) > 1 else ""
            constant = f", {r.constant_bytes} bytes of __constant__" if r.constant_bytes else ""
            _, compared = _count_state_bytes(kernel)
            constant += f", {compared} bytes of variables, compared after its launches" if compared else ""
            used.append(f"{side.variant.name}{label} {r.registers} registers, {r.smem_bytes / 1024:.1f} KB{constant}")
        for shape, kernel, budget in _pair_with_budgets(side, rung, dims):
            r, (state, _) = kernel.resources, _count_state_bytes(kernel)
            for resource, limit, actual in (
                ("registers", budget.registers, r.registers),
                ("shared memory, bytes", budget.smem_bytes, r.smem_bytes),
                ("stack, bytes", budget.stack_bytes, r.stack_bytes),
                ("spills, bytes", budget.spill_bytes, r.spill_bytes),
                ("device variables, bytes", budget.device_state_bytes, state),
            ):
                held = actual <= limit
                name = f"{side.role} {side.variant.name} ({_name_kernel(side, shape, kernel)}): {resource}"
                checks.append((name, f"<= {limit} ({rung.name})", str(actual), "PASS" if held else "FAIL"))
                if not held:
                    variables = _name_variables(kernel) if resource.startswith("device") else ""
                    reasons.append(f"{name} is {actual}, the budget of {rung.name} allows {limit}{variables}")
    return GateResult(
        gate="RESOURCES", status="FAIL" if reasons else "PASS", summary="; ".join(used), reasons=reasons, checks=checks
    )


def _name_kernel(side: BuiltSide, shape: str, kernel: CompiledKernel) -> str:
    """Return the name of the shape, and the kernel's entry if the shape has several kernels."""
    return f"{shape}, {kernel.source.entry}" if len(side.programs[shape].kernels) > 1 else shape


def _pair_with_budgets(
    side: BuiltSide, rung: Rung, dims: Mapping[str, dict[str, int]]
) -> list[tuple[str, CompiledKernel, Budget]]:
    """Return each pair of a kernel and a budget that it must meet, with the first shape of the pair."""
    pairs: dict[tuple[str, int], tuple[str, CompiledKernel, Budget]] = {}
    for shape, program in side.programs.items():
        budget = rung.budget_for(dims[shape])
        for kernel in program.kernels:
            pairs.setdefault((kernel.kernel_hash, id(budget)), (shape, kernel, budget))
    return list(pairs.values())


def _count_state_bytes(kernel: CompiledKernel) -> tuple[int, int]:
    """Return the bytes that could hold state between launches, and the bytes that are compared after the launches.

    A cubin may be a whole library, so only the variables of this kernel count. Without PTX, constant tables cannot be
    distinguished from state; they are compared after the launches.
    """
    global_bytes = kernel.resources.global_bytes
    if not global_bytes or kernel.source.language != "cubin":
        return global_bytes, 0
    compared = sum(state_variables(kernel)[name] for name in watched_variables(kernel))
    return min(global_bytes, sum(state_variables(kernel).values()) - compared), compared


def _name_variables(kernel: CompiledKernel) -> str:
    """Return the names of the largest variables that could hold state, for a message; empty if none has a name."""
    readonly = read_only_variables(kernel.cubin, kernel.ptx)
    sizes = {name: size for name, size in state_variables(kernel).items() if name and name not in readonly}
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:_MOST_NAMED]
    rest = f" and {len(sizes) - _MOST_NAMED} more" if len(sizes) > _MOST_NAMED else ""
    return f" (written, or its address is used for more than loads: {', '.join(largest)}{rest})" if largest else ""


def _conclude(record: Run, result: GateResult) -> GateResult:
    """Take the amounts of the rows from the record's builds. Variables are not there: some are compared after launches.

    The row of a kernel has the name of its first shape. A shape with several launches has the kernel's entry too.
    """
    if result.status != "PASS" or not isinstance(record, Record | BenchRecord):
        return conclude_checks(result)
    actual = {}
    for role, side in record.sides():
        for build in (build for build in side.builds if build.resources is not None and build.shapes):
            used, shape = build.resources, build.shapes[0]
            kernel = shape if not build.launches or shape in build.launches else f"{shape}, {build.entry}"
            prefix = f"{role if isinstance(record, Record) else 'candidate'} {side.variant} ({kernel})"
            assert used is not None
            actual[f"{prefix}: registers"] = str(used.registers)
            actual[f"{prefix}: shared memory, bytes"] = str(used.smem_bytes)
            actual[f"{prefix}: stack, bytes"] = str(used.stack_bytes)
            actual[f"{prefix}: spills, bytes"] = str(used.spill_bytes)
    checks = [(check, target, actual.pop(check, amount), status) for check, target, amount, status in result.checks]
    checks += [(check, "a limit", amount, "FAIL") for check, amount in actual.items()]
    return conclude_checks(msgspec.structs.replace(result, checks=checks))


def _list_sections(record: Run, plot: str | None) -> list[Section]:
    return [Section("Compiler resources", [resource_table(record)])]


def resource_table(record: Run) -> str:
    """Return a table of the compiler resources of every kernel."""
    rows = [
        (
            side,
            variant,
            formatting.dims(build.dims),
            str(r.registers),
            formatting.kilobytes(r.smem_bytes),
            f"{r.static_smem_bytes} + {r.dynamic_smem_bytes}",
            str(r.stack_bytes),
            f"{r.spill_store_bytes} / {r.spill_load_bytes}",
        )
        for side, variant, build in facts.list_builds(record)
        if (r := build.resources) is not None
    ]
    if not rows:
        gate = "RESOURCES" if any(facts.list_builds(record)) else "BUILD"
        return formatting.without_html(facts.gate_line(record, gate))
    numbers = ("registers", "SMEM", "static + dynamic bytes", "stack bytes", "spill store / load bytes")
    return formatting.table(("side", "variant", "dims", *numbers), rows, right=numbers)


GATE = Gate("RESOURCES", exit_code=12, after="BUILD", check=check_budgets, conclude=_conclude, sections=_list_sections)
