"""What a node costs under a strategy: its computation and the collectives inside it.

Example: a cross entropy whose vocabulary is split computes for 2 ms, and sends two small
all-reduces forward. A node and a strategy enter; seconds and costs leave `node_costs`, which the
exact search adds up and the objective lists by term.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.cost.communication import Cost, inner_costs
from autopar.cost.compute import node_seconds
from autopar.ir.graph import carries_gradient
from autopar.ir.mesh import Mesh
from autopar.ir.program import Annotations
from autopar.ir.sharding_rule import results_of
from autopar.ir.strategy import Strategy
from autopar.ops.sharded import inner_collectives
from autopar.world import World


def node_costs(
    node: fx.Node, strategy: Strategy, notes: Annotations, mesh: Mesh, world: World
) -> tuple[float, list[Cost]]:
    """Return what a node costs under a strategy: the seconds of its computation, forward and
    backward, and the collectives inside its sharded implementation.
    """
    gradient = carries_gradient(notes, node)
    dtype = next(v.dtype for v in results_of(node) if isinstance(v, torch.Tensor))
    seconds = node_seconds(notes.specs[node.name], strategy, dtype, gradient, world)
    collectives = inner_collectives(node, strategy.operands)
    sent = [collective for collective in collectives if gradient or not collective.backward]
    return seconds, list(inner_costs(sent, mesh, world))
