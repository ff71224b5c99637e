"""Collectives in several levels: scatter inside, the same collective across on what is left, gather
inside (see cost/ways.py, which says when that is faster). In one level they are the wire's own.

A route (`wire.route`) has the (ranks, group) of every level, innermost first; a rank's place in the
whole group is (..., place across, place inside), row-major. Sums are added in another order than in
one level: equal but for rounding.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from autopar import wire
from autopar.wire import Route


def route_size(route: Route) -> int:
    """The number of ranks in all."""
    found = 1
    for ranks, _ in route:  # a loop, as dynamo traces no generator in an autograd function
        found *= ranks
    return found


def hierarchical_all_gather(x: Tensor, route: Route) -> Tensor:
    """x (n, ...) of every rank, one after the other: (size·n, ...)."""
    if len(route) == 1:
        return wire.all_gather(x, *route[0])
    for ranks, group in reversed(route):  # across first: there the part of one rank goes
        x = wire.all_gather(x.unsqueeze(0), ranks, group)
    levels = len(route)  # dims (inside, ..., across, n, ...)
    order = [*reversed(range(levels)), *range(levels, x.dim())]
    return x.permute(order).flatten(0, levels)


def hierarchical_reduce_scatter(x: Tensor, route: Route) -> Tensor:
    """Slice number (own rank) of the sum of x (size·n, ...): (n, ...)."""
    if len(route) == 1:
        return wire.reduce_scatter(x, *route[0])
    levels = len(route)
    x = x.unflatten(0, [*[ranks for ranks, _ in reversed(route)], -1])
    x = x.permute([*reversed(range(levels)), *range(levels, x.dim())])
    for ranks, group in route:
        x = wire.reduce_scatter(x, ranks, group).squeeze(0)
    return x


def hierarchical_all_reduce(x: Tensor, route: Route) -> Tensor:
    """The sum of x over all ranks, same shape."""
    if len(route) == 1:
        return wire.all_reduce(x, *route[0])
    *inside, across = route
    part = x.reshape(-1)
    missing = -part.numel() % route_size(tuple(inside))
    part = functional.pad(part, (0, missing)) if missing else part
    for level in inside:
        part = wire.reduce_scatter(part, *level)
    part = wire.all_reduce(part, *across)
    for level in reversed(inside):
        part = wire.all_gather(part, *level)
    return part[: x.numel()].view(x.shape)
