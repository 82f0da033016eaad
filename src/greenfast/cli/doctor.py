"""``greenfast doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import json

from greenfast.judge.doctor import examine, gpu_gates, static_gates

EXIT_MACHINE = 3


def run(args: argparse.Namespace) -> int:
    """Print what is installed and what is missing; 0 if validate can decide the static gates, else 3.

    The table is plain text, as rich may be missing.
    """
    findings = examine()
    static = static_gates(findings)
    if args.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"static_gates": static, "gpu_gates": gpu_gates(findings), "findings": rows}, indent=2))
        return 0 if static else EXIT_MACHINE
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.what:{width}}  {finding.status:8}  {finding.found}")
        if finding.remedy:
            print(f"{'':{width}}            -> {finding.remedy}")
    if not static:
        print("\nvalidate cannot run here until what is MISSING is there")
    elif gpu_gates(findings):
        print("\nvalidate can decide every gate here")
    else:
        print(
            "\nvalidate can decide every gate but PERFORMANCE here, CORRECTNESS on the emulator; PERFORMANCE can be "
            "quoted from a record of the same kernels"
        )
    return 0 if static else EXIT_MACHINE
