"""`python -m vitlab`, for torchrun."""

import sys

from vitlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
