"""The options of ``greenfast evolve``."""

from __future__ import annotations

import argparse
from pathlib import Path

from greenfast.cli.values import count, numbers, share, speedup, words


def evolve(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast evolve``."""
    parser.add_argument("task", nargs="?", help="a task's name (see `greenfast list`), or the folder of one")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with a run, from its folder")
    parser.add_argument(
        "--space", metavar="SPACE", help="a JSON file, or NAME for the task's space_NAME.json (default: its space.json)"
    )
    parser.add_argument(
        "--proposer",
        metavar="NAME",
        help="random, exhaustive, tpe, evolutionary, scripted, free, insight or full (default: random)",
    )
    parser.add_argument(
        "--budget", metavar="gpu=12m,evals=256,time=1h", help="limits of the search (default: evals=64)"
    )
    parser.add_argument("--islands", type=count, metavar="N", help="of the evolutionary proposer")
    parser.add_argument("--model", metavar="M", help="of free, insight and full: http:URL or mailbox:FOLDER")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="another option of the proposer"
    )
    parser.add_argument(
        "--workers",
        default="local:1",
        metavar="W",
        help="local:N processes, or ray:ADDRESS for a Ray cluster (default: %(default)s)",
    )
    parser.add_argument("--baseline", metavar="B", help="a rung, toggles or a solution (default: the task's)")
    parser.add_argument("--shapes", type=words, metavar="A,B", help="shapes that are raced (default: the gated ones)")
    parser.add_argument("--small", type=words, metavar="A,B", help="shapes for the emulator (default: the smallest)")
    parser.add_argument("--seeds", type=numbers, metavar="0,1", help="seeds of the search's inputs (default: 0)")
    parser.add_argument("--format", metavar="FORMAT", help="number format of the task's config (default: its own)")
    parser.add_argument("--arch", metavar="SM", help="target, such as sm_89 (default: the GPU's, else the task's)")
    parser.add_argument(
        "--batch", type=count, default=8, metavar="N", help="candidates at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--screen",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="share of a batch that the counts let into the race, such as 0.5 (default: all)",
    )
    parser.add_argument(
        "--finalists", type=count, default=3, metavar="N", help="that are validated in whole (default: %(default)s)"
    )
    parser.add_argument("--required", type=speedup, metavar="RATIO", help="the required speedup of a winner")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that the search draws (default: 0)")
    parser.add_argument(
        "--insights",
        type=Path,
        metavar="FILE",
        help="insights.jsonl of earlier runs, for proposers (default: the task's)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="auto, all, none, emulator, or GPUs' numbers such as 0 or 0,1; races spread over them, finalists are "
        "validated on the first (default: %(default)s)",
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds that a GPU step may take")
    parser.add_argument("--out", type=Path, default=Path("results"), help="results folder (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of text")
