"""The modelled step as a plan shows it: its collectives, a line a subgraph, and its memory; and
amounts, bytes and seconds as people read them.

Example: Row("blocks.0-3.mlp", "x→n k", …) is a line of `Plan.table`, for four layers alike.
cost/summary.py and cost/memory.py make these figures, plan_file.py reads them, the planner's memory
search compares the `Memory` of plans. The command line and planner/why.py print units.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

_STRICT = ConfigDict(extra="forbid")  # of plans' files: an unknown field is a mistake
# Bytes or seconds in a step.
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
}  # states that an optimizer keeps for every trained number, each in the dtype of the parameter


@dataclass(frozen=True)
class Collective:
    """One collective of the modelled step: its subgraph (`chain`), the axes, forward or backward,
    the bytes that a rank sends, and its seconds.
    """

    __pydantic_config__ = _STRICT
    chain: str
    kind: CollectiveKind
    axes: tuple[str, ...]
    backward: bool
    bytes: Amount
    seconds: Amount


@dataclass(frozen=True)
class Padding:
    """A factor of a dim that is padded with zeros: `place` among the factors of dim `dim` of the
    value of `node`, from `size` to `padded`.
    """

    __pydantic_config__ = _STRICT
    node: str
    dim: Annotated[int, Field(ge=0, le=64)]
    place: Annotated[int, Field(ge=0, le=64)]
    size: Annotated[int, Field(ge=2, le=2**62)]
    padded: Annotated[int, Field(ge=2, le=2**62)]


@dataclass(frozen=True)
class Row:
    """One line of the table: a subgraph, what its matmuls split on each axis, its collectives, and
    the sums of its bytes and seconds.

    `computation`, `communication`, `exposed`: seconds of the simulated step, where the plan was
    made to overlap communication with computation. Communication that is not exposed is hidden.
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
    def step_seconds(self) -> float:
        """Seconds that the line takes of the step: computing and exposed ones, where the step was
        simulated, else all.
        """
        if self.computation is None:
            return self.seconds
        return self.computation + (self.exposed or 0.0)

    @property
    def hidden(self) -> float:
        """Seconds of communication that run under computation."""
        return (self.communication or 0.0) - (self.exposed or 0.0)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a training step: the fields add up to `peak`.

    `parameters`: with buffers and constants. `gradients`: those of parameters that are live at the
    peak. `activations`: saved activations that the backward has yet to use, gathered weights among
    them. `transient`: intermediate results, buffers of collectives among them. `in_flight`: what a
    step may hold besides to overlap communication with computation: weights that are gathered
    early, gradients that wait for their sums.
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
        """The peak in bytes of a step that waits for every collective at once."""
        return self.peak - self.in_flight

    def __str__(self) -> str:
        unit, size = byte_unit(self.peak)
        names = ("parameters", "gradients", "optimizer", "activations", "transient", "in_flight")
        amounts = {name.replace("_", " "): f"{getattr(self, name) / size:,.2f}" for name in names}
        terms = ", ".join(f"{name} {text}" for name, text in amounts.items() if text != "0.00")
        return f"{self.peak / size:,.2f} {unit} ({terms})"


def summed_rows(rows: Sequence[Row]) -> Row:
    """Return the sum of all rows, as a row named "all"."""
    names = ("bytes", "seconds", "computation", "communication", "exposed")
    return Row("all", "", "", *(sum(getattr(row, name) or 0.0 for row in rows) for name in names))


def subgraphs_of(subgraph: str) -> list[str]:
    """Return the subgraphs that a line of the table is about.

    >>> subgraphs_of("blocks.0-2.mlp"), subgraphs_of("head")
    (['blocks.0.mlp', 'blocks.1.mlp', 'blocks.2.mlp'], ['head'])
    >>> subgraphs_of("blocks.0-1.1,3")
    ['blocks.0.1', 'blocks.0.3', 'blocks.1.1', 'blocks.1.3']
    """
    names = [_numbers_of(name) for name in subgraph.split(".")]
    return [".".join(path) for path in itertools.product(*names)]


def numbers_text(numbers: Iterable[int]) -> str:
    """Return numbers with those that follow one another as ranges.

    >>> numbers_text([0, 1, 2, 5, 7])
    '0-2,5,7'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _numbers_of(name: str) -> list[str]:
    """Return what `numbers_text` wrote as one name of a path, each number alone; any other name as
    it is.
    """
    if re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", name) is None:
        return [name]
    ends = [list(map(int, run.split("-"))) for run in name.split(",")]
    return [str(number) for run in ends for number in range(run[0], run[-1] + 1)]


# -- units -----------------------------------------------------------------------------------------
def format_count(things: int) -> str:
    """Return a number of things, such as parameters, with B for billions: "8.03 B"."""
    return format_amount(things).replace("G", "B").strip()


def format_ranks(ranks: int) -> str:
    """Return a number of ranks in words: "1 rank", "1,024 ranks"."""
    return f"{ranks:,} rank{'' if ranks == 1 else 's'}"


def format_amount(value: float) -> str:
    """Return a number with a metric prefix, and a space for the unit to follow: "8.03 G"."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.0f} "


def format_bytes(size: float) -> str:
    """Return bytes in GiB or MiB: "80.00 GiB"."""
    unit, unit_bytes = byte_unit(size)
    return f"{size / unit_bytes:,.2f} {unit}"


def byte_unit(size: float) -> tuple[str, int]:
    """Return the unit in which bytes up to `size` are read best, and its size: ("MiB", 2**20)."""
    return ("GiB", 2**30) if size >= 2**27 else ("MiB", 2**20)


def format_seconds(seconds: float) -> str:
    """Return seconds in s or ms: "12.50 ms"."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def blocks_text(names: tuple[str, ...]) -> str:
    """Return blocks in words: "3 blocks, blocks.0 to blocks.2"."""
    several = f"{len(names)} blocks, " if len(names) > 1 else ""
    return several + (f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0])
