"""``greenfast variants``."""

from __future__ import annotations

import argparse
import json

from greenfast.cli.console import show, table
from greenfast.judge.tasks import find_task, load
from greenfast.judge.variant_choice import choices
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError


def run(args: argparse.Namespace) -> int:
    """List a task's rungs with their toggles and gates, and the toggles."""
    if args.choose is not None:
        return _choose(args)
    if args.format is not None or args.shapes is not None:
        raise UsageError("--format and --shapes are for --choose")
    config = find_task(args.task).config
    rungs = [
        {
            "variant": rung.name,
            "after": rung.after or "",
            "toggles": " ".join(f"{n}={v}" for n, v in rung.toggles.items() if v) or "all off",
            "required": f"{rung.required_speedup:g}x" if rung.required_speedup else "",
            "budget": f"{rung.budget.registers} registers, {rung.budget.smem_bytes} B",
            "title": rung.title,
        }
        for rung in config.rungs
    ]
    if args.json:
        toggles = {n: {"default": t.default, "values": t.values, "help": t.help} for n, t in config.toggles.items()}
        print(json.dumps({"task": config.name, "variants": rungs, "toggles": toggles}, indent=2))
        return 0
    show(table(tuple(rungs[0]), [tuple(r.values()) for r in rungs], title=f"variants of {config.name}"))
    rows = [(n, str(t.default), ", ".join(map(str, t.values)), t.help) for n, t in config.toggles.items()]
    show("")
    show(table(("toggle", "default", "allowed", "meaning"), rows))
    return 0


def _choose(args: argparse.Namespace) -> int:
    """Print the recommended variant for each shape, and why."""
    task, target = load(find_task(args.task)), Target.parse(args.choose)
    config = task.config
    shapes = [config.shape(name) for name in args.shapes] if args.shapes else config.shapes
    fmt = args.format or config.defaults.format
    rows = [
        (shape.name, "-", choice) if isinstance(choice, str) else (shape.name, choice.rung, choice.reason)
        for shape, choice in choices(task, target, fmt, shapes)
    ]
    if args.json:
        print(json.dumps([dict(zip(("shape", "variant", "why"), row, strict=True)) for row in rows], indent=2))
        return 0
    show(table(("shape", "variant", "why"), rows, title=f"{config.name}, {fmt}, on {target.name}"))
    return 0
