"""Read files that users name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

#: Bytes; the largest records have some.
MOST = 256 << 20


def read_file(path: Path, most: int = MOST) -> bytes:
    """The content of an ordinary file.

    Raises OSError, whose ``strerror`` says why, for what cannot be read, for a larger file, and for a pipe or a device:
    one waits for the first, and the second may have no end. ValueError for what is no path at all.
    """
    if not stat.S_ISREG(os.stat(path).st_mode) and not path.is_dir():
        raise OSError(errno.EINVAL, "no regular file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB, which is the most that is read")
    return data
