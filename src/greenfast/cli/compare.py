"""``greenfast compare``."""

from __future__ import annotations

import argparse

from greenfast.judge.compare import compare


def run(args: argparse.Namespace) -> int:
    """Print the comparison and write it to --out."""
    print(compare(args.baseline, args.candidate, required=args.required, out=args.out), end="")
    return 0
