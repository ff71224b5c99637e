"""The pass that makes every random draw of a model one of three, which are the same in every
layout.

    randn_like(mu)              randn([8, 4])
    empty.exponential_()        -log1p(-rand([8, 4]))
    bernoulli(p)                rand([8, 4]) < p
    multinomial(p, 2)           topk(p / exponential, 2)
    lstm(…, layers=2, p=0.1)    lstm, dropout, lstm

DRAWS (ops/rules/shapes.py) are `rand`, `randn` and `randint`, which hang on no other value: each
rank makes the shard that it needs (ops/sharded/draws.py), and each says its dtype: one of torch's
default is float64 where `verify` makes the graph so. What is made of them is split as any other op.
`annotate` refuses the draws that no entry of REPLACEMENTS describes.

A traced program enters and leaves. planner.py runs it before `annotate`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar._compat import LazyGraphModule
from autopar.ir.graph import add_call, add_node, copy_graph
from autopar.ir.program import Program, renamed_outputs, same_inputs, same_outputs
from autopar.ir.sharding_rule import bound
from autopar.ops.rules.shapes import DRAWS

aten = torch.ops.aten


def draws(program: Program) -> Program:
    """Return the program with DRAWS, each of a dtype of its own, in place of its other random ops;
    the same program where there is nothing to change.
    """
    if not any(_is_rewritten(n) or _has_no_dtype(n) for n in program.module.graph.nodes):
        return program
    graph = copy_graph(program.module.graph)
    for node in list(graph.nodes):
        if _has_no_dtype(node):
            node.update_kwarg("dtype", node.meta["val"].dtype)
        if _is_rewritten(node):
            last = node.prev
            with graph.inserting_before(node):
                REPLACEMENTS[node.target](_Draw(graph, node))
            _describe(last.next, node)
            graph.erase_node(node)
    # Draws count as impure, but the graph owes nobody those whose result is not used.
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    outputs = renamed_outputs(program.signature.outputs, graph)
    return dataclasses.replace(
        program,
        module=LazyGraphModule(program.module, graph),
        signature=dataclasses.replace(program.signature, outputs=outputs),
    )


def check(program: Program) -> None:
    """The contract: inputs and outputs match the signature, and every draw that the pass knows is
    one of DRAWS and says its dtype.
    """
    same_inputs(program)
    same_outputs(program)
    nodes = program.module.graph.nodes
    left = [node.name for node in nodes if _is_rewritten(node) or _has_no_dtype(node)]
    assert not left, f"draws left {left}"


def _is_rewritten(node: fx.Node) -> bool:
    """Whether a node draws other numbers than DRAWS, which are real. rrelu and recurrent layers do
    so in training alone, and the latter between two layers.
    """
    if node.op != "call_function" or node.target not in REPLACEMENTS:
        return False
    if node.target in DRAWS:
        return bool(node.meta["val"].is_complex())
    arguments = bound(node)
    training = arguments.get("training", arguments.get("train", True))
    return bool(training) and arguments.get("dropout") != 0 and arguments.get("num_layers") != 1


def _has_no_dtype(node: fx.Node) -> bool:
    """Whether a node is one of DRAWS and leaves its dtype to torch's default."""
    return node.op == "call_function" and node.target in DRAWS and not node.kwargs.get("dtype")


def _describe(new: fx.Node, node: fx.Node) -> None:
    """Give the nodes from `new` up to `node` the module and the line of `node`."""
    while new is not node:
        new.meta = {**{k: v for k, v in node.meta.items() if k != "val"}, **new.meta}
        new = new.next


class _Draw:
    """A node that draws, its arguments by name, and what puts other nodes in its place."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node, self.arguments = graph, node, bound(node)
        value = node.meta["val"]
        self.value = value[0] if isinstance(value, list | tuple) else value
        self.size = [int(size) for size in self.value.shape]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return add_call(self.graph, target, args, kwargs)

    def replace(self, result: fx.Node) -> None:
        """Put a node in the place of the draw, in its dtype."""
        self.node.replace_all_uses_with(self.cast(result))

    def cast(self, result: fx.Node) -> fx.Node:
        if result.meta["val"].dtype is self.value.dtype:
            return result
        return self.call(aten._to_copy.default, result, dtype=self.value.dtype)

    def _drawn(self, target: Any, args: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
        """Add one of DRAWS; the last of `args` is its size."""
        options = {"dtype": dtype, "device": torch.device(self.value.device.type)}
        value = self.value.new_empty(args[-1], dtype=dtype)
        return add_node(self.graph, target, args, value, options)

    def uniform(
        self, dtype: torch.dtype | None = None, size: Sequence[int] | None = None
    ) -> fx.Node:
        """Add numbers from 0 to below 1, of the draw's dtype and size or of others."""
        return self._real_or_complex(aten.rand.default, dtype, size)

    def normal(self) -> fx.Node:
        """Add numbers of mean 0 and variance 1; those of complex ones have half of it."""
        drawn = self._real_or_complex(aten.randn.default, None, None)
        if self.value.dtype.is_complex:
            return self.call(aten.mul.Tensor, drawn, math.sqrt(0.5))
        return drawn

    def _real_or_complex(
        self, target: Any, dtype: torch.dtype | None, size: Sequence[int] | None
    ) -> fx.Node:
        dtype, size = dtype or self.value.dtype, list(self.size if size is None else size)
        if not dtype.is_complex:
            return self._drawn(target, (size,), dtype)
        pair = (self._drawn(target, (size,), dtype.to_real()) for _ in range(2))
        return self.call(aten.complex.default, *pair)

    def integers(self, low: int, high: int) -> fx.Node:
        """Add whole numbers from `low` to below `high`."""
        return self._drawn(aten.randint.low, (low, high, self.size), self.value.dtype)

    def exponential(self, size: Sequence[int] | None = None) -> fx.Node:
        """Add numbers with the density exp(-x). They are computed in float64: 1 - u of a narrower
        one would be 1, and its logarithm 0, once in some million.
        """
        negative = self.call(aten.neg.default, self.uniform(torch.float64, size))
        return self.call(aten.neg.default, self.call(aten.log1p.default, negative))

    def spread(self, numbers: fx.Node, scale: Any, shift: Any) -> fx.Node:
        """Add numbers · scale + shift; each of the two a number or a node."""
        if isinstance(scale, fx.Node) or scale != 1:
            numbers = self.call(aten.mul.Tensor, numbers, scale)
        if isinstance(shift, fx.Node) or shift != 0:
            numbers = self.call(aten.add.Tensor, numbers, shift)
        return numbers


# -- what each draw is made of ---------------------------------------------------------------------
def _uniform(draw: _Draw) -> None:
    low = draw.arguments.get("from", 0)
    draw.replace(draw.spread(draw.uniform(), draw.arguments.get("to", 1) - low, low))


def _normal(draw: _Draw) -> None:
    """torch gives mean and deviation no gradient."""
    mean, deviation = (
        draw.call(aten.detach.default, x) if isinstance(x, fx.Node) else x
        for x in (draw.arguments.get("mean", 0), draw.arguments.get("std", 1))
    )
    draw.replace(draw.spread(draw.normal(), deviation, mean))


def _log_normal(draw: _Draw) -> None:
    draw.replace(draw.call(aten.exp.default, draw.spread(draw.normal(), draw["std"], draw["mean"])))


def _integers(draw: _Draw) -> None:
    draw.replace(draw.integers(draw.arguments.get("low", 0), draw["high"]))


def _any_integers(draw: _Draw) -> None:
    """`Tensor.random_`: without a bound, all whole numbers that the dtype holds exactly."""
    draw.replace(draw.integers(0, draw.arguments.get("to") or _bound(draw.value.dtype)))


def _bound(dtype: torch.dtype) -> int:
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype is torch.bool else torch.iinfo(dtype).max


def _exponential(draw: _Draw) -> None:
    draw.replace(draw.spread(draw.exponential(), 1 / draw["lambd"], 0))


def _bernoulli(draw: _Draw) -> None:
    rate = draw.arguments.get("p", draw["self"])
    compare = aten.lt.Tensor if isinstance(rate, fx.Node) else aten.lt.Scalar
    draw.replace(draw.call(compare, draw.uniform(torch.float32), rate))


def _rrelu(draw: _Draw) -> None:
    x, low, high = draw["self"], draw["lower"], draw["upper"]
    slope = draw.spread(draw.uniform(), high - low, low)
    negative = draw.call(aten.lt.Scalar, x, 0)
    draw.replace(draw.call(aten.where.self, negative, draw.call(aten.mul.Tensor, x, slope), x))


def _permutation(draw: _Draw) -> None:
    draw.replace(draw.call(aten.argsort.default, draw.uniform(torch.float64)))


def _multinomial(draw: _Draw) -> None:
    """The largest of weight / exponential is each with its probability, and the largest n of them
    are n without replacement (Efraimidis and Spirakis, 2006). With replacement, each number falls
    into one class's part of the sum of weights.
    """
    weights, count = draw["self"], draw["num_samples"]
    value = weights.meta["val"]
    wide = draw.call(aten._to_copy.default, weights, dtype=torch.float64)
    if not draw["replacement"] or count == 1:
        race = draw.call(aten.div.Tensor, wide, draw.exponential(value.shape))
        draw.replace(_item(draw, draw.call(aten.topk.default, race, count, -1), 1))
        return
    sums = draw.call(aten.cumsum.default, wide, -1)
    total = draw.call(aten.slice.Tensor, sums, -1, value.shape[-1] - 1, value.shape[-1])
    aims = draw.call(aten.mul.Tensor, draw.uniform(torch.float64), total)
    draw.replace(draw.call(aten.searchsorted.Tensor, sums, aims, right=True))


def _item(draw: _Draw, results: fx.Node, index: int) -> fx.Node:
    return add_node(draw.graph, operator.getitem, (results, index), results.meta["val"][index])


def _recurrent(draw: _Draw) -> None:
    """A recurrent op of several layers with dropout between them becomes an op for each layer."""
    target: Any = draw.node.target
    states = draw["hx"] if isinstance(draw["hx"], list | tuple) else [draw["hx"]]
    directions = 2 if draw["bidirectional"] else 1
    each = len(draw["params"]) // draw["num_layers"]
    x, last = draw["input"], []
    for layer in range(draw["num_layers"]):
        if layer:
            x = draw.call(aten.dropout.default, x, draw["dropout"], True)
        first = [
            draw.call(aten.slice.Tensor, state, 0, layer * directions, (layer + 1) * directions)
            for state in states
        ]
        results = draw.call(
            target,
            x,
            first if isinstance(draw["hx"], list | tuple) else first[0],
            draw["params"][layer * each : (layer + 1) * each],
            draw["has_biases"],
            1,
            0.0,
            draw["train"],
            draw["bidirectional"],
            draw["batch_first"],
        )
        x, *ends = (_item(draw, results, i) for i in range(1 + len(states)))
        last.append(ends)
    joined = [draw.call(aten.cat.default, list(ends)) for ends in zip(*last, strict=True)]
    for item in list(draw.node.users):
        index: Any = item.args[1]
        item.replace_all_uses_with([x, *joined][index])
        draw.graph.erase_node(item)


REPLACEMENTS: dict[Any, Callable[[_Draw], None]] = {
    aten.rand.default: _uniform,
    aten.rand_like.default: _uniform,
    aten.uniform.default: _uniform,
    aten.randn.default: _normal,
    aten.randn_like.default: _normal,
    aten.normal.float_float: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal_functional.default: _normal,
    aten.log_normal.default: _log_normal,
    aten.randint.default: _integers,
    aten.randint_like.default: _integers,
    aten.randint_like.low_dtype: _integers,
    aten.random.default: _any_integers,
    aten.random.to: _any_integers,
    aten.exponential.default: _exponential,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.rrelu.default: _rrelu,
    aten.randperm.default: _permutation,
    aten.multinomial.default: _multinomial,
    aten.lstm.input: _recurrent,
    aten.gru.input: _recurrent,
    aten.rnn_tanh.input: _recurrent,
    aten.rnn_relu.input: _recurrent,
}
