"""The call that an op becomes on a rank's shards: the same op with local shapes, or a sharded
implementation where the dim that the op reduces is split.

Examples: a view of (8, 6) to (48,) with eight rows on four ranks becomes a reshape to (12,); a
layer norm over a split last dim becomes `sharded.layer_norm`. passes/rewrite.py calls `emit_local`
for each node, and cost/activations.py for the shapes that a rank saves. An op without an entry here
is called on its shards as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.band import Band
from autopar.ir.layout import Digit, Layout
from autopar.ir.sharding_rule import arguments_of, bound, operands_of, shape_of, value_of
from autopar.ops import sharded
from autopar.ops.experts import expert_layer, experts_op
from autopar.ops.rules.losses import ENTRYWISE_LOSSES, ROW_LOSSES
from autopar.ops.rules.reductions import bag_length, reduced_dims
from autopar.ops.rules.shapes import DRAWS, FILLS, NEW_FILLS, slice_extent
from autopar.ops.sharded.masked_attention import BLOCK_MASK, MASKED_ATTENTION

aten = torch.ops.aten

# In the meta of a softmax or a cross entropy whose dim is padded: the size of that dim without its
# padding, which must not count (passes/pad.py). In that of a mean over padded rows: of how many
# numbers each mean is.
UNPADDED = "unpadded"


@dataclass
class Call:
    """A node about to be emitted, its operands already in the layouts of its strategy, and
    helpers.
    """

    graph: fx.Graph
    node: fx.Node
    operands: Sequence[fx.Node | None]
    operand_layouts: Sequence[Layout | None]
    results: Sequence[Layout]
    coordinate: Callable[[str], fx.Node]  # the rank's own coordinate on an axis
    seed: Callable[[], fx.Node]  # for random numbers: the same on all ranks and copies
    # a host seed that depends on the rank's coordinates on these axes, and the number of this draw
    own_seed: Callable[[tuple[str, ...]], tuple[fx.Node | None, int]] = lambda _: (None, 0)

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call to the graph."""
        return self.graph.call_function(target, args, kwargs)

    def values(self) -> dict[str, Any]:
        """Return the node's arguments by schema name, with tensors replaced by the operands."""
        remaining = iter(self.operands)
        values = bound(self.node)
        for argument in arguments_of(self.node):
            if "Tensor" not in str(argument.type):
                continue
            value = values[argument.name]
            if isinstance(value, list | tuple):
                values[argument.name] = [_operand_or(item, next(remaining)) for item in value]
            else:
                values[argument.name] = _operand_or(value, next(remaining))
        return values

    def again(self, values: dict[str, Any], target: Any = None) -> fx.Node:
        """Append the same op, or another of the same schema, with these arguments."""
        target = target or self.node.target
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in target._schema.arguments:
            if argument.kwarg_only:
                if argument.name in self.node.kwargs:
                    kwargs[argument.name] = values[argument.name]
            else:
                args.append(values[argument.name])
        while args and len(args) > len(self.node.args) and not _by_name(self.node, len(args) - 1):
            args.pop()
        return self.graph.call_function(target, tuple(args), kwargs)

    def digits(self, layout: Layout, dim: int) -> tuple[list[fx.Node], list[Digit]]:
        """Return the coordinates on the axes that split a dim, and its digits, in the same
        order.
        """
        dim_digits = list(layout.digits(dim % len(layout.shape)))
        return [self.coordinate(digit.axis) for digit in dim_digits], dim_digits


def _operand_or(value: Any, operand: fx.Node | None) -> Any:
    """Return the operand where the original took a tensor; a number in a tensor's place stays."""
    return operand if isinstance(value, fx.Node) else value


def _by_name(node: fx.Node, position: int) -> bool:
    """Whether the node passes the argument at this position by keyword."""
    return arguments_of(node)[position].name in node.kwargs


def emit_local(call: Call) -> fx.Node:
    """Append the node's call on its shards to the graph and return the new node."""
    emit = _SPECIAL.get(call.node.target)
    if emit is not None:
        return emit(call)
    return call.again(call.values())


_SPECIAL: dict[Any, Callable[[Call], fx.Node]] = {}


def _emits(*targets: Any) -> Callable[[Callable[[Call], fx.Node]], Callable[[Call], fx.Node]]:
    """Return a decorator that enters a function as the emitter of these ops."""

    def enter(emit: Callable[[Call], fx.Node]) -> Callable[[Call], fx.Node]:
        for target in targets:
            _SPECIAL[target] = emit
        return emit

    return enter


# -- shapes ----------------------------------------------------------------------------------------
@_emits(
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


@_emits(aten.view_as_complex.default, aten.view.dtype, aten.as_strided.default)
def _contiguous_first(call: Call) -> fx.Node:
    """Emit an op that reads memory by its strides on a contiguous copy: shards need not be
    contiguous.
    """
    values = call.values()
    values["self"] = call.emit(aten.contiguous.default, values["self"])
    return call.again(values)


@_emits(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def _expand(call: Call) -> fx.Node:
    return call.emit(aten.expand.default, call.operands[0], list(call.results[0].local_shape))


@_emits(*FILLS, *NEW_FILLS)
def _fill(call: Call) -> fx.Node:
    values = call.values()
    values["size"] = list(call.results[0].local_shape)
    return call.again(values)


@_emits(aten.repeat.default, aten.tile.default)
def _repeat(call: Call) -> fx.Node:
    layout, result = call.operand_layouts[0], call.results[0]
    assert layout is not None
    own = (1,) * (len(result.shape) - len(layout.shape)) + layout.local_shape
    repeats = [size // length for size, length in zip(result.local_shape, own, strict=True)]
    return call.emit(aten.repeat.default, call.operands[0], repeats)


@_emits(aten.repeat_interleave.self_int)
def _repeat_interleave(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[0], call.values()
    assert layout is not None
    repeats = call.results[0].local_size // max(1, layout.local_size)
    return call.emit(aten.repeat_interleave.self_int, call.operands[0], repeats, values["dim"])


@_emits(aten.affine_grid_generator.default)
def _affine_grid(call: Call) -> fx.Node:
    values = call.values()
    values["size"] = [call.results[0].local_shape[0], *values["size"][1:]]
    return call.again(values)


@_emits(aten.split.Tensor, aten.unsafe_split.Tensor)
def _split(call: Call) -> fx.Node:
    values = call.values()
    values["split_size"] = _local_length(call, values["dim"], values["split_size"])
    return call.again(values)


@_emits(aten.split_with_sizes.default)
def _split_with_sizes(call: Call) -> fx.Node:
    values = call.values()
    values["split_sizes"] = [
        _local_length(call, values["dim"], size) for size in values["split_sizes"]
    ]
    return call.again(values)


def _local_length(call: Call, dim: int, length: int) -> int:
    """Return the local length of a stretch of the first operand's dim."""
    layout = call.operand_layouts[0]
    assert layout is not None
    return length * layout.local_shape[dim] // layout.shape[dim]


@_emits(aten.slice.Tensor)
def _slice(call: Call) -> fx.Node:
    values = call.values()
    if values["step"] == 1:  # with another step the dim is unsharded
        start, length = slice_extent(call.node)
        values["start"] = _local_length(call, values["dim"], start)
        values["end"] = _local_length(call, values["dim"], start + length)
    return call.again(values)


@_emits(
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


@_emits(
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)
def _transposed_convolution(call: Call) -> fx.Node:
    values = call.values()
    weight, result = call.operand_layouts[1], call.results[0]
    assert weight is not None
    channels = result.local_shape[-len(weight.shape) + 1]
    values["groups"] = channels // weight.local_shape[1]
    return call.again(values)


@_emits(aten.group_norm.default)
def _group_norm(call: Call) -> fx.Node:
    values, layout = call.values(), call.operand_layouts[0]
    assert layout is not None
    if values["num_groups"] == 1:
        return _normalised_from(call, 1)
    values["num_groups"] = values["num_groups"] * layout.local_shape[1] // layout.shape[1]
    return call.again(values)


@_emits(aten.instance_norm.default)
def _instance_norm(call: Call) -> fx.Node:
    return _normalised_from(call, 2)


def _normalised_from(call: Call, first: int) -> fx.Node:
    """Emit the norm over all dims from this one on."""
    layout, values = call.operand_layouts[0], call.values()
    assert layout is not None
    axes = tuple(a for dim in range(first, len(layout.shape)) for a in _axes_of_dim(layout, dim))
    if not axes:
        return call.again(values)
    return call.emit(
        sharded.group_norm,
        values["input"],
        values["weight"],
        values["bias"],
        first,
        values["eps"],
        math.prod(layout.shape[first:]),
        axes,
        str(layout.mesh),
    )


# -- sums ------------------------------------------------------------------------------------------
@_emits(aten.mean.dim, aten.mean.default)
def _mean(call: Call) -> fx.Node:
    """Emit the local mean times local count / global count: a partial value of the mean. Padding
    does not count.
    """
    layout, result = call.operand_layouts[0], call.results[0]
    assert layout is not None
    mean = call.again(call.values())
    local_count = layout.local_size / result.local_size
    count = math.prod(layout.shape) / math.prod(result.shape)
    count = call.node.meta.get(UNPADDED, count)
    return mean if local_count == count else call.emit(aten.mul.Tensor, mean, local_count / count)


@_emits(*ENTRYWISE_LOSSES, *ROW_LOSSES)
def _mean_of_losses(call: Call) -> fx.Node:
    """Emit the local loss; a mean is divided by the number of shards, to add up to the mean."""
    loss, values = call.again(call.values()), bound(call.node)
    if _REDUCTIONS[values["reduction"]] != "mean":
        return loss
    layouts = [layout for layout in call.operand_layouts if layout is not None]
    split_axes = {axis for layout in layouts for axis in layout.axes_of("S")}
    shards = math.prod(layouts[0].mesh.sizes[axis] for axis in split_axes)
    return loss if shards == 1 else call.emit(aten.mul.Tensor, loss, 1 / shards)


# -- sharded implementations -----------------------------------------------------------------------
def _axes_of_dim(layout: Layout | None, dim: int) -> tuple[str, ...]:
    """Return the axes that split a dim."""
    assert layout is not None
    return tuple(digit.axis for digit in layout.digits(dim % len(layout.shape)))


@_emits(aten.layer_norm.default)
def _layer_norm(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[0], call.values()
    axes = _axes_of_dim(layout, -1)
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


@_emits(aten.rms_norm.default)
def _rms_norm(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[0], call.values()
    axes = _axes_of_dim(layout, -1)
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


@_emits(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats)
def _batch_norm(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[0], call.values()
    assert layout is not None
    dims = [dim for dim in range(len(layout.shape)) if dim != 1]
    axes = tuple(axis for dim in dims for axis in _axes_of_dim(layout, dim))
    if not axes:
        return call.again(values)
    running = "running_mean" in values
    return call.emit(
        sharded.batch_norm,
        values["input"],
        values["weight"],
        values["bias"],
        (values["running_mean"], values["running_var"]) if running else None,
        values["momentum"],
        values["eps"],
        math.prod(layout.shape[dim] for dim in dims),
        axes,
        str(layout.mesh),
    )


@_emits(aten.linalg_vector_norm.default)
def _vector_norm(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[0], call.values()
    assert layout is not None
    dims = sorted(reduced_dims(call.node))
    axes = tuple(axis for dim in dims for axis in _axes_of_dim(layout, dim))
    if not axes:
        return call.again(values)
    source, dtype = values["self"], values["dtype"]
    if dtype is not None:
        source = call.emit(aten._to_copy.default, source, dtype=dtype)
    return call.emit(
        sharded.vector_norm,
        source,
        float(values["ord"]),
        dims,
        values["keepdim"],
        axes,
        str(layout.mesh),
    )


@_emits(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default)
def _softmax(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[0], call.values()
    assert layout is not None
    axes = _axes_of_dim(layout, values["dim"])
    if (size := call.node.meta.get(UNPADDED)) is not None:
        coordinates, digits = call.digits(layout, values["dim"])
        name = next(iter(values))
        where = [values["dim"], size, coordinates, [tuple(d) for d in digits]]
        values[name] = call.emit(sharded.mask_padding, values[name], *where)
    if not axes:
        return call.again(values)
    log = call.node.target in (aten.log_softmax.int, aten._log_softmax.default)
    source = next(iter(values.values()))
    dtype = torch.float32 if values.get("half_to_float") else values.get("dtype")
    if dtype is not None:
        source = call.emit(aten._to_copy.default, source, dtype=dtype)
    function = sharded.log_softmax if log else sharded.softmax
    return call.emit(function, source, values["dim"], axes, str(layout.mesh))


@_emits(aten.embedding.default)
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


@_emits(experts_op)
def _experts(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[3], call.values()
    assert layout is not None
    coordinates, digits = call.digits(layout, 0)
    if not digits:
        return call.emit(expert_layer, *values.values())
    return call.emit(sharded.experts, *values.values(), coordinates, [tuple(d) for d in digits])


@_emits(aten.embedding_bag.padding_idx)
def _embedding_bag(call: Call) -> fx.Node:
    """Emit the bags of a rank, whose offsets begin at 0 as those of all bags do."""
    layout, values = call.operand_layouts[1], call.values()
    assert layout is not None
    if layout.axes_of("S"):
        length = bag_length(call.node)
        offsets = bound(call.node)["offsets"].meta["val"]
        values["offsets"] = call.emit(
            aten.arange.start_step,
            0,
            layout.local_size,
            length,
            dtype=offsets.dtype,
            device=offsets.device,
        )
    return call.again(values)


_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@_emits(aten.cross_entropy_loss.default)
def _cross_entropy(call: Call) -> fx.Node:
    layout, values, target = call.operand_layouts[0], call.values(), operands_of(call.node)[1]
    assert layout is not None and target is not None
    if value_of(target).is_floating_point():
        return _mean_of_losses(call)
    class_dim = 1 if len(layout.shape) > 1 else 0
    coordinates, digits = call.digits(layout, class_dim)
    tokens = tuple(axis for axis in layout.axes_of("S") if axis not in {d.axis for d in digits})
    classes = call.node.meta.get(UNPADDED, layout.shape[class_dim])
    if not digits and classes < layout.shape[class_dim]:
        for name, dim in (("self", class_dim), ("weight", 0)):
            if values[name] is not None:
                values[name] = call.emit(aten.slice.Tensor, values[name], dim, 0, classes)
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
        classes,
        coordinates,
        [tuple(d) for d in digits],
        tokens,
        str(layout.mesh),
    )


@_emits(aten.nll_loss_nd.default)
def _negative_log_likelihood(call: Call) -> fx.Node:
    layout, values = call.operand_layouts[0], call.values()
    assert layout is not None
    tokens = layout.axes_of("S")
    if not tokens:
        return call.again(values)
    return call.emit(
        sharded.nll_loss,
        values["self"],
        values["target"],
        values["weight"],
        _REDUCTIONS[values["reduction"]],
        values["ignore_index"],
        tokens,
        str(layout.mesh),
    )


# -- random numbers --------------------------------------------------------------------------------
def _all_digits(
    call: Call, layout: Layout, dims: int
) -> tuple[list[fx.Node], list[list[tuple[str, int, int]]]]:
    """Return the coordinates, and the digits of each of the first `dims` dims, for
    `sharded.dropout`.
    """
    coordinates: list[fx.Node] = []
    by_dim: list[list[tuple[str, int, int]]] = []
    for dim in range(dims):
        places, digits = call.digits(layout, dim)
        coordinates.extend(places)
        by_dim.append([(d.axis, d.stride, d.size) for d in digits])
    return coordinates, by_dim


@_emits(aten.dropout.default)
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


_KINDS: dict[Any, str] = {
    aten.rand.default: "uniform",
    aten.randn.default: "normal",
    aten.randint.low: "integers",
}


@_emits(*DRAWS)
def _draw(call: Call) -> fx.Node:
    """Emit the numbers of the rank's shard, on its device."""
    values, layout = call.values(), call.results[0]
    coordinates, digits = _all_digits(call, layout, len(layout.shape))
    return call.emit(
        sharded.draw,
        _KINDS[call.node.target],
        [values.get("low", 0), values.get("high", 1)],
        list(layout.local_shape),
        values["dtype"] or value_of(call.node).dtype,
        call.seed(),
        coordinates,
        digits,
        list(layout.shape),
    )


@_emits(aten.scaled_dot_product_attention.default)
def _attention(call: Call) -> fx.Node:
    """Emit torch's fused op, or `sharded.attention` where it has dropout; that may use a fused
    kernel too where only batch and heads are split. Where the queries of a causal one are split,
    the mask follows from the rank's coordinates.
    """
    values, layout = call.values(), call.results[0]
    _, key, *_ = operands_of(call.node)
    assert key is not None
    keys = shape_of(value_of(key))[-2]
    split = _axes_of_dim(layout, -2)
    if not values["dropout_p"]:
        if not (split and values["is_causal"]):
            return call.again(values)
        return _in_blocks(call, values, [], [], "", Band(after=0))
    coordinates, digits = _all_digits(call, layout, len(layout.shape) - 1)
    axes = tuple(sorted({axis for dim in digits for axis, *_ in dim}))
    own_seed_and_draw = (None, 0) if digits[-1] else call.own_seed(axes)
    mask, causal = values["attn_mask"], values["is_causal"]
    if causal and split:
        device = value_of(call.node).device
        mask = _mask_of(call, layout, [], [], "", Band(after=0), keys, device)
    return call.emit(
        sharded.attention,
        values["query"],
        values["key"],
        values["value"],
        mask,
        values["dropout_p"],
        causal and not split,
        values["scale"],
        call.seed(),
        coordinates,
        [*digits, []],
        [*layout.shape[:-1], keys],
        *own_seed_and_draw,
    )


@_emits(MASKED_ATTENTION)
def _masked_attention(call: Call) -> fx.Node:
    values = call.values()
    band = Band(values["before"], values["after"])
    return _in_blocks(call, values, values["queries"], values["keys"], values["compare"], band)


def _in_blocks(
    call: Call, values: dict[str, Any], queries: Any, keys: Any, compare: str, band: Band
) -> fx.Node:
    """Emit attention under a described mask, for the queries that the rank has."""
    operands = (values["query"], values["key"], values["value"], list(queries), list(keys))
    options = (compare, *band, values["scale"], *_query_digits(call, call.results[0]))
    return call.emit(MASKED_ATTENTION, *operands, *options)


@_emits(BLOCK_MASK)
def _block_mask(call: Call) -> fx.Node:
    values, layout = call.values(), call.results[0]
    vectors = (values["queries"], values["keys"], values["compare"])
    band = Band(values["before"], values["after"])
    return _mask_of(call, layout, *vectors, band, layout.shape[-1], values["device"])


def _mask_of(
    call: Call,
    layout: Layout,
    queries: Any,
    keys: Any,
    compare: str,
    band: Band,
    columns: int,
    device: torch.device,
) -> fx.Node:
    """Emit the rank's own block of a described mask, for the queries of this layout."""
    size = (layout.local_shape[-2], columns, device)
    vectors = (list(queries), list(keys), compare)
    return call.emit(BLOCK_MASK, *vectors, *band, *size, *_query_digits(call, layout))


def _query_digits(call: Call, layout: Layout) -> tuple[list[fx.Node], list[int]]:
    """Return the coordinates and the digits (stride, size, …) of the dim of queries."""
    coordinates, digits = call.digits(layout, -2)
    return coordinates, [number for digit in digits for number in (digit.stride, digit.size)]
