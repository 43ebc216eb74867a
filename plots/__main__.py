"""python -m plots: draws the figures."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
