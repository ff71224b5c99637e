"""Random modules under random layouts, held against the module itself on one device.

    python -m tests.fuzz --seconds 600 --ranks 2-16   # verify, and simulated ranks
    python -m tests.fuzz --seconds 600 --gloo         # four real ranks, two optimizer steps
    python -m tests.fuzz --gloo 2 --habits 1          # two ranks, habits in every case

In reading order: `table` (what an op kind is) and the ops_*.py that fill it, `habits` (what people
do to a module between steps), `case` (a seed becomes a description), `source` (a description
becomes the text of a module), `reference` (what one device gives), `simulated` and `ranks` (what
the parallel program gives), `shrink`, `workers`, `__main__`.

On real ranks the habits of a case are done one before each further step, alike to the plain and to
the parallel module. Simulated ranks have no module that a user holds: all are done to the model
before it is planned.
"""

from __future__ import annotations

import sys
from pathlib import Path

# `plans` of tests/support is found there, as by pytest.
sys.path.append(str(Path(__file__).parents[1] / "support"))
