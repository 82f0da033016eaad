"""``python -m greenfast``: the command line."""

import sys

from greenfast.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
