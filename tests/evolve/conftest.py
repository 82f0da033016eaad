"""Fixtures of the searches' tests."""

from tests.cli.conftest import machine as machine
