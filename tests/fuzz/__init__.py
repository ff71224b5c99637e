"""Random modules under random layouts, held against the module itself on one device.

    python -m tests.fuzz --seconds 600 --ranks 2-16   # verify, and simulated ranks
    python -m tests.fuzz --seconds 600 --gloo         # four real ranks, two optimizer steps

In reading order: `table` (what an op kind is) and the ops_*.py that fill it, `case` (a seed becomes
a description), `source` (a description becomes the text of a module), `reference` (what one device
gives), `simulated` and `ranks` (what the parallel program gives), `shrink`, `workers`, `__main__`.
"""

from __future__ import annotations

import sys
from pathlib import Path

# `plans` of tests/support is found there, as by pytest.
sys.path.append(str(Path(__file__).parents[1] / "support"))
