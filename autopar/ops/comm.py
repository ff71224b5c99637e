"""The wire: the communications that everything is made of, and who takes part in them: four on the
leading dim, and for panels (autopar.ops.sharded.matmul) the two that have a root.

Nothing here has a gradient. All of it goes through one seam, `simulator`, so that
`autopar.runtime.lockstep` can run all ranks in one process; normally it is None and the calls are
torch's functional collectives, which graphs show as `_c10d_functional` nodes.

Collectives in several levels: scatter inside, the same collective across on what is left, gather
inside (see cost/algorithms.py, which says when that is faster). In one level they are the plain
ones.

A route (`route`) has the (ranks, group) of every level, innermost first; a rank's place in the
whole group is (..., place across, place inside), row-major. Sums are added in another order than in
one level: equal but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from autopar import _compat
from autopar.ir.mesh import Mesh, Within, axes_of_group, group_name
from autopar.ops import failures

Axes = str | Sequence[str]
Hierarchy = int | Sequence[int]  # ranks inside, level by level from the innermost on; () is flat
Route = tuple[tuple[int, str], ...]  # (ranks, group) of every level, the innermost first


class Simulator(Protocol):
    """What takes the place of the wire when all ranks run in one process."""

    def exchange(self, kind: str, x: Tensor, group: str) -> Tensor: ...


simulator: Simulator | None = None
_compat.safe_gathers()  # before anything is sent

# Who takes part depends on strings alone: dynamo takes it as a constant, it need not trace parsers.


@_compat.constant_result
def size_of(axis: Axes, mesh: str) -> int:
    """The number of ranks that a change over `axis` joins."""
    return _participants(axis if isinstance(axis, str) else tuple(axis), mesh)[0]


@_compat.constant_result
def sizes_of(axis: Axes, mesh: str) -> tuple[int, ...]:
    """The number of ranks on each of these axes, in mesh order."""
    parsed = Mesh.parse(mesh)
    return tuple(parsed.sizes[name] for name in parsed.ordered(axis))


@_compat.constant_result
def group_of(axis: Axes, mesh: str) -> str:
    """The name of the process group over `axis`."""
    return _participants(axis if isinstance(axis, str) else tuple(axis), mesh)[1]


@_compat.constant_result
def route(axis: Axes, mesh: str, inside: Hierarchy = (), lane: int = 0) -> Route:
    """Which groups a collective over `axis` goes through, in one level or in several.

    >>> route("data", "data8.x2", inside=2)
    ((2, 'autopar/data8.x2/data/2@1'), (4, 'autopar/data8.x2/data/4@2'))
    """
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    return _route(names, mesh, (inside,) if isinstance(inside, int) else tuple(inside), lane)


@cache
def _route(axis: tuple[str, ...], mesh: str, inside: tuple[int, ...], lane: int) -> Route:
    parsed = Mesh.parse(mesh)
    axes = parsed.ordered(axis)
    ranks = math.prod(parsed.sizes[name] for name in axes)
    if not inside:
        return ((ranks, group_name(mesh, axes, lane=lane)),)
    within = math.prod(inside)
    assert ranks % within == 0 and ranks > within, f"{inside} inside of {ranks} ranks of {mesh}"
    found, stride = [], 1
    for size in (*inside, ranks // within):
        found.append((size, group_name(mesh, axes, Within(size, stride), lane)))
        stride *= size
    return tuple(found)


@cache
def _participants(axis: str | tuple[str, ...], mesh: str) -> tuple[int, str]:
    parsed = Mesh.parse(mesh)
    axes = parsed.ordered(axis)
    return math.prod(parsed.sizes[name] for name in axes), group_name(mesh, axes)


@_compat.constant_result
def _reduce_scatter_is_slow(group: str, device_type: str) -> bool:
    """On gloo it clones, sums and slices: the bytes and the time of a whole all-reduce, twice those
    of an all-to-all and a local sum (measured on 2 and 4 ranks, 16 KB to 16 MB).
    """
    return _compat.backend_name(group, device_type) == "gloo"


def _wait(x: Tensor, kind: str, group: str = "") -> Tensor:
    """x, once it has arrived. Where it does not, the error names the ranks that are gone."""
    if torch.compiler.is_compiling():
        return torch.ops._c10d_functional.wait_tensor(x)
    try:
        return torch.ops._c10d_functional.wait_tensor(x)
    except RuntimeError as error:
        over = f" over {axes_of_group(group)}" if group.startswith("autopar/") else ""
        failures.explain(error, f"{kind}{over}")


def _reals(x: Tensor) -> Tensor:
    """Complex x (...) as (..., 2): transports know no complex numbers."""
    return torch.view_as_real(x.resolve_conj())


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """x (n, ...) of every rank, one after the other: (size·n, ...)."""
    if x.is_complex():
        return torch.view_as_complex(all_gather(_reals(x), size, group))
    if x.dtype == torch.bool:  # gloo knows no bool
        return all_gather(x.view(torch.uint8), size, group).view(torch.bool)
    if simulator is not None:
        return simulator.exchange("all-gather", x, group)
    under_way = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group)
    return _wait(under_way, "all-gather", group)


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Slice number (own rank) of the sum of x (size·n, ...): (n, ...)."""
    if x.is_complex():
        return torch.view_as_complex(reduce_scatter(_reals(x), size, group))
    if simulator is not None:
        return simulator.exchange("reduce-scatter", x, group)
    if _reduce_scatter_is_slow(group, x.device.type):
        return all_to_all(x.unflatten(0, (size, -1)), group).sum(0, dtype=x.dtype)
    under_way = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    return _wait(under_way, "reduce-scatter", group)


def all_reduce(x: Tensor, size: int, group: str, op: Literal["sum", "max"] = "sum") -> Tensor:
    """The sum or maximum of x over the group's `size` ranks, same shape."""
    if x.is_complex():
        return torch.view_as_complex(all_reduce(_reals(x), size, group, op))
    if simulator is not None:
        return simulator.exchange(f"all-reduce {op}", x, group)
    under_way = torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group)
    return _wait(under_way, "all-reduce", group)


def all_to_all(x: Tensor, group: str) -> Tensor:
    """x (size, ...): slice j goes to rank j of the group, slice i of the result is from rank i."""
    if x.is_complex():
        return torch.view_as_complex(all_to_all(_reals(x), group))
    if x.dtype == torch.bool:
        return all_to_all(x.view(torch.uint8), group).view(torch.bool)
    if simulator is not None:
        return simulator.exchange("all-to-all", x, group)
    splits = [1] * x.shape[0]
    under_way = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), splits, splits, group)
    return _wait(under_way, "all-to-all", group)


# Many at once: gloo starts one operation where it would start one for each (40 sums of 2 KB over a
# slow link: 3.8 ms, one after the other 109). Gathers go side by side in one tensor, not in torch's
# coalesced form: see `_compat.safe_gathers`.


def all_reduce_coalesced(xs: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
    """The sums of several tensors of one dtype over the group's `size` ranks, as one operation."""
    if xs and xs[0].is_complex():
        sums = all_reduce_coalesced([_reals(x) for x in xs], size, group)
        return [torch.view_as_complex(x) for x in sums]
    if simulator is not None:
        return [all_reduce(x, size, group) for x in xs]
    under_way = torch.ops._c10d_functional.all_reduce_coalesced(
        [x.contiguous() for x in xs], "sum", group
    )
    return [_wait(x, "all-reduce", group) for x in under_way]


def all_gather_coalesced(xs: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
    """Of several tensors of one dtype the x (n, ...) of every rank, one after the other: (size·n,
    ...); as one operation.
    """
    flat = all_gather(torch.cat([x.reshape(-1) for x in xs]), size, group).view(size, -1)
    parts = flat.split([x.numel() for x in xs], 1)
    return [
        part.reshape(size * x.shape[0], *x.shape[1:]) for x, part in zip(xs, parts, strict=True)
    ]


# A root is a place within the group. What is issued is under way and must be waited for; all ranks
# issue the same in the same order.


def wait(x: Tensor) -> Tensor:
    """x, which `issue_broadcast` or `issue_reduce` gave, once it has arrived."""
    return x if simulator is not None else _wait(x, "broadcast or reduce")


def broadcast(x: Tensor, root: int, size: int, group: str) -> Tensor:
    """The x of rank number `root` of the group's `size` ranks, which all have the same shape."""
    return wait(issue_broadcast(x, root, size, group))


def issue_broadcast(x: Tensor, root: int, size: int, group: str) -> Tensor:
    """As `broadcast`, but only under way."""
    assert 0 <= root < size, f"root {root} of {size} ranks"
    if x.is_complex():
        return torch.view_as_complex(issue_broadcast(_reals(x), root, size, group))
    if simulator is not None:
        return simulator.exchange(f"broadcast root {root}", x, group)
    return torch.ops._c10d_functional.broadcast(x, root, group)


def reduce(x: Tensor, root: int, size: int, group: str) -> Tensor:
    """The sum of x over the group's `size` ranks on rank number `root`; on the others the result
    has the same shape and undefined numbers.
    """
    return wait(issue_reduce(x, root, size, group))


def issue_reduce(x: Tensor, root: int, size: int, group: str) -> Tensor:
    """As `reduce`, but only under way."""
    assert 0 <= root < size, f"root {root} of {size} ranks"
    if x.is_complex():
        return torch.view_as_complex(issue_reduce(_reals(x), root, size, group))
    if simulator is not None:
        return simulator.exchange(f"reduce root {root}", x, group)
    return _reduce(x, root, group)


# torch has no functional reduce. This one is opaque to torch.compile, and waited for like the rest.
@torch.library.custom_op("autopar::reduce", mutates_args=())
def _reduce(x: Tensor, root: int, group: str) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    work = dist.reduce(y, group_dst=root, group=_compat.process_group(group), async_op=True)
    assert work is not None, f"this rank is not in {group}"
    _compat.register_work(y, work)
    return y


@_reduce.register_fake
def _reduce_of_fakes(x: Tensor, root: int, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def total(x: Tensor, axes: Axes, mesh: str, op: Literal["sum", "max"] = "sum") -> Tensor:
    """The sum or maximum over the ranks of `axes` (none: x itself), with NO gradient: for use
    inside autograd functions.
    """
    if not axes:
        return x
    return all_reduce(x, size_of(axes, mesh), group_of(axes, mesh), op)


def route_size(route: Route) -> int:
    """The number of ranks in all."""
    found = 1
    for ranks, _ in route:  # a loop, as dynamo traces no generator in an autograd function
        found *= ranks
    return found


def hierarchical_all_gather(x: Tensor, route: Route) -> Tensor:
    """x (n, ...) of every rank, one after the other: (size·n, ...)."""
    if len(route) == 1:
        return all_gather(x, *route[0])
    for ranks, group in reversed(route):  # across first: there the part of one rank goes
        x = all_gather(x.unsqueeze(0), ranks, group)
    levels = len(route)  # dims (inside, ..., across, n, ...)
    order = [*reversed(range(levels)), *range(levels, x.dim())]
    return x.permute(order).flatten(0, levels)


def hierarchical_reduce_scatter(x: Tensor, route: Route) -> Tensor:
    """Slice number (own rank) of the sum of x (size·n, ...): (n, ...)."""
    if len(route) == 1:
        return reduce_scatter(x, *route[0])
    levels = len(route)
    x = x.unflatten(0, [*[ranks for ranks, _ in reversed(route)], -1])
    x = x.permute([*reversed(range(levels)), *range(levels, x.dim())])
    for ranks, group in route:
        x = reduce_scatter(x, ranks, group).squeeze(0)
    return x


def hierarchical_all_reduce(x: Tensor, route: Route) -> Tensor:
    """The sum of x over all ranks, same shape."""
    if len(route) == 1:
        return all_reduce(x, *route[0])
    *inside, across = route
    part = x.reshape(-1)
    missing = -part.numel() % route_size(tuple(inside))
    part = functional.pad(part, (0, missing)) if missing else part
    for level in inside:
        part = reduce_scatter(part, *level)
    part = all_reduce(part, *across)
    for level in reversed(inside):
        part = all_gather(part, *level)
    return part[: x.numel()].view(x.shape)
