"""Graphs for the commands `trace` and `graph`: a part of a graph, its nodes as facts, and a page
that shows them.

Example: part_of(module, "blocks.0") is the graph of the first block alone, whose inputs are the
values that enter it; `nodes_of` describes its nodes, `page` writes them as one HTML page.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import html
from collections.abc import Sequence

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import blocks, inlined, module_path
from autopar.ir.layout import Layout
from autopar.ir.show import function_name, is_named, size_text, subgraph_of

ALL = "all"  # the pattern of every node

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --move: #c2410c; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem; }
h1 { font-size: 1.3rem; } input { font: inherit; padding: .3rem .5rem; width: 24rem; }
table { border-collapse: collapse; margin-top: 1rem; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .5rem; text-align: left;
  vertical-align: top; font-family: ui-monospace, monospace; font-size: .85rem; }
th { font-family: inherit; position: sticky; top: 0; background: Canvas; }
tr.reshard td { color: var(--move); } tr.input td, tr.output td { opacity: .7; }
tr:target td { background: #facc1533; } a { color: inherit; }
"""
_SCRIPT = """
const box = document.querySelector("input"), rows = document.querySelectorAll("tbody tr");
box.addEventListener("input", () => rows.forEach(
  row => { row.hidden = !row.textContent.includes(box.value); }));
"""


@dataclasses.dataclass(frozen=True)
class GraphNode:
    """A node: `kind` is "input", "call" or "output"; `operands` are names of nodes. `shape`: of a
    rank's part, where the graph has layouts; None for what is no single tensor. `layout`: its state
    on every axis; None before the rewrite. `reshard`: the node changes a layout. `again`: it runs
    in the backward a second time.
    """

    name: str
    kind: str
    function: str
    operands: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: str | None
    layout: str | None
    subgraph: str
    module: str
    reshard: bool
    again: bool


def first_block(module: fx.GraphModule) -> str:
    """Return the name of the first repeated block, such as "blocks.0"; ALL where there is none."""
    return next(iter(blocks(inlined(module).graph.nodes)), ALL)


def part_of(module: fx.GraphModule, pattern: str) -> fx.GraphModule:
    """Return a graph of the nodes whose subgraph or module `pattern` names, and of the nodes that
    are called so; values that enter are inputs, values that leave are outputs. Blocks that run
    again are inlined. Raises PlanError where it names nothing.

    >>> net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
    >>> [node.name for node in part_of(fx.symbolic_trace(net), "_1").graph.nodes]
    ['_0', '_1', 'output']
    """
    module = inlined(module)
    if pattern == ALL:
        return module
    nodes = [n for n in module.graph.nodes if _fits(n, pattern)]
    if not nodes:
        names = dict.fromkeys(
            subgraph_of(n) for n in module.graph.nodes if n.op.startswith("call_")
        )
        raise PlanError(
            f"--block {pattern}: it names no subgraph, module or node; subgraphs are "
            f"{', '.join([*names][:12])}{', …' if len(names) > 12 else ''}; {ALL} is the graph"
        )
    chosen, graph, copies = set(nodes), fx.Graph(), dict[fx.Node, fx.Node]()
    for node in dict.fromkeys(n for call in nodes for n in call.all_input_nodes):
        if node not in chosen:
            is_attribute = node.op == "get_attr"
            copies[node] = graph.node_copy(node) if is_attribute else graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    leaving = [copies[node] for node in nodes if not chosen.issuperset(node.users)]
    graph.output(tuple(leaving))
    return fx.GraphModule(module, graph)


def _fits(node: fx.Node, pattern: str) -> bool:
    """Whether a pattern names a node, or the module whose value a reshard changes."""
    value_of = module_path(node) if "step" in node.meta else ""
    return is_named(node, pattern) or any(
        fnmatch.fnmatch(value_of, p) for p in (pattern, f"{pattern}.*")
    )


def nodes_of(module: fx.GraphModule) -> tuple[GraphNode, ...]:
    """Return the facts of a graph's nodes, in its order."""
    return tuple(_facts(node) for node in module.graph.nodes if node.op != "get_attr")


def _facts(node: fx.Node) -> GraphNode:
    kind = {"placeholder": "input", "output": "output"}.get(node.op, "call")
    value, layout = node.meta.get("val"), node.meta.get("layout")
    shape = tuple(map(int, value.shape)) if isinstance(value, torch.Tensor) else None
    dtype = value.dtype if isinstance(value, torch.Tensor) else node.meta.get("dtype")
    if isinstance(layout, Layout):
        shape = tuple(layout.local_shape)
    name = function_name(node.target) if kind == "call" else kind
    return GraphNode(
        node.name, kind, name, tuple(n.name for n in node.all_input_nodes), shape,
        None if dtype is None else str(dtype).removeprefix("torch."),
        None if layout is None else str(layout), subgraph_of(node) if kind == "call" else "",
        module_path(node), "step" in node.meta, bool(node.meta.get("again")),
    )  # fmt: skip


def page(title: str, facts: Sequence[tuple[str, str]], nodes: Sequence[GraphNode]) -> str:
    """Return one HTML page, which needs no network, with lines of (name, text) and a row for every
    node; operands are links, and a box leaves the rows that contain a text.
    """
    lines = "".join(f"<li>{html.escape(name)}: {html.escape(text)}</li>" for name, text in facts)
    names = {node.name for node in nodes}
    rows = "\n".join(_row(node, names) for node in nodes)
    heads = "".join(
        f"<th>{head}</th>"
        for head in ("node", "function", "operands", "shape", "dtype", "layout", "subgraph")
    )
    parts = (
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><ul>{lines}</ul>",
        '<input placeholder="only lines with this text" aria-label="filter">',
        f"<table><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table>",
        f"<script>{_SCRIPT}</script></body></html>",
    )
    return "\n".join(parts) + "\n"


def _row(node: GraphNode, names: set[str]) -> str:
    kind = "reshard" if node.reshard else node.kind
    links = ", ".join(
        f'<a href="#{html.escape(name)}">{html.escape(name)}</a>' if name in names
        else html.escape(name)
        for name in node.operands
    )  # fmt: skip
    again = " (again in the backward)" if node.again else ""
    shape = "" if node.shape is None else size_text(node.shape)
    cells = [node.name, node.function + again, links, shape, node.dtype or "", node.layout or "",
             node.subgraph]  # fmt: skip
    escaped = [cell if cell is links else html.escape(cell) for cell in cells]
    row = "".join(f"<td>{cell}</td>" for cell in escaped)
    return f'<tr id="{html.escape(node.name)}" class="{kind}">{row}</tr>'
