"""``greenfast list``: the known tasks, or the variants of one."""

from __future__ import annotations

import argparse
import json

import msgspec

from greenfast.cli.console import show, table
from greenfast.judge.task import TaskConfig, choices, find_task, load, load_known_tasks
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError

_VARIANT_HEADER = ("variant", "after", "toggles", "required", "budget", "title")


def run(args: argparse.Namespace) -> int:
    """Print the tasks, the variants of a task, its choice of a variant per shape, or the schema of a task's config."""
    if args.schema:
        print(json.dumps(msgspec.json.schema(TaskConfig), indent=2))
        return 0
    if args.choose is None and (args.format is not None or args.shapes is not None):
        raise UsageError("--format and --shapes are for --choose")
    if args.choose is not None and args.task is None:
        raise UsageError("--choose: name the task")
    if args.task is None:
        return _list_tasks(args.json)
    return _list_variants(args) if args.choose is None else _list_choices(args)


def _list_tasks(as_json: bool) -> int:
    """List the tasks. A task with an invalid config is listed with its error, and the exit code is 2."""
    rows, code = [], 0
    for folder, task in load_known_tasks():
        if isinstance(task, UsageError):
            code = task.exit_code
            rows.append((folder.name, f"invalid: {task}", "", str(folder)))
            continue
        config = task.config
        shapes = ", ".join(f"{s.name} ({', '.join(s.aliases)})" if s.aliases else s.name for s in config.shapes)
        rows.append((config.name, config.description, shapes, str(folder)))
    if as_json:
        keys = ("name", "description", "shapes", "folder")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
    else:
        show(table(("task", "description", "shapes", "folder"), rows))
    return code


def _list_variants(args: argparse.Namespace) -> int:
    config = find_task(args.task).config
    rows = [
        (
            rung.name,
            rung.after or "",
            " ".join(f"{n}={v}" for n, v in rung.toggles.items() if v) or "all off",
            f"{rung.required_speedup:g}x" if rung.required_speedup else "",
            f"{rung.budget.registers} registers, {rung.budget.smem_bytes} B",
            rung.title,
        )
        for rung in config.rungs
    ]
    if args.json:
        toggles = {n: {"default": t.default, "values": t.values, "help": t.help} for n, t in config.toggles.items()}
        rungs = [dict(zip(_VARIANT_HEADER, row, strict=True)) for row in rows]
        print(json.dumps({"task": config.name, "variants": rungs, "toggles": toggles}, indent=2))
        return 0
    show(table(_VARIANT_HEADER, rows, title=f"variants of {config.name}"))
    toggle_rows = [(n, str(t.default), ", ".join(map(str, t.values)), t.help) for n, t in config.toggles.items()]
    show("")
    show(table(("toggle", "default", "allowed", "meaning"), toggle_rows))
    return 0


def _list_choices(args: argparse.Namespace) -> int:
    task, target = load(args.task), Target.parse(args.choose)
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
