"""rewrite: the traced graph on one rank's shards, with every change of state a node of its own.

Values that hang on parameters are made in the layouts of the plan and converted where a consumer
wants another; each step of a conversion is made once per (value, layout) and shared. All other
values (masks, positions, token ids) have no layout of their own: each consumer's wish is pushed
back through their ops to the constants and inputs, so that they are never made whole where a slice
is wanted.

From the layout wanted of a node's result to the layouts of its operands: how slices reach back
to constants and inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import torch
from torch import fx

from autopar.cost.communication import hierarchies, path_seconds
from autopar.ir.graph import chain_name, producer
from autopar.ir.layout import Element, Layout, R, S, State
from autopar.ir.plan import Plan
from autopar.ir.program import Annotations, Input, Program, Value
from autopar.ir.reshard import reshard_steps
from autopar.ir.sharding_rule import Dims, OpShardingRule, operands_of, results_of, shape_of, value_of
from autopar.ops.collectives import emit_step
from autopar.ops.local import Call, emit_local
from autopar.ops.sharded.inner_collectives import inner_collectives
from autopar.world import World

Shapes = tuple[tuple[int, ...] | None, ...]


def push_back_layouts(
    spec: OpShardingRule, wanted: Layout, result: int, operands: Shapes
) -> tuple[Layout, tuple[Layout | None, ...]]:
    """(the layout in which the node can make its result, the layouts of its operands for that).

    An axis whose digit lies inside one factor that may be split reaches back; every other axis of
    the result is made whole (R), to be sliced afterwards.
    """
    mesh = wanted.mesh
    reached: list[State] = []
    back: list[list[State]] = []
    for axis, state in zip(mesh.axes, wanted.states, strict=True):
        found = _factor(spec, spec.results[result], state, axis.size) if state.kind == "S" else None
        reached.append(state if found else R)
        back.append(
            [_state(spec, dims, found) if dims is not None else R for dims in spec.operands]
        )
    columns = [tuple(states[i] for states in back) for i in range(len(spec.operands))]
    layouts = tuple(
        None if shape is None or dims is None else Layout(mesh, shape, column)
        for shape, dims, column in zip(operands, spec.operands, columns, strict=True)
    )
    return Layout(mesh, wanted.shape, tuple(reached)), layouts


def _units(spec: OpShardingRule, names: tuple[str, ...]) -> list[tuple[str, int]]:
    """The factors of one dim with their units: the product of the sizes of the factors inside."""
    return [
        (name, math.prod(spec.sizes[n] for n in names[i + 1 :])) for i, name in enumerate(names)
    ]


def _factor(spec: OpShardingRule, dims: Dims, state: State, size: int) -> tuple[str, int] | None:
    """The factor in which a digit lies and its stride there; None where it spans two, or where the
    factor may not be split.
    """
    for name, unit in _units(spec, dims[state.dim]):
        inside = state.stride % unit == 0 and state.stride * size <= unit * spec.sizes[name]
        if (
            inside
            and (unit * spec.sizes[name]) % (state.stride * size) == 0
            and spec.splittable(name)
        ):
            return name, state.stride // unit
    return None


def _state(spec: OpShardingRule, dims: Dims, found: tuple[str, int] | None) -> State:
    if found is None:
        return R
    for dim, names in enumerate(dims):
        for name, unit in _units(spec, names):
            if name == found[0]:
                return S(dim, found[1] * unit)
    return R


aten = torch.ops.aten


def rewrite(program: Program, world: World) -> Program:
    """The distributed graph. Twice: the first run finds in which layout every input is wanted, the
    second takes it so.
    """
    assert program.plan is not None
    wishes = _Rewriter(program, world, {}).run().wishes
    inputs = {value: _common(layouts) for value, layouts in wishes.items()}
    return _Rewriter(program, world, inputs).run().program()


def check(program: Program) -> None:
    """The contract: the graph is well formed, every kept layout is a legal one, and all outputs are
    where the plan wants them.
    """
    program.module.graph.lint()
    names = [node.name for node in program.module.graph.nodes if node.op == "placeholder"]
    assert names == [entry.node for entry in program.signature.inputs], (
        "placeholders and signature differ"
    )
    for output in program.signature.outputs:
        if output.node is not None:
            assert not program.layouts[output.node].axes_of("P"), f"output {output.node} is partial"


def _common(layouts: list[Layout]) -> Layout:
    """What all wishes for an input agree on: an axis that holds the same digit in each, else the
    whole value. A plain layout, as users may give an input as a DTensor.
    """
    states = [
        found.pop() if len(found := set(column)) == 1 and next(iter(found)).kind == "S" else R
        for column in zip(*(layout.states for layout in layouts), strict=True)
    ]
    return Layout(layouts[0].mesh, layouts[0].shape, tuple(states)).plain_part()


def _numbered(graph: fx.Graph) -> dict[str, int]:
    """The nodes that may draw random numbers, each with a number of its own, which is added to the
    upper word of the seed: steps count in the lower one. Known before anything is emitted, so that
    all copies of a node drop the same.
    """
    drawn = (
        node.name
        for node in graph.nodes
        if node.op == "call_function"
        and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    )
    return {name: number for number, name in enumerate(drawn, start=1)}


class _Rewriter:
    def __init__(self, program: Program, world: World, inputs: dict[str, Layout]) -> None:
        assert program.plan is not None and program.annotations is not None
        self.source, self.world, self.inputs = program, world, inputs
        self.plan: Plan = program.plan
        self.notes: Annotations = program.annotations
        self.mesh = self.plan.mesh
        self.graph = fx.Graph()
        self.made: dict[tuple[Value, Layout], fx.Node] = {}
        self.native: dict[Value, Layout] = {}
        self.nodes = {node.name: node for node in program.module.graph.nodes}
        self.wishes: dict[str, list[Layout]] = {}
        self.layouts: dict[str, Layout] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.chain = ""
        self.draws = _numbered(program.module.graph)

    def run(self) -> _Rewriter:
        self.entries = list(self.source.signature.inputs)
        self.free_inputs = {e.node for e in self.entries if e.kind == "user"} - self.notes.searched
        for node in self.source.module.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        self.coordinates = {name: self._coordinate(name) for name in self.mesh.names}
        self.seed: fx.Node | None = self._seed() if self.draws else None
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
        module = fx.GraphModule(torch.nn.Module(), self.graph)
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
    def _placeholder(self, node: fx.Node) -> None:
        new = self.graph.placeholder(node.name)
        new.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        shape = shape_of(value_of(node))
        layout = (
            self.plan.stored.get(node.name) or self.inputs.get(node.name) or self._all(shape, R)
        )
        self._born((node.name, 0), layout, new)
        self.layouts[node.name] = layout
        self.dtypes[node.name] = value_of(node).dtype

    def _coordinate(self, axis: str) -> fx.Node:
        entry = Input("coordinate", f"coordinate_{axis}", axis)
        self.entries.append(entry)
        return self.graph.placeholder(entry.node)

    def _seed(self) -> fx.Node:
        self.entries.append(Input("seed", "seed", "seed"))
        return self.graph.placeholder("seed")

    def _seed_of(self, node: fx.Node) -> fx.Node:
        """The seed of a traced node, the same in each of its copies."""
        assert self.seed is not None
        return self.graph.call_function(aten.add.Scalar, (self.seed, self.draws[node.name] << 32))

    def _own_seed_of(self, node: fx.Node, axes: tuple[str, ...]) -> tuple[fx.Node, int]:
        """A seed on the host for the rank's place on these axes, and which draw the node's is."""
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
                self._born((node.name, index), layout, item)
        else:
            assert len(values) == 1
            self._born((node.name, 0), choice.results[0], new)

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
        made = last.next
        while made.op != "root":
            self._describe(made, node, results[0])
            made = made.next
        gradient = any(producer(n) in self.notes.gradient for n in node.all_input_nodes)
        new.meta["inside"] = [x for x in inner_collectives(node.target, layouts) if gradient or not x.backward]
        return new

    def _describe(self, new: fx.Node, node: fx.Node, layout: Layout) -> None:
        for key in ("nn_module_stack", "stack_trace"):
            if key in node.meta:
                new.meta[key] = node.meta[key]
        new.meta["source"], new.meta["layout"], new.meta["chain"] = node.name, layout, self.chain
        tensors = (v for v in results_of(node) if isinstance(v, torch.Tensor))
        new.meta["dtype"] = next((v.dtype for v in tensors), torch.float32)

    def _plain(self, value: Value, layout: Layout) -> Layout:
        """Where no gradient flows, I and R are the same state: it is called R."""
        if value in self.notes.gradient or not layout.axes_of("I"):
            return layout
        states = tuple(R if state.kind == "I" else state for state in layout.states)
        return Layout(layout.mesh, layout.shape, states)

    def _value(self, node: fx.Node, layout: Layout) -> fx.Node:
        value = producer(node)
        layout = self._plain(value, layout)
        if value in self.native:
            return self._converted(value, layout)
        return self._free(node, layout)

    def _make(self, value: Value, layout: Layout, node: fx.Node) -> None:
        self.made[value, layout] = node
        node.meta["value"] = value

    def _born(self, value: Value, layout: Layout, node: fx.Node) -> None:
        """Enter a value in the layout in which it is made."""
        self.native[value] = self._plain(value, layout)
        self._make(value, self.native[value], node)

    # -- conversions -------------------------------------------------------------------------------
    def _converted(self, value: Value, layout: Layout) -> fx.Node:
        """The value in this layout, from where it is nearest: as it was made, or from its copy."""
        if (value, layout) in self.made:
            return self.made[value, layout]
        if value[0] in self.free_inputs:
            self.wishes.setdefault(value[0], []).append(layout)
        sources = [self.native[value]]
        if value in self.plan.copies:
            sources.append(self._plain(value, self.plan.copies[value]))
        size = results_of(self.nodes[value[0]])[value[1]].dtype.itemsize
        element = self.notes.element(value, size)
        best = min(sources, key=lambda s: path_seconds(reshard_steps(s, layout), element, self.world))
        if best != self.native[value]:
            self._walk(value, self.native[value], best, element)
        return self._walk(value, best, layout, element)

    def _walk(self, value: Value, source: Layout, target: Layout, element: Element) -> fx.Node:
        """The steps from one layout of a value that is made to another; those that were made before
        are shared.
        """
        for step in reshard_steps(source, target):
            if (value, step.after) not in self.made:
                before = self.made[value, step.before]
                ways = hierarchies(step, element, self.world)
                wide = self.notes.reduce_dtype if element.gradient > element.bytes else None
                node = emit_step(self.graph, before, step, self.coordinates.__getitem__, ways, wide)
                self._describe(node, self.nodes[value[0]], step.after)
                node.meta.update(step=step, element=element)
                self._make(value, step.after, node)
        return self.made[value, target]

    # -- values without a layout of their own ------------------------------------------------------
    def _free(self, node: fx.Node, layout: Layout) -> fx.Node:
        """A value that hangs on no parameter, made in the layout that is wanted."""
        value = producer(node)
        if (value, layout) in self.made:
            return self.made[value, layout]
        source = self.nodes[value[0]]
        spec = self.notes.specs[source.name]
        results = [v for v in results_of(source) if isinstance(v, torch.Tensor)]
        reached, operand_layouts = push_back_layouts(
            spec,
            layout,
            value[1],
            tuple(None if n is None else shape_of(value_of(n)) for n in operands_of(source)),
        )
        if (value, reached) not in self.made:
            operands = [
                None if n is None or want is None else self._value(n, want)
                for n, want in zip(operands_of(source), operand_layouts, strict=True)
            ]
            made = tuple(
                reached if index == value[1] else self._all(shape_of(v), R)
                for index, v in enumerate(results)
            )
            new = self._emit(source, operands, operand_layouts, made)
            if not isinstance(value_of(source), list | tuple):
                self._make(value, reached, new)
            else:  # where nothing is split, the other results are whole too: one call for all
                whole = not reached.axes_of("S")
                for index in range(len(made)) if whole else (value[1],):
                    item = self.graph.call_function(operator.getitem, (new, index))
                    self._describe(item, source, made[index])
                    self._make((source.name, index), made[index], item)
        return self._walk(value, reached, layout, Element(results[value[1]].dtype.itemsize, 0))

    def _all(self, shape: tuple[int, ...], state: State) -> Layout:
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
            layout = self.plan.outputs.get(str(number)) or self._all(shape_of(value_of(node)), R)
            new = self._value(node, layout)
            returned.append(new)
            self.outputs.append(dataclasses.replace(output, node=new.name))
            self.layouts[new.name] = layout
        self.graph.output(tuple(returned))
