"""What passes leave behind for whoever looks into them: AUTOPAR_LOG and AUTOPAR_DUMP.

Example: AUTOPAR_LOG=debug prints a line a pass, with its seconds and the nodes of its graph, on
stderr; AUTOPAR_DUMP=folder writes every graph there, as 007-rewrite.txt. Rank 0 speaks; the others
print warnings alone. pass_manager.py calls `note`.
"""

from __future__ import annotations

import itertools
import logging
import os
from functools import cache
from pathlib import Path

from torch import fx

from autopar.errors import PlanError
from autopar.ir.show import listing

LEVEL, FOLDER = "AUTOPAR_LOG", "AUTOPAR_DUMP"  # environment variables
_NUMBERS = itertools.count()  # of the graphs of this process


@cache
def logger() -> logging.Logger:
    """Return the logger "autopar"; the first call gives it the level that AUTOPAR_LOG names.
    Raises PlanError for a level that logging does not have.
    """
    log = logging.getLogger("autopar")
    name = os.environ.get(LEVEL)
    if name:
        level = logging.getLevelName(name.upper())
        if not isinstance(level, int):
            raise PlanError(f"{LEVEL}={name}: it is debug, info, warning or error")
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"autopar rank {_rank()}: %(message)s"))
        log.addHandler(handler)
        log.setLevel(level if _rank() == 0 else max(level, logging.WARNING))
        log.propagate = False
    return log


def note(name: str, graph: fx.Graph | None, seconds: float) -> None:
    """Log that a pass ran, and write its graph, where the environment asks for that. Raises
    PlanError where the folder cannot be written to.
    """
    logger().debug(
        "%s: %.3f s%s", name, seconds, "" if graph is None else f", {len(graph.nodes)} nodes"
    )
    folder = os.environ.get(FOLDER)
    if not folder or graph is None or _rank():
        return
    path = Path(folder) / f"{next(_NUMBERS):03}-{name}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            listing(graph.owning_module or fx.GraphModule({}, graph), shapes=True), encoding="utf-8"
        )
    except OSError as error:
        raise PlanError(f"{FOLDER}={folder}: {error}") from error


def _rank() -> int:
    """Return this process's rank, as torchrun and SLURM's launchers give it."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
