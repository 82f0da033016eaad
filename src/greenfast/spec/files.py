"""Read files that users name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

#: Bytes; the largest records have some.
MOST = 256 << 20


def read_file(path: Path, most: int = MOST) -> bytes:
    """Read a regular file.

    Raises OSError with the reason in ``strerror`` for an unreadable or too large file, and for a pipe or a device: they
    may block or never end. Raises ValueError for an invalid path.
    """
    if not stat.S_ISREG(os.stat(path).st_mode) and not path.is_dir():
        raise OSError(errno.EINVAL, "no regular file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB, the limit")
    return data
