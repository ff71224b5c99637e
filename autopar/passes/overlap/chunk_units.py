"""Finds what chunk.py can cut into pieces: a matmul with the collective before it, behind it, or
both.

A `Cut` says where a value is cut, as a layout says where it is sharded: by a digit of a dim. It
passes through views, copies, pointwise ops, a matmul's rows or columns, and collectives (which add
a digit of their own to dim 0). For example the rows of `wait(all_reduce(mm(x, w)))` can be cut all
the way: piece i sums the rows i of `x @ w`. So the nodes of a `Unit` can run piece by piece, each
piece on smaller operands. chunk.py calls `units`, and uses `operand` to slice what comes in.
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
    """A value cut along `dim`, which is seen as (`outer`, pieces, inner): a piece has its inner
    part of every outer part.
    """

    dim: int
    outer: int = 1


@dataclass(frozen=True)
class Unit:
    """Nodes that are cut together, in an order in which they can run, with the cut of each result,
    and the number of pieces.
    """

    cut_of: Mapping[fx.Node, Cut]
    pieces: int

    @property
    def collectives(self) -> list[fx.Node]:
        """Return the nodes of the unit that are collectives."""
        return [node for node in self.cut_of if collective_of(node) is not None]


# -- how a cut goes through a node -----------------------------------------------------------------
def result_cut(node: fx.Node, source: fx.Node, cut: Cut, pieces: int) -> Cut | None:
    """Return how the result of a node is cut if its operand `source` is cut like this; None where
    it cannot be.
    """
    if not isinstance(node.target, OpOverload) or value_of(node) is None:
        return None
    operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
    if node.target._schema.is_mutable or operands.count(source) != 1:
        return None
    if set(operands) != set(node.all_input_nodes):
        return None
    if collective_of(node) is not None:
        return _through_collective(node, cut)
    if is_wait(node) or node.target in _ALIKE or _pointwise(node, source):
        return cut
    if node.target in SHAPED:
        return _through_view(shape_of(source), shape_of(node), cut, pieces)
    return _through_dims(node, source, cut)


def _through_collective(node: fx.Node, cut: Cut) -> Cut | None:
    """Carry a cut through a collective: on dim 0 the ranks' parts are its outermost digit."""
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
    """Whether each element of the result depends on one element of the source."""
    assert isinstance(node.target, OpOverload)
    tags = node.target.tags
    is_pointwise = torch.Tag.pointwise in tags or node.target is aten._to_copy.default
    return (
        is_pointwise
        and torch.Tag.nondeterministic_seeded not in tags
        and shape_of(node) == shape_of(source)
    )


def _through_view(
    before: tuple[int, ...], after: tuple[int, ...], cut: Cut, pieces: int
) -> Cut | None:
    """Carry a cut through a view: to the dim that holds the same digit."""
    outside, passed = math.prod(before[: cut.dim]) * cut.outer, 1
    for dim, length in enumerate(after):
        outer, apart = divmod(outside, passed)
        if not outer:
            return None
        if not apart and length % (outer * pieces) == 0:
            return Cut(dim, outer)
        passed *= length
    return None


def _through_dims(node: fx.Node, source: fx.Node, cut: Cut) -> Cut | None:
    """Carry a cut through an op that permutes, adds or removes dims."""
    dims, dim, target = len(shape_of(source)), cut.dim, node.target
    match target:
        case aten.t.default if dims == 2:
            return cut._replace(dim=1 - dim)
        case aten.permute.default:
            return cut._replace(dim=[place % dims for place in _numbers(node)].index(dim))
        case aten.transpose.int:
            first, second = (place % dims for place in _numbers(node))
            return cut._replace(dim={first: second, second: first}.get(dim, dim))
        case aten.unsqueeze.default:
            return cut._replace(dim=dim + (dim >= _numbers(node)[0] % (dims + 1)))
        case aten.squeeze.dim:
            at = _numbers(node)[0] % dims
            return cut._replace(dim=dim - (dim > at and shape_of(source)[at] == 1))
    return cut._replace(dim=dim - 1) if _adds_parts(node) and dim else None


def _numbers(node: fx.Node) -> list[int]:
    """Return the arguments behind the first, which are numbers or one list of them."""
    arguments: Any = node.args[1:]
    return [
        int(number) for number in (arguments[0] if isinstance(arguments[0], list) else arguments)
    ]


def _adds_parts(node: fx.Node) -> bool:
    """Whether a node sums over dim 0, as gloo's reduce-scatters sum what an all-to-all brought."""
    return node.target is aten.sum.dim_IntList and node.args[1:] == ([0],)


def operand(node: fx.Node, place: int, cut: Cut) -> Cut | None:
    """Return how operand number `place` of a node is cut if the result is and the operand comes
    from outside of the unit; None where each piece takes the operand uncut.
    """
    source = node.args[place]
    assert isinstance(source, fx.Node)
    if collective_of(node) == _GATHER:
        ranks = size(group_pattern(group_of(node)))
        return cut if cut.dim else Cut(0, cut.outer // ranks)
    if node.target in MATMULS:
        left_place = 1 if node.target is aten.addmm.default else 0
        last = len(shape_of(node)) - 1
        if place == left_place:
            return cut if cut.dim < last else None
        if place == left_place + 1:
            return cut if cut.dim == last else None
    dim = cut.dim - len(shape_of(node)) + len(shape_of(source))  # it may be broadcast
    if dim < 0 or shape_of(source)[dim] != shape_of(node)[cut.dim]:
        return None
    return Cut(dim, cut.outer)


# -- finding units ---------------------------------------------------------------------------------
class _Search(NamedTuple):
    """A search for units of `pieces` pieces. `nowhere` holds the nodes from which, cut like this,
    no wait is reached: the sums of a residual stream lead past all later layers, and so are
    followed only once.
    """

    pieces: int
    nowhere: set[tuple[fx.Node, Cut]]


def units(graph: fx.Graph, pieces: int, without: Set[fx.Node]) -> list[Unit]:
    """Return the units that can be cut into this many pieces, no node twice: gathers with the
    matmuls that take their results, and matmuls with the sum over ranks behind them. `without`
    holds nodes that are not to be cut.
    """
    result, used, search = [], set[fx.Node](without), _Search(pieces, set())
    nodes = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    for node in nodes:
        if collective_of(node) == _GATHER and node not in used:
            cut_of = _from_gather(node, search)
            if cut_of and not used & cut_of.keys() and _joinable(cut_of):
                result.append(Unit(cut_of, pieces))
                used |= cut_of.keys()
    for node in nodes:
        if node.target in MATMULS and node not in used:
            cut_of = next(
                filter(None, (_to_sum_over_ranks(node, c, search) for c in _sides(node, pieces))),
                {},
            )
            if cut_of and not used & cut_of.keys() and _joinable(cut_of):
                result.append(Unit(cut_of, pieces))
                used |= cut_of.keys()
    return result


def _joinable(by_node: Mapping[fx.Node, Cut]) -> bool:
    """Whether results that leave the unit are contiguous, as concatenated pieces are."""
    return all(by_node.keys() >= n.users.keys() or value_of(n).is_contiguous() for n in by_node)


def _sides(matmul: fx.Node, pieces: int) -> list[Cut]:
    """Return the cuts of a matmul by rows and by columns, the longer side first: narrow pieces are
    slow.
    """
    shape = shape_of(matmul)
    sides = [Cut(dim) for dim in (len(shape) - 2, len(shape) - 1) if shape[dim] % pieces == 0]
    return sorted(sides, key=lambda cut: -shape[cut.dim])


def _to_sum_over_ranks(matmul: fx.Node, cut: Cut, search: _Search) -> dict[fx.Node, Cut]:
    """Return the cuts from a matmul to the sum over ranks behind it; {} where there is none. On
    gloo a reduce-scatter is an all-to-all and a sum of what arrives.
    """
    cut_of = _to_wait(matmul, cut, search)
    if not any(collective_of(node) == "all_to_all_single" for node in cut_of):
        return cut_of
    wait = next(reversed(cut_of))
    users = list(wait.users)
    if len(users) != 1 or not _adds_parts(users[0]):
        return {}
    sum_cut = result_cut(users[0], wait, cut_of[wait], search.pieces)
    return {} if sum_cut is None else {**cut_of, users[0]: sum_cut}


def _to_wait(node: fx.Node, cut: Cut, search: _Search) -> dict[fx.Node, Cut]:
    """Return the cuts from a node to the wait for the first collective behind it; {} where there is
    none.
    """
    if is_wait(node):
        return {node: cut}
    for user in node.users:
        if user.target in MATMULS or collective_of(user) == _GATHER:
            continue
        user_cut = result_cut(user, node, cut, search.pieces)
        if user_cut is None or (user, user_cut) in search.nowhere:
            continue
        cut_of = _to_wait(user, user_cut, search)
        if cut_of:
            return {node: cut, **cut_of}
    search.nowhere.add((node, cut))
    return {}


def _from_gather(gather: fx.Node, search: _Search) -> dict[fx.Node, Cut]:
    """Return the cuts of a gather, of views and copies of its result, of the matmuls whose left
    operand that is, and of the sums over ranks behind them; {} where there are no such matmuls.
    """
    (source,) = gather.all_input_nodes
    for dim, length in enumerate(shape_of(source)):
        if length % search.pieces == 0:
            cut_of = _cut_from_gather(gather, source, Cut(dim), search)
            if any(node.target in MATMULS for node in cut_of):
                return cut_of
    return {}


def _cut_from_gather(
    gather: fx.Node, operand: fx.Node, cut: Cut, search: _Search
) -> dict[fx.Node, Cut]:
    """Return the cuts of a gather and of all that leads to matmuls, if its operand is cut like
    this.
    """
    gather_cut = result_cut(gather, operand, cut, search.pieces)
    if gather_cut is None:
        return {}
    cut_of: dict[fx.Node, Cut] = {}
    _follow(gather, gather_cut, search, cut_of)
    return dict(sorted(cut_of.items()))  # in the order of the graph


def _follow(node: fx.Node, cut: Cut, search: _Search, by_node: dict[fx.Node, Cut]) -> bool:
    """Add the node and those of its users that lead to matmuls to `by_node`; return whether there
    are any.
    """
    reached = False
    for user in node.users:
        if user.target in MATMULS:
            reached |= _enter_matmul(user, node, cut, search, by_node)
            continue
        passes_cut = is_wait(user) or user.target in SHAPED | _ALIKE | _MOVING
        user_cut = result_cut(user, node, cut, search.pieces) if passes_cut else None
        if user_cut is not None:
            reached |= _follow(user, user_cut, search, by_node)
    if reached:
        by_node[node] = cut
    return reached


_MOVING = frozenset({aten.permute.default, aten.transpose.int, aten.squeeze.dim}) | {
    aten.unsqueeze.default,
    aten.t.default,
    aten._to_copy.default,
}


def _enter_matmul(
    matmul: fx.Node, left: fx.Node, cut: Cut, search: _Search, by_node: dict[fx.Node, Cut]
) -> bool:
    """Add a matmul to `by_node` where `cut` cuts its rows, with the sum over ranks behind it;
    return whether it does.
    """
    arguments = matmul.args[1:] if matmul.target is aten.addmm.default else matmul.args
    rows = len(shape_of(matmul)) - 2
    if arguments[0] is not left or arguments[1] is left or cut.dim != rows:
        return False
    by_node |= _to_sum_over_ranks(matmul, cut, search) or {matmul: cut}
    return True


# -- facts -----------------------------------------------------------------------------------------
def value_of(node: fx.Node) -> Any:
    """Return the tensor that a node gives; None where it gives something else."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of the tensor that a node gives."""
    return tuple(value_of(node).shape)
