"""`autopar trace`: the graph that a model is traced to, before anything is split.

Example: autopar trace gpt2 --block blocks.0 prints the ATen ops of the first block. graph_view.py
picks the excerpt and writes the page.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.command import build_target, report_errors, require_folder
from autopar.cli.options import BatchOption, JsonOption, SchemaOption, TargetArgument
from autopar.cli.terminal import console, model_text, print_json, print_line, watch_progress
from autopar.ir import graph_view
from autopar.ir.show import listing
from autopar.planner.tracing import trace_model
from autopar.world import json_file

_SAMPLES = 8  # of the batch where none is named


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced graph or a part of it: `block` names the part, "all" is the graph."""

    target: str
    parameters: int
    block: str
    nodes: tuple[graph_view.GraphNode, ...]


HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", dir_okay=False, help="Write the nodes there, as one HTML page."
    ),
]


def trace(
    target: TargetArgument,
    batch: BatchOption = None,
    block: Annotated[
        str, typer.Option(metavar="PATTERN", help="A subgraph, module or node alone.")
    ] = graph_view.ALL,
    page: HtmlOption = None,
    as_json: JsonOption = False,
    json_schema: SchemaOption = False,
) -> None:
    """Print the graph that TARGET is traced to: its ops, before anything is split.

    Example: autopar trace gpt2 --block blocks.0 --html trace.html
    """
    with report_errors(as_json):
        require_folder(page, "--html")
        built = build_target(target, batch, _SAMPLES)
        tracing = f"tracing {built.name}"
        source = watch_progress(tracing, lambda _: trace_model(built.model, built.inputs), as_json)
        excerpt = graph_view.excerpt(source.module, block)
        result = Trace(built.name, built.parameters, block, graph_view.nodes_of(excerpt))
        if page is not None:
            facts = [("model", model_text(built)), ("block", block)]
            text = graph_view.page(f"autopar trace: {built.name}", facts, result.nodes)
            json_file.write(page, text)
        if as_json:
            print_json(dataclasses.asdict(result))
            return
        out = console()
        print_line(out, "model", model_text(built))
        out.print(listing(excerpt), markup=False, soft_wrap=True)
        if page is not None:
            print_line(out, "saved", f"as {page}")
