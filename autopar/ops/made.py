"""Rules of tensors that are made from nothing."""

from __future__ import annotations

from torch import fx

from autopar.ir.sharding_rule import Spec, shape_of, value_of
from autopar.ops.common import aten, named, spec, unsplit

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
