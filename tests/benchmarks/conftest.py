"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

from tests.cli.conftest import machine

__all__ = ["machine"]
