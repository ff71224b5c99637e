"""A rewritten graph as text, and amounts, bytes and seconds as people read them.

Example: a line of `listing` is "mm_3 = mm(view_2, t_3)   # x:S(1)", with ">>" in front where it
communicates; subgraphs have headlines. The command line prints listings, planner/why.py amounts.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar._compat import OpOverload
from autopar.ir.graph import called

_HIDDEN = ("mesh", "coordinate")


def listing(module: fx.GraphModule) -> str:
    """Return the graph as text: `name = function(operands)   # layout`, with a headline wherever
    the subgraph changes.

    `>>` marks communication. The mesh, which every line would repeat, is left out.
    """
    return "\n".join(_lines(module)) + "\n"


def _lines(module: fx.GraphModule) -> list[str]:
    """Return the lines of a graph and its headlines."""
    lines: list[str] = []
    chain: str | None = None
    for node in module.graph.nodes:
        if node.op == "get_attr":
            continue
        if called(module, node):
            lines.extend(_block(module, node))
            continue
        if node.op == "call_function" and node.meta.get("chain") not in (None, chain):
            chain = node.meta["chain"]
            lines.append(f"\n# {chain}")
        lines.append(_line(node))
    return lines


def _block(module: fx.GraphModule, node: fx.Node) -> list[str]:
    """Return the lines of a call of a subgraph, which is computed or gathered again in the
    backward: its arguments, and its own lines indented.
    """
    (block,) = called(module, node)
    arguments = ", ".join(str(a) for a in node.args[2:])
    inner = "\n".join(line for line in _lines(block) if not line.startswith("input "))
    indented = [f"    {line}" if line else "" for line in inner.split("\n")]
    return [f"\n   {node.name} = {_name(node.target)}({arguments}):", *indented]


def _line(node: fx.Node) -> str:
    """Return the line of one node."""
    if node.op == "placeholder":
        return f"input {node.name}"
    if node.op == "output":
        return f"\nreturn {_text(node.args[0])}"
    arguments = [_text(a) for a in node.args]
    arguments += [
        f"{k}={_text(v)}" for k, v in node.kwargs.items() if k not in _HIDDEN and v is not None
    ]
    mark = ">> " if "step" in node.meta else "   "
    layout = node.meta.get("layout")
    note = f"   # {layout}" if layout is not None else ""
    return f"{mark}{node.name} = {_name(node.target)}({', '.join(arguments)}){note}"


def _name(target: Any) -> str:
    """Return the name of a node's function, without the namespace of ATen."""
    if isinstance(target, OpOverload):
        return target._schema.name.removeprefix("aten::")
    return getattr(target, "__name__", str(target))


def _text(value: Any) -> str:
    """Return an argument as text."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(v) for v in value) + "]"
    return str(value)


def format_count(things: int) -> str:
    """Return a number of things, such as parameters, with B for billions: "8.03 B"."""
    return format_amount(things).replace("G", "B").strip()


def format_amount(value: float) -> str:
    """Return a number with a metric prefix, and a space for the unit to follow: "8.03 G"."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.0f} "


def format_bytes(size: float) -> str:
    """Return bytes in GiB or MiB: "80.00 GiB"."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.2f} MiB"


def format_seconds(seconds: float) -> str:
    """Return seconds in s or ms: "12.50 ms"."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
