"""BUILD: every implementation compiles for the target, and a GPU of the target can launch its kernels."""

from __future__ import annotations

from greenfast.device.cubin import block_fault, read_cubin
from greenfast.device.identity import check_code
from greenfast.judge.implementation import BASELINE, CANDIDATE, BuiltSide, build_side
from greenfast.judge.pipeline import Gate, GateRun
from greenfast.judge.record_schema import GateResult, Status
from greenfast.spec.arch import Target
from greenfast.spec.errors import AbsentError, CompileError, UsageError
from greenfast.spec.limits import launch_faults


def build_sides(run: GateRun) -> GateResult:
    """Compile the implementation of each role. Store the compiled implementations that can be launched in the run.

    PENDING if a dependency of an implementation's language is missing, such as a GPU for a callable; on the emulator,
    where no times are compared, the candidate alone is enough.

    A candidate must support the shapes of the check plan that are in no option and no default. A baseline may reject
    them; it is then compared on the shapes that it supports.
    Raises UsageError if an implementation rejects any other shape.
    """
    request, sides = run.request, run.sides
    target, shapes = request.target, request.built_shapes
    unnamed_shapes = request.check_plan.unnamed_shapes if request.check_plan else ()
    checks: list[tuple[str, str, str, Status]] = []
    reasons: list[str] = []
    missing: list[str] = []
    for role, implementation in run.implementations.items():
        variant = implementation.variant
        label = f"{role} {variant.name}"
        rejections: dict[str, str] = {}
        try:
            side = build_side(
                role, implementation.family, variant, request.format, shapes, target, rejections=rejections
            )
            for _, kernel in side.distinct:
                if kernel.source.language == "cubin":
                    check_code(kernel)
        except CompileError as e:
            checks.append((label, "compiles", "does not compile", "FAIL"))
            reasons.append(implementation.restore_paths(str(e)))
            continue
        except AbsentError as e:
            checks.append((label, "compiles", "not here", "PENDING"))
            missing.append(str(e))
            continue
        if named := [name for name in rejections if name not in unnamed_shapes or not side.programs]:
            raise UsageError(rejections[named[0]])
        faults = _list_launch_faults(side, target)
        if rejections and role != BASELINE:
            shapes_by_reason: dict[str, list[str]] = {}
            for name, reason in rejections.items():
                shapes_by_reason.setdefault(reason, []).append(name)
            faults += [
                f"refuses {', '.join(names)}, required of every kernel: {reason}"
                for reason, names in shapes_by_reason.items()
            ]
        reasons += [f"{variant.name} {fault}" for fault in faults]
        times = ", ".join(f"{k.compile_ms:.0f} ms{' from the cache' if k.from_cache else ''}" for _, k in side.distinct)
        checks.append((label, "compiles", f"{len(side.distinct)} kernel(s), {times}", "PASS"))
        if faults:
            checks.append((label, "computes every shape, within CUDA's limits", f"{len(faults)} fault(s)", "FAIL"))
            continue
        if rejections:
            computed = f"{len(side.programs)}; not {', '.join(rejections)}"
            checks.append((label, f"computes some of {len(shapes)} shapes", computed, "PASS"))
        sides.append(side)
    if reasons:
        is_compile_error = any(check[1] == "compiles" and check[3] == "FAIL" for check in checks)
        summary = "a variant does not compile" if is_compile_error else "a variant cannot be launched for every shape"
        return GateResult(gate="BUILD", status="FAIL", summary=summary, reasons=reasons, checks=checks)
    if missing:
        summary = "; ".join(dict.fromkeys(missing))
        if request.device is not None and request.device.kind != "gpu" and [side.role for side in sides] == [CANDIDATE]:
            # The baseline is for the comparison of times, and there are none here.
            summary = f"the candidate; not the baseline: {summary}"
            return GateResult(gate="BUILD", status="PASS", summary=summary, checks=checks)
        return GateResult(gate="BUILD", status="PENDING", summary=summary, checks=checks)
    compilers = dict.fromkeys(kernel.compiler for side in sides for _, kernel in side.distinct)
    summary = f"{', '.join(compilers) or 'nothing to compile'} for {target.name}"
    return GateResult(gate="BUILD", status="PASS", summary=summary, checks=checks)


def _list_launch_faults(side: BuiltSide, target: Target) -> list[str]:
    """Return the launch parameters that no GPU of the target allows, each with the first shape that has it."""
    first_shapes: dict[str, str] = {}
    for shape, program in side.programs.items():
        for kernel, step in zip(program.kernels, program.program.steps, strict=True):
            faults = launch_faults(kernel.source, step.launch, kernel.reported, target)
            if kernel.cubin:
                image = read_cubin(kernel.cubin, kernel.source.name)
                faults += filter(None, [block_fault(image, kernel.source.entry, kernel.source.block)])
            for fault in faults:
                first_shapes.setdefault(fault, shape)
    return [f"cannot be launched at {shape}: {fault}" for fault, shape in first_shapes.items()]


GATE = Gate("BUILD", exit_code=11, after="", check=build_sides)
