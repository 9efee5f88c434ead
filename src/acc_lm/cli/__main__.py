"""Entry point of `python -m acc_lm.cli`, the same as `acc-lm`, for launchers that start modules."""

import sys

from acc_lm.cli import main

if __name__ == "__main__":
    sys.exit(main())
