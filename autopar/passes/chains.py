"""chains: the subgraphs whose layouts are chosen together and shown together: the matrix products
under one module.
"""

from __future__ import annotations

import dataclasses

from autopar.ir.graph import chain_name
from autopar.ir.program import Chain, Program


def chains(program: Program) -> Program:
    """Group the nodes by the module they belong to: the block's part ("blocks.3.mlp") or the
    model's ("head").
    """
    assert program.annotations is not None
    groups: dict[str, list[str]] = {}
    for node in program.module.graph.nodes:
        if node.op == "call_function" and node.name in program.annotations.searched:
            groups.setdefault(chain_name(node), []).append(node.name)
    specs = program.annotations.specs
    found = tuple(
        Chain(
            name,
            tuple(nodes),
            tuple(n for n in nodes if n in specs and specs[n].product is not None),
        )
        for name, nodes in groups.items()
    )
    return dataclasses.replace(program, chains=found)


def check(program: Program) -> None:
    """The contract: every searched node is in exactly one chain."""
    assert program.annotations is not None
    members = [name for chain in program.chains for name in chain.nodes]
    calls = {n.name for n in program.module.graph.nodes if n.op == "call_function"}
    assert len(members) == len(set(members)), "a node is in two chains"
    assert set(members) == program.annotations.searched & calls, "a searched node is in no chain"
