"""A kernel of the corpus."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from greenfast.judge.store import write_whole


@dataclass(frozen=True)
class Kernel:
    """A solution in one text with a header.

    gate, says: of a cheat, the gate that must fail without a GPU, or the error before any gate, and a pattern of its
    message. suffix: .ptx for PTX.
    """

    gate: str
    says: str
    text: str
    suffix: str = ".cu"

    @property
    def path(self) -> Path:
        """The text as a file in a temporary folder of its own, named as its solution."""
        name = re.findall(r'"name": "(\w+)"', self.text)[0]
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:12]
        path = Path(tempfile.gettempdir()) / f"greenfast-cheats-{os.getuid()}" / digest / f"{name}{self.suffix}"
        if not path.is_file():
            write_whole(path, self.text)
        return path
