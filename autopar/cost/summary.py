"""The figures of a plan, read off the rewritten graph: what each subgraph sends, how long it takes,
and how it is split.

A rewritten program enters `summary_rows`, its plan leaves with a table, its collectives, and the
bytes that a rank sends. The planner calls it once a plan is chosen (planner.py, world_size.py), and
asks `rematerialization_seconds` what recomputation costs (rematerialize.py).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from autopar._compat import pytree
from autopar.cost.algorithms import algorithms, flat_algorithms
from autopar.cost.communication import collective_cost, sent_collectives
from autopar.cost.compute import node_seconds
from autopar.cost.microbatches import optimizer_step, times
from autopar.cost.simulator import Timeline
from autopar.ir.graph import block_name, every_node, numbered_block
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Collective, Row, numbers_text
from autopar.ir.program import Program
from autopar.ir.sharding_rule import results_of
from autopar.ir.strategy import Strategy
from autopar.world import World

_NOTICEABLE = 0.02  # share of the summed step that resharding weights may take without a note
_SHORT = {
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_reduce": "AR",
    "all_to_all": "A2A",
    "broadcast": "B",
    "reduce": "Red",
}


def summary_rows(program: Program, world: World, step: Timeline | None = None) -> Plan:
    """Return the plan with its table, its collectives, and the bytes that a rank sends. `step`: its
    simulation, where communication is to be overlapped.
    """
    plan = program.plan
    assert plan is not None
    plan_collectives = collectives(program, world)
    recomputation = rematerialization_seconds(program, world, plan_collectives)
    unsplit = (*plan.unsplit, *_unknown_ops(program))
    seconds, bound = plan.seconds + recomputation, plan.bound
    if plan.microbatches > 1:  # the gap is that of one
        seconds = _seconds_of_microbatches(program, world, plan_collectives)
        bound *= seconds / plan.seconds if plan.seconds else 1.0
    return dataclasses.replace(
        plan,
        collectives=plan_collectives,
        seconds=seconds,  # the search does not count what runs twice
        bound=bound,
        notes=(
            *_reshard_notes(program, plan_collectives, seconds),
            *_output_notes(program, plan_collectives, seconds),
        ),
        comm_bytes=sum(c.bytes for c in plan_collectives),
        rows=_rows(program, plan_collectives, world, step),
        overlapped=None if step is None else step.seconds,
        unsplit=unsplit,
    )


def _seconds_of_microbatches(
    program: Program, world: World, step_collectives: Sequence[Collective]
) -> float:
    """Return the seconds of a step in micro-batches, whose collectives are all of the step's."""
    plan = program.plan
    assert plan is not None
    each = zip(sent_collectives(program), step_collectives, times(program), strict=True)
    sent_by_microbatch = sum(c.seconds / count for sent, c, count in each if not sent.again)
    optimizer = optimizer_step(program, world)
    computing = max(0.0, plan.seconds - sent_by_microbatch - optimizer)
    computing += sum(_again_seconds(program, world).values())
    communication = sum(collective.seconds for collective in step_collectives)
    return communication + optimizer + plan.microbatches * computing


def rematerialization_seconds(
    program: Program, world: World, step_collectives: Sequence[Collective] | None = None
) -> float:
    """Return the seconds of what runs again in the backward, of one micro-batch.
    `step_collectives`: the program's, of all micro-batches.
    """
    assert program.plan is not None
    step_collectives = collectives(program, world) if step_collectives is None else step_collectives
    communication = sum(
        collective.seconds / program.plan.microbatches
        for sent, collective in zip(sent_collectives(program), step_collectives, strict=True)
        if sent.again
    )
    return communication + sum(_again_seconds(program, world).values())


def rematerialization_seconds_by_block(program: Program, world: World) -> dict[str, float]:
    """Return what `rematerialization_seconds` adds up, by the repeated block where it is spent."""
    assert program.plan is not None
    total: dict[str, float] = defaultdict(float)
    each = zip(sent_collectives(program), collectives(program, world), strict=True)
    count = program.plan.microbatches
    spent = [(sent.chain, collective.seconds / count) for sent, collective in each if sent.again]
    for chain, seconds in (*spent, *_again_seconds(program, world).items()):
        block = numbered_block(chain)
        total["" if block is None else block_name(block)] += seconds
    return total


def collectives(program: Program, world: World) -> tuple[Collective, ...]:
    """Return every collective of a training step, in the order of the forward graph."""
    assert program.plan is not None
    priced = []
    for sent, count in zip(sent_collectives(program), times(program), strict=True):
        find = flat_algorithms if sent.inside else algorithms
        price = collective_cost(
            sent.traffic, sent.axes, program.plan.mesh, sent.element_bytes, world, find
        )
        priced.append(
            Collective(
                sent.chain,
                sent.traffic.collective,
                sent.axes,
                sent.backward,
                count * price.bytes,
                count * price.seconds,
            )
        )
    return tuple(priced)


def _reshard_notes(
    program: Program, step_collectives: Sequence[Collective], seconds: float
) -> tuple[str, ...]:
    """Return one sentence where it takes a noticeable part of the step to reshard fused weights,
    which are stored as plain shards and not in the digits that their matmuls want.
    """
    notes = program.annotations
    assert notes is not None
    spent_s = sum(
        collective.seconds
        for sent, collective in zip(sent_collectives(program), step_collectives, strict=True)
        if not sent.inside
        and sent.traffic.collective == "all_to_all"
        and sent.node.meta["value"] in notes.weights
    )
    if spent_s <= _NOTICEABLE * seconds:
        return ()
    return (
        f"fused weights are stored as plain shards and resharded for their products: "
        f"{spent_s * 1e3:.3g} ms, {spent_s / seconds:.0%} of the summed step; a larger batch makes "
        "that part smaller",
    )


def _output_notes(
    program: Program, step_collectives: Sequence[Collective], seconds: float
) -> tuple[str, ...]:
    """Return one sentence where it takes a noticeable part of the step to hand every rank all of
    the outputs.
    """
    gathered = list(_gathered_outputs(program))
    steps = {step for _, node in gathered for step in _steps_to(node)}
    spent_s = sum(
        collective.seconds
        for sent, collective in zip(sent_collectives(program), step_collectives, strict=True)
        if sent.node in steps
    )
    if spent_s <= _NOTICEABLE * seconds:
        return ()
    sizes = [f"{path} of {b / 1e6:,.1f} MB" for path, b in gathered_output_bytes(program).items()]
    return (
        f"every rank receives all of {', '.join(sizes)}: {spent_s * 1e3:.3g} ms, "
        f"{spent_s / seconds:.0%} of the summed step; outputs='sharded' leaves each its own part",
    )


def gathered_output_bytes(program: Program) -> dict[str, float]:
    """Return the bytes of every output that an emitted program hands to every rank, by its path in
    what the model returns.
    """
    return {
        path or "the output": float(
            math.prod(program.layouts[node.name].shape) * node.meta["element"].bytes
        )
        for path, node in _gathered_outputs(program)
    }


def _gathered_outputs(program: Program) -> Iterator[tuple[str, fx.Node]]:
    """Yield the outputs that collectives replicate, with their paths in what the model returns;
    scalars are replicated in any case.
    """
    assert program.plan is not None
    nodes = {node.name: node for node, _ in every_node(program.module)}
    outputs = [output for output in program.signature.outputs if output.kind == "user"]
    tree = pytree.tree_unflatten(outputs, program.signature.out_tree)
    for path, output in pytree.tree_flatten_with_path(tree)[0]:
        if program.plan.replicated_outputs and output.node is not None:
            node = nodes[output.node]
            if program.layouts[output.node].shape and _steps_to(node):
                yield pytree.keystr(path), node


def _steps_to(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that reshard a value into an output and serve nothing else."""
    steps = []
    while "step" in node.meta and len(node.users) == 1:
        steps.append(node)
        node = node.all_input_nodes[0]
    return steps


def _unknown_ops(program: Program) -> list[str]:
    """Return one sentence for every op that has no sharding rule."""
    notes = program.annotations
    assert notes is not None
    return [
        f"{op} has no sharding rule, and none was found by trial: every rank runs all of it"
        for op in notes.unknown
    ]


def _rows(
    program: Program, step_collectives: tuple[Collective, ...], world: World, step: Timeline | None
) -> tuple[Row, ...]:
    """Return one row for all layers that have the same layout, chain by chain; with the step's
    simulation one more for the rest of it, which is the optimizer's.
    """
    by_chain = defaultdict(list)
    for collective in step_collectives:
        by_chain[collective.chain].append(collective)
    names = [chain.name for chain in program.chains]
    names += [name for name in by_chain if name not in names]
    count = 1 if program.plan is None else program.plan.microbatches
    seconds = {n: count * x for n, x in _compute_seconds(program, world).items()}
    unused = {} if step is None else dict(step.by_chain)
    members_of: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    totals: dict[tuple[str, str, str], list[list[float]]] = defaultdict(list)
    for name in names:
        chain_collectives = by_chain[name]
        key = (
            re.sub(r"\d+", "*", name),
            _layout_text(program, name),
            _collective_text(chain_collectives),
        )
        members_of[key].append(name)
        chain_seconds = sum(c.seconds for c in chain_collectives) + seconds.get(name, 0.0)
        simulated = unused.pop(name, [0.0] * 3) if step is not None else []
        totals[key].append([sum(c.bytes for c in chain_collectives), chain_seconds, *simulated])
    if unused:
        optimizer_columns = [sum(column) for column in zip(*unused.values(), strict=True)]
        members_of["optimizer", "", "none"] = ["optimizer"]
        totals["optimizer", "", "none"] = [[0.0, optimizer_columns[0], *optimizer_columns]]
    return tuple(
        Row(_range_name(members), key[1], key[2], *(sum(c) for c in zip(*totals[key], strict=True)))
        for key, members in members_of.items()
    )


def _range_name(names: list[str]) -> str:
    """Return one name for several layers: blocks.0.mlp, blocks.1.mlp -> blocks.0-1.mlp"""
    if len(names) == 1:
        return names[0]
    numbers = [[int(n) for n in re.findall(r"\d+", name)] for name in names]
    columns = iter(zip(*numbers, strict=True))
    return re.sub(r"\d+", lambda _: numbers_text(next(columns)), names[0])


def _layout_text(program: Program, chain: str) -> str:
    """Return what the chain's matmuls split on every axis, in the letters of Y[m,n] = X[m,k] ·
    W[k,n]: "x→n k, y→m".
    """
    plan = program.plan
    assert plan is not None
    members = next((c for c in program.chains if c.name == chain), None)
    nodes = (
        [n for n in (members.products or members.nodes[-1:]) if n in plan.choices]
        if members
        else []
    )
    texts = []
    for index, axis in enumerate(plan.mesh.axes):
        letters = [letter_of(program, n, plan.choices[n].splits[index]) for n in nodes]
        texts.append(f"{axis.name}→{' '.join(dict.fromkeys(letters))}")
    return ", ".join(texts)


def letter_of(program: Program, name: str, split: str) -> str:
    """Return the name of a factor for people: "e" for experts, its role in a matmul, the dim of the
    result that it is, or the state that all of the node shares.
    """
    assert program.annotations is not None
    rule = program.annotations.specs[name]
    if split in rule.uneven:
        return "e"
    if rule.product is not None:
        for letter, role in zip("mnk", rule.product, strict=True):
            if split in role:
                return letter
    for tensor in (*rule.results, *rule.operands):
        for dim, names in enumerate(tensor or ()):
            if split in names:
                return f"dim {dim}"
    return split


def _collective_text(step_collectives: list[Collective]) -> str:
    counts = Counter((_SHORT[c.kind], "+".join(c.axes)) for c in step_collectives)
    return (
        ", ".join(f"{count} {kind} {axes}" for (kind, axes), count in sorted(counts.items()))
        or "none"
    )


def compute_seconds_by_node(program: Program, world: World) -> dict[str, float]:
    """Return for every node with a choice the seconds of its computation on one rank, forward and
    backward, without what runs again.
    """
    plan, notes = program.plan, program.annotations
    assert plan is not None and notes is not None
    dtypes = {_source(n): _dtype(n) for n, _ in every_node(program.module) if _computes(n)}
    seconds: dict[str, float] = {}
    for name, choice in plan.choices.items():
        ranks = _rank_count(plan, choice.splits, notes.specs[name].sizes)
        strategy = Strategy((), choice.operands, choice.results, ranks)
        gradient = (name, 0) in notes.gradient
        if name in dtypes:
            rule = notes.specs[name]
            seconds[name] = node_seconds(rule, strategy, dtypes[name], gradient, world)
    return seconds


def _compute_seconds(program: Program, world: World) -> dict[str, float]:
    """Return for every subgraph the seconds of its computation, recomputation included."""
    total: dict[str, float] = defaultdict(float)
    chain_of = {name: chain.name for chain in program.chains for name in chain.nodes}
    for name, seconds in compute_seconds_by_node(program, world).items():
        total[chain_of[name]] += seconds
    for chain, seconds in _again_seconds(program, world).items():
        total[chain] += seconds
    return total


def _computes(node: fx.Node) -> bool:
    """Whether the node is an op, and not a reshard."""
    return node.op == "call_function" and "step" not in node.meta


def _source(node: fx.Node) -> str:
    """Return the name of the traced node that a node stands for; on one rank the graph is the
    traced one.
    """
    return str(node.meta.get("source", node.name))


def _dtype(node: fx.Node) -> torch.dtype:
    if "dtype" in node.meta or "val" not in node.meta:
        return node.meta.get("dtype", torch.float32)
    return next((v.dtype for v in results_of(node) if isinstance(v, torch.Tensor)), torch.float32)


def _again_seconds(program: Program, world: World) -> dict[str, float]:
    """Return for every subgraph the seconds of the computation that runs again in the backward."""
    plan, notes = program.plan, program.annotations
    assert plan is not None and notes is not None
    dtypes = {
        _source(n): _dtype(n) for n, again in every_node(program.module) if again and _computes(n)
    }
    chain_of = {name: chain.name for chain in program.chains for name in chain.nodes}
    total: dict[str, float] = defaultdict(float)
    for name in filter(plan.choices.__contains__, dtypes):  # in one order on every rank
        choice, rule = plan.choices[name], notes.specs[name]
        ranks = _rank_count(plan, choice.splits, rule.sizes)
        strategy = Strategy((), choice.operands, choice.results, ranks)
        total[chain_of[name]] += node_seconds(rule, strategy, dtypes[name], False, world)
    return total


def _rank_count(plan: Plan, splits: tuple[str, ...], factors: dict[str, int]) -> int:
    """Return among how many ranks a node's work is divided."""
    ranks = 1
    for axis, split in zip(plan.mesh.axes, splits, strict=True):
        ranks *= axis.size if split in factors else 1
    return ranks
