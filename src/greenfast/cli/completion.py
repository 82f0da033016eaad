"""``greenfast completion``: the script of a shell, made by shtab from the parser of all verbs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import shtab

from greenfast.cli.main import parser

#: Arguments that can be a path and also a name.
_PATHS = ("subject", "problem", "baseline", "task", "quote", "summary")


def run(args: argparse.Namespace) -> int:
    """Print the completion script of a shell. Arguments that are paths complete to files."""
    options = parser()
    _complete_paths(options)
    script = shtab.complete(options, shell=args.shell)
    print(json.dumps({"shell": args.shell, "script": script}, indent=2) if args.json else script)
    return 0


def _complete_paths(options: argparse.ArgumentParser) -> None:
    """Mark the arguments of a parser and of its verbs that are paths, for shtab."""
    for action in options._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _complete_paths(verb)
        elif action.type is Path or action.dest in _PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
