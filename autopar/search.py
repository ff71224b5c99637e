"""The exact search on one mesh: (annotated program, mesh, world, constraint) -> Plan of least
modelled time.

One variable per stored parameter and per output (its layouts), per region of nodes (their joint
strategies), and per value with several consumers (a second layout in which it may be kept, so that
consumers that want the same one share its conversion). Costs are tables over one to three
variables; what looks alike shares its tables, which elimination.py turns into working each layer
out once.

A region is a node, or a node followed by ops that only carry its layout on (pointwise ops, views,
pieces of a dim) and hang on that one value alone. Nothing is converted inside a region: to convert
its input or its results costs no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from .constraint import Constraint
from .cost.comm import inside_costs, path_seconds
from .cost.compute import node_seconds, optimizer_seconds
from .cost.inside import HAVE_INSIDE, inside
from .elimination import Memo, Table, minimise
from .graphs import module_path, producer
from .layout import I, Layout, R, steps
from .mesh import Mesh
from .plan import Choice, Plan
from .program import Annotations, Program, Value
from .rules import Spec, operands_of, results_of, shape_of, value_of
from .strategies import Slot, Strategy, axis_choices, placements, strategies
from .world import World

Array = NDArray[np.float64]


class _Options(NamedTuple):
    """What one variable chooses from; nodes that look alike share the object, and so all tables
    made of it.
    """

    key: int
    items: tuple[Any, ...]
    costs: Array


class _Want(NamedTuple):
    """One use of a value: the variable that uses it, and the layout that each option wants."""

    variable: int
    key: Hashable
    layouts: tuple[Layout, ...]


@dataclass(eq=False)
class _Region:
    """Nodes that choose together. `root`: the value from outside that carriers hang on (None: a
    node by itself). An option is a strategy for each node; `uses` are the (node, operand) places
    that take the root.
    """

    root: Value | None
    nodes: list[str]
    sources: list[list[Value | None]]
    options: _Options
    uses: list[tuple[int, int]] = field(default_factory=list)


def _joined(
    region: _Options, node: _Options, wiring: tuple[Any, ...], uses: list[tuple[int, int]]
) -> tuple[list[tuple[Strategy, ...]], list[float]]:
    """Every pair of an option of a region and a strategy of the next node that agree on the layouts
    between them.
    """
    tied = [i for i, source in enumerate(wiring) if source is not None]
    fitting: dict[tuple[Layout | None, ...], list[int]] = defaultdict(list)
    for number, strategy in enumerate(node.items):
        fitting[tuple(strategy.operands[i] for i in tied)].append(number)
    items: list[tuple[Strategy, ...]] = []
    seconds: list[float] = []
    for item, cost in zip(region.items, region.costs, strict=True):
        if uses:
            root = item[uses[0][0]].operands[uses[0][1]]
        elif (
            "root" in wiring
        ):  # the first use: every layout of the root will do, if all uses in this node agree
            for number, strategy in enumerate(node.items):
                if len({strategy.operands[i] for i in tied}) == 1:
                    items.append((*item, strategy))
                    seconds.append(cost + node.costs[number])
            continue
        else:
            root = None
        wanted = tuple(
            root if wiring[i] == "root" else item[wiring[i][0]].results[wiring[i][1]] for i in tied
        )
        for number in fitting.get(wanted, ()):
            items.append((*item, node.items[number]))
            seconds.append(cost + node.costs[number])
    return items, seconds


def search(
    program: Program, mesh: Mesh, world: World, constraint: Constraint, redundant: bool = False
) -> Plan:
    """The plan of least modelled time on this mesh under this constraint."""
    return _Search(program, mesh, world, constraint, redundant).solve()


class _Search:
    def __init__(
        self, program: Program, mesh: Mesh, world: World, constraint: Constraint, redundant: bool
    ) -> None:
        assert program.annotations is not None
        self.program, self.mesh, self.world = program, mesh, world
        self.constraint, self.redundant = constraint, redundant
        self.notes: Annotations = program.annotations
        self.known: dict[Hashable, Any] = {}
        self.variables: list[_Options] = []
        self.tables: list[Table] = []
        self.index: dict[str, int] = {}  # variable of a node, or of output number i as "output i"
        self.copies: dict[Value, int] = {}
        self.native: dict[Value, _Want] = {}  # the layouts in which a value is made
        self.wants: dict[Value, list[_Want]] = defaultdict(list)
        self.regions: list[_Region] = []
        self.region_of: dict[Value, _Region] = {}
        self.fed_by: dict[
            Value, _Region
        ] = {}  # regions of carriers by the one value that they hang on
        self.members: dict[int, _Region] = {}

    def solve(self) -> Plan:
        entries = {entry.node: entry for entry in self.program.signature.inputs}
        nodes = list(self.program.module.graph.nodes)
        self.element = {
            node.name: [
                v.dtype.itemsize if isinstance(v, torch.Tensor) else 1 for v in results_of(node)
            ]
            for node in nodes
            if node.op in ("placeholder", "call_function")
        }
        self.owner = {
            entry.node: entry.target.rpartition(".")[0]
            for entry in entries.values()
            if entry.kind == "parameter"
        }
        for node in nodes:
            if node.op == "placeholder" and node.name in self.notes.searched:
                self._placeholder(node, entries[node.name].kind == "parameter")
        for node in nodes:
            if (
                node.op == "call_function"
                and node.name in self.notes.searched
                and node.name in self.notes.specs
            ):
                self._place(node)
        for region in self.regions:
            self._enter(region)
        self._outputs()
        for value, wants in self.wants.items():
            self._conversions(value, wants)
        memo: Memo = {}
        seconds, values = minimise([len(v.items) for v in self.variables], self.tables, memo)
        return self._plan(seconds, values)

    # -- variables ---------------------------------------------------------------------------------
    def _variable(self, name: str, options: _Options) -> int:
        self.index[name] = len(self.variables)
        self.variables.append(options)
        self.tables.append(Table((self.index[name],), options.costs))
        return self.index[name]

    def _options(self, key: Hashable, make: Any) -> _Options:
        if key not in self.known:
            items, costs = make()
            self.known[key] = _Options(
                len(self.known), tuple(items), np.array(costs, dtype=np.float64)
            )
        return self.known[key]

    def _gradient(self, value: Value) -> bool:
        return value in self.notes.gradient

    def _placeholder(self, node: fx.Node, parameter: bool) -> None:
        value = (node.name, 0)
        dims, shape, size = (
            self.notes.dims[value],
            shape_of(value_of(node)),
            value_of(node).dtype.itemsize,
        )
        gradient = self._gradient(value)
        signature = tuple(tuple((a.size, a.opaque) for a in atoms) for atoms in dims)
        path = self.owner.get(node.name, "")
        rules = (self.constraint.roles(path), self.constraint.letters.get(node.name))

        def make() -> tuple[list[Layout], list[float]]:
            found = placements(dims, shape, self.mesh, I if gradient else R)
            if not parameter:  # an input whose gradient the user wants whole, as he gives it
                return found[:1], [0.0]
            found = self.constraint.storage(node.name, path, found)
            return found, [optimizer_seconds(x, size, self.world) for x in found]

        options = self._options(
            ("stored", shape, signature, size, gradient, parameter, rules), make
        )
        variable = self._variable(node.name, options)
        self.native[value] = _Want(variable, (options.key, 0), options.items)

    def _call(self, node: fx.Node) -> _Options:
        """The strategies of one node."""
        spec, factors = self.notes.specs[node.name], self.notes.factors[node.name]
        operands = operands_of(node)
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        operand_shapes = tuple(None if n is None else shape_of(value_of(n)) for n in operands)
        result_shapes = tuple(shape_of(v) for v in results)
        gradient = any(self._gradient((node.name, i)) for i in range(len(results))) or any(
            n is not None and self._gradient(producer(n)) for n in operands
        )
        size = results[0].dtype.itemsize
        path = module_path(node)
        everything = axis_choices(spec, factors, self.mesh, gradient)
        per_axis = self.constraint.narrow(path, spec, factors, everything)
        free = self.constraint.roles(path) is None

        def make() -> tuple[list[Strategy], list[float]]:
            redundant = self.redundant or not free
            shapes = operand_shapes, result_shapes
            found = strategies(spec, factors, self.mesh, *shapes, per_axis, redundant)
            if (
                not found
            ):  # what the layout asks of each axis does not fit together: an axis may be idle here
                eased = [
                    [*kept, *(c for c in every if c not in kept and not isinstance(c, Slot))]
                    for kept, every in zip(per_axis, everything, strict=True)
                ]
                found = strategies(spec, factors, self.mesh, *shapes, eased, redundant)
            found = self.constraint.joint(path, spec, found)
            return found, [self._node_seconds(node, spec, s, size, gradient) for s in found]

        target = node.target if node.target in HAVE_INSIDE else None
        return self._options(
            (
                target,
                _look(spec, factors),
                operand_shapes,
                result_shapes,
                size,
                gradient,
                str(per_axis),
                free,
            ),
            make,
        )

    def _node_seconds(
        self, node: fx.Node, spec: Spec, strategy: Strategy, size: int, gradient: bool
    ) -> float:
        found = [x for x in inside(node.target, strategy.operands) if gradient or not x.backward]
        return node_seconds(spec, strategy, size, gradient, self.world) + sum(
            cost.seconds for cost in inside_costs(found, self.mesh, size, self.world)
        )

    # -- regions -----------------------------------------------------------------------------------
    def _place(self, node: fx.Node) -> None:
        """Put a node into the region of what it hangs on, if it only carries that on; else it is a
        region of its own.
        """
        options = self._call(node)
        sources = [None if n is None else producer(n) for n in operands_of(node)]
        searched = {s for s in sources if s is not None and s[0] in self.notes.searched}
        region = self._carried_by(node, searched)
        if region is None or not self._extend(region, node.name, sources, options):
            region = _Region(None, [], [], _Options(-1, ((),), np.zeros(1)))
            self.regions.append(region)
            self._extend(region, node.name, sources, options)
        for index in range(len(options.items[0].results)):
            self.region_of[node.name, index] = region

    def _carried_by(self, node: fx.Node, searched: set[Value]) -> _Region | None:
        spec = self.notes.specs[node.name]
        stops = {f for f in spec.whole if spec.sizes[f] > 1} - {"pieces"}
        if spec.product or spec.sum or spec.shared or stops:
            return None
        homes = {self._home(value) for value in searched}
        return homes.pop() if len(homes) == 1 else None

    def _home(self, value: Value) -> _Region:
        """The region that a carrier of this value belongs to: the one that makes it, if that is one
        of carriers, else the one it feeds.
        """
        made_in = self.region_of.get(value)
        if made_in is not None and made_in.root is not None:
            return made_in
        if value not in self.fed_by:
            self.fed_by[value] = _Region(value, [], [], _Options(-1, ((),), np.zeros(1)))
            self.regions.append(self.fed_by[value])
        return self.fed_by[value]

    def _extend(
        self, region: _Region, name: str, sources: list[Value | None], options: _Options
    ) -> bool:
        """Join a node's strategies to the region's, where no conversion is needed between them;
        False where there are none.
        """
        inside = {member: i for i, member in enumerate(region.nodes)}
        wiring = tuple(
            None
            if s is None
            else "root"
            if s == region.root
            else (inside[s[0]], s[1])
            if s[0] in inside
            else None
            for s in sources
        )

        def make() -> tuple[list[Any], list[float]]:
            return _joined(region.options, options, wiring, region.uses)

        uses = tuple(region.uses)
        joined = self._options(("region", region.options.key, options.key, wiring, uses), make)
        if not joined.items:
            return False
        region.nodes.append(name)
        region.sources.append(sources)
        region.uses.extend((len(region.nodes) - 1, i) for i, w in enumerate(wiring) if w == "root")
        region.options = joined
        return True

    def _enter(self, region: _Region) -> None:
        """Make a region a variable: the layouts of all it makes, and what it wants of the values it
        takes from outside.
        """
        if not region.nodes:
            return
        variable = self._variable(region.nodes[0], region.options)
        self.members[variable] = region
        items, key = region.options.items, region.options.key
        for position, (name, sources) in enumerate(zip(region.nodes, region.sources, strict=True)):
            for index in range(len(items[0][position].results)):
                layouts = tuple(item[position].results[index] for item in items)
                self.native[name, index] = _Want(variable, (key, position, index), layouts)
            for index, source in enumerate(sources):
                if (
                    source is None
                    or source[0] not in self.notes.searched
                    or source[0] in region.nodes
                ):
                    continue
                if source == region.root and (position, index) != region.uses[0]:
                    continue
                layouts = tuple(item[position].operands[index] for item in items)
                self.wants[source].append(_Want(variable, (key, position, -1 - index), layouts))

    def _outputs(self) -> None:
        nodes = {node.name: node for node in self.program.module.graph.nodes}
        for number, output in enumerate(self.program.signature.outputs):
            if output.node is None:
                continue
            value = producer(nodes[output.node])
            if value not in self.native:
                continue
            shape = shape_of(value_of(nodes[output.node]))
            whole_only = output.kind == "mutation" or not shape
            dims = self.notes.dims[value]
            signature = tuple(tuple((a.size, a.opaque) for a in atoms) for atoms in dims)

            def make(dims: Any = dims, shape: Any = shape, whole_only: bool = whole_only) -> Any:
                found = placements(dims, shape, self.mesh)
                if whole_only:
                    found = found[:1]
                return found, [0.0] * len(found)

            options = self._options(("output", shape, signature, whole_only), make)
            variable = self._variable(f"output {number}", options)
            self.wants[value].append(_Want(variable, (options.key, 0), options.items))

    # -- conversions -------------------------------------------------------------------------------
    def _conversions(self, value: Value, wants: list[_Want]) -> None:
        native = self.native[value]
        if len(wants) > 1 and (copy := self._copy(value, native, wants)) is not None:
            for want in wants:
                self._shared(value, native, copy, want)
            return
        for want in wants:
            self.tables.append(
                Table((native.variable, want.variable), self._matrix(value, native, want))
            )

    def _facts(self, value: Value) -> tuple[int, bool]:
        return self.element[value[0]][value[1]], self._gradient(value)

    def _matrix(self, value: Value, source: _Want, target: _Want) -> Array:
        """Seconds to convert from each option of the source to each of the target."""
        size, gradient = self._facts(value)
        key = ("matrix", source.key, target.key, size, gradient)
        if key not in self.known:
            self.known[key] = self._between(source.layouts, target.layouts, size, gradient)
        return self.known[key]

    def _between(
        self, sources: Sequence[Layout], targets: Sequence[Layout], size: int, gradient: bool
    ) -> Array:
        rows = {layout: i for i, layout in enumerate(dict.fromkeys(sources))}
        columns = {layout: i for i, layout in enumerate(dict.fromkeys(targets))}
        small = np.array([[self._seconds(a, b, size, gradient) for b in columns] for a in rows])
        return small[np.ix_([rows[a] for a in sources], [columns[b] for b in targets])]

    def _seconds(self, source: Layout, target: Layout, size: int, gradient: bool) -> float:
        key = (source, target, size, gradient)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = path_seconds(
                steps(source, target), gradient, size, self.world
            )
        return found

    def _copy(self, value: Value, native: _Want, wants: list[_Want]) -> _Want | None:
        """A variable for a second layout of the value; the first option, the native layout itself,
        is no copy at all.
        """
        size, gradient = self._facts(value)
        key = ("copy", native.key, tuple(want.key for want in wants), size, gradient)

        def make() -> tuple[list[Layout | None], list[float]]:
            times: dict[Layout, int] = {}
            for want in wants:
                for layout in dict.fromkeys(want.layouts):
                    times[layout] = times.get(layout, 0) + 1
            shared = [layout for layout, count in times.items() if count > 1]
            return [None, *shared], [0.0] * (1 + len(shared))

        options = self._options(key, make)
        if len(options.items) == 1:
            return None
        variable = self._variable(f"copy {value}", options)
        self.copies[value] = variable
        kept = _Want(variable, (options.key, 0), options.items[1:])
        if (cost_key := ("copied", *key)) not in self.known:
            matrix = self._between(native.layouts, kept.layouts, size, gradient)
            self.known[cost_key] = np.concatenate(
                [np.zeros((len(native.layouts), 1)), matrix], axis=1
            )
        self.tables.append(Table((native.variable, variable), self.known[cost_key]))
        return kept

    def _shared(self, value: Value, native: _Want, copy: _Want, want: _Want) -> None:
        """A use takes the value from where it is nearer: as it was made, or from its copy."""
        size, gradient = self._facts(value)
        key = ("shared", native.key, copy.key, want.key, size, gradient)
        if key not in self.known:
            direct = self._between(native.layouts, want.layouts, size, gradient)
            through = self._between(copy.layouts, want.layouts, size, gradient)
            nearer = np.minimum(direct[:, None, :], through[None, :, :])
            self.known[key] = np.concatenate([direct[:, None, :], nearer], axis=1)
        order = (native.variable, copy.variable, want.variable)
        self.tables.append(Table(order, self.known[key]))

    # -- the result --------------------------------------------------------------------------------
    def _plan(self, seconds: float, values: list[int]) -> Plan:
        choices, stored, outputs, unsplit = {}, {}, {}, []
        for name, variable in self.index.items():
            item = self.variables[variable].items[values[variable]]
            if variable in self.members:
                for member, strategy in zip(self.members[variable].nodes, item, strict=True):
                    choices[member] = Choice(
                        self._splits(strategy), strategy.operands, strategy.results
                    )
                    unsplit.extend(self._why_whole(member, strategy))
            elif name.startswith("output "):
                outputs[name.removeprefix("output ")] = item
            elif not name.startswith("copy "):
                stored[name] = item
        copies = {
            value: self.variables[v].items[values[v]]
            for value, v in self.copies.items()
            if values[v]
        }
        return Plan(
            self.mesh,
            self.constraint.name,
            choices,
            stored,
            copies,
            outputs,
            seconds,
            0.0,
            0.0,
            unsplit=tuple(dict.fromkeys(unsplit)),
            world=str(self.world),
            panels=self.constraint.panels,
        )

    def _splits(self, strategy: Strategy) -> tuple[str, ...]:
        return tuple(
            choice.factor if isinstance(choice, Slot) else getattr(choice, "kind", "P")
            for choice in strategy.choices
        )

    def _why_whole(self, name: str, strategy: Strategy) -> list[str]:
        """One sentence for each axis on which a matrix product is computed whole."""
        spec, factors = self.notes.specs[name], self.notes.factors[name]
        if spec.product is None:
            return []
        sizes = ", ".join(
            f"{factor} = {' × '.join(str(a.size) for a in factors[factor])}"
            for factor in spec.sizes
            if spec.splittable(factor) and factors[factor]
        )
        return [
            f"{name}: axis {axis.name} of {axis.size} divides none of {sizes}"
            for axis, slot in zip(self.mesh.axes, strategy.slots, strict=True)
            if slot is None
        ]


def _look(spec: Spec, factors: dict[str, Any]) -> Hashable:
    """All of a node's rule that its strategies and their cost depend on."""
    atoms = tuple(
        (name, tuple((a.size, a.opaque) for a in chain)) for name, chain in factors.items()
    )
    return (
        spec.operands,
        spec.results,
        tuple(spec.sizes.items()),
        spec.sum,
        spec.whole,
        spec.shared,
        spec.added,
        spec.linear,
        spec.product,
        spec.flops,
        atoms,
    )
