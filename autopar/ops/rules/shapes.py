"""Rules of views: the same entries in another shape or order.

Rules of tensors that are made from nothing.
"""

from __future__ import annotations

from torch import fx

from autopar.ir.sharding_rule import Spec, bound, operands_of, shape_of, value_of, view_factors
from autopar.ops.rules.pointwise import pointwise
from autopar.ops.rules.registry import aten, named, operand_shape, spec, unsplit


@spec(
    (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.unsqueeze.default,
        aten.view_as.default,
    )
)
def view(node: fx.Node) -> Spec:
    source = operands_of(node)[0]
    assert source is not None
    if 0 in operand_shape(source):
        return unsplit(node, found="rule")
    sizes, left, right, whole = view_factors(operand_shape(source), shape_of(value_of(node)))
    rest = (None,) * (len(operands_of(node)) - 1)
    return Spec((left, *rest), (right,), sizes, whole=whole, linear=(frozenset({0}),))


@spec((aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default))
def permutation(node: fx.Node) -> Spec:
    source = operands_of(node)[0]
    assert source is not None
    shape = operand_shape(source)
    sizes: dict[str, int] = {}
    dims = named(shape, sizes)
    values = bound(node)
    order = list(range(len(shape)))
    if node.target is aten.permute.default:
        order = [d % len(shape) for d in values["dims"]]
    elif node.target is aten.transpose.int:
        a, b = values["dim0"] % len(shape), values["dim1"] % len(shape)
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return Spec((tuple(dims),), (tuple(dims[d] for d in order),), sizes, linear=(frozenset({0}),))


@spec((aten.expand.default, aten.expand_as.default, aten.broadcast_to.default))
def expand(node: fx.Node) -> Spec:
    made = pointwise(node)
    rest = (None,) * (len(made.operands) - 1)
    return Spec((made.operands[0], *rest), made.results, made.sizes, linear=(frozenset({0}),))


FILLS = (aten.full.default, aten.zeros.default, aten.ones.default)


MADE = (
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.scalar_tensor.default,
    aten.eye.default,
    aten.empty.memory_format,
)


NEW_FILLS = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)


@spec(FILLS)
def fill(node: fx.Node) -> Spec:
    sizes: dict[str, int] = {}
    return Spec((), (tuple(named(shape_of(value_of(node)), sizes)),), sizes)


@spec(MADE)
def made_whole(node: fx.Node) -> Spec:
    """Small tensors that come from nothing: made whole, then sliced."""
    return unsplit(node, found="rule")


@spec(NEW_FILLS)
def new_fill(node: fx.Node) -> Spec:
    made = unsplit(node)
    sizes = dict(made.sizes)
    result = tuple(named(shape_of(value_of(node)), sizes))
    return Spec(made.operands, (result,), sizes, whole=made.whole)
