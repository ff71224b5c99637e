"""How an op is called on its shards: the same call with local shapes, or the sharded implementation
where its own dim is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import Digit, Layout
from autopar.ir.sharding_rule import arguments_of, bound, operands_of, shape_of, value_of
from autopar.ops import sharded
from autopar.ops.rules import FILLS, NEW_FILLS, slice_extent

aten = torch.ops.aten


@dataclass
class Call:
    """One node about to be emitted: the original, its operands already in the layouts that its
    strategy wants, and helpers.
    """

    graph: fx.Graph
    node: fx.Node
    operands: Sequence[fx.Node | None]
    operand_layouts: Sequence[Layout | None]
    results: Sequence[Layout]
    coordinate: Callable[[str], fx.Node]  # the rank's own place on an axis
    seed: Callable[[], fx.Node]  # of the node's random numbers: the same on all ranks and in copies
    # the same on the host, for the rank's place on these axes, and which of its draws is the node's
    own_seed: Callable[[tuple[str, ...]], tuple[fx.Node | None, int]] = lambda _: (None, 0)

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def values(self) -> dict[str, Any]:
        """The node's arguments by schema name, tensors replaced by the operands."""
        remaining = iter(self.operands)
        values = bound(self.node)
        for argument in arguments_of(self.node):
            if "Tensor" not in str(argument.type):
                continue
            value = values[argument.name]
            if isinstance(value, list | tuple):
                values[argument.name] = [_filled(item, next(remaining)) for item in value]
            else:
                values[argument.name] = _filled(value, next(remaining))
        return values

    def again(self, values: dict[str, Any], target: Any = None) -> fx.Node:
        """The same op (or another of the same schema) with these arguments."""
        target = target or self.node.target
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in target._schema.arguments:
            if argument.kwarg_only:
                if argument.name in self.node.kwargs:
                    kwargs[argument.name] = values[argument.name]
            else:
                args.append(values[argument.name])
        while args and len(args) > len(self.node.args) and not _given(self.node, len(args) - 1):
            args.pop()
        return self.graph.call_function(target, tuple(args), kwargs)

    def digits(self, layout: Layout, dim: int) -> tuple[list[fx.Node], list[Digit]]:
        """The digits of a dim and the coordinates on their axes, in the same order."""
        found = list(layout.digits(dim % len(layout.shape)))
        return [self.coordinate(digit.axis) for digit in found], found


def _filled(value: Any, operand: fx.Node | None) -> Any:
    """The operand where the original took a tensor; a number in a tensor's place stays."""
    return operand if isinstance(value, fx.Node) else value


def _given(node: fx.Node, position: int) -> bool:
    return arguments_of(node)[position].name in node.kwargs


def emit_local(call: Call) -> fx.Node:
    """Emit the node on its shards; returns the new node."""
    emit = _SPECIAL.get(call.node.target)
    if emit is not None:
        return emit(call)
    return call.again(call.values())


_SPECIAL: dict[Any, Callable[[Call], fx.Node]] = {}


def _for(*targets: Any) -> Callable[[Callable[[Call], fx.Node]], Callable[[Call], fx.Node]]:
    def enter(emit: Callable[[Call], fx.Node]) -> Callable[[Call], fx.Node]:
        for target in targets:
            _SPECIAL[target] = emit
        return emit

    return enter


# -- shapes ----------------------------------------------------------------------------------------
@_for(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.view_as.default,
)
def _reshape(call: Call) -> fx.Node:
    return call.emit(aten.reshape.default, call.operands[0], list(call.results[0].local_shape))


@_for(aten.view_as_complex.default, aten.view.dtype, aten.as_strided.default)
def _from_memory(call: Call) -> fx.Node:
    """Ops that read memory by its strides: a shard, or what a collective made, need not be
    contiguous.
    """
    values = call.values()
    values["self"] = call.emit(aten.contiguous.default, values["self"])
    return call.again(values)


@_for(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def _expand(call: Call) -> fx.Node:
    return call.emit(aten.expand.default, call.operands[0], list(call.results[0].local_shape))


@_for(*FILLS, *NEW_FILLS)
def _fill(call: Call) -> fx.Node:
    values = call.values()
    values["size"] = list(call.results[0].local_shape)
    return call.again(values)


@_for(aten.split.Tensor)
def _split(call: Call) -> fx.Node:
    values = call.values()
    values["split_size"] = _scaled(call, values["dim"], values["split_size"])
    return call.again(values)


@_for(aten.split_with_sizes.default)
def _split_with_sizes(call: Call) -> fx.Node:
    values = call.values()
    values["split_sizes"] = [_scaled(call, values["dim"], size) for size in values["split_sizes"]]
    return call.again(values)


def _scaled(call: Call, dim: int, length: int) -> int:
    """What a rank has of a stretch of the first operand's dim."""
    layout = call.operand_layouts[0]
    assert layout is not None
    return length * layout.local_shape[dim] // layout.shape[dim]


@_for(aten.slice.Tensor)
def _slice(call: Call) -> fx.Node:
    values = call.values()
    if values["step"] == 1:  # else the dim is whole
        start, length = slice_extent(call.node)
        values["start"] = _scaled(call, values["dim"], start)
        values["end"] = _scaled(call, values["dim"], start + length)
    return call.again(values)


@_for(
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
)
def _convolution(call: Call) -> fx.Node:
    values = call.values()
    source, weight = call.operand_layouts[:2]
    assert source is not None and weight is not None
    channels = source.local_shape[-len(weight.shape) + 1]
    values["groups"] = channels // weight.local_shape[1]
    return call.again(values)


# -- sums ------------------------------------------------------------------------------------------
@_for(aten.mean.dim, aten.mean.default)
def _mean(call: Call) -> fx.Node:
    """The local mean divides by the local count: what is missing to the global one is a factor."""
    layout, result = call.operand_layouts[0], call.results[0]
    assert layout is not None
    mean = call.again(call.values())
    local = layout.local_size / result.local_size
    whole = math.prod(layout.shape) / math.prod(result.shape)
    return mean if local == whole else call.emit(aten.mul.Tensor, mean, local / whole)


@_for(
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default,
)
def _elementwise_loss(call: Call) -> fx.Node:
    loss, values = call.again(call.values()), bound(call.node)
    if _REDUCTIONS[values["reduction"]] != "mean":
        return loss
    layouts = [layout for layout in call.operand_layouts if layout is not None]
    split = {axis for layout in layouts for axis in layout.axes_of("S")}
    parts = math.prod(layouts[0].mesh.sizes[axis] for axis in split)
    return loss if parts == 1 else call.emit(aten.mul.Tensor, loss, 1 / parts)


# -- sharded implementations -----------------------------------------------------------------------
def _axes(layout: Layout | None, dim: int) -> tuple[str, ...]:
    assert layout is not None
    return tuple(digit.axis for digit in layout.digits(dim % len(layout.shape)))


@_for(aten.layer_norm.default)
def _layer_norm(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[0], call.values()
    axes = _axes(layout, -1)
    if not axes or layout is None:
        return call.again(values)
    return call.emit(
        sharded.layer_norm,
        values["input"],
        values["weight"],
        values["bias"],
        values["eps"],
        layout.shape[-1],
        axes,
        str(layout.mesh),
    )


@_for(aten.rms_norm.default)
def _rms_norm(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[0], call.values()
    axes = _axes(layout, -1)
    if not axes or layout is None:
        return call.again(values)
    return call.emit(
        sharded.rms_norm,
        values["input"],
        values["weight"],
        values["eps"],
        layout.shape[-1],
        axes,
        str(layout.mesh),
    )


@_for(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default)
def _softmax(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[0], call.values()
    axes = _axes(layout, values["dim"])
    if not axes or layout is None:
        return call.again(values)
    log = call.node.target in (aten.log_softmax.int, aten._log_softmax.default)
    source = next(iter(values.values()))
    dtype = torch.float32 if values.get("half_to_float") else values.get("dtype")
    if dtype is not None:
        source = call.emit(aten._to_copy.default, source, dtype=dtype)
    function = sharded.log_softmax if log else sharded.softmax
    return call.emit(function, source, values["dim"], axes, str(layout.mesh))


@_for(aten.embedding.default)
def _embedding(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[0], call.values()
    assert layout is not None
    coordinates, digits = call.digits(layout, 0)
    if not digits:
        return call.again(values)
    padding = values["padding_idx"]
    return call.emit(
        sharded.embedding,
        values["weight"],
        values["indices"],
        coordinates,
        [tuple(d) for d in digits],
        padding if padding is not None and padding >= 0 else None,
    )


_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@_for(aten.cross_entropy_loss.default)
def _cross_entropy(call: Call) -> fx.Node:
    layout, target_layout, values = call.operand_layouts[0], call.operand_layouts[1], call.values()
    assert layout is not None and target_layout is not None
    class_dim = 1 if len(layout.shape) > 1 else 0
    coordinates, digits = call.digits(layout, class_dim)
    tokens = tuple(axis for axis in layout.axes_of("S") if axis not in {d.axis for d in digits})
    if not digits and not tokens:
        return call.again(values)
    return call.emit(
        sharded.cross_entropy,
        values["self"],
        values["target"],
        values["weight"],
        _REDUCTIONS[values["reduction"]],
        values["ignore_index"],
        values["label_smoothing"],
        layout.shape[class_dim],
        coordinates,
        [tuple(d) for d in digits],
        tokens,
        str(layout.mesh),
    )


# -- random numbers --------------------------------------------------------------------------------
def _all_digits(
    call: Call, layout: Layout, dims: int
) -> tuple[list[fx.Node], list[list[tuple[str, int, int]]]]:
    coordinates: list[fx.Node] = []
    by_dim: list[list[tuple[str, int, int]]] = []
    for dim in range(dims):
        places, digits = call.digits(layout, dim)
        coordinates.extend(places)
        by_dim.append([(d.axis, d.stride, d.size) for d in digits])
    return coordinates, by_dim


@_for(aten.dropout.default)
def _dropout(call: Call) -> fx.Node:
    values, layout = call.values(), call.results[0]
    if not values["train"] or values["p"] == 0:
        return call.emit(aten.alias.default, call.operands[0])
    coordinates, digits = _all_digits(call, layout, len(layout.shape))
    return call.emit(
        sharded.dropout,
        call.operands[0],
        values["p"],
        call.seed(),
        coordinates,
        digits,
        list(layout.shape),
    )


@_for(aten.scaled_dot_product_attention.default)
def _attention(call: Call) -> fx.Node:
    """The fused kernel; with dropout `sharded.attention`, which may have one where batch and heads
    alone are split.
    """
    values, layout = call.values(), call.results[0]
    if not values["dropout_p"]:
        return call.again(values)
    _, key, *_ = operands_of(call.node)
    assert key is not None
    coordinates, digits = _all_digits(call, layout, len(layout.shape) - 1)
    axes = tuple(sorted({axis for dim in digits for axis, *_ in dim}))
    own = (None, 0) if digits[-1] else call.own_seed(axes)
    return call.emit(
        sharded.attention,
        values["query"],
        values["key"],
        values["value"],
        values["attn_mask"],
        values["dropout_p"],
        values["is_causal"],
        values["scale"],
        call.seed(),
        coordinates,
        [*digits, []],
        [*layout.shape[:-1], shape_of(value_of(key))[-2]],
        *own,
    )
