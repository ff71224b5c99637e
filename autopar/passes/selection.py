"""Which ops of a block are cheap to run again: norms, activations, rotary embeddings, masks.

Example: in a Llama block that is recomputed selectively, rms_norm runs again before the products
that save its result, and silu and the multiplication before the last product. What is kept are the
results of products and of attention, and whatever collectives or random numbers made. recompute.py
makes a call of each group that `selective_groups` returns.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.ir.graph import block_of
from autopar.ir.sharding_rule import OpShardingRule

# ATen ops whose time is that of reading and writing their operands once or twice.
_CHEAP = """
layer_norm rms_norm group_norm native_layer_norm gelu silu relu leaky_relu elu tanh sigmoid
softplus hardtanh pow rsqrt sqrt exp neg abs mul div sub mean sum where masked_fill cat slice
select split split_with_sizes chunk reshape view transpose permute t unsqueeze squeeze expand
flatten unflatten clone contiguous _to_copy to type_as lt gt le ge eq ne logical_not logical_and
bitwise_and
"""
_SUMS = frozenset({"add"})  # cheap where all operands are: a residual sum would keep two for one
Group = tuple[tuple[fx.Node, ...], frozenset[fx.Node]]


def selective_groups(
    nodes: Iterable[fx.Node],
    names: Collection[str],
    rules: dict[str, OpShardingRule],
    fixed: Collection[fx.Node],
) -> list[Group]:
    """Return groups of nodes of these blocks, each with those that run again: cheap ops of
    activations, and then the products and the attention that save their results. `fixed`: nodes
    that hang on stored tensors alone, which are no activations.
    """
    blocks: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if node.op == "call_function" and node not in fixed and block_of(node) in names:
            blocks.setdefault(block_of(node), []).append(node)
    return [group for members in blocks.values() for group in _groups_of(members, rules)]


def _groups_of(members: list[fx.Node], rules: dict[str, OpShardingRule]) -> list[Group]:
    """Return the groups of one block: cheap ops that hang together with as many products before
    them, and the products that take their results.
    """
    cheap: dict[fx.Node, int] = {}
    level: dict[fx.Node, int] = {}
    for node in members:
        makers = (n if n in level else _caller(n) for n in node.all_input_nodes)
        before = [n for n in makers if n in level]
        level[node] = max((level[n] + (n not in cheap) for n in before), default=0)
        if _is_cheap(node, cheap):
            cheap[node] = level[node]
    roots: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while roots.setdefault(node, node) is not node:
            node = roots[node]
        return node

    for node in members:
        if node in cheap or _saves(node, rules):
            for source in node.all_input_nodes:
                if source in cheap and cheap[source] == level[node]:
                    roots[root(node)] = root(source)
    by_root: dict[fx.Node, list[fx.Node]] = {}
    for node in members:
        if node in roots:
            by_root.setdefault(root(node), []).append(node)
    groups = []
    for group in by_root.values():
        again = [node for node in group if node in cheap]
        products = [node for node in group if node not in cheap]
        if again and products:
            groups.append(((*again, *products), frozenset(again)))
    return groups


def _caller(node: fx.Node) -> fx.Node:
    """Return the call of which a node is a result: of a group, which is of the block, as the result
    itself is not.
    """
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _is_cheap(node: fx.Node, cheap: Collection[fx.Node]) -> bool:
    """Whether a node may run again: it reads and writes little, neither draws nor communicates."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0] in cheap
    if node.meta.get("inside"):
        return False
    if "step" in node.meta:  # a change of state in name alone, whose gradient is what moves
        return getattr(node.target, "__name__", "") == "replicate"
    if not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable:
        return False
    name = node.target._schema.name.removeprefix("aten::")
    if name in _SUMS:
        return all(source in cheap for source in node.all_input_nodes)
    return name in _CHEAP.split()


def _saves(node: fx.Node, rules: dict[str, OpShardingRule]) -> bool:
    """Whether a node is a product or attention, which saves its operands for the backward."""
    rule = rules.get(node.meta.get("source", node.name))  # on one rank nodes are the traced ones
    return (
        rule is not None
        and "step" not in node.meta
        and (rule.product is not None or rule.attends is not None)
    )
