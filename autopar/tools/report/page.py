"""The page of a report: one HTML file that needs no network, made with jinja2 and plotly.

Example: `write_page(plan, "report.html", "gpt2", inputs)`, as `plan.report("report.html")` does.
Facts, figures and pictures enter, the file leaves. `Plan.report` and cli/ call it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import fx

from autopar.cost.formula import Formula
from autopar.ir import graph_view
from autopar.ir.graph import inline
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Row, format_bytes, format_ranks, format_seconds
from autopar.ir.show import size_text
from autopar.planner.pipelines import step_of
from autopar.tools.report import facts as gathering
from autopar.tools.report import figures, pictures
from autopar.tools.report.facts import Facts, Module
from autopar.tools.report.pipeline import picture
from autopar.world import json_file

_MOST_NODES = 160  # lines of a block's graph
_TEMPLATES = Path(__file__).parent
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)\n\s*(.*)')


class Line(NamedTuple):
    """A line of a graph: the name, what it computes, shape, dtype, and layout, as HTML; `kind` is
    its class, `source` the line of the user's code that it came from, and `link` leads there.
    """

    name: str
    call: str
    shape: str
    layout: str
    kind: str
    source: str
    link: str
    code: str


def write_page(
    plan: Plan,
    path: str | Path,
    name: str = "",
    inputs: Any = None,
    compare: bool = True,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write the report of a plan to `path`. `name` of the model; `inputs` give tokens/s; `compare`
    plans the named layouts, too. Raises ReportError where plotly or jinja2 is missing.
    """
    figures.require_libraries()
    facts = gathering.gather(plan, name, inputs, compare, progress)
    json_file.write(path, render(facts))


def render(facts: Facts) -> str:
    """Return the page as text."""
    from jinja2 import Environment, FileSystemLoader  # only where a report is made
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    plan = facts.plan
    drawn = {
        "layouts": figures.layouts_figure(facts),
        "meshes": figures.meshes_figure(plan),
        "timeline": figures.timeline_figure(plan),
        "memory": figures.memory_figure(plan),
    }
    block, before, after = block_graphs(plan)
    return environment.get_template("page.html.jinja").render(
        facts=facts,
        plan=plan,
        script=Markup(figures.bundle()),
        figures={
            name: Markup(figure.to_json().replace("</", "<\\/"))
            for name, figure in drawn.items()
            if figure is not None
        },
        others=figures.other_lines(facts),
        tree=Markup(tree_html(facts)),
        pipeline=Markup(picture(step_of(plan))) if plan.stage_starts and plan.context else "",
        cluster=Markup(pictures.cluster(plan.world, list(facts.load))) if facts.load else "",
        block=block,
        before=before,
        after=after,
        state_style=Markup(graph_view.STATE_STYLE),
        legend=Markup(graph_view.LEGEND),
        format_bytes=format_bytes,
        format_ranks=format_ranks,
    )


# -- the tree of modules ---------------------------------------------------------------------------
def tree_html(facts: Facts) -> str:
    """Return the tree of modules as nested details, each with its line of the table, its matrices
    and its closed form.
    """
    total = facts.tree.seconds or 1.0
    return "".join(_module_html(m, facts, total) for m in facts.tree.inside.values())


def _module_html(module: Module, facts: Facts, total: float) -> str:
    share = module.seconds / total
    bar = f'<span class="bar" style="width:{100 * share:.1f}%"></span>'
    head = (
        f"<summary><b>{html.escape(module.name)}</b> <span>{format_seconds(module.seconds)}, "
        f"{share:.1%} of the step</span>{bar}</summary>"
    )
    own = "" if module.row is None else _row_html(module.row, facts)
    inside = "".join(_module_html(m, facts, total) for m in module.inside.values())
    return f'<details class="module">{head}{own}{inside}</details>'


def _row_html(row: Row, facts: Facts) -> str:
    known = facts.subgraphs.get(row.subgraph)
    lines = [
        ("splits", row.layout),
        ("collectives", row.collectives),
        ("sent by a rank", f"{row.bytes / 1e6:,.2f} MB a step"),
    ]
    if row.computation is not None:
        hidden, exposed = format_seconds(row.hidden), format_seconds(row.exposed or 0.0)
        lines += [
            ("computing", format_seconds(row.computation)),
            ("communication", f"{hidden} hidden, {exposed} exposed"),
        ]
    else:
        lines.append(("seconds", format_seconds(row.seconds)))
    cells = "".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in lines if b)
    matrices, formula = "", ""
    if known is not None:
        drawn = "".join(pictures.owners(name, layout) for name, layout in known.matrices)
        matrices = f'<div class="matrices">{drawn}</div>' if drawn else ""
        formula = _formula_html(known.formula)
    return f'<div class="row"><dl>{cells}</dl>{matrices}{formula}</div>'


def _formula_html(expression: Formula | None) -> str:
    """Return a closed form as MathML, with its sizes; "" for none and for nothing that moves."""
    if expression is None or expression.total == 0:
        return ""
    from sympy import mathml, simplify

    text = mathml(simplify(expression.total), printer="presentation")
    sizes = ", ".join(f"{symbol} = {size:,}" for symbol, size in expression.sizes.items())
    return (
        '<div class="formula" tabindex="0">bytes that a rank sends in a step, in one block: '
        f"<br><math><mrow>{text}</mrow></math><br><small>{html.escape(sizes)}</small></div>"
    )


# -- the graph of one block ------------------------------------------------------------------------
def block_graphs(plan: Plan) -> tuple[str, list[Line], list[Line]]:
    """Return the name of the first block, and its lines before and after the rewrite; no lines for
    a plan from a file.
    """
    if plan.context is None:
        return "", [], []
    before, after = plan.context.graphs["trace"], plan.context.program.module
    block = graph_view.first_block(before)
    return block, lines_of(before, block), lines_of(after, block)


def lines_of(module: fx.GraphModule, block: str) -> list[Line]:
    """Return the lines of a block's graph."""
    sources = {node.name: _source(node) for node in inline(module).graph.nodes}
    nodes = graph_view.nodes_of(graph_view.excerpt(module, block))
    return [_line(node, sources.get(node.name)) for node in nodes][:_MOST_NODES]


def _line(node: graph_view.GraphNode, source: tuple[str, int, str] | None) -> Line:
    shape = "" if node.shape is None else size_text(node.shape)
    dtype = f" {node.dtype}" if node.dtype else ""
    file, number, code = source or ("", 0, "")
    return Line(
        node.name,
        f"{node.function}({', '.join(node.operands)})" if node.kind == "call" else node.kind,
        shape + dtype,
        graph_view.colour_layout(node.layout or ""),
        "reshard" if node.reshard else node.kind,
        f"{Path(file).name}:{number}" if file else "",
        Path(file).as_uri() if file.startswith("/") else "",
        code,
    )


def _source(node: fx.Node) -> tuple[str, int, str] | None:
    """Return file, line and code of the innermost line outside of torch that made a node."""
    frames: Iterable[tuple[str, str, str, str]] = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/" not in frame[0]]
    if not own:
        return None
    file, number, _, code = own[-1]
    return file, int(number), code
