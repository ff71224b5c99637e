"""The communication primitives: all-gather, reduce-scatter, all-reduce, all-to-all, broadcast and
reduce on local tensors, and the process groups that take part in them.

Example: `all_gather(x, 4, group)` takes x (n, ...) of each of 4 ranks and returns (4·n, ...). The
first four work on the leading dim; SUMMA (autopar.ops.sharded.summa) uses the two with a root.
Nothing here has a gradient: autograd.py and the sharded ops call these functions inside autograd
functions. They are torch's functional collectives, which graphs show as `_c10d_functional` nodes,
unless `simulator` is set: `autopar.runtime.lockstep` sets it to run all ranks in one process.

A hierarchical collective reduce-scatters inside, runs the collective across on what is left, and
gathers inside; cost/algorithms.py says when that is faster. A `Route` has the (ranks, group) of
every level, innermost first. A rank's place in the full group is (..., place across, place inside),
row-major. Sums are added in another order than in a flat collective, so they differ by rounding.
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
from autopar.ops import process_groups

Axes = str | Sequence[str]
Hierarchy = int | Sequence[int]  # ranks of the inner levels, innermost first; () is flat
Route = tuple[tuple[int, str], ...]  # (ranks, group) of every level, the innermost first


class Simulator(Protocol):
    """An object that exchanges tensors in place of torch.distributed when all ranks run in one
    process.
    """

    def exchange(self, kind: str, x: Tensor, group: str) -> Tensor: ...

    def send(self, to: int, x: Tensor) -> None: ...

    def receive(self, number: int, source: int) -> Tensor: ...


simulator: Simulator | None = None
_compat.safe_gathers()  # before the first communication

# Sizes and groups depend on strings alone, so dynamo takes them as constants and traces no parser.


@_compat.constant_result
def size_of(axis: Axes, mesh: str) -> int:
    """Return the number of ranks that a collective over `axis` joins."""
    return _participants(axis if isinstance(axis, str) else tuple(axis), mesh)[0]


@_compat.constant_result
def sizes_of(axis: Axes, mesh: str) -> tuple[int, ...]:
    """Return the number of ranks on each of these axes, in mesh order."""
    parsed = Mesh.parse(mesh)
    return tuple(parsed.sizes[name] for name in parsed.ordered(axis))


@_compat.constant_result
def group_of(axis: Axes, mesh: str) -> str:
    """Return the name of the process group over `axis`."""
    return _participants(axis if isinstance(axis, str) else tuple(axis), mesh)[1]


@_compat.constant_result
def route(axis: Axes, mesh: str, inside: Hierarchy = ()) -> Route:
    """Return the (ranks, group) of every level that a collective over `axis` goes through,
    innermost first; a flat collective has one.

    >>> route("data", "data8.x2", inside=2)
    ((2, 'autopar/data8.x2/data/2@1'), (4, 'autopar/data8.x2/data/4@2'))
    """
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    return _route(names, mesh, (inside,) if isinstance(inside, int) else tuple(inside))


@cache
def _route(axis: tuple[str, ...], mesh: str, inside: tuple[int, ...]) -> Route:
    parsed = Mesh.parse(mesh)
    axes = parsed.ordered(axis)
    ranks = math.prod(parsed.sizes[name] for name in axes)
    if not inside:
        return ((ranks, group_name(mesh, axes)),)
    inner_ranks = math.prod(inside)
    assert ranks % inner_ranks == 0 and ranks > inner_ranks, (
        f"{inside} inside of {ranks} ranks of {mesh}"
    )
    levels, stride = [], 1
    for size in (*inside, ranks // inner_ranks):
        levels.append((size, group_name(mesh, axes, Within(size, stride))))
        stride *= size
    return tuple(levels)


@cache
def _participants(axis: str | tuple[str, ...], mesh: str) -> tuple[int, str]:
    parsed = Mesh.parse(mesh)
    axes = parsed.ordered(axis)
    return math.prod(parsed.sizes[name] for name in axes), group_name(mesh, axes)


@_compat.constant_result
def _reduce_scatter_is_slow(group: str, device_type: str) -> bool:
    """Whether a reduce-scatter on this backend is slower than an all-to-all with a local sum.

    On gloo it is: reduce-scatter clones, sums and slices there, and takes the bytes and the time of
    a full all-reduce, twice those of an all-to-all and a local sum (measured on 2 and 4 ranks, 16
    KB to 16 MB).
    """
    return _compat.backend_name(group, device_type) == "gloo"


def _wait(x: Tensor, kind: str, group: str = "") -> Tensor:
    """Return x once it has arrived. Where it does not arrive, the error names the ranks that are
    gone.
    """
    if torch.compiler.is_compiling():
        return torch.ops._c10d_functional.wait_tensor(x)
    try:
        return torch.ops._c10d_functional.wait_tensor(x)
    except RuntimeError as error:
        over = f" over {axes_of_group(group)}" if group.startswith("autopar/") else ""
        process_groups.explain(error, f"{kind}{over}")


def _as_reals(x: Tensor) -> Tensor:
    """Return complex x (...) as real (..., 2): backends support no complex numbers."""
    return torch.view_as_real(x.resolve_conj())


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Return the x (n, ...) of every rank, one after the other: (size·n, ...)."""
    if x.is_complex():
        return torch.view_as_complex(all_gather(_as_reals(x), size, group))
    if x.dtype == torch.bool:  # gloo knows no bool
        return all_gather(x.view(torch.uint8), size, group).view(torch.bool)
    if simulator is not None:
        return simulator.exchange("all-gather", x, group)
    pending = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group)
    return _wait(pending, "all-gather", group)


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Return slice number (own rank) of the sum of x (size·n, ...): (n, ...)."""
    if x.is_complex():
        return torch.view_as_complex(reduce_scatter(_as_reals(x), size, group))
    if simulator is not None:
        return simulator.exchange("reduce-scatter", x, group)
    if _reduce_scatter_is_slow(group, x.device.type):
        return all_to_all(x.unflatten(0, (size, -1)), group).sum(0, dtype=x.dtype)
    pending = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    return _wait(pending, "reduce-scatter", group)


def all_reduce(x: Tensor, size: int, group: str, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Return the sum or maximum of x over the group's `size` ranks, same shape."""
    if x.is_complex():
        return torch.view_as_complex(all_reduce(_as_reals(x), size, group, op))
    if simulator is not None:
        return simulator.exchange(f"all-reduce {op}", x, group)
    pending = torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group)
    return _wait(pending, "all-reduce", group)


def all_to_all(x: Tensor, group: str) -> Tensor:
    """Return x (size, ...) exchanged: slice j goes to rank j of the group, slice i of the result
    comes from rank i.
    """
    if x.is_complex():
        return torch.view_as_complex(all_to_all(_as_reals(x), group))
    if x.dtype == torch.bool:
        return all_to_all(x.view(torch.uint8), group).view(torch.bool)
    if simulator is not None:
        return simulator.exchange("all-to-all", x, group)
    splits = [1] * x.shape[0]
    pending = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), splits, splits, group)
    return _wait(pending, "all-to-all", group)


# A coalesced collective is one operation for many tensors (40 sums of 2 KB on gloo over a slow link
# take 3.8 ms in place of 109 ms one after the other). Gathers go side by side in one tensor, not in
# torch's coalesced form: see `_compat.safe_gathers`.


def all_reduce_coalesced(xs: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
    """Return the sums of several tensors of one dtype over the group's `size` ranks, as one
    operation.
    """
    if xs and xs[0].is_complex():
        sums = all_reduce_coalesced([_as_reals(x) for x in xs], size, group)
        return [torch.view_as_complex(x) for x in sums]
    if simulator is not None:
        return [all_reduce(x, size, group) for x in xs]
    pending = torch.ops._c10d_functional.all_reduce_coalesced(
        [x.contiguous() for x in xs], "sum", group
    )
    return [_wait(x, "all-reduce", group) for x in pending]


# A root is a rank's place within the group. Each issued collective must be waited for, and all
# ranks must issue the same ones in the same order.


def wait(x: Tensor) -> Tensor:
    """Return x, which `issue_broadcast` or `issue_reduce` returned, once it has arrived."""
    return x if simulator is not None else _wait(x, "broadcast or reduce")


def broadcast(x: Tensor, root: int, size: int, group: str) -> Tensor:
    """Return the x of rank number `root` of the group's `size` ranks, which all have the same
    shape.
    """
    return wait(issue_broadcast(x, root, size, group))


def issue_broadcast(x: Tensor, root: int, size: int, group: str) -> Tensor:
    """Start a `broadcast` and return its result, which must be passed to `wait`."""
    assert 0 <= root < size, f"root {root} of {size} ranks"
    if x.is_complex():
        return torch.view_as_complex(issue_broadcast(_as_reals(x), root, size, group))
    if simulator is not None:
        return simulator.exchange(f"broadcast root {root}", x, group)
    return torch.ops._c10d_functional.broadcast(x, root, group)


def reduce(x: Tensor, root: int, size: int, group: str) -> Tensor:
    """Return the sum of x over the group's `size` ranks on rank number `root`; on the others the
    result has the same shape and undefined numbers.
    """
    return wait(issue_reduce(x, root, size, group))


def issue_reduce(x: Tensor, root: int, size: int, group: str) -> Tensor:
    """Start a `reduce` and return its result, which must be passed to `wait`."""
    assert 0 <= root < size, f"root {root} of {size} ranks"
    if x.is_complex():
        return torch.view_as_complex(issue_reduce(_as_reals(x), root, size, group))
    if simulator is not None:
        return simulator.exchange(f"reduce root {root}", x, group)
    return _reduce(x, root, group)


# torch has no functional reduce. This one is opaque to torch.compile; it is waited for like others.
@torch.library.custom_op("autopar::reduce", mutates_args=())
def _reduce(x: Tensor, root: int, group: str) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    work = dist.reduce(y, group_dst=root, group=_compat.process_group(group), async_op=True)
    assert work is not None, f"this rank is not in {group}"
    _compat.register_work(y, work)
    return y


@_reduce.register_fake
def _reduce_fake(x: Tensor, root: int, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def total(x: Tensor, axes: Axes, mesh: str, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Return the sum or maximum over the ranks of `axes` (x itself where there are none), with NO
    gradient: for use inside autograd functions.
    """
    if not axes:
        return x
    return all_reduce(x, size_of(axes, mesh), group_of(axes, mesh), op)


def route_size(route: Route) -> int:
    """Return the number of ranks that a route joins, over all levels."""
    size = 1
    for ranks, _ in route:  # a loop, as dynamo traces no generator in an autograd function
        size *= ranks
    return size


def hierarchical_all_gather(x: Tensor, route: Route) -> Tensor:
    """Return the x (n, ...) of every rank, one after the other, (size·n, ...), level by level."""
    if len(route) == 1:
        return all_gather(x, *route[0])
    for ranks, group in reversed(route):  # across first, where only one rank's part is sent
        x = all_gather(x.unsqueeze(0), ranks, group)
    levels = len(route)  # dims (inside, ..., across, n, ...)
    order = [*reversed(range(levels)), *range(levels, x.dim())]
    return x.permute(order).flatten(0, levels)


def hierarchical_reduce_scatter(x: Tensor, route: Route) -> Tensor:
    """Return slice number (own rank) of the sum of x (size·n, ...), (n, ...), level by level."""
    if len(route) == 1:
        return reduce_scatter(x, *route[0])
    levels = len(route)
    x = x.unflatten(0, [*[ranks for ranks, _ in reversed(route)], -1])
    x = x.permute([*reversed(range(levels)), *range(levels, x.dim())])
    for ranks, group in route:
        x = reduce_scatter(x, ranks, group).squeeze(0)
    return x


def hierarchical_all_reduce(x: Tensor, route: Route) -> Tensor:
    """Return the sum of x over all ranks, same shape, level by level."""
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
