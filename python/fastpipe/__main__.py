"""Runs the command line interface: `python -m fastpipe`."""

from __future__ import annotations

import sys

from fastpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
