"""Fixtures of the searches' tests."""

from tests.cli.conftest import families_here as families_here
from tests.cli.conftest import machine as machine
