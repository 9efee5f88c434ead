"""Entry point of `python -m acc_lm`, the same as `acc-lm`."""

import sys

from acc_lm.cli import main

if __name__ == "__main__":
    sys.exit(main())
