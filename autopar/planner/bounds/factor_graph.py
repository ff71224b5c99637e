"""The factor graph of a program: variables to decide, and edges whose ends must agree or be
resharded.

Example: a linear layer is a region whose options on one axis are "split the batch", "split n", …;
an edge hands its result to the next region. On one mesh axis a value is invariant (I), replicated
(R), partial (P), or split on one of its atoms; on k axes a region's options are k-tuples.

`frame` builds it from an annotated program, whatever the mesh; `shorten_frame` leaves out the
middle of runs of equal blocks, so that messages start on a shorter graph. Used by bounds/, bound.py
and small_models.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from autopar.ir.graph import (
    Block,
    carries_gradient,
    is_of_all_blocks,
    module_path,
    numbered_block,
    producer,
    remember,
    repeats,
)
from autopar.ir.layout import Element
from autopar.ir.program import Annotations, Atom, Program, Value
from autopar.ir.sharding_rule import (
    Dims,
    OpShardingRule,
    operand_shapes,
    results_of,
    shape_of,
)
from autopar.ir.strategy import AxisChoice, PartialPassThrough, Slot, free_choices, rule_key
from autopar.ops.sharded import HAVE_INNER_COLLECTIVES
from autopar.planner.regions import Options, Region, regions_of

INVARIANT, REPLICATED, PARTIAL, FIRST_SLOT = 0, 1, 2, 3  # the codes of states; slots follow


class AxisOption(NamedTuple):
    """What one axis may do at a node: its choice, and the state of each operand and result."""

    choice: AxisChoice
    operands: tuple[int | None, ...]
    results: tuple[int, ...]


class Kind(NamedTuple):
    """Everything about a value that the cost of its reshards depends on."""

    shape: tuple[int, ...]
    slots: tuple[tuple[int, int, int], ...]  # (dim, unit, size of the atom) of every slot
    element: Element  # as the cost model of reshards takes it


@dataclass(eq=False)
class Variable:
    """One thing to decide: what a region does, how a parameter is stored, or (a hub) the layout
    from which the consumers of a value take it.

    `options`: of a region, a choice for each node; else states. `key`: variables that look alike
    cost the same. `block`: its repeated block, such as ("layers", 3). `kind`: of a parameter or a
    hub. `handed`: the program outputs that are taken from it: kind, the state by option, the states
    that are wanted.
    """

    name: str
    options: tuple[Any, ...]
    key: Hashable
    block: tuple[str, int] | None
    kind: Kind
    region: Region | None = None
    parameter: fx.Node | None = None
    trained: bool = False
    edges: list[Edge] = field(default_factory=list)
    handed: list[tuple[Kind, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    slots: tuple[tuple[int, int], ...] = ()  # of a parameter: (dim, place of the atom) of each
    place: int = -1  # among the variables of its block
    is_hub: bool = field(init=False)  # the layout from which the consumers of a value take it
    is_leaf: bool = field(init=False)  # a parameter with one use, once all edges are there

    def __post_init__(self) -> None:
        self.is_hub = self.region is None and self.parameter is None
        self.is_leaf = False


@dataclass(eq=False)
class Edge:
    """A value between its maker and one use: the state of each option at both ends."""

    value: Value
    kind: Kind
    maker: Variable
    produced: tuple[int, ...]
    user: Variable
    wanted: tuple[int, ...]
    key: Hashable = field(init=False)  # equal for edges whose costs are the same

    def __post_init__(self) -> None:
        self.key = self.kind, self.produced, self.wanted


@dataclass(frozen=True)
class Frame:
    """The variables in the order of the graph. `owner`: the path of the module of a parameter."""

    notes: Annotations
    nodes: dict[str, fx.Node]
    variables: tuple[Variable, ...]
    owner: dict[str, str]
    kinds: dict[Value, Kind]

    def __post_init__(self) -> None:
        for variable in self.variables:
            variable.is_leaf = variable.parameter is not None and len(variable.edges) == 1


def frame(program: Program) -> Frame:
    """Return the factor graph of an annotated program, built once and kept with its graph: the
    searches for every layout and world read the same one.
    """
    reads = program.annotations, program.signature
    return remember(
        program.module.graph, "factor graph", reads, _Builder(program).build, program.counting
    )


class _Builder:
    """Builds a Frame: first its variables, then its edges."""

    def __init__(self, program: Program) -> None:
        assert program.annotations is not None
        self.program, self.notes = program, program.annotations
        self.nodes = {node.name: node for node in program.module.graph.nodes}
        self.known: dict[Hashable, Options] = {}  # by what a node looks like
        self.variables: list[Variable] = []
        self.kinds: dict[Value, Kind] = {}
        self.makers: dict[Value, tuple[Variable, tuple[int, ...]]] = {}
        self.uses: dict[Value, list[tuple[Variable, tuple[int, ...]]]] = defaultdict(list)
        self.owner = {
            entry.node: entry.target.rpartition(".")[0]
            for entry in program.signature.inputs
            if entry.kind == "parameter"
        }

    def build(self) -> Frame:
        """Build the variables in the order of the graph, then the edges."""
        entries = {entry.node: entry for entry in self.program.signature.inputs}
        for node in self.nodes.values():
            if node.op == "placeholder" and node.name in self.notes.searched:
                self._stored(node, entries[node.name].kind == "parameter")
        options = {
            node.name: self._options(node)
            for node in self.nodes.values()
            if node.op == "call_function"
            and node.name in self.notes.searched
            and node.name in self.notes.specs
        }
        for region in regions_of(self.nodes.values(), self.notes, options):
            self._enter(region)
        self._connect()
        count: Counter[tuple[str, int] | None] = Counter()
        for variable in self.variables:
            variable.place = count[variable.block]
            count[variable.block] += 1
        return Frame(self.notes, self.nodes, tuple(self.variables), self.owner, self.kinds)

    # -- variables ---------------------------------------------------------------------------------
    def _stored(self, node: fx.Node, parameter: bool) -> None:
        value = (node.name, 0)
        kind = self.kind(value)
        may_split = parameter and not self.notes.replicated_parameters
        slots = range(FIRST_SLOT, FIRST_SLOT + len(kind.slots)) if may_split else ()
        states = (INVARIANT if kind.element.gradient else REPLICATED, *slots)
        variable = Variable(
            node.name,
            states,
            ("stored", kind, parameter),
            numbered_block(self.owner.get(node.name, "")),
            kind,
            parameter=node,
            trained=parameter,
            slots=tuple(
                (dim, place)
                for dim, atoms in enumerate(self.notes.dims[value])
                for place in reversed(range(len(atoms)))
                if not atoms[place].opaque
            ),
        )
        self.variables.append(variable)
        self.makers[value] = (variable, states)

    def _options(self, node: fx.Node) -> Options:
        rule, factors = self.notes.specs[node.name], self.notes.factors[node.name]
        gradient = carries_gradient(self.notes, node)
        key = (node_key(self.notes, node), gradient)
        if key not in self.known:
            choices = free_choices(rule, factors, gradient)
            items = tuple(self._option(rule, factors, choice) for choice in choices)
            self.known[key] = Options(items, np.zeros(len(items)))
        return self.known[key]

    def _option(
        self, rule: OpShardingRule, factors: dict[str, tuple[Atom, ...]], choice: AxisChoice
    ) -> AxisOption:
        """Return what a choice does on one axis: the state of every operand and result."""

        def state(dims: Dims, index: int | None) -> int:
            if isinstance(choice, PartialPassThrough):
                return PARTIAL if index is None or index in choice.operands else REPLICATED
            if not isinstance(choice, Slot):
                return {"I": INVARIANT, "R": REPLICATED, "P": PARTIAL}[choice.kind]
            if any(choice.factor in dim for dim in dims):
                return FIRST_SLOT + slot_number(dims, factors, choice)
            if index is None:
                return INVARIANT if choice.factor in rule.shared else PARTIAL
            added_once = index in rule.added and choice.factor in rule.sum
            return PARTIAL if added_once else REPLICATED

        return AxisOption(
            choice,
            tuple(None if d is None else state(d, i) for i, d in enumerate(rule.operands)),
            tuple(state(d, None) for d in rule.results),
        )

    def _enter(self, region: Region) -> None:
        items = region.options.items
        first = self.nodes[region.nodes[0]]
        variable = Variable(
            first.name,
            items,
            ("region", region.options),
            numbered_block(module_path(first)),
            self.kind((first.name, 0)),
            region,
        )
        self.variables.append(variable)
        for position, name in enumerate(region.nodes):
            for index in range(len(items[0][position].results)):
                states = tuple(item[position].results[index] for item in items)
                self.makers[name, index] = (variable, states)
        for source, position, index in region.outside_uses(self.notes.searched):
            wanted = tuple(item[position].operands[index] for item in items)
            self.uses[source].append((variable, wanted))

    # -- edges -------------------------------------------------------------------------------------
    def _connect(self) -> None:
        """Tie the makers of values to their users and to the program's outputs, through a hub where
        a value has several uses.
        """
        hubs: list[tuple[int, Variable]] = []
        handed = self._handed_out()
        for value in dict.fromkeys((*self.uses, *handed)):
            uses, outputs = self.uses.get(value, []), handed.get(value, [])
            maker, maker_states = self.makers[value]
            kind, index = self.kind(value), self.variables.index(maker)
            if len(uses) + len(outputs) > 1:  # all take one layout, or reshard from it
                wanted_states = {s for wanted in (*(w for _, w in uses), *outputs) for s in wanted}
                states = tuple(sorted(wanted_states | set(maker_states)))
                hub = Variable(f"kept {value}", states, ("hub", kind, states), maker.block, kind)
                hubs.append((index, hub))
                self._tie(Edge(value, kind, maker, maker_states, hub, states))
                maker, maker_states = hub, states
            for user, wanted in uses:
                self._tie(Edge(value, kind, maker, maker_states, user, wanted))
            if outputs:
                maker.handed.extend((kind, maker_states, wanted) for wanted in outputs)
                maker.key = (maker.key, tuple(maker.handed))
        hubs.sort(key=lambda pair: pair[0])
        for index, hub in reversed(hubs):
            self.variables.insert(index + 1, hub)

    def _tie(self, edge: Edge) -> None:
        edge.maker.edges.append(edge)
        edge.user.edges.append(edge)

    def _handed_out(self) -> dict[Value, list[tuple[int, ...]]]:
        """Return the states in which each output of the program may be, by the value it is."""
        handed: dict[Value, list[tuple[int, ...]]] = defaultdict(list)
        for output in self.program.signature.outputs:
            value = None if output.node is None else producer(self.nodes[output.node])
            if value is None or value not in self.makers:
                continue
            kind = self.kind(value)
            unsharded = output.kind == "mutation" or not kind.shape or self.notes.replicated_outputs
            slots = () if unsharded else range(FIRST_SLOT, FIRST_SLOT + len(kind.slots))
            handed[value].append((INVARIANT, *slots))
        return handed

    # -- facts -------------------------------------------------------------------------------------
    def kind(self, value: Value) -> Kind:
        """Return the kind of a value, built once."""
        if value not in self.kinds:
            self.kinds[value] = self._kind(value)
        return self.kinds[value]

    def _kind(self, value: Value) -> Kind:
        tensor = results_of(self.nodes[value[0]])[value[1]]
        slots = []
        for dim, atoms in enumerate(self.notes.dims[value]):
            unit = 1
            for atom in reversed(atoms):
                if not atom.opaque:
                    slots.append((dim, unit, atom.size))
                unit *= atom.size
        return Kind(
            shape_of(tensor), tuple(slots), self.program.element(value, tensor.dtype.itemsize)
        )


def slot_number(dims: Dims, factors: dict[str, tuple[Atom, ...]], slot: Slot) -> int:
    """Return the number of the slot (in the order of Kind.slots) that an atom of a factor is."""
    number = 0
    for names in dims:
        for name in reversed(names):
            for position in reversed(range(len(factors[name]))):
                if (name, position) == slot:
                    return number
                number += not factors[name][position].opaque
    raise AssertionError(f"{slot} is in none of {dims}")


def node_key(notes: Annotations, node: fx.Node) -> Hashable:
    """Return everything that a node's options and costs depend on, except the constraint."""
    results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
    target = node.target if node.target in HAVE_INNER_COLLECTIVES else None
    rule = rule_key(notes.specs[node.name], notes.factors[node.name])
    return target, rule, operand_shapes(node), results[0].dtype


_EDGE = 1  # equal units of blocks that stay at either end of a run

Twins = Mapping[int, Variable]  # by the id of a variable of the full frame


def shorten_frame(frame: Frame) -> tuple[Frame, Twins]:
    """Return the frame without the middle of each run of equal units of blocks (itself where it
    has none), and the twin of every variable.
    """
    blocks: dict[Block, list[Variable]] = defaultdict(list)
    for variable in frame.variables:
        if variable.block is not None:
            blocks[variable.block].append(variable)
    keys = {block: _block_key(variables) for block, variables in blocks.items()}
    standing = {
        block: twin
        for run in repeats(keys)
        for unit in run[_EDGE:-_EDGE]
        for block, twin in zip(unit, run[_EDGE - 1], strict=True)
    }  # from a block left out to the one that stands for it
    if not standing:
        return frame, {id(v): v for v in frame.variables}
    stand_in = {id(v): v for v in frame.variables}
    for gone, other in standing.items():
        stand_in.update((id(v), twin) for v, twin in zip(blocks[gone], blocks[other], strict=True))
    copies = {
        id(v): dataclasses.replace(v, edges=[]) for v in frame.variables if v.block not in standing
    }
    for variable in frame.variables:
        for edge in variable.edges if id(variable) in copies else ():
            if edge.user is variable:
                maker = copies[id(stand_in[id(edge.maker)])]
                new_edge = dataclasses.replace(edge, maker=maker, user=copies[id(variable)])
                new_edge.maker.edges.append(new_edge)
                new_edge.user.edges.append(new_edge)
    short = dataclasses.replace(frame, variables=tuple(copies.values()))
    return short, {id(v): copies[id(stand_in[id(v)])] for v in frame.variables}


def _block_key(variables: list[Variable]) -> Hashable:
    """Return what a block's variables and edges look like, equal for equal blocks."""
    return tuple(
        (v.key, frozenset((e.key, e.maker is v, _far_end(e, v)) for e in v.edges))
        for v in variables
    )


def _far_end(edge: Edge, variable: Variable) -> Hashable:
    """Return where the other end lies: so many blocks on, or outside the run."""
    other = edge.user if edge.maker is variable else edge.maker
    if variable.block is None or other.block is None or other.block[0] != variable.block[0]:
        return id(other)
    if other is edge.maker and other.block != variable.block:
        readers = (e.user.block for e in other.edges if e.maker is other)
        if is_of_all_blocks(other.block, filter(None, readers)):
            return id(other)
    return other.block[1] - variable.block[1], other.place
