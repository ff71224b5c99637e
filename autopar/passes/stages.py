"""Cuts the graph of one rank into the stages of a pipeline.

    embed, blocks.0, blocks.1 | blocks.2, blocks.3, norm, head      two stages, one border tensor

Every stage has the same mesh, so what is cut is the graph that a rank of any stage would run, and a
border tensor goes from a rank to the same place of the next stage's mesh, in its local layout. What
follows from parameters and inputs together is computed in one stage; all else, such as masks,
positions, and weights as they are gathered, is made again where it is used. A value that several
later stages read passes through those between. Where several ranks of a stage hold the same border
tensor, `slice_borders` lets each send a slice of it, and the next stage gathers the slices.

The emitted program of one micro-batch enters `cut` with the seconds of its nodes; `Stage`s leave,
each with a program of its own. planner/pipelines.py asks, and runtime/training/stages_run.py runs
them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar.cost.communication import hierarchies
from autopar.errors import LayoutError, PlanError
from autopar.ir.graph import ancestors, block_of, is_inexact, where
from autopar.ir.layout import Layout, S
from autopar.ir.program import Input, Output, Program
from autopar.ir.reshard import reshard_steps
from autopar.ops.collectives import emit_step


@dataclass(frozen=True)
class Stage:
    """One stage: its program, whose placeholders are the inputs of the whole that it reads and then
    what it `receives` from the stage before, and which returns what it `sends` to the next one and
    then its own `results`, the places of these among the results of the whole. `blocks`: the names
    of the repeated blocks that it runs.
    """

    number: int
    program: Program
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    results: tuple[int, ...]
    blocks: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The placeholders of the parameters that the stage reads."""
        return tuple(e.node for e in self.program.signature.inputs if e.kind == "parameter")


def cut(program: Program, firsts: Sequence[str]) -> tuple[Stage, ...]:
    """Return the stages of an emitted program. `firsts`: the block that each stage but the first
    one begins with. Raises PlanError where a stage would have nothing to train, or where the model
    changes a buffer or trains in float16.
    """
    fed = [e.target for e in program.signature.inputs if e.kind == "user" and e.trainable]
    if fed:
        raise PlanError(
            f"stages: the input {fed[0]} requires a gradient, which no stage sends back: detach "
            "it, or plan without stages"
        )
    home, stage_of = _stages_of_nodes(program, firsts), _stage_of_blocks(program, firsts)
    count = len(firsts) + 1
    trains = any(e.trainable for e in program.signature.inputs if e.kind == "parameter")
    graph = program.module.graph
    in_float16 = next((n for n in home if n.meta.get("dtype") is torch.float16), None)
    if trains and in_float16 is not None:
        raise PlanError(
            f"stages: {where(in_float16)} is computed in float16, whose gradients need a "
            "torch.amp.GradScaler: it would see the overflows of one stage alone, and ranks would "
            "skip other steps. Train in bfloat16, or plan without stages"
        )
    (results,) = graph.output_node().args
    assert isinstance(results, tuple | list)
    for output, node in zip((o for o in program.signature.outputs if o.node), results, strict=True):
        assert isinstance(node, fx.Node)
        if output.kind == "mutation":
            raise PlanError(
                f"stages: {where(node)} writes a buffer ({output.target}), which stages do not do "
                "for every micro-batch. Freeze it (eval() of that module), or plan without stages"
            )
    borders = _borders(home, count)
    homes_of_results = [home.get(node, count - 1) for node in results if isinstance(node, fx.Node)]
    stages = []
    for number in range(count):
        received = borders[number - 1] if number else []
        sent = borders[number] if number + 1 < count else []
        own = [n for n, stage in home.items() if stage == number]
        places = tuple(i for i, stage in enumerate(homes_of_results) if stage == number)
        stage = _stage(program, number, own, received, sent, places)
        own_blocks = tuple(name for name, n in stage_of.items() if n == number)
        stage = dataclasses.replace(stage, blocks=own_blocks)
        if trains and not any(
            e.trainable for e in stage.program.signature.inputs if e.kind == "parameter"
        ):
            begin = firsts[number - 1] if number else "the first block"
            raise PlanError(
                f"stages: stage {number} of {count}, from {begin} on, has no parameter that is "
                "trained: use fewer stages"
            )
        stages.append(stage)
    return tuple(stages)


def check(program: Program, stages: Sequence[Stage]) -> None:
    """The contract: a value of parameters and inputs is computed in one stage, what a stage
    receives is what the one before sends, and every result is returned once.
    """
    flowing = {node.name for node in _nodes_of_step(program)}
    computed = [
        node.name
        for stage in stages
        for node in stage.program.module.graph.nodes
        if node.op == "call_function" and node.name in flowing
    ]
    assert len(computed) == len(set(computed)), "a value is computed in two stages"
    for before, after in itertools.pairwise(stages):
        assert before.sends == after.receives, f"stage {after.number} is sent something else"
    assert not stages[0].receives and not stages[-1].sends, "a border outside"
    returned = sorted(place for stage in stages for place in stage.results)
    outputs = [o for o in program.signature.outputs if o.node is not None]
    assert returned == list(range(len(outputs))), "a result is lost"
    for stage in stages:
        graph = stage.program.module.graph
        graph.lint()
        items = graph.find_nodes(op="call_function", target=operator.getitem)
        several = {item.all_input_nodes[0].name for item in items}
        assert several.isdisjoint(stage.receives), "a border of several tensors"


# -- slices of border tensors ----------------------------------------------------------------------
def slice_borders(program: Program, firsts: Sequence[str]) -> Program:
    """Return the program with border tensors in slices, of which no rank of a stage sends what
    another one sends too; the program itself where none do. `firsts`: as for `cut`.

        x (I) | layers.2 …    becomes    x (I) → slice (S) | gathered (I) → layers.2 …

    A border tensor of parts of sums is scattered, and gathered where the next stage would have
    summed it. The reshards carry gradients as any do, so these go back in slices as well. Source:
    the scatter and gather of Megatron-LM, arXiv 2104.04473, section 4.1.
    """
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    output = graph.graph_copy(program.module.graph, copied)
    assert output is not None
    graph.output(output)
    graph.output_node().meta = dict(program.module.graph.output_node().meta)
    module = fx.GraphModule(program.module, graph, class_name="Parallel")
    emitter = _Slices(dataclasses.replace(program, module=module))
    home = _stages_of_nodes(emitter.source, firsts)
    borders = dict.fromkeys(itertools.chain.from_iterable(_borders(home, len(firsts) + 1)))
    sliced = {node: _in_slices(node.meta["layout"]) for node in borders}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node, layout in sliced.items():
        if layout is None:
            continue
        users: dict[tuple[int, Layout], list[fx.Node]] = {}
        reshards = {user for user in node.users if "step" in user.meta and user not in sliced}
        for user in sorted(node.users, key=order.__getitem__):
            if home.get(user, 0) > home[node]:
                wanted = user.meta["layout"] if user in reshards else node.meta["layout"]
                users.setdefault((home[user], wanted), []).append(user)
        own = emitter.resharded(node, layout, like=node, before=node.next)
        for (_, wanted), later in users.items():
            gathered = emitter.resharded(own, wanted, like=later[0], before=later[0])
            for user in later:
                if user in reshards:
                    user.replace_all_uses_with(gathered)
                    graph.erase_node(user)
                else:
                    user.replace_input_with(node, gathered)
    return program if all(layout is None for layout in sliced.values()) else emitter.program()


def _in_slices(layout: Layout) -> Layout | None:
    """Return the layout in which ranks that hold the same of a value, or parts of its sum, hold a
    slice each, of the first dim that so many divide; None where there are no such ranks or dim.
    """
    alike = [
        axis
        for axis, state in zip(layout.mesh.axes, layout.states, strict=True)
        if state.kind != "S" and axis.size > 1
    ]
    count = math.prod(axis.size for axis in alike)
    for dim, size in enumerate(layout.local_shape):
        if not alike or size % count:
            continue
        with suppress(LayoutError):  # no digit is left inside those that others hold
            inner, sliced = size, layout
            for axis in alike:
                inner //= axis.size
                sliced = sliced.with_state(axis.name, S(dim, inner))
            return sliced
    return None


class _Slices:
    """Emits reshards into the emitted graph of a program, with the notes that its nodes have."""

    def __init__(self, source: Program) -> None:
        assert source.plan is not None and source.annotations is not None
        self.source, self._world = source, source.plan.world
        self._wide = source.annotations.reduce_dtype
        self._inputs = list(source.signature.inputs)

    def resharded(self, x: fx.Node, target: Layout, like: fx.Node, before: fx.Node) -> fx.Node:
        """Return x in another layout, in the same block as `like`, emitted `before` a node."""
        graph = x.graph
        value = x.meta["value" if "value" in x.meta else "value_inside"]
        element = self.source.element(value, x.meta["dtype"].itemsize)
        keys = ("stack_trace", "source", "dtype")
        described: dict[str, Any] = {key: x.meta[key] for key in keys if key in x.meta}
        described["value"] = value
        described["chain"] = like.meta.get("chain", "")
        for step in reshard_steps(x.meta["layout"], target):
            with graph.inserting_before(before):
                levels = hierarchies(step, element, self._world)
                wide = self._wide if element.gradient > element.bytes else None
                node = emit_step(graph, x, step, self._coordinate, levels, wide)
            node.meta.update(described, layout=step.after, step=step, element=element)
            node.meta["custom"] = {"node": node.name, "module": described["chain"]}
            x = node
        return x

    def _coordinate(self, axis: str) -> fx.Node:
        """Return the input with the rank's coordinate on an axis, added where there is none."""
        graph, name = self.source.module.graph, f"coordinate_{axis}"
        for node in graph.find_nodes(op="placeholder"):
            if node.name == name:
                return node
        *_, last = graph.find_nodes(op="placeholder")
        with graph.inserting_after(last):
            node = graph.placeholder(name)
        self._inputs.append(Input("coordinate", name, axis))
        return node

    def program(self) -> Program:
        """Return the program with what was emitted."""
        graph = self.source.module.graph
        graph.lint()
        self.source.module.recompile()
        signature = dataclasses.replace(self.source.signature, inputs=tuple(self._inputs))
        return dataclasses.replace(self.source, signature=signature)


def balance(seconds: Mapping[str, float], count: int) -> tuple[str, ...]:
    """Return the block that each stage but the first begins with, of so many stages of consecutive
    blocks whose slowest one is as fast as can be. `seconds`: of each block, in their order.

    >>> balance({"a.0": 1.0, "a.1": 1.0, "a.2": 1.0, "a.3": 3.0}, 2)
    ('a.3',)
    """
    names, times = list(seconds), list(seconds.values())
    if count > len(names):
        raise PlanError(
            f"stages: {count} stages of a model with {len(names)} repeated blocks: a stage has at "
            "least one. Use fewer stages"
        )

    @cache
    def best(start: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """Return the slowest stage's seconds, the sum of their squares, which is least where stages
        are alike, and where stages begin, of the blocks from `start` on.
        """
        if stages == 1:
            last = math.fsum(times[start:])
            return last, last**2, ()
        candidates = []
        for end in range(start + 1, len(times) - stages + 2):
            own = math.fsum(times[start:end])
            slowest, squares, begins = best(end, stages - 1)
            candidates.append((max(own, slowest), own**2 + squares, (end, *begins)))
        return min(candidates)

    return tuple(names[place] for place in best(0, count)[2])


def seconds_by_block(graph: fx.Graph, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each repeated block, in the order in which they run; what comes before
    the first counts with it, and what comes after the last with that. `seconds`: of nodes.
    """
    by_block: dict[str, float] = {}
    before = 0.0
    for node in graph.nodes:
        block, own = block_of(node), seconds.get(node.name, 0.0)
        if block:
            by_block[block] = by_block.get(block, 0.0) + own
        elif by_block:
            by_block[next(reversed(by_block))] += own
        else:
            before += own
    if by_block:
        by_block[next(iter(by_block))] += before
    return by_block


# -- where a node is computed ----------------------------------------------------------------------
def _nodes_of_step(program: Program) -> list[fx.Node]:
    """Return the nodes that follow from parameters and from what is new in every step, in order."""
    kinds = {e.node: e.kind for e in program.signature.inputs}
    trained, fresh = set[fx.Node](), set[fx.Node]()
    for node in program.module.graph.nodes:
        if node.op == "placeholder":
            kind = kinds[node.name]
            trained |= {node} if kind == "parameter" else set()
            fresh |= {node} if kind in ("user", "seed") else set()
        elif node.op != "output":
            trained |= set() if trained.isdisjoint(node.all_input_nodes) else {node}
            fresh |= set() if fresh.isdisjoint(node.all_input_nodes) else {node}
    return [n for n in program.module.graph.nodes if n in trained and n in fresh]


def _stages_of_nodes(program: Program, firsts: Sequence[str]) -> dict[fx.Node, int]:
    """Return the stage of every node that flows. A block's nodes are in its stage, other ones where
    the last of what they read is made, or where they are read first if less is sent then: an
    embedding of tokens that a later stage reads is computed there.
    """
    stage_of = _stage_of_blocks(program, firsts)
    flowing = _nodes_of_step(program)
    home: dict[fx.Node, int] = {}
    for node in flowing:
        block = block_of(node)
        reads = [n for n in node.all_input_nodes if n in home]
        own = 0 if node.target is operator.getitem else stage_of.get(block, 0)
        home[node] = max([own, *(home[n] for n in reads)])
    for node in reversed(flowing):
        users = [home[user] for user in node.users if user in home]
        movable = not block_of(node) and node.target is not operator.getitem
        if users and movable and min(users) > home[node]:
            later, sent = min(users), 0.0
            for read in set(node.all_input_nodes) & set(home):
                others = [home[user] for user in read.users if user in home and user is not node]
                sent += 0.0 if max(others, default=0) >= later else _bytes(read)
            if sent < _bytes(node):
                home[node] = later
    return home


def _borders(home: Mapping[fx.Node, int], count: int) -> list[list[fx.Node]]:
    """Return the border tensors between each of so many stages and the next."""
    last_use = {n: max((home[u] for u in n.users if u in home), default=0) for n in home}
    return [[n for n in home if home[n] < number <= last_use[n]] for number in range(1, count)]


def _bytes(node: fx.Node) -> float:
    """Return the bytes that a rank has of a value; none of several results, which are not sent."""
    layout = node.meta.get("layout")
    return 0.0 if layout is None else float(layout.local_size * node.meta["dtype"].itemsize)


def _stage_of_blocks(program: Program, firsts: Sequence[str]) -> dict[str, int]:
    order = list(dict.fromkeys(b for n in program.module.graph.nodes if (b := block_of(n))))
    missing = [name for name in firsts if name not in order]
    if missing:
        raise PlanError(
            f"stages: no block {missing[0]!r} to begin a stage with; the blocks are "
            f"{', '.join(order[:4])} …. Blocks before the first with a parameter are none. Use "
            "fewer stages"
        )
    stage_of, number = {}, 0
    for name in order:
        number += name in firsts
        stage_of[name] = number
    return stage_of


# -- the program of a stage ------------------------------------------------------------------------
def _stage(
    program: Program,
    number: int,
    own: Sequence[fx.Node],
    received: Sequence[fx.Node],
    sent: Sequence[fx.Node],
    places: tuple[int, ...],
) -> Stage:
    source = program.module.graph
    (results,) = source.output_node().args
    assert isinstance(results, tuple | list)
    returned = [n for i, n in enumerate(results) if i in places and isinstance(n, fx.Node)]
    needed = ancestors([*own, *returned], set(received))
    graph = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op == "placeholder" and node in needed:
            twins[node] = graph.node_copy(node)
    for node in received:
        twins[node] = graph.placeholder(node.name)
        twins[node].meta = dict(node.meta)
    for node in source.nodes:
        if node in needed and node not in twins:
            twins[node] = graph.node_copy(node, lambda n: twins[n])
    graph.output(tuple(twins[node] for node in (*sent, *returned)))
    graph.output_node().meta = dict(source.output_node().meta)
    module = fx.GraphModule(program.module, graph)
    stage_program = _program_of(program, module, received, sent, places)
    names = [node.name for node in received], [node.name for node in sent]
    return Stage(number, stage_program, tuple(names[0]), tuple(names[1]), places)


def _program_of(
    program: Program,
    module: fx.GraphModule,
    received: Sequence[fx.Node],
    sent: Sequence[fx.Node],
    places: tuple[int, ...],
) -> Program:
    """Return the program with a stage's graph and the signature that goes with it."""
    placeholders = {node.name for node in module.graph.find_nodes(op="placeholder")}
    inputs = [e for e in program.signature.inputs if e.node in placeholders]
    inputs += [
        Input("user", node.name, "the stage before", trainable=carries(node)) for node in received
    ]
    outputs = [o for o in program.signature.outputs if o.node is not None]
    borders = [Output("border", node.name) for node in sent]
    signature = dataclasses.replace(
        program.signature,
        inputs=tuple(inputs),
        outputs=(*borders, *(outputs[place] for place in places)),
    )
    layouts, dtypes = dict(program.layouts), dict(program.dtypes)
    for node in (*received, *sent):
        layouts.setdefault(node.name, node.meta["layout"])
        dtypes.setdefault(node.name, node.meta["dtype"])
    return dataclasses.replace(
        program, module=module, signature=signature, layouts=layouts, dtypes=dtypes
    )


def carries(node: fx.Node) -> bool:
    """Whether a border tensor has a gradient that goes back."""
    return is_inexact(node.meta["dtype"])
