"""Composite operators that write into an operand without saying so in their signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from autopar._compat import OpOverload, changes_in_place, pytree, strict_fake_mode


def secretly_written(exported: ExportedProgram) -> dict[OpOverload, fx.Node]:
    """The composite operators that change an operand though their signatures do not say so, each
    with a node that calls it.
    """
    found: dict[OpOverload, fx.Node] = {}
    seen: set[object] = set()
    for node in exported.graph.nodes:
        if isinstance(node.target, OpOverload) and not node.target._schema.is_mutable:
            key = (node.target, str(fx.map_arg((node.args, node.kwargs), lambda n: None)))
            if key not in seen and _writes(node.target, node):
                found[node.target] = node
            seen.add(key)
    return found


def _writes(op: OpOverload, node: fx.Node) -> bool:
    """Whether an operand has been written to after a call on fake tensors, which count that."""
    made: dict[fx.Node, Any] = {}

    def fake(value: torch.Tensor) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype)

    def stand_in(source: fx.Node) -> Any:
        made[source] = pytree.tree_map_only(torch.Tensor, fake, source.meta.get("val"))
        return made[source]

    with strict_fake_mode(), torch.no_grad():
        try:
            args, kwargs = fx.map_arg((node.args, node.kwargs), stand_in)
            op.decompose(*args, **kwargs)  # does nothing where there is nothing to decompose
        except Exception:  # a shape that hangs on the data: refused later on, by its line
            return False
    leaves = pytree.tree_leaves(made)
    return any(isinstance(x, torch.Tensor) and changes_in_place(x) > 0 for x in leaves)
