"""The plan: a mesh, a layout for every node and stored tensor, what a step costs, and what could
not be split.

Example: autopar.plan(model, world, inputs, "fsdp") returns one; print(plan.table()) shows it, and
plan.save(path) writes it for Plan.load. The planner makes plans, planner/edit.py checks edited
ones, passes/rewrite.py turns a graph and its plan into the distributed graph. plan_file.py reads
the file, plan_table.py holds the lines of the table.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from autopar.errors import PlanError
from autopar.ir import plan_file, plan_view
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.pipeline_schedule import Pipeline, pipeline_of
from autopar.ir.plan_file import digest, write
from autopar.ir.plan_table import Collective, Memory, Padding, Row, blocks_text
from autopar.world import World, json_file
from autopar.world.world import CALIBRATED

if TYPE_CHECKING:  # what a plan answers with stands above it
    from autopar.cost.formula import Formula
    from autopar.cost.pipeline import PipelineTimeline
    from autopar.cost.simulator import Timeline
    from autopar.planner.plan_context import PlanContext
    from autopar.planner.why import Why

_FACTS = (
    "layout", "fingerprint", "seconds", "comm_bytes", "peak_bytes", "bound", "optimizer", "limit",
    "device_limit", "replicated_outputs", "microbatches", "sums_once",
    "gathers_once", "interleaved", "strided_from", "schedule", "rounds", "slices_borders",
)  # fmt: skip
_NAME_LISTS = ("panels", "recompute", "regather", "rerun", "groups", "unsplit",
               "stage_starts")  # fmt: skip
_UNCONVERTED = (
    "world", "rows", "collectives", "memory", "meshes", "smaller", "overlapped", "planned",
    "padding",
)  # fmt: skip
# Fields of a file.
_LAYOUT_FIELDS = ("mesh", "stored", "outputs", "copies", "recompute", "regather", "rerun")


@dataclass(frozen=True)
class Choice:
    """The choice for one node: what each axis splits (for people), and the layouts of its operands
    and results.
    """

    splits: tuple[str, ...]
    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Decision:
    """What a plan decides: all that the graph of a rank, and how it runs, follow from."""

    mesh: Mesh
    choices: dict[str, Choice]
    stored: dict[str, Layout]  # layouts of parameters, by placeholder
    # a second layout in which some consumers of a value take it
    copies: dict[tuple[str, int], Layout]
    outputs: dict[str, Layout]
    world: World = field(default_factory=lambda: World.of(1))  # the world it was planned for
    # the row and the column axis, where matmuls run as SUMMA
    panels: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()  # blocks that are computed again in the backward
    regather: tuple[str, ...] = ()  # blocks whose weights are gathered again in the backward
    rerun: tuple[str, ...] = ()  # blocks whose cheap ops run again in the backward
    reduce_dtype: torch.dtype | None = None  # in which parameters' gradients are summed
    replicated_outputs: bool = False  # every rank returns all of every output, not its own part
    microbatches: int = 1  # of a step, one after the other; the graph is that of one
    sums_once: bool = True  # ranks sum every gradient once a step, not once a micro-batch
    gathers_once: bool = False  # ranks gather every weight once a step, not once a micro-batch
    interleaved: bool = False  # micro-batches run in pairs: one computes as the other sends
    # the block that each stage of a pipeline but the first begins with; none without stages
    stage_starts: tuple[str, ...] = ()
    schedule: str = ""  # of a pipeline: a name of ir.pipeline_schedule.SCHEDULES
    rounds: int = 1  # stages of a rank
    slices_borders: bool = False  # of what ranks of a stage hold alike, each sends on a slice
    # tokens: sequences as long, which causal attention reads, may be split by stride
    strided_from: int | None = None
    # factors of dims that are padded with zeros, so that axes divide them
    padding: tuple[Padding, ...] = ()

    def decides_as(self, other: Decision) -> bool:
        """Whether both decide the same."""
        names = (each.name for each in fields(Decision))
        return all(getattr(self, name) == getattr(other, name) for name in names)


@dataclass(frozen=True, kw_only=True, repr=False)
class Figures:
    """What a decision comes to: seconds, bytes and collectives of one rank in one training step."""

    seconds: float
    comm_bytes: float = 0.0
    peak_bytes: float = 0.0
    bound: float = 0.0  # seconds: no plan of this layout is faster on any of `meshes`
    # every mesh that was considered, with a proven lower bound of its seconds
    meshes: tuple[tuple[str, float], ...] = ()
    # seconds of a step with communication under computation, where it was chosen to run so
    overlapped: float | None = None
    memory: Memory | None = None  # the terms of the peak, known after the rewrite
    rows: tuple[Row, ...] = ()
    collectives: tuple[Collective, ...] = ()
    # axes of the process groups in the graph, known after the rewrite: "x", "data.x"
    groups: tuple[str, ...] = ()
    # layouts of the user's tensors, known after the rewrite
    inputs: dict[str, Layout] = field(default_factory=dict)
    unsplit: tuple[str, ...] = ()  # what was not split and why, one sentence each
    # ranks and modelled seconds of a smaller world that would be as fast
    smaller: tuple[int, float] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)  # other costs of this layout


@dataclass(frozen=True, kw_only=True, repr=False)
class Origin:
    """Where a plan comes from: the model, what was asked, and the process or the file."""

    layout: str
    fingerprint: str = ""
    optimizer: str | float = "adamw"  # whose states are in `memory`
    limit: float | None = None  # bytes on each device, if the fastest plan needs more
    device_limit: float | None = None  # bytes that no step may exceed on any device
    # digests of the splits and of the layouts, as autopar planned them: edits change them
    planned: tuple[str, str] = field(default=("", ""), compare=False)
    # which figures of a file differ from those computed anew, in sentences
    changed_figures: tuple[str, ...] = field(default=(), compare=False)
    seconds_by_pass: dict[str, float] = field(default_factory=dict, compare=False)  # of planning
    # the PlanContext that `apply` needs; only in the process that planned
    context: PlanContext | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Decision, Figures, Origin):
    """A chosen layout for a model on a world: a decision, its figures and its origin. `seconds`,
    `comm_bytes` (sent) and `peak_bytes` (held) are modelled, of one rank in one training step.

    >>> import autopar
    >>> plan = autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 8),), "megatron")
    >>> print(plan.mesh, plan.stored["p_weight"], plan.stored["p_weight"].local_shape)
    tp4 tp:S(0) (4, 8)

    `fingerprint` names the traced graph that the plan is for; `apply` refuses another one.
    """

    def table(self) -> Table:
        """Return the plan as a table for people, one line a subgraph: `print` shows it, rich.print
        in colour.

        >>> import autopar
        >>> plan = autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 8),), "megatron")
        >>> [column.header for column in plan.table().columns[:3]]
        ['subgraph', 'layout', 'collectives']
        """
        return plan_view.table(self)

    @property
    def step_seconds(self) -> float:
        """The seconds of the modelled step: with communication hidden where the plan hides it, else
        the sum `seconds`.
        """
        return self.seconds if self.overlapped is None else self.overlapped

    @property
    def ranks(self) -> int:
        """The ranks that the plan is for: those of the mesh, for each of a pipeline's."""
        return max(1, self.mesh.size) * self.pipeline.ranks

    @property
    def pipeline(self) -> Pipeline:
        """How the stages lie on ranks; of one rank without stages."""
        ranks = (len(self.stage_starts) + 1) // self.rounds
        return pipeline_of(self.schedule, ranks, self.rounds) if self.schedule else Pipeline(ranks)

    @property
    def measured(self) -> bool:
        """Whether the rates of the plan's world are those that calibrate measured, none assumed."""
        return bool(self.world.measured) or self.world.name == CALIBRATED

    @property
    def gap(self) -> float:
        """The largest part of `seconds` that another plan of this layout could save: 0 where the
        plan is proven to be the fastest, 0.1 where another may take a tenth less. It counts
        collectives that are not hidden.
        """
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds and self.bound else 0.0

    @property
    def dropped(self) -> tuple[tuple[str, str], ...]:
        """The blocks with work that the backward repeats, and which: "computed", "weights gathered"
        or "norms, activations and other cheap ops".
        """
        pairs = [(self.recompute, "computed"), (self.regather, "weights gathered")]
        pairs.append((self.rerun, "norms, activations and other cheap ops"))
        return tuple((blocks_text(names), what) for names, what in pairs if names)

    @property
    def edited(self) -> frozenset[str]:
        """The parts that were edited since autopar planned them: "splits" (what the nodes split),
        "layouts" (the mesh, every layout, and what is recomputed).
        """
        names = ("splits", "layouts")
        now = _digests(self.to_json()) if any(self.planned) else self.planned
        pairs = zip(names, now, self.planned, strict=True)
        return frozenset(
            name for name, digest_now, digest_planned in pairs if digest_now != digest_planned
        )

    def formula(self, pattern: str = "*") -> Formula:
        """Return the bytes that subgraphs move as a closed form in the sizes of the model and of
        the axes: a `cost.formula.Formula`, to print and to evaluate at arrays of sizes.

        `pattern` names subgraphs as `table` does: "blocks.*.mlp"; what lies below counts too.
        Raises PlanError where it names none, and for a plan from a file, which holds no graph.

        >>> import autopar
        >>> linear, x = torch.nn.Linear(8, 16), torch.ones(4, 8)
        >>> plan = autopar.plan(linear, 4, (x,), "ddp", outputs="sharded")
        >>> plan.formula().bytes(Gdata=[1, 2, 4])  # the all-reduce of 144 float32 gradients
        array([  0., 576., 864.])
        """
        if self.context is None:
            raise PlanError(
                "a plan from a file holds no graph to read formulas off: plan again in this "
                "process, with autopar.plan(model, world, inputs, layout)"
            )
        return self.context.formula(pattern)

    def timeline(self, overlap: bool = True) -> Timeline | PipelineTimeline:
        """Return the modelled step event by event: a `cost.simulator.Timeline` with its `seconds`,
        exposed and hidden ones, and `save(path)` for Perfetto. `overlap=False`: the step waits for
        every collective at once. Of a plan with stages, a `cost.pipeline.PipelineTimeline`: the
        actions and sends of every rank of the pipeline, whose stages overlap either way. Raises
        PlanError for a plan from a file.

        >>> import autopar
        >>> plan = autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 8),), "megatron")
        >>> plan.timeline().seconds <= plan.timeline(overlap=False).seconds
        True
        """
        if self.context is None:
            raise PlanError("a plan from a file holds no graph: plan again to see its timeline")
        return self.context.timeline(overlap)

    def why(self, pattern: str) -> Why:
        """Return why these nodes have this choice: a `planner.why.Why`, to print with rich, with up
        to five runners-up and what each would add to the cost of the plan, by term.

        `pattern` is a node's name or a module path, "blocks.0.mlp", "blocks.*.mlp" for all layers
        alike; what lies below counts too. Raises PlanError where it names nothing, and for a plan
        from a file.

        >>> import autopar
        >>> why = autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 8),)).why("linear")
        >>> why.chosen, [runner.layout for runner in why.runners]
        ('linear x→n', ['linear x→k', 'linear x→m'])
        """
        if self.context is None:
            raise PlanError(
                "a plan from a file does not know what it was chosen from: plan again in this "
                "process, with autopar.plan(model, world, inputs, layout)"
            )
        return self.context.why(pattern)

    def report(
        self, path: str | os.PathLike[str], name: str = "", inputs: Any = None, compare: bool = True
    ) -> None:
        """Write a page about the plan, one HTML file that needs no network: meshes and layouts,
        modules with who holds what, the step, its memory, the cluster, one block's graph.

        `name` of the model, for its title; `inputs` of the step give tokens/s; `compare` plans the
        named layouts, too, for half a minute at most. A plan from a file has what the file holds.
        Raises `ReportError` where plotly or jinja2 is missing (the extra `report`).

        >>> import autopar, tempfile
        >>> plan = autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 8),), "megatron")
        >>> plan.report(path := f"{tempfile.mkdtemp()}/report.html", "a linear", compare=False)
        >>> "<h1>a linear on 4 ranks</h1>" in open(path).read()
        True
        """
        # The page stands above the plan that it is of, as what `why` and `timeline` answer with.
        page = importlib.import_module("autopar.tools.report.page")
        page.write_page(self, path, name, inputs, compare)

    def __repr__(self) -> str:
        return plan_view.summary(self)

    def _repr_html_(self) -> str:
        return plan_view.notebook(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, in one step: a save that fails leaves the file that was there.

        >>> import autopar, tempfile
        >>> plan = autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 8),), "megatron")
        >>> plan.save(path := f"{tempfile.mkdtemp()}/plan.json")
        >>> autopar.Plan.load(path) == plan
        True
        """
        json_file.write(path, json.dumps(self.to_json(), indent=1))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as dicts, lists and numbers, for `from_json` and as `save` writes it.

        >>> import autopar
        >>> plan = autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 8),), "megatron")
        >>> Plan.from_json(plan.to_json()).to_json()["mesh"]
        'tp4'
        """

        def layouts(by_name: dict[str, Layout]) -> dict[str, Any]:
            return {name: write(layout) for name, layout in by_name.items()}

        def choice(node_choice: Choice) -> dict[str, Any]:
            operands = [None if x is None else write(x) for x in node_choice.operands]
            results = [write(x) for x in node_choice.results]
            return {"splits": list(node_choice.splits), "operands": operands, "results": results}

        data = {
            "version": plan_file.VERSION,
            "mesh": str(self.mesh),
            **{name: getattr(self, name) for name in _FACTS},
            "world": self.world.to_json(),
            "choices": {name: choice(chosen) for name, chosen in self.choices.items()},
            **{name: layouts(getattr(self, name)) for name in ("stored", "outputs", "inputs")},
            "copies": [[name, index, write(x)] for (name, index), x in self.copies.items()],
            "rows": [asdict(row) for row in self.rows],
            "collectives": [asdict(c) for c in self.collectives],
            **{name: list(getattr(self, name)) for name in _NAME_LISTS},
            "memory": None if self.memory is None else asdict(self.memory),
            "meshes": [list(pair) for pair in self.meshes],
            "smaller": None if self.smaller is None else list(self.smaller),
            "overlapped": self.overlapped,
            "padding": [asdict(each) for each in self.padding],
            "reduce_dtype": plan_file.REDUCE_DTYPES[self.reduce_dtype],
        }
        return {**data, "planned": list(self.planned if any(self.planned) else _digests(data))}

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote. Raises PlanError for a file of another version and for one
        that is no plan, with every field that is wrong.
        """
        return _plan_of_file(plan_file.load(path))

    @staticmethod
    def from_json(data: Any, where: str = "the plan") -> Plan:
        """Return the plan that `to_json` gave. Raises as `load` does, and calls it `where`.

        >>> Plan.from_json({"version": 0}, where="my plan")
        Traceback (most recent call last):
        autopar.errors.PlanError: my plan ...
        """
        return _plan_of_file(plan_file.inside(data, where))


def _plan_of_file(reader: plan_file.Reader) -> Plan:
    """Return the plan in a file."""
    file = reader.file
    plain = {name: getattr(file, name) for name in (*_FACTS, *_NAME_LISTS, *_UNCONVERTED)}
    return Plan(
        mesh=reader.mesh,
        choices={
            name: Choice(text.splits, reader.operands(name), reader.results(name))
            for name, text in file.choices.items()
        },
        stored=reader.layouts("stored"),
        outputs=reader.layouts("outputs"),
        inputs=reader.layouts("inputs"),
        copies=reader.copies(),
        reduce_dtype=plan_file.read_reduce_dtype(file.reduce_dtype),
        **plain,
    )


def _digests(data: dict[str, Any]) -> tuple[str, str]:
    """Return the digest of what the nodes split, and that of every layout."""
    splits = {name: choice["splits"] for name, choice in data["choices"].items()}
    layouts = [data[key] for key in _LAYOUT_FIELDS]
    layouts += [[name, c["operands"], c["results"]] for name, c in data["choices"].items()]
    return digest(splits), digest(layouts)
