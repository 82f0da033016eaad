"""From a verb's options to a request."""

from __future__ import annotations

import argparse
import math

from greenfast.judge.request import Request, make_request
from greenfast.judge.tasks import LoadedTask, find_task, load
from greenfast.spec.errors import UsageError


def request_of(args: argparse.Namespace, task: LoadedTask | None = None, target: str = "") -> Request:
    """Load the task and check the shared options; raises UsageError or MachineError.

    task: replaces the task of the options. target: default if the options have none.
    """
    if not 0 < args.timeout < math.inf:
        raise UsageError(f"--timeout {args.timeout:g}: give a number of seconds above 0")
    return make_request(
        task or load(find_task(args.task)),
        shapes=args.shapes,
        seeds=args.seeds,
        fmt=args.format,
        arch=args.arch or target or None,
        device=args.device,
        warmup=getattr(args, "warmup", None),
        iters=getattr(args, "iters", None),
        processes=getattr(args, "processes", None),
        timeout_s=args.timeout,
        out=args.out,
        command=args.command,
    )
