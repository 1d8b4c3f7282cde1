"""The paper's comparison, on real text at real cost: `run` measures, `report` makes the tables."""

from __future__ import annotations

import sys

from paper.cli import main

if __name__ == "__main__":
    sys.exit(main())
