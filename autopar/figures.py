"""What a plan says of a step: its collectives, a line a subgraph, and what memory it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective of the modelled step: where, on which axes, forward or backward, and the wire
    bytes a rank sends.
    """

    chain: str
    kind: str
    axes: tuple[str, ...]
    backward: bool
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Row:
    """One line of the table: a subgraph, what its products split on each axis, what it moves and
    how long it takes, added up.

    `computation`, `communication`, `exposed`: seconds of the simulated step, where the plan was
    made to run with communication under computation. What is not exposed is hidden.
    """

    subgraph: str
    layout: str
    collectives: str
    bytes: float
    seconds: float
    computation: float | None = None
    communication: float | None = None
    exposed: float | None = None

    @property
    def hidden(self) -> float:
        return (self.communication or 0.0) - (self.exposed or 0.0)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a training step, which the parts add up to.

    `parameters`: with buffers and constants. `gradients`: those of parameters that are there at
    that moment. `activations`: what the forward left for the backward and is still there, gathered
    weights among it. `transient`: what is made on the way, buffers of collectives among it.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    peak: float

    def __str__(self) -> str:
        unit, size = ("GiB", 2**30) if self.peak >= 2**27 else ("MiB", 2**20)
        names = ("parameters", "gradients", "optimizer", "activations", "transient")
        parts = ", ".join(f"{name} {getattr(self, name) / size:,.2f}" for name in names)
        return f"{self.peak / size:,.2f} {unit} ({parts})"


def summed(rows: Sequence[Row]) -> Row:
    """All rows added up, under the name "all"."""
    names = ("bytes", "seconds", "computation", "communication", "exposed")
    return Row("all", "", "", *(sum(getattr(row, name) or 0.0 for row in rows) for name in names))
