"""`autopar graph`: the graph of one rank that a plan of a model is rewritten to.

Example: autopar graph gpt2 --ranks 8 --layout 4d prints the first block, with every reshard, as it
runs on a rank. graph_view.py picks the excerpt and writes the page.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from autopar import api
from autopar.cli.command import build_target, ranks_text, report_errors, require_folder
from autopar.cli.options import (
    BatchOption,
    JsonOption,
    LayoutOption,
    RanksOption,
    SchemaOption,
    TargetArgument,
    WorldOption,
    read_layout,
    read_world,
)
from autopar.cli.terminal import console, model_text, print_json, print_line, watch_progress
from autopar.cli.trace import HtmlOption
from autopar.errors import PlanError
from autopar.ir import graph_view
from autopar.ir.show import listing
from autopar.world import json_file


@dataclasses.dataclass(frozen=True)
class RankGraph:
    """The graph of one rank or a part of it: `block` names the part, "all" is the graph; `after`:
    the pass that made it.
    """

    target: str
    layout: str
    mesh: str
    after: str
    block: str
    nodes: tuple[graph_view.GraphNode, ...]


def graph(
    target: TargetArgument,
    world: WorldOption = None,
    ranks: RanksOption = None,
    batch: BatchOption = None,
    layout: LayoutOption = "auto",
    block: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="A subgraph, module or node alone, or all; left out: the first repeated block.",
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="PASS", help="As this pass left it; left out: as it runs."),
    ] = None,
    page: HtmlOption = None,
    as_json: JsonOption = False,
    json_schema: SchemaOption = False,
) -> None:
    """Print the graph of one rank that TARGET is rewritten to: one block, with every reshard.

    Example: autopar graph gpt2 --ranks 8 --layout 4d --batch 16x128 --html graph.html
    """
    with report_errors(as_json):
        require_folder(page, "--html")
        machines, layouts = read_world(world, ranks), read_layout(layout)
        built = build_target(target, batch, machines.ranks)
        plan = watch_progress(
            f"planning {built.name} on {ranks_text(machines)}",
            lambda report: api.plan(
                built.model, machines, built.inputs, layouts, progress=report, smaller=False
            ),
            as_json,
        )
        assert plan.context is not None
        graphs, name = plan.context.graphs, after or "recompute"
        if name not in graphs:
            raise PlanError(f"--after {name}: there is no such pass; they are {', '.join(graphs)}")
        module = plan.context.program.module if after is None else graphs[name]
        block = block or graph_view.first_block(module)
        excerpt = graph_view.excerpt(module, block)
        mesh, nodes = str(plan.mesh) or "one rank", graph_view.nodes_of(excerpt)
        result = RankGraph(built.name, plan.layout, mesh, name, block, nodes)
        if page is not None:
            facts = [("model", model_text(built)), ("layout", plan.layout), ("mesh", mesh),
                     ("block", block)]  # fmt: skip
            text = graph_view.page(f"autopar graph: {built.name}", facts, nodes)
            json_file.write(page, text)
        if as_json:
            print_json(dataclasses.asdict(result))
            return
        out = console()
        print_line(out, "model", model_text(built))
        print_line(out, "layout", f"{plan.layout}, mesh {mesh}; of one rank: {block}")
        out.print(listing(excerpt), markup=False, soft_wrap=True)
        if page is not None:
            print_line(out, "saved", f"as {page}")
