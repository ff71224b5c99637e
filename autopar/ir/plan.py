"""The plan: which mesh, which layout for every node and stored tensor, what it costs, and what
could not be split.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from autopar.errors import PlanError
from autopar.ir import plan_file
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan_file import digest, write
from autopar.ir.plan_table import Collective, Memory, Row, summed_rows
from autopar.world import World, json_file

REDUCE_DTYPES = {None: None, torch.float32: "float32"}  # by the names in files
# Of a step that overlaps, with their headings: short ones, as the collectives want the room.
_PARTS = {
    "computation": "compute",
    "communication": "comm.",
    "hidden": "hidden",
    "exposed": "exposed",
}
_FACTS = (
    "layout", "fingerprint", "seconds", "comm_bytes", "peak_bytes", "bound", "optimizer", "limit",
    "device_limit",
)  # fmt: skip
_NAMES = ("panels", "recompute", "regather", "groups", "unsplit")
_AS_THEY_ARE = (
    "world", "rows", "collectives", "memory", "meshes", "smaller", "overlapped", "planned",
)  # fmt: skip
_LAYOUTS = ("mesh", "stored", "outputs", "copies", "recompute", "regather")  # in a file


@dataclass(frozen=True)
class Choice:
    """What was chosen for one node: per axis what it splits (for people), and the layouts of its
    operands and results.
    """

    splits: tuple[str, ...]
    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]


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
    # a second layout in which a value with several consumers is kept
    copies: dict[tuple[str, int], Layout]
    outputs: dict[str, Layout]
    seconds: float
    comm_bytes: float
    peak_bytes: float
    rows: tuple[Row, ...] = ()
    collectives: tuple[Collective, ...] = ()
    unsplit: tuple[str, ...] = ()  # what was not split and why, one sentence each
    # every mesh that was rated, with a proven lower bound of its seconds
    meshes: tuple[tuple[str, float], ...] = ()
    fingerprint: str = ""
    world: World = field(default_factory=lambda: World.of(1))  # that it was planned for
    # of the user's tensors, known after the rewrite
    inputs: dict[str, Layout] = field(default_factory=dict)
    # the row and the column axis, where products run in SUMMA's panels
    panels: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()  # blocks whose activations are computed again in the backward
    regather: tuple[str, ...] = ()  # blocks whose weights are only gathered again there, not kept
    memory: Memory | None = None  # what the peak is made of, known after the rewrite
    bound: float = 0.0  # seconds: no plan of this layout is modelled faster, on any mesh rated
    optimizer: str | float = "adamw"  # whose states are in `memory`
    limit: float | None = None  # bytes on each device, where the fastest plan does not fit them
    device_limit: float | None = None  # bytes that no step may exceed on any device
    # ranks and modelled seconds of a smaller world that would be as fast
    smaller: tuple[int, float] | None = None
    reduce_dtype: torch.dtype | None = None  # what parameters' gradients are added up in
    # process groups that the graph communicates over, known after the rewrite: "x", "data.x"
    groups: tuple[str, ...] = ()
    # seconds of a step with communication under computation, where it was chosen to run so
    overlapped: float | None = None
    # digests of what was split and of the layouts, as autopar planned them
    planned: tuple[str, str] = field(default=("", ""), compare=False)
    told: tuple[str, ...] = field(default=(), compare=False)  # where a file's figures were others
    notes: tuple[str, ...] = field(default=(), compare=False)  # what this layout costs besides
    seconds_by_pass: dict[str, float] = field(default_factory=dict, compare=False)  # planning took
    # what `apply` needs; only in the process that planned
    ready: Any = field(default=None, compare=False, repr=False)

    def table(self) -> Table:
        """The plan for people: one line a subgraph. Print it with rich."""
        title = (
            f"mesh {str(self.mesh) or 'of one rank'}, {self._hidden()}{self.seconds * 1e3:.1f} ms "
            f"{'a step modelled' if self.overlapped is None else 'summed'}{self._certificate()}"
        )
        table = Table(title=title, title_justify="left", caption_justify="left")
        table.add_column("subgraph", no_wrap=True)
        for name in ("layout", "collectives"):
            table.add_column(name, overflow="fold")
        names = ["MB/rank/step", "ms"]
        if self.overlapped is not None:
            names = ["MB", *(f"{heading}\nms" for heading in _PARTS.values())]
        for name in names:
            table.add_column(name, justify="right", min_width=max(map(len, name.split())))
        for row in self.rows:
            table.add_row(*self._cells(row))
        if self.overlapped is not None:
            table.add_section()
            table.add_row(*self._cells(summed_rows(self.rows)))
        legend = (
            "axis→loop dim of Y(m,n) = X(m,k)·W(k,n); AG all-gather, RS reduce-scatter, "
            "AR all-reduce, A2A all-to-all, B broadcast"
        )
        table.caption = "\n".join(
            [
                legend,
                *self._parts(),
                *(f"not split: {escape(reason)}" for reason in self.unsplit),
                *(escape(f"{what} again in the backward: {names}") for names, what in self.dropped),
                *self._as_fast(),
                *(escape(line) for line in (*self.notes, *self.told)),
            ]
        )
        return table

    def _cells(self, row: Row) -> list[str]:
        seconds: list[float] = [row.seconds]
        if self.overlapped is not None:
            seconds = [getattr(row, name) or 0.0 for name in _PARTS]
        numbers = [f"{row.bytes / 1e6:,.2f}", *(f"{each * 1e3:.2f}" for each in seconds)]
        return [*map(escape, (row.subgraph, row.layout, row.collectives)), *numbers]

    @property
    def gap(self) -> float:
        """By what part a plan of this layout could at most be faster, in modelled seconds: 0 where
        the plan is proven to be the fastest. Of `seconds`, where nothing hides.
        """
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds and self.bound else 0.0

    def _hidden(self) -> str:
        """The step with communication under computation, if it is to run so."""
        if self.overlapped is None:
            return ""
        return f"{self.overlapped * 1e3:.1f} ms a step modelled with communication hidden, "

    def _parts(self) -> list[str]:
        """What the step with communication under computation is made of."""
        if self.overlapped is None:
            return []
        total = summed_rows(self.rows)
        parts = [
            f"{_PARTS[name]} {getattr(total, name) * 1e3:.2f}"
            for name in ("computation", "exposed")
        ]
        step = f"{' + '.join(parts)} = {self.overlapped * 1e3:.2f} ms a step"
        return [f"MB: sent by a rank; {step}"]

    def _certificate(self) -> str:
        if not self.bound or not self.mesh.axes:
            return ""
        several = f" on {len(self.meshes)} meshes" if len(self.meshes) > 1 else ""
        least = "optimum" if self.overlapped is None else "least sum"
        proof = "optimal" if self.gap < 1e-6 else f"at most {self.gap:.2%} above the {least}"
        return f", {proof}{self._knowing()}{several}"

    def _knowing(self) -> str:
        """Whether what bounds the plan knows of the limit that it had to fit."""
        if self.limit is None or self.gap < 1e-6:
            return ""
        free = min((seconds for _, seconds in self.meshes), default=self.bound)
        within = self.bound > free * (1 + 1e-6)
        return " within this memory" if within else " of unlimited memory"

    @property
    def dropped(self) -> tuple[tuple[str, str], ...]:
        """What is not kept for the backward, in words: which blocks, and what is done there."""
        pairs = (self.recompute, "computed"), (self.regather, "weights gathered")
        return tuple((_spanned(names), what) for names, what in pairs if names)

    def _as_fast(self) -> list[str]:
        if self.smaller is None:
            return []
        ranks, seconds = self.smaller
        plural = "s" if ranks > 1 else ""
        return [f"{ranks} rank{plural} would be as fast: {seconds * 1e3:.1f} ms a step modelled"]

    @property
    def edited(self) -> frozenset[str]:
        """Which parts were changed since autopar planned them: "splits" (what the nodes split),
        "layouts" (the mesh, every layout, and what is recomputed).
        """
        names = ("splits", "layouts")
        now = _digests(self.to_json()) if any(self.planned) else self.planned
        pairs = zip(names, now, self.planned, strict=True)
        return frozenset(name for name, one, other in pairs if one != other)

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

    def why(self, pattern: str) -> Any:
        """Why this choice in these nodes: a `report.why.Why`, to print with rich, with up to five
        runners-up and what each would cost more in the whole plan, by term.

        `pattern` is a node's name or a module path, "blocks.0.mlp", "blocks.*.mlp" for all layers
        alike; what lies below counts too. Raises PlanError where it names nothing, and for a plan
        from a file.

        Example: rich.print(plan.why("blocks.0.mlp"))
        """
        if self.ready is None:
            raise PlanError(
                "a plan from a file does not know what it was chosen from: plan again in this "
                "process, with autopar.plan(model, world, inputs, layout)"
            )
        return self.ready.why(pattern)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, in one step: a save that fails leaves the file that was there."""
        json_file.write(path, json.dumps(self.to_json(), indent=1))

    def to_json(self) -> dict[str, Any]:
        def layouts(found: dict[str, Layout]) -> dict[str, Any]:
            return {name: write(layout) for name, layout in found.items()}

        def choice(found: Choice) -> dict[str, Any]:
            operands = [None if x is None else write(x) for x in found.operands]
            results = [write(x) for x in found.results]
            return {"splits": list(found.splits), "operands": operands, "results": results}

        data = {
            "version": plan_file.VERSION,
            "mesh": str(self.mesh),
            **{name: getattr(self, name) for name in _FACTS},
            "world": self.world.to_json(),
            "choices": {name: choice(found) for name, found in self.choices.items()},
            **{name: layouts(getattr(self, name)) for name in ("stored", "outputs", "inputs")},
            "copies": [[name, index, write(x)] for (name, index), x in self.copies.items()],
            "rows": [asdict(row) for row in self.rows],
            "collectives": [asdict(c) for c in self.collectives],
            **{name: list(getattr(self, name)) for name in _NAMES},
            "memory": None if self.memory is None else asdict(self.memory),
            "meshes": [list(pair) for pair in self.meshes],
            "smaller": None if self.smaller is None else list(self.smaller),
            "overlapped": self.overlapped,
            "reduce_dtype": REDUCE_DTYPES[self.reduce_dtype],
        }
        return {**data, "planned": list(self.planned if any(self.planned) else _digests(data))}

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote. Raises PlanError for another version, for a file that is
        no plan, and with every field that is wrong.
        """
        return _read(plan_file.load(path))

    @staticmethod
    def from_json(data: Any, where: str = "the plan") -> Plan:
        """The same from what `to_json` gave; messages say `where` it stands."""
        return _read(plan_file.inside(data, where))


def _spanned(names: tuple[str, ...]) -> str:
    """blocks.0, blocks.1, blocks.2 -> 3 blocks, blocks.0 to blocks.2"""
    several = f"{len(names)} blocks, " if len(names) > 1 else ""
    return several + (f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0])


def _read(reader: plan_file.Reader) -> Plan:
    file = reader.file
    plain = {name: getattr(file, name) for name in (*_FACTS, *_NAMES, *_AS_THEY_ARE)}
    return Plan(
        mesh=reader.mesh,
        choices={
            name: Choice(found.splits, reader.operands(name), reader.results(name))
            for name, found in file.choices.items()
        },
        stored=reader.layouts("stored"),
        outputs=reader.layouts("outputs"),
        inputs=reader.layouts("inputs"),
        copies=reader.copies(),
        reduce_dtype=reduce_dtype(file.reduce_dtype),
        **plain,
    )


def reduce_dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    """What gradients of parameters are to be added up in: None for their own dtype, float32 by name
    or as a dtype. Raises PlanError for others.
    """
    for dtype, name in REDUCE_DTYPES.items():
        if given in (dtype, name):
            return dtype
    raise PlanError(
        f"reduce_dtype is {given!r}: gradients of parameters are added up in float32, or "
        "(None) in their own dtype"
    )


def _digests(data: dict[str, Any]) -> tuple[str, str]:
    """Of what the nodes split, and of every layout."""
    splits = {name: choice["splits"] for name, choice in data["choices"].items()}
    layouts = [data[key] for key in _LAYOUTS]
    layouts += [[name, c["operands"], c["results"]] for name, c in data["choices"].items()]
    return digest(splits), digest(layouts)
