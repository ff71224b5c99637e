"""The exact search: the plan of least modelled time on one mesh under one constraint.

The search has one variable per stored parameter and per output (its layouts), per region of nodes
(their joint strategies), and per value with several consumers (a second layout in which the value
may be copied, so that consumers that want the same layout share its reshard). Costs are tables over
one to three variables. What looks alike shares its tables, so elimination.py works out the equal
layers of a model once.

Called by solve.py, why.py and small_models.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import fx

from autopar.cost.activations import Price, bytes_of
from autopar.cost.communication import path_terms, terms_between
from autopar.cost.compute import optimizer_seconds
from autopar.cost.nodes import node_costs
from autopar.errors import PlanError
from autopar.ir.dim_roles import goes_with_weight
from autopar.ir.graph import carries_gradient, module_path, producer, remember
from autopar.ir.layout import Element, I, Layout, R
from autopar.ir.mesh import Mesh
from autopar.ir.padding import plain_shards
from autopar.ir.plan import Choice, Plan
from autopar.ir.program import Annotations, Program, Value
from autopar.ir.reshard import reshard_steps
from autopar.ir.sharding_rule import (
    operand_shapes,
    result_shapes,
    results_of,
    shape_of,
    value_of,
)
from autopar.ir.strategy import (
    AxisChoice,
    AxisOrders,
    Strategy,
    axis_choices,
    placements,
    rule_key,
)
from autopar.ops.sharded import HAVE_INNER_COLLECTIVES
from autopar.planner.axis_orders import NestingOrders
from autopar.planner.constraint import Constraint, Offered
from autopar.planner.elimination import LARGEST, Table, minimise, order_of, too_large
from autopar.planner.entangled import minimise_nearly
from autopar.planner.regions import Array, Options, Region, regions_of
from autopar.world import World


def search(
    program: Program,
    mesh: Mesh,
    world: World,
    constraint: Constraint,
    among: Near | None = None,
    price: Price | None = None,
    largest: int | None = None,
    nesting_orders: bool = False,
) -> Plan:
    """Return the plan of least modelled time on this mesh under this constraint. `among`: the joint
    choices to search, by node and stored tensor; None for all. With a `price`, the bytes that a
    plan holds count as time too. `nesting_orders`: with fewer orders of axes that share an atom,
    see axis_orders.py. Raises PlanError where a table has more than `largest` entries, by default
    elimination.LARGEST.
    """
    orders = None
    if nesting_orders and among is not None:
        assert program.annotations is not None
        orders = NestingOrders(program.annotations, mesh, among)
    entered = Search(program, mesh, world, constraint, among, price, orders).enter()
    return entered.solve(largest)


def search_nearly(
    program: Program,
    mesh: Mesh,
    world: World,
    constraint: Constraint,
    among: Near | None = None,
    price: Price | None = None,
) -> Plan:
    """Return what `search` returns, or a plan near it where tables would outgrow memory. No plan
    among these choices is faster than the plan's `bound`, in seconds.
    """
    if among is not None or price is not None:
        return Search(program, mesh, world, constraint, among, price).enter().solve_nearly()
    bare = dataclasses.replace(program, tensors={})
    entered = remember(
        program.module.graph,
        "searches",
        (program.annotations, program.signature, program.padding, constraint, world),
        lambda: Search(bare, mesh, world, constraint).enter(),
        mesh,
        _MOST_REMEMBERED,
    )
    return entered.counting_as(program).solve_nearly()


_MOST_REMEMBERED = 2  # searches of a graph, which come again as other shares count
Near = Mapping[str, tuple[tuple[AxisChoice, ...], ...]]  # by node and stored tensor


class Search:
    """The variables and tables of one search: see `search`. `enter` builds them, then `solve` or
    `solve_nearly` finds the plan. `orders`: those of the axes that share an atom, None for all.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        world: World,
        constraint: Constraint,
        among: Near | None = None,
        price: Price | None = None,
        orders: NestingOrders | None = None,
    ) -> None:
        assert program.annotations is not None
        self.program, self.mesh, self.world = program, mesh, world
        self.constraint, self.among = constraint, among
        self.price, self.orders = price, orders
        self.notes: Annotations = program.annotations
        self.known: dict[Hashable, Options] = {}  # that were built, by what they were built of
        self.conversions = ReshardCosts(world)
        self.variables: list[Options] = []
        self.scopes: list[tuple[int, ...]] = []  # the variables of each table
        self._costs: list[Callable[[Program], Array]] = []  # of each, as a program counts
        self.index: dict[str, int] = {}  # variable of a node, or of output number i as "output i"
        self.copies: dict[Value, int] = {}
        self.native: dict[Value, Want] = {}  # the layouts in which a value is made
        self.wants: dict[Value, list[Want]] = defaultdict(list)
        self.members: dict[int, Region] = {}

    def solve(self, largest: int | None = None) -> Plan:
        """Minimise the sum of the tables and return the plan. Raises PlanError where a table
        would have more than `largest` entries, by default elimination.LARGEST.
        """
        return self.plan(*self._least_sum(largest))

    def solve_nearly(self) -> Plan:
        """Return the plan of the tables' least sum, or one near it, with a bound."""
        try:
            seconds, values = self._least_sum()
            bound = seconds
        except PlanError:
            seconds, values, bound = minimise_nearly(self.sizes, self.tables)
        return dataclasses.replace(self.plan(seconds, values), bound=bound)

    def _least_sum(self, largest: int | None = None) -> tuple[float, list[int]]:
        """Return the least sum of the tables and the values that reach it. Tables are made once it
        is known that none that elimination needs is too large.
        """
        order = order_of(self.sizes, self.scopes, largest)
        return minimise(self.sizes, self.tables, order=order)

    @property
    def sizes(self) -> list[int]:
        """The number of values of each variable."""
        return [len(variable.items) for variable in self.variables]

    @cached_property
    def tables(self) -> list[Table]:
        """The tables of all that `enter` entered."""
        each = zip(self.scopes, self._costs, strict=True)
        return [Table(scope, costs(self.program)) for scope, costs in each]

    def counting_as(self, program: Program) -> Search:
        """Return the same search as `program` counts, which differs from the search's own program
        in nothing else: reshards have other seconds, and all variables are those that this search
        has entered.
        """
        other = copy(self)
        other.program = program
        other.__dict__.pop("tables", None)
        return other

    def _enter_table(self, scope: tuple[int, ...], costs: Callable[[Program], Array]) -> None:
        self.scopes.append(scope)
        self._costs.append(costs)

    def enter(self) -> Search:
        """Build all variables, and what makes their tables; return this search."""
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
        strategies = {
            node.name: self._strategies(node)
            for node in nodes
            if node.op == "call_function"
            and node.name in self.notes.searched
            and node.name in self.notes.specs
        }
        for region in regions_of(nodes, self.notes, strategies):
            self._region(region)
        self._outputs()
        for value, wants in self.wants.items():
            self._convert(value, wants)
        return self

    # -- variables ---------------------------------------------------------------------------------
    def _variable(self, name: str, options: Options) -> int:
        self.index[name] = len(self.variables)
        self.variables.append(options)
        self._enter_table((self.index[name],), lambda _: options.costs)
        return self.index[name]

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

        pads = self.program.pads(node.name) if parameter else ()
        joint = None if self.among is None or pads else self.among[node.name]
        orders, orders_key = self._axis_orders(node.name, joint)
        already = self.constraint.stored_already(node.name, gradient) if parameter else None

        key = (
            *("stored", shape, signature, size, gradient, parameter),
            *(rules, joint, orders_key, already, pads),
        )
        if key not in self.known:
            layouts = placements(dims, shape, self.mesh, I if gradient else R, joint, orders)
            # the user passes an input, and wants its gradient, unsharded
            if already is not None:
                layouts = [already]
            elif not parameter or self.notes.replicated_parameters:
                layouts = layouts[:1]
            else:
                layouts = [layout for layout in layouts if plain_shards(layout, pads)]
                layouts = self.constraint.storage(node.name, path, layouts)
            seconds = [self._stored_seconds(x, size) if parameter else 0.0 for x in layouts]
            self.known[key] = Options(tuple(layouts), np.array(seconds))
        options = self.known[key]
        variable = self._variable(node.name, options)
        self.native[value] = Want(variable, (options, 0), options.items)

    def _stored_seconds(self, layout: Layout, size: int) -> float:
        """Return the optimizer's seconds for a parameter stored so, with the price of its bytes."""
        seconds = optimizer_seconds(layout, size, self.world)
        if self.price is not None:
            each = self.price.memory.bytes_per_element(size, True)
            seconds += self.price.seconds_per_byte * each * layout.local_size
        return seconds

    def _strategies(self, node: fx.Node) -> Options:
        """Return the strategies of one node, with their seconds."""
        rule, factors = self.notes.specs[node.name], self.notes.factors[node.name]
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        gradient = carries_gradient(self.notes, node)
        offered = self._offered(node, gradient)
        shapes = operand_shapes(node), result_shapes(node)
        key = (
            node.target if node.target in HAVE_INNER_COLLECTIVES else None,
            rule_key(rule, factors),
            *shapes,
            results[0].dtype,
            gradient,
            None if self.price is None else self.price.memory.of(node),
            str(offered.allowed) if offered.joint is None else offered.joint,
            self._axis_orders(node.name, offered.joint)[1],
            offered.free,
        )
        if key not in self.known:
            legal = offered.legal(rule, factors, self.mesh, *shapes)
            legal = self.constraint.joint(module_path(node), rule, legal)
            seconds = [self._node_seconds(node, strategy) for strategy in legal]
            self.known[key] = Options(tuple(legal), np.array(seconds))
        return self.known[key]

    def _offered(self, node: fx.Node, gradient: bool) -> Offered:
        """Return what the layout and `among` leave a node."""
        rule, factors = self.notes.specs[node.name], self.notes.factors[node.name]
        path = module_path(node)
        # An op that casts or transposes a weight follows the weight, whatever the module's rules.
        of_weight = goes_with_weight(self.notes, node)
        free = of_weight or self.constraint.roles(path) is None
        if self.among is not None:
            joint = self.among[node.name]
            return Offered(free, joint=joint, orders=self._axis_orders(node.name, joint)[0])
        every = axis_choices(rule, factors, self.mesh, gradient)
        allowed = every if of_weight else self.constraint.narrow(path, rule, factors, every)
        return Offered(free, every, allowed)

    def _axis_orders(
        self, name: str, joint: tuple[tuple[AxisChoice, ...], ...] | None
    ) -> tuple[AxisOrders, Hashable]:
        """Return the orders of axes at a node or stored tensor, None for all, and a key of them."""
        if self.orders is None or joint is None:
            return None, None
        return self.orders.of_node(name), self.orders.key(name, joint)

    def _node_seconds(self, node: fx.Node, strategy: Strategy) -> float:
        """Return the seconds of a node under a strategy, with the price of what it saves."""
        seconds, collectives = node_costs(node, strategy, self.notes, self.mesh, self.world)
        seconds += sum(cost.seconds for cost in collectives)
        if self.price is not None:
            saved_bytes = bytes_of(self.price.memory.of(node), strategy)
            seconds += self.price.seconds_per_byte * saved_bytes
        return seconds

    def _region(self, region: Region) -> None:
        """Make a region a variable: the layouts of all values that it makes, and the layouts it
        wants of values made outside.
        """
        variable, options = self._variable(region.nodes[0], region.options), region.options
        self.members[variable] = region
        items = options.items
        for position, name in enumerate(region.nodes):
            for index in range(len(items[0][position].results)):
                layouts = tuple(item[position].results[index] for item in items)
                self.native[name, index] = Want(variable, (options, position, index), layouts)
        for source, position, index in region.outside_uses(self.notes.searched):
            layouts = tuple(item[position].operands[index] for item in items)
            self.wants[source].append(Want(variable, (options, position, -1 - index), layouts))

    def _outputs(self) -> None:
        nodes = {node.name: node for node in self.program.module.graph.nodes}
        for number, output in enumerate(self.program.signature.outputs):
            if output.node is None:
                continue
            value = producer(nodes[output.node])
            if value not in self.native:
                continue
            shape = shape_of(value_of(nodes[output.node]))
            whole_only = output.kind == "mutation" or not shape or self.notes.replicated_outputs
            dims = self.notes.dims[value]
            signature = tuple(tuple((a.size, a.opaque) for a in atoms) for atoms in dims)

            key = ("output", shape, signature, whole_only)
            if key not in self.known:
                layouts = [x for x in placements(dims, shape, self.mesh) if x.is_plain]
                layouts = layouts[:1] if whole_only else layouts
                self.known[key] = Options(tuple(layouts), np.zeros(len(layouts)))
            options = self.known[key]
            variable = self._variable(f"output {number}", options)
            self.wants[value].append(Want(variable, (options, 0), options.items))

    # -- reshards ----------------------------------------------------------------------------------
    def _convert(self, value: Value, wants: list[Want]) -> None:
        native = self.native[value]
        second = self._copy(value, native, wants) if len(wants) > 1 else None
        if second is not None:
            self._enter_reshard(value, self.conversions.copied, native, second)
        for want in wants:
            if second is None:
                self._enter_reshard(value, self.conversions.direct, native, want)
            else:
                self._enter_reshard(value, self.conversions.nearer, native, second, want)

    def _enter_reshard(self, value: Value, table: Callable[..., Array], *wants: Want) -> None:
        """Enter the table of a value's reshards between these layouts."""
        size = self.element[value[0]][value[1]]
        scope = tuple(want.variable for want in wants)
        self._enter_table(scope, lambda program: table(*wants, program.element(value, size)))

    def _copy(self, value: Value, native: Want, wants: list[Want]) -> Want | None:
        """Return a variable for a second layout of the value, one that at least two uses may want;
        its first option is no copy. None where no layout is wanted twice.
        """
        key = ("copy", native.key, tuple(want.key for want in wants))
        if key not in self.known:
            times = Counter(layout for want in wants for layout in dict.fromkeys(want.layouts))
            shared = [layout for layout, count in times.items() if count > 1]
            self.known[key] = Options((None, *shared), np.zeros(1 + len(shared)))
        options = self.known[key]
        if len(options.items) == 1:
            return None
        self.copies[value] = self._variable(f"copy {value}", options)
        return Want(self.copies[value], (options, 0), options.items[1:])

    # -- the result --------------------------------------------------------------------------------
    def plan(self, seconds: float, values: list[int]) -> Plan:
        """Return the plan that these values of the variables stand for."""
        choices, stored, outputs = {}, {}, {}
        for name, variable in self.index.items():
            item = self.variables[variable].items[values[variable]]
            if variable in self.members:
                for member, strategy in zip(self.members[variable].nodes, item, strict=True):
                    choices[member] = Choice(strategy.splits, strategy.operands, strategy.results)
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
            mesh=self.mesh,
            layout=self.constraint.name,
            choices=choices,
            stored=stored,
            copies=copies,
            outputs=outputs,
            seconds=seconds,
            world=self.world,
            panels=self.constraint.panels,
            reduce_dtype=self.notes.reduce_dtype,
            replicated_outputs=self.notes.replicated_outputs,
        )


# -- tables of reshards ----------------------------------------------------------------------------
_MANY = 1 << 9  # pairs of layouts from which on they are priced as arrays


class Want(NamedTuple):
    """One use of a value, or its making: its variable, and the layout that each option has."""

    variable: int
    key: Hashable
    layouts: tuple[Layout, ...]


class ReshardCosts:
    """Seconds of reshards between layouts; tables for the same layouts are built once."""

    def __init__(self, world: World) -> None:
        self._world, self._terms = world, _pricer(world)
        self._known: dict[Hashable, Array] = {}

    def direct(self, native: Want, want: Want, element: Element) -> Array:
        """Return the seconds from each layout of the maker to each of the user."""
        key = ("direct", native.key, want.key, element)
        if key not in self._known:
            self._known[key] = self._between(native.layouts, want.layouts, element)
        return self._known[key]

    def copied(self, native: Want, copy: Want, element: Element) -> Array:
        """Return the seconds from each layout of the maker to each copy; a copy's first option is
        none.
        """
        key = ("copied", native.key, copy.key, element)
        if key not in self._known:
            matrix = self._between(native.layouts, copy.layouts, element)
            no_copy = np.zeros((len(native.layouts), 1))
            self._known[key] = np.concatenate([no_copy, matrix], axis=1)
        return self._known[key]

    def nearer(self, native: Want, copy: Want, want: Want, element: Element) -> Array:
        """Return the seconds to each layout of the user from the maker or the copy, whichever is
        nearer. Raises PlanError where the table is larger than elimination takes.
        """
        sizes = (len(native.layouts), 1 + len(copy.layouts), len(want.layouts))
        if math.prod(sizes) > LARGEST:
            raise too_large(sizes)
        key = ("nearer", native.key, copy.key, want.key, element)
        if key not in self._known:
            direct = self._between(native.layouts, want.layouts, element)[:, None, :]
            through = self._between(copy.layouts, want.layouts, element)[None, :, :]
            self._known[key] = np.concatenate([direct, np.minimum(direct, through)], axis=1)
        return self._known[key]

    def _between(
        self, sources: Sequence[Layout], targets: Sequence[Layout], element: Element
    ) -> Array:
        rows = {layout: i for i, layout in enumerate(dict.fromkeys(sources))}
        columns = {layout: i for i, layout in enumerate(dict.fromkeys(targets))}
        whole = element._replace(share=1.0)  # searches at several shares ask for the same terms
        if len(rows) * len(columns) < _MANY:
            terms = np.array([[self._terms(a, b, whole) for b in columns] for a in rows])
        else:
            terms = terms_between([*rows], [*columns], whole, self._world)
        unique_pairs = terms[..., 0] + element.share * terms[..., 1]
        return unique_pairs[np.ix_([rows[a] for a in sources], [columns[b] for b in targets])]


@lru_cache(maxsize=4)
def _pricer(world: World) -> Callable[[Layout, Layout, Element], tuple[float, float]]:
    """Return the function that gives the seconds of a reshard: in memory, and of its collectives.
    It remembers its results, since planning takes many searches on the same few meshes.
    """

    @lru_cache(maxsize=1 << 20)
    def terms(source: Layout, target: Layout, element: Element) -> tuple[float, float]:
        return path_terms(reshard_steps(source, target), element, world)

    return terms
