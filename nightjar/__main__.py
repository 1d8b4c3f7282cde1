"""`python -m nightjar` is the console script."""

import sys

from nightjar.cli import main

sys.exit(main())
