"""``python -m greenfast``: the command line."""

import os
import sys

# ``python -m`` puts the current folder first, where a solution's multiprocessing.py would replace Python's own. The
# modules of a task may be there, so it stays, but last.
if sys.path and sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):
    sys.path.append(sys.path.pop(0))

from greenfast.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
