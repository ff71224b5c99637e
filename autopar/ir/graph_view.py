"""Graphs as HTML: a part of a graph, its nodes as facts, and a page or a notebook that shows them.

Example: excerpt(module, "blocks.0") is the graph of the first block alone, whose inputs are the
values that enter it; `nodes_of` describes its nodes, `page` writes them as one HTML page for the
commands `trace` and `graph`, and `notebook` is what `par.graph` shows as a cell's result.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import html
import re
from collections.abc import Collection, Sequence

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import blocks, inline, module_path
from autopar.ir.layout import Layout
from autopar.ir.show import communicates, entries, function_name, is_named, part_text, subgraph_of

ALL = "all"  # the pattern of every node
MOST_ROWS = 400  # of a graph in a notebook
_COLUMNS = ("node", "function", "operands", "shape", "dtype", "layout")
_STATE = re.compile(r"(\S+?):((?:S\(\d+\))|[IRP])(?=\s|$)")

# A state's colour is a tint behind its text, which is read on light pages and on dark ones.
STATE_STYLE = """
i.state { font-style: normal; padding: 0 .25em; border-radius: .25em; background: #8883; }
i.state.R { background: #3b82f640; } i.state.P { background: #f59e0b59; }
i.state.S { background: #22c55e4d; }
"""
_STYLE = f"""{STATE_STYLE}
.autopar-graph table.nodes {{ border-collapse: collapse; }}
.autopar-graph table.nodes tr > * {{ border-bottom: 1px solid #8884; padding: .2rem .5rem;
  text-align: left; vertical-align: top; font-family: ui-monospace, monospace;
  font-size: .85rem; max-width: 40rem; overflow-wrap: anywhere; }}
.autopar-graph table.nodes tr.headline > th {{ padding-top: .8rem; }}
.autopar-graph table.nodes tr.reshard > td {{ background: #f9731626; }}
.autopar-graph table.nodes tr.input > td, .autopar-graph table.nodes tr.output > td
  {{ opacity: .75; }}
"""
_NOTEBOOK_STYLE = f"""{_STYLE}
.autopar-graph {{ max-height: 36rem; overflow: auto; }}
"""
_PAGE_STYLE = f"""{_STYLE}
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem; }}
h1 {{ font-size: 1.3rem; }} input {{ font: inherit; padding: .3rem .5rem; width: 24rem; }}
.autopar-graph table.nodes {{ margin-top: 1rem; width: 100%; }} a {{ color: inherit; }}
thead th {{ position: sticky; top: 0; background: Canvas; }}
.autopar-graph table.nodes tr:target > td {{ background: #facc1533; }}
"""
LEGEND = ", ".join(
    f'<i class="state {text[0]}">{text}</i>'
    for text in ("I invariant", "R replicated", "P partial sum", "S(dim) split")
)
_SCRIPT = """
const box = document.querySelector("input"), rows = document.querySelectorAll("tbody tr");
box.addEventListener("input", () => rows.forEach(
  row => { row.hidden = !row.textContent.includes(box.value); }));
"""


@dataclasses.dataclass(frozen=True)
class GraphNode:
    """A node: `kind` is "input", "call" or "output"; `operands` are names of nodes. `shape`: of a
    rank's part, where the graph has layouts; None for what is no single tensor. `layout`: its state
    on every axis, and `full_shape`: that of the unsharded tensor; None before the rewrite.
    `reshard`: the node communicates or changes a layout. `again`: it runs in the backward a second
    time.
    """

    name: str
    kind: str
    function: str
    operands: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: str | None
    layout: str | None
    full_shape: tuple[int, ...] | None
    subgraph: str
    module: str
    reshard: bool
    again: bool


def first_block(module: fx.GraphModule) -> str:
    """Return the name of the first repeated block, such as "blocks.0"; ALL where there is none."""
    return next(iter(blocks(inline(module).graph.nodes)), ALL)


def excerpt(module: fx.GraphModule, pattern: str) -> fx.GraphModule:
    """Return a graph of the nodes whose subgraph or module `pattern` names, and of the nodes that
    are called so; values that enter are inputs, values that leave are outputs. Blocks that run
    again are inlined. Raises PlanError where it names nothing.

    >>> net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
    >>> [node.name for node in excerpt(fx.symbolic_trace(net), "_1").graph.nodes]
    ['_0', '_1', 'output']
    """
    module = inline(module)
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
    full_shape = tuple(layout.shape) if isinstance(layout, Layout) else None
    dtype = value.dtype if isinstance(value, torch.Tensor) else node.meta.get("dtype")
    if isinstance(layout, Layout):
        shape = tuple(layout.local_shape)
    name = function_name(node.target) if kind == "call" else kind
    return GraphNode(
        node.name, kind, name, tuple(n.name for n in node.all_input_nodes), shape,
        None if dtype is None else str(dtype).removeprefix("torch."),
        None if layout is None else str(layout), full_shape,
        subgraph_of(node) if kind == "call" else "", module_path(node), communicates(node),
        bool(node.meta.get("again")),
    )  # fmt: skip


def colour_layout(layout: str) -> str:
    """Return a layout as HTML, each state in its colour of STATE_STYLE.

    >>> print(colour_layout("x:S(0) y:P"))
    <i class="state S">x:S(0)</i> <i class="state P">y:P</i>
    """
    return _STATE.sub(lambda m: f'<i class="state {m[2][0]}">{m[0]}</i>', html.escape(layout))


def page(title: str, facts: Sequence[tuple[str, str]], nodes: Sequence[GraphNode]) -> str:
    """Return one HTML page, which needs no network, with lines of (name, text) and a row for every
    node; operands are links, and a box leaves the rows that contain a text.
    """
    lines = "".join(f"<li>{html.escape(name)}: {html.escape(text)}</li>" for name, text in facts)
    names = {node.name for node in nodes}
    rows = [_row(node, names) for node in nodes]
    page_lines = (
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_PAGE_STYLE}</style></head><body><h1>{html.escape(title)}</h1><ul>{lines}</ul>",
        '<input placeholder="only lines with this text" aria-label="filter">',
        _table(rows, (*_COLUMNS, "subgraph")),
        f"<script>{_SCRIPT}</script></body></html>",
    )
    return "\n".join(page_lines) + "\n"


def notebook(module: fx.GraphModule) -> str:
    """Return a graph as a notebook shows it: the rows of `page`, folded and with the headlines of
    `listing(module, fold=True)`, as HTML without script and links; MOST_ROWS of them at most.
    """
    module = inline(module)
    rows, nodes = [], nodes_of(module)
    facts = {node.name: node for node in nodes}
    for text, node in entries(module, fold=True):
        if node is None:
            head = f'<th colspan="{len(_COLUMNS)}">{html.escape(text.removeprefix("# "))}</th>'
            rows.append(f'<tr class="headline">{head}</tr>')
        else:
            rows.append(_row(facts[node.name]))
    if len(rows) > MOST_ROWS:
        more = f"{len(rows) - MOST_ROWS} more lines: autopar.listing(graph, pattern) has a part"
        rows[MOST_ROWS:] = [f'<tr><th colspan="{len(_COLUMNS)}">{more}</th></tr>']
    reshards = sum(node.reshard for node in nodes)
    return (
        f"<style>{_NOTEBOOK_STYLE}</style><p>{len(nodes)} nodes, {reshards} of them communicate or "
        f"change a layout (&gt;&gt;). States: {LEGEND}.</p>{_table(rows, _COLUMNS)}"
    )


def show_in_notebooks(module: fx.GraphModule) -> None:
    """Let a graph show itself as the result of a notebook's cell, by `notebook`. A copy does not.

    >>> module = fx.symbolic_trace(torch.nn.ReLU())
    >>> show_in_notebooks(module)
    >>> "relu" in module._repr_html_()
    True
    """
    # fx gives each graph a class of its own, so no other graph of the process changes.
    type(module)._repr_html_ = notebook  # type: ignore[attr-defined]


def _table(rows: Sequence[str], columns: Sequence[str]) -> str:
    heads = "".join(f"<th>{column}</th>" for column in columns)
    body = "\n".join(rows)
    return (
        f'<div class="autopar-graph"><table class="nodes"><thead><tr>{heads}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _row(node: GraphNode, names: Collection[str] | None = None) -> str:
    """Return the row of a node; for a page, which has rows of `names`, with links to these, an id
    and the subgraph.
    """
    links = ", ".join(
        f'<a href="#{html.escape(name)}">{html.escape(name)}</a>' if name in (names or ())
        else html.escape(name)
        for name in node.operands
    )  # fmt: skip
    function = f"{'>> ' if node.reshard else ''}{node.function}"
    again = " (again in the backward)" if node.again else ""
    shape = "" if node.shape is None else part_text(node.shape, node.full_shape)
    cells = [html.escape(node.name), html.escape(function + again), links, shape,
             node.dtype or "", colour_layout(node.layout or "")]  # fmt: skip
    cells += [] if names is None else [html.escape(node.subgraph)]
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    name = "" if names is None else f' id="{html.escape(node.name)}"'
    return f'<tr{name} class="{"reshard" if node.reshard else node.kind}">{row}</tr>'
