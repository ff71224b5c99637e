"""What of a derived graph can be cut into pieces: a product with the collective before it, the one
behind it, or both.

A `Cut` says where a value is cut, as layouts say where it is split: by a digit of a dim. It goes
through views, copies, pointwise ops, a product's rows or columns and the collectives, whose own
digit is another one. So the nodes of a unit can be run piece by piece, each on smaller operands
(cutting.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.cost.network import size
from autopar.cost.simulator.graph_events import collective_of, group_of, group_pattern, is_wait

aten = torch.ops.aten

MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})
SHAPED = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
_ALIKE = frozenset(
    {aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default}
)
_GATHER = "all_gather_into_tensor"


class Cut(NamedTuple):
    """A value cut along `dim`, whose numbers are (`outer`, pieces, the rest): a piece has the rest
    of every outer part.
    """

    dim: int
    outer: int = 1


@dataclass(frozen=True)
class Unit:
    """Nodes that are cut together, in an order in which they can run, and how the result of each
    is cut; into how many pieces.
    """

    cuts: Mapping[fx.Node, Cut]
    pieces: int

    @property
    def collectives(self) -> list[fx.Node]:
        return [node for node in self.cuts if collective_of(node) is not None]


# -- how a cut goes through a node -----------------------------------------------------------------
def through(node: fx.Node, source: fx.Node, cut: Cut, pieces: int) -> Cut | None:
    """How the result of a node is cut if its operand `source` is; None where it cannot be."""
    if not isinstance(node.target, OpOverload) or value_of(node) is None:
        return None
    direct = [given for given in node.args if isinstance(given, fx.Node)]
    if node.target._schema.is_mutable or direct.count(source) != 1:
        return None
    if set(direct) != set(node.all_input_nodes):
        return None
    if collective_of(node) is not None:
        return _exchanged(node, cut)
    if is_wait(node) or node.target in _ALIKE or _pointwise(node, source):
        return cut
    if node.target in SHAPED:
        return _viewed(shape_of(source), shape_of(node), cut, pieces)
    return _moved(node, source, cut)


def _exchanged(node: fx.Node, cut: Cut) -> Cut | None:
    """Through a collective, which works on dim 0: the ranks' parts are its outermost digit."""
    ranks, name = size(group_pattern(group_of(node))), collective_of(node)
    if name == "all_reduce" or cut.dim > 0:
        return cut if name in ("all_reduce", *_ON_DIM_0) else None
    if name == _GATHER:
        return Cut(0, cut.outer * ranks)
    if name == "reduce_scatter_tensor" and cut.outer % ranks == 0:
        return Cut(0, cut.outer // ranks)
    return None


_ON_DIM_0 = (_GATHER, "reduce_scatter_tensor", "all_to_all_single")


def _pointwise(node: fx.Node, source: fx.Node) -> bool:
    """Whether the result has a number for each of the source's."""
    assert isinstance(node.target, OpOverload)
    tags = node.target.tags
    able = torch.Tag.pointwise in tags or node.target is aten._to_copy.default
    return (
        able
        and torch.Tag.nondeterministic_seeded not in tags
        and shape_of(node) == shape_of(source)
    )


def _viewed(before: tuple[int, ...], after: tuple[int, ...], cut: Cut, pieces: int) -> Cut | None:
    """Through a view: the dim that holds the same digit."""
    left, passed = math.prod(before[: cut.dim]) * cut.outer, 1
    for dim, length in enumerate(after):
        outer, apart = divmod(left, passed)
        if not outer:
            return None
        if not apart and length % (outer * pieces) == 0:
            return Cut(dim, outer)
        passed *= length
    return None


def _moved(node: fx.Node, source: fx.Node, cut: Cut) -> Cut | None:
    """Through an op that changes which dims there are, or their order."""
    dims, dim, target = len(shape_of(source)), cut.dim, node.target
    match target:
        case aten.t.default if dims == 2:
            return cut._replace(dim=1 - dim)
        case aten.permute.default:
            return cut._replace(dim=[place % dims for place in _numbers(node)].index(dim))
        case aten.transpose.int:
            one, other = (place % dims for place in _numbers(node))
            return cut._replace(dim={one: other, other: one}.get(dim, dim))
        case aten.unsqueeze.default:
            return cut._replace(dim=dim + (dim >= _numbers(node)[0] % (dims + 1)))
        case aten.squeeze.dim:
            at = _numbers(node)[0] % dims
            return cut._replace(dim=dim - (dim > at and shape_of(source)[at] == 1))
    return cut._replace(dim=dim - 1) if _adds_parts(node) and dim else None


def _numbers(node: fx.Node) -> list[int]:
    """The arguments behind the first one, which are numbers or one list of them."""
    given: Any = node.args[1:]
    return [int(number) for number in (given[0] if isinstance(given[0], list) else given)]


def _adds_parts(node: fx.Node) -> bool:
    """Whether a node adds up what an all-to-all brought: a sum over dim 0 (see wire.py)."""
    return node.target is aten.sum.dim_IntList and node.args[1:] == ([0],)


def operand(node: fx.Node, place: int, cut: Cut) -> Cut | None:
    """How operand number `place` of a node is cut if the result is and the operand comes from
    outside of the unit; None where each piece takes it whole.
    """
    given = node.args[place]
    assert isinstance(given, fx.Node)
    if collective_of(node) == _GATHER:
        ranks = size(group_pattern(group_of(node)))
        return cut if cut.dim else Cut(0, cut.outer // ranks)
    if node.target in MATMULS:
        left = 1 if node.target is aten.addmm.default else 0
        last = len(shape_of(node)) - 1
        if place == left:
            return cut if cut.dim < last else None
        if place == left + 1:
            return cut if cut.dim == last else None
    dim = cut.dim - len(shape_of(node)) + len(shape_of(given))  # it may be broadcast
    if dim < 0 or shape_of(given)[dim] != shape_of(node)[cut.dim]:
        return None
    return Cut(dim, cut.outer)


# -- finding ---------------------------------------------------------------------------------------
class _Search(NamedTuple):
    """For units of so many pieces. `nowhere`: nodes from which, cut like this, no wait is reached:
    the sums of a residual stream lead past all later layers, and so are followed once.
    """

    pieces: int
    nowhere: set[tuple[fx.Node, Cut]]


def units(graph: fx.Graph, pieces: int, without: Set[fx.Node]) -> list[Unit]:
    """What can be cut into so many pieces, no node twice: gathers with the products that take what
    they bring, and products with the sum over ranks behind them. `without`: nodes that stay whole.
    """
    found, taken, search = [], set[fx.Node](without), _Search(pieces, set())
    nodes = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    for node in nodes:
        if collective_of(node) == _GATHER and node not in taken:
            cuts = _fed(node, search)
            if cuts and not taken & cuts.keys() and _joinable(cuts):
                found.append(Unit(cuts, pieces))
                taken |= cuts.keys()
    for node in nodes:
        if node.target in MATMULS and node not in taken:
            cuts = next(filter(None, (_summed(node, c, search) for c in _sides(node, pieces))), {})
            if cuts and not taken & cuts.keys() and _joinable(cuts):
                found.append(Unit(cuts, pieces))
                taken |= cuts.keys()
    return found


def _joinable(cuts: Mapping[fx.Node, Cut]) -> bool:
    """Whether what goes out is laid out as pieces side by side are."""
    return all(cuts.keys() >= n.users.keys() or value_of(n).is_contiguous() for n in cuts)


def _sides(product: fx.Node, pieces: int) -> list[Cut]:
    """A product's rows and columns, the more numerous first: narrow pieces are slow."""
    shape = shape_of(product)
    cuts = [Cut(dim) for dim in (len(shape) - 2, len(shape) - 1) if shape[dim] % pieces == 0]
    return sorted(cuts, key=lambda cut: -shape[cut.dim])


def _summed(product: fx.Node, cut: Cut, search: _Search) -> dict[fx.Node, Cut]:
    """From a product to the sum over ranks behind it; {} where there is none. On gloo a
    reduce-scatter is an all-to-all and a sum of what arrives.
    """
    found = _to_wait(product, cut, search)
    if not any(collective_of(node) == "all_to_all_single" for node in found):
        return found
    wait = next(reversed(found))
    users = list(wait.users)
    if len(users) != 1 or not _adds_parts(users[0]):
        return {}
    onward = through(users[0], wait, found[wait], search.pieces)
    return {} if onward is None else {**found, users[0]: onward}


def _to_wait(node: fx.Node, cut: Cut, search: _Search) -> dict[fx.Node, Cut]:
    """From a node to the wait for the first collective behind it; {} where there is none."""
    if is_wait(node):
        return {node: cut}
    for user in node.users:
        if user.target in MATMULS or collective_of(user) == _GATHER:
            continue
        onward = through(user, node, cut, search.pieces)
        if onward is None or (user, onward) in search.nowhere:
            continue
        further = _to_wait(user, onward, search)
        if further:
            return {node: cut, **further}
    search.nowhere.add((node, cut))
    return {}


def _fed(gather: fx.Node, search: _Search) -> dict[fx.Node, Cut]:
    """A gather, what shows or copies its result, and the products whose left operand that is, with
    the sums over ranks behind them; {} where there are none.
    """
    (given,) = gather.all_input_nodes
    for dim, length in enumerate(shape_of(given)):
        if length % search.pieces == 0:
            found = _flooded(gather, given, Cut(dim), search)
            if any(node.target in MATMULS for node in found):
                return found
    return {}


def _flooded(gather: fx.Node, given: fx.Node, cut: Cut, search: _Search) -> dict[fx.Node, Cut]:
    onward = through(gather, given, cut, search.pieces)
    if onward is None:
        return {}
    found: dict[fx.Node, Cut] = {}
    _follow(gather, onward, search, found)
    return dict(sorted(found.items()))  # in the order of the graph


def _follow(node: fx.Node, cut: Cut, search: _Search, found: dict[fx.Node, Cut]) -> bool:
    """Puts into `found` the node and its users on the way to products; whether there are any."""
    reached = False
    for user in node.users:
        if user.target in MATMULS:
            reached |= _multiplied(user, node, cut, search, found)
            continue
        able = is_wait(user) or user.target in SHAPED | _ALIKE | _MOVING
        onward = through(user, node, cut, search.pieces) if able else None
        if onward is not None:
            reached |= _follow(user, onward, search, found)
    if reached:
        found[node] = cut
    return reached


_MOVING = frozenset({aten.permute.default, aten.transpose.int, aten.squeeze.dim}) | {
    aten.unsqueeze.default,
    aten.t.default,
    aten._to_copy.default,
}


def _multiplied(
    product: fx.Node, left: fx.Node, cut: Cut, search: _Search, found: dict[fx.Node, Cut]
) -> bool:
    """Whether a product's rows are those that `left` is cut by; then it is put into `found`."""
    arguments = product.args[1:] if product.target is aten.addmm.default else product.args
    rows = len(shape_of(product)) - 2
    if arguments[0] is not left or arguments[1] is left or cut.dim != rows:
        return False
    found |= _summed(product, cut, search) or {product: cut}
    return True


# -- facts -----------------------------------------------------------------------------------------
def value_of(node: fx.Node) -> Any:
    """The tensor that a node gives; None where it gives something else."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Its shape."""
    return tuple(value_of(node).shape)
