"""Fixtures of the compiler's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compile cache for this test alone; the folder does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GREENFAST_CACHE_DIR", str(folder))
    return folder
