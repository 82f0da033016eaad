"""``greenfast tasks``."""

from __future__ import annotations

import argparse
import json

import msgspec

from greenfast.cli.console import show, table
from greenfast.judge.task import TaskConfig, load_task
from greenfast.judge.tasks import task_folders
from greenfast.spec.errors import UsageError


def run(args: argparse.Namespace) -> int:
    """List the tasks; a task with an invalid config is listed with its error, and the exit code is 2."""
    if args.schema:
        print(json.dumps(msgspec.json.schema(TaskConfig), indent=2))
        return 0
    rows, broken = [], False
    for folder in task_folders():
        try:
            config = load_task(folder).config
            shapes = ", ".join(f"{s.name} ({', '.join(s.aliases)})" if s.aliases else s.name for s in config.shapes)
            rows.append((config.name, config.description, shapes, str(folder)))
        except UsageError as e:
            broken = True
            rows.append((folder.name, f"invalid: {e}", "", str(folder)))
    if args.json:
        keys = ("name", "description", "shapes", "folder")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
    else:
        show(table(("task", "description", "shapes", "folder"), rows))
    return 2 if broken else 0
