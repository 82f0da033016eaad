"""Parse option values for argparse; an error lists the allowed values."""

from __future__ import annotations

import argparse
from pathlib import Path


def words(text: str) -> list[str]:
    """A comma-separated list of names."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give names separated by commas")
    return found


def numbers(text: str) -> list[int]:
    """A comma-separated list of whole numbers."""
    try:
        return [int(part) for part in words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers separated by commas") from None


def extent(text: str) -> tuple[int, int, int]:
    """X, X,Y or X,Y,Z; omitted extents are 1."""
    sizes = numbers(text)
    if len(sizes) > 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give X, X,Y or X,Y,Z, whole numbers from 1 up")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def count(text: str) -> int:
    """A whole number from 0 up."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 0 up")
    return int(text)


def rounds(text: str) -> int:
    """A whole number from 2 up."""
    if not (text.isascii() and text.isdigit() and int(text) >= 2):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 2 up")
    return int(text)


def file_if_named(text: str) -> Path | None:
    """Parse a path; None for an empty text, as from an unset environment variable."""
    return Path(text) if text else None


def named_file(text: str) -> tuple[str, Path]:
    """NAME=FILE."""
    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=FILE.npy")
    return name, Path(file)


def tolerance(text: str) -> float:
    """A largest allowed difference."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from 0 up")
    return value


def speedup(text: str) -> float:
    """A required speedup as a ratio, such as 1.15."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.0 <= value < 1000.0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a ratio from 1 up, such as 1.15 for 15 % faster")
    return value


def share(text: str) -> float:
    """A part of a whole, above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share above 0 and up to 1, such as 0.5")
    return value
