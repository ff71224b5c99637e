"""`autopar trace` and `autopar graph`: a graph before and after the rewrite, in text and HTML; and
graphs that show themselves in a notebook.
"""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir import graph_view
from autopar.ir.show import entries, listing
from commands import refused, run
from html_page import Page
from models import Mlp


class Block(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stack() -> tuple[nn.Module, Any]:
    return Stack(), (torch.randn(16, 64),)


TARGET = "test_graph_view:stack"


def facts(*arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return result


def test_trace_prints_the_graph_or_a_part_of_it() -> None:
    printed = run("trace", TARGET).stdout
    assert printed.count(" = linear(") == 6 and "return [mean]" in printed
    printed = run("trace", TARGET, "--block", "blocks.1").stdout
    assert printed.count(" = linear(") == 2 and "input p_blocks_1_up_weight" in printed
    assert "blocks_0" not in printed and "blocks_2" not in printed


def test_trace_prints_nodes_as_facts() -> None:
    whole, part = facts("trace", TARGET), facts("trace", TARGET, "--block", "blocks.1.up")
    (linear,) = [node for node in part["nodes"] if node["function"] == "linear"]
    assert linear in [{**node} for node in whole["nodes"]]
    assert linear["shape"] == [16, 256] and linear["dtype"] == "float32"
    assert linear["module"] == "blocks.1.up" and linear["layout"] is None
    assert [node["kind"] for node in part["nodes"]].count("input") == 3
    weight = next(node for node in part["nodes"] if node["name"] == "p_blocks_1_up_weight")
    assert weight["kind"] == "input" and weight["shape"] == [256, 64]
    names = [node["name"] for node in part["nodes"]]
    assert all(operand in names for node in part["nodes"] for operand in node["operands"])


def test_graph_is_one_block_of_one_rank() -> None:
    arguments = ("graph", TARGET, "--ranks", "4", "--layout", "megatron")
    printed = run(*arguments).stdout
    assert "layout   megatron, mesh tp4; of one rank: blocks.0" in printed
    assert ">> all_reduce" in printed and "p_blocks_1" not in printed
    part = facts(*arguments, "--block", "blocks.2")
    up = next(node for node in part["nodes"] if node["module"] == "blocks.2.up"
              and node["function"] == "linear")  # fmt: skip
    assert up["shape"] == [16, 64] and up["layout"] == "tp:S(1)"  # a quarter of 256
    reshards = [node["function"] for node in part["nodes"] if node["reshard"]]
    assert reshards == ["all_reduce", "place", "all_reduce"]  # of its input, a bias, its output
    every = facts(*arguments, "--block", "all")
    assert len(every["nodes"]) > 2.5 * len(part["nodes"])


def test_graph_as_a_pass_left_it() -> None:
    arguments = ("graph", TARGET, "--ranks", "4", "--layout", "megatron", "--after", "annotate")
    assert "all_reduce" not in run(*arguments).stdout
    text = refused(*arguments[:-1], "fuse")
    assert "--after fuse: there is no such pass; they are trace, " in text


def test_a_block_that_is_none() -> None:
    text = refused("trace", TARGET, "--block", "blocks.7")
    assert "it names no subgraph, module or node; subgraphs are blocks.0" in text
    assert "there is no folder" in refused("trace", TARGET, "--html", "nowhere/x.html")


@pytest.mark.parametrize("command", ["trace", "graph"])
def test_a_page_has_a_row_for_every_node(command: str, tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    more = ("--ranks", "4", "--layout", "ddp") if command == "graph" else ()
    nodes = facts(command, TARGET, *more, "--html", str(path))["nodes"]
    rows = Page(path.read_text())
    assert not rows.open and rows.ids == [node["name"] for node in nodes]
    assert {link.removeprefix("#") for link in rows.links} <= set(rows.ids)
    assert len(rows.links) == sum(len(node["operands"]) for node in nodes)
    assert not re.search(r'(src|href)="(?!#)', path.read_text())  # it needs no network


def test_a_page_shows_names_as_they_are() -> None:
    node = graph_view.GraphNode(
        "a<b", "call", "f&g", ("x>",), (2, 3), None, "t:S(0)", (4, 3), "", "", True, True
    )
    text = graph_view.page("a & b", [("model", "<m>")], [node])
    assert "a&lt;b" in text and "f&amp;g (again in the backward)" in text
    assert "<td>2×3 of 4×3</td>" in text and '<td><i class="state S">t:S(0)</i></td>' in text
    assert "<m>" not in text and 'class="reshard"' in text


TAGS = {"style", "p", "i", "div", "table", "thead", "tbody", "tr", "th", "td"}


# -- in a notebook ---------------------------------------------------------------------------------
class Table(HTMLParser):
    """The cells of each row of a table, by their text, and all tags and attributes of a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and data.strip():
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    model, inputs = stack()
    return autopar.plan(model, 4, inputs, "megatron", recompute="full")


def shown(module: torch.fx.GraphModule) -> str:
    return str(module._repr_html_())  # type: ignore[operator]


def test_a_graph_shows_the_lines_of_its_folded_listing(plan: autopar.Plan) -> None:
    assert plan.context is not None
    graph = plan.context.graphs["rewrite"]
    rows = Table(shown(graph)).rows[1:]
    expected = [
        text.removeprefix("# ") or node.name
        for text, node in entries(graph, fold=True)
        if text or node
    ]
    assert "(model)" in expected
    assert [row[0] for row in rows] == expected and "blocks.2 as blocks.1" in expected
    text = listing(graph, shapes=True, fold=True)
    calls = [row for row in rows if len(row) > 1 and row[3]]
    assert len(calls) > 8
    for name, function, operands, *note in calls:
        (line,) = [x for x in text.splitlines() if x[3:].startswith(f"{name} = ")]
        assert line.startswith(">> ") == function.startswith(">> ")
        assert line.endswith(f"   # {note[1]} {note[0]} {note[2]}")
        assert all(operand in line for operand in operands.split(", "))


def test_every_graph_shows_itself_and_needs_nothing(
    plan: autopar.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("jinja2", "plotly", "markupsafe"):
        monkeypatch.setitem(sys.modules, name, None)
    assert plan.context is not None and len(plan.context.graphs) > 8
    for graph in plan.context.graphs.values():
        text = shown(graph)
        table = Table(text)
        assert table.tags <= TAGS
        assert table.attributes <= {"class", "colspan"}
        assert "url(" not in text and "@import" not in text and len(text) < 20_000
    assert "(again in the backward)" in shown(plan.context.program.module)
    for tag in ("state S", "state P", "state R"):
        assert f'<i class="{tag}">tp:' in shown(plan.context.graphs["rewrite"])
    other = torch.fx.symbolic_trace(nn.ReLU())
    assert not hasattr(other, "_repr_html_")


def test_a_parallel_module_has_such_graphs() -> None:
    model, inputs = stack()
    par = autopar.parallelize(model, 1, inputs)
    assert "blocks.1-2 as blocks.0" in shown(par.graph) and shown(par.graphs["trace"])


def test_a_long_graph_is_cut(monkeypatch: pytest.MonkeyPatch, plan: autopar.Plan) -> None:
    assert plan.context is not None
    graph = plan.context.graphs["rewrite"]
    whole = Table(shown(graph)).rows
    monkeypatch.setattr(graph_view, "MOST_ROWS", 5)
    rows = Table(shown(graph)).rows
    assert rows[:6] == whole[:6] and len(rows) == 7
    assert rows[6][0].startswith(f"{len(whole) - 6} more lines: autopar.listing(graph, pattern)")
