"""The lab's command: checks the kernel on the cases and times it. See --help."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent / "kernel"))

from harness.cli import main  # noqa: E402 - kernel/ must be on the path first

if __name__ == "__main__":
    sys.exit(main())
