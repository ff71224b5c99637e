"""Groups the nodes of an annotated program into chains: all searched nodes of one module.

For example the two matmuls of an MLP and the activation between them are the chain "blocks.3.mlp",
and the last linear of the model is the chain "head". The planner chooses the layouts of a chain
together, and the plan's table shows a row for each. Called after `annotate`, by the planner.
"""

from __future__ import annotations

import dataclasses

from autopar.ir.graph import chain_name
from autopar.ir.program import Chain, Program


def chains(program: Program) -> Program:
    """Return the program with its searched nodes grouped by the module that they belong to.

    The module is a block's part ("blocks.3.mlp") or a child of the model ("head").
    """
    assert program.annotations is not None
    groups: dict[str, list[str]] = {}
    for node in program.module.graph.nodes:
        if node.op == "call_function" and node.name in program.annotations.searched:
            groups.setdefault(chain_name(node), []).append(node.name)
    rules = program.annotations.specs
    grouped = tuple(
        Chain(
            name,
            tuple(nodes),
            tuple(n for n in nodes if n in rules and rules[n].product is not None),
        )
        for name, nodes in groups.items()
    )
    return dataclasses.replace(program, chains=grouped)


def check(program: Program) -> None:
    """The contract: every searched node is in exactly one chain."""
    assert program.annotations is not None
    members = [name for chain in program.chains for name in chain.nodes]
    calls = {n.name for n in program.module.graph.nodes if n.op == "call_function"}
    assert len(members) == len(set(members)), "a node is in two chains"
    assert set(members) == program.annotations.searched & calls, "a searched node is in no chain"
