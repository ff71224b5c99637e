"""Rewrites the traced graph into the graph of one rank: ops run on shards, reshards are nodes.

Values that depend on parameters are made in the layouts of the plan; each step of a reshard is
emitted once per (value, layout). All other values (masks, positions, token ids) have no layout in
the plan: `push_back_layouts` carries the layout that a consumer wants back through their ops to the
constants and inputs, so that a rank computes only its slice. planner/planner.py calls this once a
plan is chosen, and `emit_program` for candidates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import torch
from torch import fx

from autopar._compat import LazyGraphModule
from autopar.cost.communication import hierarchies, path_seconds
from autopar.ir.graph import chain_name, producer
from autopar.ir.layout import Element, Layout, R, S, State
from autopar.ir.padding import unpadded_shape
from autopar.ir.plan import Plan
from autopar.ir.program import Annotations, Input, Program, Value, same_inputs, same_outputs
from autopar.ir.reshard import reshard_steps
from autopar.ir.sharding_rule import (
    Dims,
    OpShardingRule,
    operand_shapes,
    operands_of,
    results_of,
    shape_of,
    value_of,
)
from autopar.ops.collectives import emit_step
from autopar.ops.local import Call, emit_local
from autopar.ops.sharded import inner_collectives
from autopar.world import World

Shapes = tuple[tuple[int, ...] | None, ...]


def push_back_layouts(
    rule: OpShardingRule, wanted: Layout, result: int, operands: Shapes
) -> tuple[Layout, tuple[Layout | None, ...]]:
    """Return the layout in which a node can make its result, and those of its operands for that.

    An axis whose digit lies inside one factor that may be split is pushed back to the operands; on
    every other axis the result is made replicated (R), and is sliced afterwards.
    """
    mesh = wanted.mesh
    reached: list[State] = []
    operand_states: list[list[State]] = []
    for axis, state in zip(mesh.axes, wanted.states, strict=True):
        split = _factor(rule, rule.results[result], state, axis.size) if state.kind == "S" else None
        reached.append(state if split else R)
        operand_states.append(
            [_state(rule, dims, split) if dims is not None else R for dims in rule.operands]
        )
    columns = [tuple(states[i] for states in operand_states) for i in range(len(rule.operands))]
    layouts = tuple(
        None if shape is None or dims is None else Layout(mesh, shape, column)
        for shape, dims, column in zip(operands, rule.operands, columns, strict=True)
    )
    return Layout(mesh, wanted.shape, tuple(reached)), layouts


def _units(rule: OpShardingRule, names: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return the factors of one dim, each with its stride in the dim."""
    return [(key, math.prod(rule.sizes[n] for n in names[i + 1 :])) for i, key in enumerate(names)]


def _factor(rule: OpShardingRule, dims: Dims, state: State, size: int) -> tuple[str, int] | None:
    """Return the factor in which a digit lies and its stride there; None if it may not be split."""
    for name, unit in _units(rule, dims[state.dim]):
        inside = state.stride % unit == 0 and state.stride * size <= unit * rule.sizes[name]
        if (
            inside
            and (unit * rule.sizes[name]) % (state.stride * size) == 0
            and rule.splittable(name)
        ):
            return name, state.stride // unit
    return None


def _state(rule: OpShardingRule, dims: Dims, factor: tuple[str, int] | None) -> State:
    if factor is None:
        return R
    for dim, names in enumerate(dims):
        for name, unit in _units(rule, names):
            if name == factor[0]:
                return S(dim, factor[1] * unit)
    return R


aten = torch.ops.aten


def rewrite(program: Program, world: World) -> Program:
    """Return the program of one rank. A first run finds the layouts wanted of the inputs."""
    assert program.plan is not None
    wanted = _Rewriter(program, world, {}).run().wishes
    inputs = {value: _common_layout(layouts) for value, layouts in wanted.items()}
    return _Rewriter(program, world, inputs).run().program()


def check(program: Program) -> None:
    """The contract: the graph is well formed, as its signature says, the plan stores every
    parameter, and no output is partial.
    """
    same_inputs(program)
    same_outputs(program)
    assert program.plan is not None
    for entry in program.signature.inputs:
        # the graph would take it as R, and no rank would sum its gradient
        stored = entry.kind != "parameter" or entry.node in program.plan.stored
        assert stored, f"the plan does not say how parameter {entry.target} is stored"
    for output in program.signature.outputs:
        if output.node is not None:
            assert not program.layouts[output.node].axes_of("P"), f"output {output.node} is partial"


def _common_layout(layouts: list[Layout]) -> Layout:
    """Return the plain layout of the digits that all wanted layouts of an input share."""
    states = [
        digits.pop() if len(digits := set(column)) == 1 and next(iter(digits)).kind == "S" else R
        for column in zip(*(layout.states for layout in layouts), strict=True)
    ]
    return Layout(layouts[0].mesh, layouts[0].shape, tuple(states)).plain_part()


def _numbered(graph: fx.Graph) -> dict[str, int]:
    """Number the nodes that may draw random numbers, for the upper word of their seed (the lower
    word counts steps), before anything is emitted: all copies of a node drop the same elements.
    """
    random_nodes = (
        node.name
        for node in graph.nodes
        if node.op == "call_function"
        and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    )
    return {name: number for number, name in enumerate(random_nodes, start=1)}


class _Rewriter:
    """Emits the graph of one rank; `resharded` holds the node of each (value, layout), shared."""

    def __init__(self, program: Program, world: World, inputs: dict[str, Layout]) -> None:
        assert program.plan is not None and program.annotations is not None
        self.source, self.world, self.inputs = program, world, inputs
        self.plan: Plan = program.plan
        self.notes: Annotations = program.annotations
        self.mesh = self.plan.mesh
        self.graph = fx.Graph()
        self.resharded: dict[tuple[Value, Layout], fx.Node] = {}
        self.native: dict[Value, Layout] = {}
        self.nodes = {node.name: node for node in program.module.graph.nodes}
        self.wishes: dict[str, list[Layout]] = {}
        self.layouts: dict[str, Layout] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.unfilled: dict[str, tuple[fx.Node, Layout]] = {}
        self.chain = ""
        self.draws = _numbered(program.module.graph)

    def run(self) -> _Rewriter:
        self.entries = list(self.source.signature.inputs)
        fed = {e.node for e in self.entries if e.kind == "user"}
        self.free_inputs = fed - self.notes.searched
        uneven = {name for name in fed if self.source.pads(name)}
        for node in self.source.module.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, node.name in uneven)
        self.coordinates = {name: self._coordinate(name) for name in self.mesh.names}
        self.seed: fx.Node | None = self._seed() if self.draws else None
        for name in sorted(uneven):
            self._fill_up(self.nodes[name])
        for node in self.source.module.graph.nodes:
            if (
                node.op == "call_function"
                and node.name in self.notes.specs
                and node.name in self.notes.searched
            ):
                self.chain = chain_name(node)
                self._call(node)
        self._outputs()
        return self

    def program(self) -> Program:
        self.graph.lint()
        module = LazyGraphModule(torch.nn.Module(), self.graph)
        plan = dataclasses.replace(
            self.plan,
            inputs={e.target: self.layouts[e.node] for e in self.entries if e.kind == "user"},
        )
        signature = dataclasses.replace(
            self.source.signature, inputs=tuple(self.entries), outputs=tuple(self.outputs)
        )
        return dataclasses.replace(
            self.source,
            module=module,
            signature=signature,
            plan=plan,
            layouts=self.layouts,
            dtypes=self.dtypes,
        )

    # -- inputs ------------------------------------------------------------------------------------
    def _placeholder(self, node: fx.Node, uneven: bool) -> None:
        """Emit an input in its layout; one of `uneven` rows whole, to be filled up."""
        new = self.graph.placeholder(node.name)
        new.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        shape = shape_of(value_of(node))
        wanted = None if uneven else self.inputs.get(node.name)
        layout = self.plan.stored.get(node.name) or wanted or self._uniform_layout(shape, R)
        self.dtypes[node.name] = value_of(node).dtype
        if uneven:
            shape = unpadded_shape(shape, self.source.pads(node.name))
            self.layouts[node.name] = Layout(self.mesh, shape, layout.states)
            self.unfilled[node.name] = new, layout
            return
        self._record_origin((node.name, 0), layout, new)
        self.layouts[node.name] = layout

    def _fill_up(self, node: fx.Node) -> None:
        """Emit an input of the user with copies of its first rows behind the last one."""
        new, layout = self.unfilled[node.name]
        for pad in self.source.pads(node.name):
            behind = (pad.padded - pad.size) * pad.inner
            copies = self.graph.call_function(aten.slice.Tensor, (new, pad.dim, 0, behind))
            new = self.graph.call_function(aten.cat.default, ([new, copies], pad.dim))
            for each in (copies, new):
                self._describe(each, node, layout)
        self._record_origin((node.name, 0), layout, new)

    def _coordinate(self, axis: str) -> fx.Node:
        entry = Input("coordinate", f"coordinate_{axis}", axis)
        self.entries.append(entry)
        return self.graph.placeholder(entry.node)

    def _seed(self) -> fx.Node:
        self.entries.append(Input("seed", "seed", "seed"))
        return self.graph.placeholder("seed")

    def _seed_of(self, node: fx.Node) -> fx.Node:
        """Return the seed of a traced node, the same in each of its copies."""
        assert self.seed is not None
        return self.graph.call_function(aten.add.Scalar, (self.seed, self.draws[node.name] << 32))

    def _own_seed_of(self, node: fx.Node, axes: tuple[str, ...]) -> tuple[fx.Node, int]:
        """Return a seed on the host for the rank's place on these axes, and the draw's number."""
        assert self.seed is not None
        entry = Input("seed", "_".join(("seed_at", *axes)), f"@{'.'.join(axes)}")
        if entry not in self.entries:
            self.entries.append(entry)
            *_, last = (n for n in self.graph.nodes if n.op == "placeholder")
            with self.graph.inserting_after(last):
                self.graph.placeholder(entry.node)
        (seed,) = (n for n in self.graph.nodes if n.op == "placeholder" and n.target == entry.node)
        return seed, self.draws[node.name]

    # -- nodes -------------------------------------------------------------------------------------
    def _call(self, node: fx.Node) -> None:
        choice = self.plan.choices[node.name]
        operands = [
            None if operand is None or layout is None else self._value(operand, layout)
            for operand, layout in zip(operands_of(node), choice.operands, strict=True)
        ]
        new = self._emit(node, operands, choice.operands, choice.results)
        values = results_of(node)
        if isinstance(value_of(node), list | tuple):
            for index, layout in enumerate(choice.results):
                item = self.graph.call_function(operator.getitem, (new, index))
                self._describe(item, node, layout)
                self._record_origin((node.name, index), layout, item)
        else:
            assert len(values) == 1
            self._record_origin((node.name, 0), choice.results[0], new)

    def _emit(
        self, node: fx.Node, operands: Any, layouts: Any, results: tuple[Layout, ...]
    ) -> fx.Node:
        last = next(iter(reversed(self.graph.nodes)))  # torch 2.11 gives no iterator
        new = emit_local(
            Call(
                self.graph,
                node,
                operands,
                layouts,
                results,
                self.coordinates.__getitem__,
                functools.partial(self._seed_of, node),
                functools.partial(self._own_seed_of, node),
            )
        )
        emitted = last.next
        while emitted.op != "root":
            self._describe(emitted, node, results[0])
            emitted = emitted.next
        gradient = any(producer(n) in self.notes.gradient for n in node.all_input_nodes)
        new.meta["inside"] = [
            x for x in inner_collectives(node, layouts) if gradient or not x.backward
        ]
        return new

    def _describe(self, new: fx.Node, node: fx.Node, layout: Layout) -> None:
        for key in ("nn_module_stack", "stack_trace"):
            if key in node.meta:
                new.meta[key] = node.meta[key]
        new.meta["source"], new.meta["layout"], new.meta["chain"] = node.name, layout, self.chain
        tensors = (v for v in results_of(node) if isinstance(v, torch.Tensor))
        new.meta["dtype"] = next((v.dtype for v in tensors), torch.float32)

    def _without_invariant(self, value: Value, layout: Layout) -> Layout:
        """Rename I to R where no gradient flows: the two are the same state there."""
        if value in self.notes.gradient or not layout.axes_of("I"):
            return layout
        states = tuple(R if state.kind == "I" else state for state in layout.states)
        return Layout(layout.mesh, layout.shape, states)

    def _value(self, node: fx.Node, layout: Layout) -> fx.Node:
        """Return this value in this layout, emitted where it is not there yet."""
        value = producer(node)
        layout = self._without_invariant(value, layout)
        if value in self.native:
            return self._reshard_value(value, layout)
        return self._free(node, layout)

    def _record(self, value: Value, layout: Layout, node: fx.Node) -> None:
        self.resharded[value, layout] = node
        node.meta["value"] = value

    def _record_origin(self, value: Value, layout: Layout, node: fx.Node) -> None:
        """Record a value in the layout in which it is first made."""
        self.native[value] = self._without_invariant(value, layout)
        self._record(value, self.native[value], node)

    # -- reshards ----------------------------------------------------------------------------------
    def _reshard_value(self, value: Value, layout: Layout) -> fx.Node:
        """Return the value, resharded from where it was made or from its copy in the plan."""
        if (value, layout) in self.resharded:
            return self.resharded[value, layout]
        if value[0] in self.free_inputs:
            self.wishes.setdefault(value[0], []).append(layout)
        sources = [self.native[value]]
        if value in self.plan.copies:
            sources.append(self._without_invariant(value, self.plan.copies[value]))
        size = results_of(self.nodes[value[0]])[value[1]].dtype.itemsize
        element = self.source.element(value, size)
        best = min(
            sources, key=lambda s: path_seconds(reshard_steps(s, layout), element, self.world)
        )
        if best != self.native[value]:
            self._walk(value, self.native[value], best, element)
        return self._walk(value, best, layout, element)

    def _walk(self, value: Value, source: Layout, target: Layout, element: Element) -> fx.Node:
        """Reshard a value step by step; steps that were emitted before are shared."""
        for step in reshard_steps(source, target):
            if (value, step.after) not in self.resharded:
                before = self.resharded[value, step.before]
                levels = hierarchies(step, element, self.world)
                wide = self.notes.reduce_dtype if element.gradient > element.bytes else None
                node = emit_step(
                    self.graph, before, step, self.coordinates.__getitem__, levels, wide
                )
                self._describe(node, self.nodes[value[0]], step.after)
                node.meta.update(step=step, element=element)
                self._record(value, step.after, node)
        return self.resharded[value, target]

    # -- values without a layout of their own ------------------------------------------------------
    def _free(self, node: fx.Node, layout: Layout) -> fx.Node:
        """Return a value that depends on no parameter, made in the layout that is wanted."""
        value = producer(node)
        if (value, layout) in self.resharded:
            return self.resharded[value, layout]
        source = self.nodes[value[0]]
        rule = self.notes.specs[source.name]
        results = [v for v in results_of(source) if isinstance(v, torch.Tensor)]
        reached, operand_layouts = push_back_layouts(
            rule,
            layout,
            value[1],
            operand_shapes(source),
        )
        if (value, reached) not in self.resharded:
            operands = [
                None if n is None or operand_layout is None else self._value(n, operand_layout)
                for n, operand_layout in zip(operands_of(source), operand_layouts, strict=True)
            ]
            result_layouts = tuple(
                reached if index == value[1] else self._uniform_layout(shape_of(v), R)
                for index, v in enumerate(results)
            )
            new = self._emit(source, operands, operand_layouts, result_layouts)
            if not isinstance(value_of(source), list | tuple):
                self._record(value, reached, new)
            else:  # without a split, the other results are unsharded too: one call for all
                unsharded = not reached.axes_of("S")
                for index in range(len(result_layouts)) if unsharded else (value[1],):
                    item = self.graph.call_function(operator.getitem, (new, index))
                    self._describe(item, source, result_layouts[index])
                    self._record((source.name, index), result_layouts[index], item)
        return self._walk(value, reached, layout, Element(results[value[1]].dtype.itemsize, 0))

    def _uniform_layout(self, shape: tuple[int, ...], state: State) -> Layout:
        return Layout(self.mesh, shape, (state,) * len(self.mesh.axes))

    # -- outputs -----------------------------------------------------------------------------------
    def _outputs(self) -> None:
        returned: list[fx.Node] = []
        self.outputs = []
        for number, output in enumerate(self.source.signature.outputs):
            if output.node is None:
                self.outputs.append(output)
                continue
            node = self.nodes[output.node]
            self.chain = chain_name(node)
            layout = self.plan.outputs.get(str(number)) or self._uniform_layout(
                shape_of(value_of(node)), R
            )
            new = self._value(node, layout)
            returned.append(new)
            self.outputs.append(dataclasses.replace(output, node=new.name))
            self.layouts[new.name] = layout
        self.graph.output(tuple(returned))
