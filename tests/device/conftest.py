"""Every test compiles into a cache of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's cache folder; it does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GREENFAST_CACHE_DIR", str(folder))
    return folder
