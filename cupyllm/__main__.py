"""`python -m cupyllm`: the command line in cupyllm/cli."""

from __future__ import annotations

import sys

from cupyllm.cli import main

sys.exit(main(sys.argv[1:]))
