"""Options that several benchmarks share."""

from __future__ import annotations

import argparse


def make_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark. text: its description, unwrapped."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=text, formatter_class=formatter)
