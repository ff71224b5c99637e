"""Run an emitted graph node by node, with somebody looking on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from autopar.recomputed import recomputed, regathered

Visit = Callable[[fx.Node, Any], Any]  # (node, what it gave) -> what the graph goes on with


def interpret(module: fx.GraphModule, inputs: list[Any], visit: Visit) -> Any:
    """Return what the graph returns; `visit` is called at every node, within blocks too."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "placeholder":
            result = next(given)
        elif node.op == "get_attr":
            result = getattr(module, str(node.target))
        elif node.target in (recomputed, regathered):
            block, _, *values = args
            result = interpret(block, values, visit)
        else:
            result = node.target(*args, **kwargs)
        env[node] = visit(node, result)
    raise AssertionError("a graph has an output")


def unchanged(_: fx.Node, result: Any) -> Any:
    """The visit that does nothing."""
    return result
