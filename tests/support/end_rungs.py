"""The end rungs of rematerialization: what a search for memory goes between."""

from __future__ import annotations

from autopar.planner.rematerialize import RematerializationSteps
from autopar.planner.rungs import Rematerialized


def end_rungs(steps: RematerializationSteps) -> tuple[Rematerialized, ...]:
    """Nothing; all blocks, weights or cheap ops again; weights and cheap ops."""
    return (
        Rematerialized((), ()),
        Rematerialized(steps.names, ()),
        Rematerialized((), steps.fetching),
        Rematerialized((), (), steps.cheap),
        Rematerialized((), steps.fetching, steps.cheap),
    )
