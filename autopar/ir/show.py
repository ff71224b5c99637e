"""A rewritten graph as text: one line a node, changes of state with their axes, grouped by the
module they come from.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar._compat import OpOverload
from autopar.ir.graph import called

_HIDDEN = ("mesh", "coordinate")


def listing(module: fx.GraphModule) -> str:
    """The graph for people: `name = function(operands)   # layout`; a headline wherever the
    subgraph changes.

    Communication stands out by `>>`. What every line repeats (the mesh) is left out.
    """
    return "\n".join(_lines(module)) + "\n"


def _lines(module: fx.GraphModule) -> list[str]:
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
    """What is computed or gathered again in the backward: what it takes, and its own lines
    indented.
    """
    (block,) = called(module, node)
    taken = ", ".join(str(a) for a in node.args[2:])
    inner = "\n".join(line for line in _lines(block) if not line.startswith("input "))
    indented = [f"    {line}" if line else "" for line in inner.split("\n")]
    return [f"\n   {node.name} = {_name(node.target)}({taken}):", *indented]


def _line(node: fx.Node) -> str:
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
    if isinstance(target, OpOverload):
        return target._schema.name.removeprefix("aten::")
    return getattr(target, "__name__", str(target))


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(v) for v in value) + "]"
    return str(value)


def format_count(things: int) -> str:
    """Parameters, samples: with B for billions."""
    return format_amount(things).replace("G", "B").strip()


def format_amount(value: float) -> str:
    """A number with the prefix of its thousands, as "8.03 G"."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.0f} "


def format_bytes(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.2f} MiB"


def format_seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
