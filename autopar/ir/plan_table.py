"""What a plan says of a step: its collectives, a line a subgraph, and what memory it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

_STRICT = ConfigDict(extra="forbid")  # as plans' files are read
# Bytes or seconds of a step.
Amount = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
CollectiveKind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce"
]
STATES = {
    "adamw": 2,
    "adam": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd-momentum": 1,
    "sgd": 0,
}  # numbers that an optimizer keeps for every trained one, each in the dtype of the parameter


@dataclass(frozen=True)
class Collective:
    """One collective of the modelled step: where, on which axes, forward or backward, and the wire
    bytes a rank sends.
    """

    __pydantic_config__ = _STRICT
    chain: str
    kind: CollectiveKind
    axes: tuple[str, ...]
    backward: bool
    bytes: Amount
    seconds: Amount


@dataclass(frozen=True)
class Row:
    """One line of the table: a subgraph, what its products split on each axis, what it moves and
    how long it takes, added up.

    `computation`, `communication`, `exposed`: seconds of the simulated step, where the plan was
    made to run with communication under computation. What is not exposed is hidden.
    """

    __pydantic_config__ = _STRICT
    subgraph: str
    layout: str
    collectives: str
    bytes: Amount
    seconds: Amount
    computation: Amount | None = None
    communication: Amount | None = None
    exposed: Amount | None = None

    @property
    def hidden(self) -> float:
        return (self.communication or 0.0) - (self.exposed or 0.0)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a training step, which the parts add up to.

    `parameters`: with buffers and constants. `gradients`: those of parameters that are there at
    that moment. `activations`: what the forward left for the backward and is still there, gathered
    weights among it. `transient`: what is made on the way, buffers of collectives among it.
    `in_flight`: what a step may hold besides so that communication runs under computation: weights
    that are fetched early, gradients that wait for their sums.
    """

    __pydantic_config__ = _STRICT
    parameters: Amount
    gradients: Amount
    optimizer: Amount
    activations: Amount
    transient: Amount
    peak: Amount
    in_flight: Amount = 0.0

    @property
    def waiting(self) -> float:
        """Bytes at the peak of a step that waits for every collective at once."""
        return self.peak - self.in_flight

    def __str__(self) -> str:
        unit, size = ("GiB", 2**30) if self.peak >= 2**27 else ("MiB", 2**20)
        names = ("parameters", "gradients", "optimizer", "activations", "transient", "in_flight")
        parts = ", ".join(
            f"{name.replace('_', ' ')} {getattr(self, name) / size:,.2f}" for name in names
        )
        return f"{self.peak / size:,.2f} {unit} ({parts})"


def summed_rows(rows: Sequence[Row]) -> Row:
    """All rows added up, under the name "all"."""
    names = ("bytes", "seconds", "computation", "communication", "exposed")
    return Row("all", "", "", *(sum(getattr(row, name) or 0.0 for row in rows) for name in names))
