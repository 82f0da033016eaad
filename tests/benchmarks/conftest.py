"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

from tests.cli.conftest import device, machine

__all__ = ["device", "machine"]
