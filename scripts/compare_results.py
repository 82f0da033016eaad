"""Run ``greenfast report --compare BASELINE CANDIDATE``."""

import sys

from greenfast.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["report", "--compare", *sys.argv[1:]]))
