"""The plan: which mesh, which layout for every node and stored tensor, what it costs, and what
could not be split.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from .errors import PlanError
from .layout import Layout, State
from .mesh import Mesh

VERSION = 1


@dataclass(frozen=True)
class Choice:
    """What was chosen for one node: per axis what it splits (for people), and the layouts of its
    operands and results.
    """

    splits: tuple[str, ...]
    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]


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
    how long it takes.
    """

    subgraph: str
    layout: str
    collectives: str
    bytes: float
    seconds: float


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


@dataclass(frozen=True)
class Plan:
    """A chosen layout for a model on a world. `seconds`, `comm_bytes` and `peak_bytes` are
    modelled, per rank and training step.

    `fingerprint` names the traced graph that the plan is for: applying it to another one is
    refused.
    """

    mesh: Mesh
    layout: str
    choices: dict[str, Choice]
    stored: dict[str, Layout]  # of parameters, by placeholder
    copies: dict[
        tuple[str, int], Layout
    ]  # a second layout in which a value with several consumers is kept
    outputs: dict[str, Layout]
    seconds: float
    comm_bytes: float
    peak_bytes: float
    rows: tuple[Row, ...] = ()
    collectives: tuple[Collective, ...] = ()
    unsplit: tuple[str, ...] = ()  # what was not split and why, one sentence each
    meshes: tuple[
        tuple[str, float], ...
    ] = ()  # every mesh that was rated, with a proven lower bound of its seconds
    fingerprint: str = ""
    world: str = ""
    inputs: dict[str, Layout] = field(
        default_factory=dict
    )  # of the user's tensors, known after the rewrite
    panels: tuple[
        str, ...
    ] = ()  # the row and the column axis, where products run in SUMMA's panels
    recompute: tuple[str, ...] = ()  # blocks whose activations are computed again in the backward
    memory: Memory | None = None  # what the peak is made of, known after the rewrite
    bound: float = 0.0  # seconds: no plan of this layout is modelled faster, on any mesh rated
    seconds_by_pass: dict[str, float] = field(
        default_factory=dict, compare=False
    )  # that planning took
    ready: Any = field(
        default=None, compare=False, repr=False
    )  # what `apply` needs; only in the process that planned

    def table(self) -> Table:
        """The plan for people: one line a subgraph. Print it with rich."""
        title = (
            f"mesh {str(self.mesh) or 'of one rank'}, {self.seconds * 1e3:.1f} ms a step modelled"
            f"{self._certificate()}"
        )
        table = Table(title=title, title_justify="left", caption_justify="left")
        for name in ("subgraph", "layout", "collectives"):
            table.add_column(name, overflow="fold")
        table.add_column("MB/rank/step", justify="right")
        table.add_column("ms", justify="right")
        for row in self.rows:
            megabytes, milliseconds = f"{row.bytes / 1e6:,.2f}", f"{row.seconds * 1e3:.2f}"
            table.add_row(row.subgraph, row.layout, row.collectives, megabytes, milliseconds)
        legend = (
            "axis→loop dim of Y(m,n) = X(m,k)·W(k,n); AG all-gather, RS reduce-scatter, "
            "AR all-reduce, A2A all-to-all, B broadcast"
        )
        table.caption = "\n".join(
            [legend, *(f"not split: {escape(reason)}" for reason in self.unsplit)]
        )
        return table

    @property
    def gap(self) -> float:
        """By what part a plan of this layout could at most be faster, in modelled seconds: 0 where
        the plan is proven to be the fastest.
        """
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds and self.bound else 0.0

    def _certificate(self) -> str:
        if not self.bound or not self.mesh.axes:
            return ""
        several = f" on {len(self.meshes)} meshes" if len(self.meshes) > 1 else ""
        proof = "optimal" if self.gap < 1e-6 else f"at most {self.gap:.2%} above the optimum"
        return f", {proof}{several}"

    def formula(self, pattern: str = "*") -> Any:
        """What subgraphs move, as a closed form in the model's sizes and the axes': a
        `cost.formula.Formula`, to print and to evaluate at arrays of sizes.

        `pattern` names subgraphs as `table` does: "blocks.*.mlp"; what lies below counts too.
        Raises PlanError where it names none, and for a plan from a file, which holds no graph.

        Example: print(plan.formula("blocks.*.mlp")); plan.formula().bytes(Gx=[1, 2, 4])
        """
        if self.ready is None:
            raise PlanError(
                "a plan from a file holds no graph to read formulas off: plan again in this "
                "process, with autopar.plan(model, world, inputs, layout)"
            )
        return self.ready.formula(pattern)

    def timeline(self, overlap: bool = True) -> Any:
        """The modelled step, event by event: a `cost.timeline.Timeline` with `seconds`, what is
        exposed and hidden, and `save(path)` for Perfetto. `overlap=False`: every collective is
        waited for at once. Raises PlanError for a plan from a file.
        """
        if self.ready is None:
            raise PlanError("a plan from a file holds no graph: plan again to see its timeline")
        return self.ready.timeline(overlap)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_json(), file, indent=1)

    def to_json(self) -> dict[str, Any]:
        def layouts(found: dict[str, Layout]) -> dict[str, Any]:
            return {name: _write(layout) for name, layout in found.items()}

        return {
            "version": VERSION,
            "mesh": str(self.mesh),
            "layout": self.layout,
            "fingerprint": self.fingerprint,
            "world": self.world,
            "seconds": self.seconds,
            "comm_bytes": self.comm_bytes,
            "peak_bytes": self.peak_bytes,
            "bound": self.bound,
            "choices": {
                name: {
                    "splits": list(choice.splits),
                    "operands": [None if x is None else _write(x) for x in choice.operands],
                    "results": [_write(x) for x in choice.results],
                }
                for name, choice in self.choices.items()
            },
            "stored": layouts(self.stored),
            "outputs": layouts(self.outputs),
            "inputs": layouts(self.inputs),
            "copies": [[name, index, _write(x)] for (name, index), x in self.copies.items()],
            "rows": [asdict(row) for row in self.rows],
            "collectives": [asdict(c) for c in self.collectives],
            "panels": list(self.panels),
            "recompute": list(self.recompute),
            "memory": None if self.memory is None else asdict(self.memory),
            "unsplit": list(self.unsplit),
            "meshes": [list(pair) for pair in self.meshes],
        }

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote. Raises PlanError for another version or a file that is no
        plan.
        """
        with open(path, encoding="utf-8") as file:
            try:
                data = json.load(file)
            except json.JSONDecodeError as error:
                raise PlanError(f"{path} is no plan: {error}") from None
        return Plan.from_json(data, str(path))

    @staticmethod
    def from_json(data: Any, where: str = "the plan") -> Plan:
        if not isinstance(data, dict) or data.get("version") != VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise PlanError(
                f"{where} is version {found}, this autopar reads version {VERSION}: plan again"
            )
        mesh = Mesh.parse(data["mesh"])

        def read(found: dict[str, Any]) -> dict[str, Layout]:
            return {name: _read(mesh, x) for name, x in found.items()}

        choices = {
            name: Choice(
                tuple(c["splits"]),
                tuple(None if x is None else _read(mesh, x) for x in c["operands"]),
                tuple(_read(mesh, x) for x in c["results"]),
            )
            for name, c in data["choices"].items()
        }
        return Plan(
            mesh,
            data["layout"],
            choices,
            read(data["stored"]),
            {(name, index): _read(mesh, x) for name, index, x in data["copies"]},
            read(data["outputs"]),
            data["seconds"],
            data["comm_bytes"],
            data["peak_bytes"],
            tuple(Row(**row) for row in data["rows"]),
            tuple(Collective(**{**c, "axes": tuple(c["axes"])}) for c in data["collectives"]),
            tuple(data["unsplit"]),
            tuple((name, seconds) for name, seconds in data["meshes"]),
            data["fingerprint"],
            data["world"],
            read(data["inputs"]),
            tuple(data["panels"]),
            tuple(data["recompute"]),
            None if data["memory"] is None else Memory(**data["memory"]),
            data["bound"],
        )


def _write(layout: Layout) -> dict[str, Any]:
    states = [f"S({s.dim},{s.stride})" if s.kind == "S" else s.kind for s in layout.states]
    return {"shape": list(layout.shape), "states": states}


def _read(mesh: Mesh, data: dict[str, Any]) -> Layout:
    states = []
    for text in data["states"]:
        if text.startswith("S("):
            dim, stride = text[2:-1].split(",")
            states.append(State("S", int(dim), int(stride)))
        elif text in ("I", "R", "P"):
            states.append(State(text))
        else:
            raise PlanError(f"state {text!r} in a plan: it is I, R, P or S(dim,stride)")
    return Layout(mesh, tuple(data["shape"]), tuple(states))
