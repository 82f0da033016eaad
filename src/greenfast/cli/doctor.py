"""``greenfast doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import json

from greenfast.cli.progress import ProgressLine
from greenfast.judge.doctor import examine, gpu_gates, library, static_gates
from greenfast.spec.extras import install_command

EXIT_MACHINE = 3


def run(args: argparse.Namespace) -> int:
    """Print installed and missing parts; return 0 if attention can be computed here, else 3.

    The table is plain text, as rich may be missing.
    """
    with ProgressLine("examining this machine"):
        findings = examine()
    static = static_gates(findings)
    code = 0 if library(findings) else EXIT_MACHINE
    if args.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        answers = {
            "library": library(findings),
            "static_gates": static,
            "gpu_gates": gpu_gates(findings),
            "findings": rows,
        }
        print(json.dumps(answers, indent=2))
        return code
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.what:{width}}  {finding.status:8}  {finding.found}")
        if finding.remedy:
            print(f"{'':{width}}            -> {finding.remedy}")
    if code:
        print("\nnothing can run here while a part is MISSING")
    elif not static:
        print(
            "\nattention works here (greenfast.sdpa); judge and the other commands need the parts marked EXTRA: "
            f"{install_command('judge')}"
        )
    elif gpu_gates(findings):
        print("\njudge can decide every gate here")
    else:
        print(
            "\njudge can decide every gate but PERFORMANCE here, CORRECTNESS on the emulator; PERFORMANCE can be "
            "quoted from a record of the same kernels"
        )
    return code
