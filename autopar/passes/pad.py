"""Pads factors of a traced graph with zeros, so that mesh axes divide them.

Example: GPT-2's vocabulary of 50,257 on eight ranks becomes 50,264. The embedding's weight enters
the graph with seven rows of zeros, the head makes seven logits that no label names, the cross
entropy leaves them out, and logits that the model returns are sliced. With twelve heads the weights
of queries, keys and values get rows of zeros, and the output's weight gets columns of zeros, so
that the four further heads add nothing.

What makes this exact: a padded factor is carried by ops that give finite numbers for it, until it
is summed against zeros, masked by an op that knows its unpadded size (softmax, cross entropy), or
sliced off. All other ops take the values without padding. The gradient of the padding is finite and
no parameter's.

Rows of the batch are padded with copies of the first ones: seven rows on four ranks become eight,
the last like the first. Whatever an op does to each row by itself, it can do to a copy. A sum over
rows takes zeros for the copies, a mean divides by the seven, a cross entropy ignores the copies.
Where an op mixes rows in another way (a batch norm), no row is padded.

Tokens of a sequence are padded likewise, at its end: seven tokens on four ranks become eight. No
token attends to a later one under a causal mask, so none sees a copy. What a copy attends to
differs from what the first token does, so from there on it is a copy no more, and only ops take it
that give finite numbers for finite ones.

An annotated Program and the padded size of some of its atoms enter; a traced Program leaves, with
`padding`. planner/padding.py decides what to pad and annotates the result.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar._compat import LazyGraphModule, OpOverload
from autopar.ir.dim_roles import dim_kinds
from autopar.ir.graph import add_call, add_node, copy_graph, producer, weights_of
from autopar.ir.padding import Pad, padded_shape, unpadded_shape
from autopar.ir.program import Atom, Program, Value, renamed_outputs, returned_names, same_inputs
from autopar.ir.sharding_rule import (
    HEADS_OF_A_KEY,
    KEY_HEADS,
    TABLE,
    OpShardingRule,
    bound,
    operands_of,
    results_of,
    shape_of,
)
from autopar.ops.experts import experts_op
from autopar.ops.local import UNPADDED
from autopar.ops.rules.losses import ENTRYWISE_LOSSES, ROW_LOSSES
from autopar.ops.rules.shapes import FILLS, NEW_FILLS

aten = torch.ops.aten

# Ops that only move numbers, and those of them that have the sizes of their result as an argument.
_SIZES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
)
_PIECES = (aten.split.Tensor, aten.unsafe_split.Tensor)
_REORDERS = {
    *_SIZES,
    *_PIECES,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unbind.int,
    aten.cat.default,
}
# Ops on single entries that give finite numbers for finite ones.
_FINITE = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.neg.default,
    aten.relu.default,
    aten.square.default,
    aten.silu.default,
    aten.gelu.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.where.self,
    aten.masked_fill.Scalar,
}
_MATMULS = {
    aten.linear.default,
    aten.mm.default,
    aten.bmm.default,
    aten.matmul.default,
    aten.addmm.default,
    aten.einsum.default,
}
_SOFTMAXES = {
    aten.softmax.int,
    aten._softmax.default,
    aten.log_softmax.int,
    aten._log_softmax.default,
}
_NORMS = {aten.layer_norm.default, aten.rms_norm.default}
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_MEANS = {aten.mean.default, aten.mean.dim}
_OF_CLASSES = {aten.cross_entropy_loss.default, aten.nll_loss_nd.default}  # or of probabilities
_OF_ENTRIES = {*ENTRYWISE_LOSSES, *ROW_LOSSES}
_NONE, _MEAN = 0, 1  # aten's numbers of reductions; a sum is 2


def pad(program: Program, sizes: Mapping[int, int]) -> Program:
    """Return the traced program with these atoms of the annotated `program` padded: `sizes` maps
    the number of an atom to its padded size. They are some of `paddable`.
    """
    return _Padding(program, sizes).run()


def paddable(program: Program, sizes: Mapping[int, int]) -> dict[int, int]:
    """Return those of these atoms that can be padded: every op that takes one carries it, sums it
    against zeros or masks it, up to the outputs and to losses that need every class. Of several
    atoms of one dim the outermost is padded.
    """
    left = dict(sizes)
    while left:
        refused = _Spread(program, left).run()
        if not refused:
            break
        left = {number: size for number, size in left.items() if number not in refused}
    return left


def check(program: Program) -> None:
    """The contract: the placeholders are those of the signature, the outputs are what it names and
    have no padding.
    """
    same_inputs(program)
    names = [output.node for output in program.signature.outputs if output.node is not None]
    assert returned_names(program.module.graph) == names, "outputs and signature differ"
    for name in names:
        assert (name, 0) not in program.padding, f"output {name} is padded"


class _Spread:
    """How far padding spreads from the weights. `padded`: the values that have it; `zeros`: those
    whose padding is zero, not only finite.
    """

    def __init__(self, program: Program, sizes: Mapping[int, int]) -> None:
        assert program.annotations is not None
        self.program, self.notes, self.sizes = program, program.annotations, sizes
        self.padded: set[Value] = set()
        self.zeros: set[Value] = set()
        self.mixed: set[Value] = set()  # whose padded tokens are no copies of others
        self.weights = weights_of(program)
        kinds = dim_kinds(program)
        self.tokens = (kinds.sequence - kinds.batch) & sizes.keys()
        self.rows = kinds.batch & sizes.keys() | self.tokens
        self.fed = {e.node for e in program.signature.inputs if e.kind == "user"}
        self._dims: dict[Value, Sequence[Sequence[Atom]]] = {}
        self._pads: dict[Value, tuple[Pad, ...]] = {}

    def run(self) -> set[int]:
        """Return the numbers of the atoms that some op cannot take with padding; where there are
        none, of those that lie inside another padded one in a dim.
        """
        refused: set[int] = set()
        inner: set[int] = set()
        for node in self.program.module.graph.nodes:
            if node.op == "placeholder":
                self.stored(node)
                if (node.name, 0) in self.weights:  # a row of numbers is trained for each sample
                    refused |= {p.atom for p in self.pads((node.name, 0))} & self.rows
            elif node.op != "call_function" or node.target is operator.getitem:
                continue
            elif self.begins(node) and not self.takes_plain(node):
                wrong = self.unsound(node) or self.of_fixed_size(node)
                refused |= wrong
                inner |= self.inner(node)
                if not wrong:
                    self.spread(node)
        return refused or inner

    def pads(self, value: Value) -> tuple[Pad, ...]:
        """Return the padding that a value would have."""
        if value not in self._pads:
            self._pads[value] = tuple(self._pads_of(self.atoms(value)))
        return self._pads[value]

    def atoms(self, value: Value) -> Sequence[Sequence[Atom]]:
        """Return the atoms of the dims of a value, as they are without padding."""
        return self._dims.get(value) or self.notes.dims.get(value, ())

    def note(self, value: Value, dims: Sequence[Sequence[Atom]]) -> None:
        """Note a further value of the padded graph, whose dims consist of these atoms."""
        self._dims[value] = dims
        self.padded.add(value)

    def _pads_of(self, dims: Sequence[Sequence[Atom]]) -> Iterator[Pad]:
        for dim, atoms in enumerate(dims):
            for place, atom in enumerate(atoms):
                if atom.number in self.sizes:
                    before, after = (
                        math.prod(self.sizes.get(a.number, a.size) for a in side)
                        for side in (atoms[:place], atoms[place + 1 :])
                    )
                    padded = self.sizes[atom.number]
                    yield Pad(dim, before, atom.size, padded, after, atom.number)

    def stored(self, node: fx.Node) -> bool:
        """Whether a placeholder enters the graph with its padding, and so is stored in parts of it:
        a parameter each of whose padded dims is padded as a whole; or whether it is an input of the
        user whose rows are padded at their end. All else is padded where it is used.
        """
        pads = self.pads((node.name, 0))
        if node.name in self.fed:
            is_fed = bool(pads) and all(p.atom in self.rows and p.outer == 1 for p in pads)
            self.padded |= {(node.name, 0)} if is_fed else set()
            return is_fed
        is_stored = (
            bool(pads)
            and (node.name, 0) in self.weights
            and all(p.outer == 1 and p.inner == 1 for p in pads)
        )
        if is_stored:
            self.padded.add((node.name, 0))
            self.zeros.add((node.name, 0))
        return is_stored

    def begins(self, node: fx.Node) -> bool:
        """Whether a node gets padding: of an operand that has it, or of a weight, to which it is
        added there; or whether it repeats a number or a row for every row.
        """
        values = [producer(n) for n in node.all_input_nodes]
        repeats = node.target in FILLS or node.target is aten.expand.default
        return any(
            value in self.padded or value in self.weights for value in values if self.pads(value)
        ) or (repeats and any(pad.atom in self.rows for pad in self.pads((node.name, 0))))

    def takes_plain(self, node: fx.Node) -> bool:
        """Whether a node always takes values without padding, though more may move for it."""
        if node.target is not aten.nll_loss_nd.default:
            return node.op == "output"
        return any(
            pad.atom not in self.rows
            for n in node.all_input_nodes
            for pad in self.pads(producer(n))
        )

    def spread(self, node: fx.Node) -> None:
        """Note that a node's results have padding."""
        zeros = node.target in _REORDERS and all(
            self._is_zero(n) for n in node.all_input_nodes if self.pads(producer(n))
        )
        mixed = node.name in self.notes.specs and self.notes.specs[node.name].attends is not None
        for operand in node.all_input_nodes:
            value = producer(operand)
            mixed = mixed or value in self.mixed
            if self.pads(value) and value not in self.padded:
                self.zeros.add(value)
        for index in range(len(results_of(node))):
            if self.pads((node.name, index)):
                self.padded.add((node.name, index))
                if zeros:
                    self.zeros.add((node.name, index))
                if mixed:
                    self.mixed.add((node.name, index))

    def unsound(self, node: fx.Node) -> set[int]:
        """Return the padded atoms of a node with which it would not give the same unpadded results,
        and finite numbers besides.
        """
        rule, factors = self.notes.specs[node.name], self.notes.factors[node.name]
        wrong: set[int] = set()
        for atom in {pad.atom for pads in self._all_pads(node) for pad in pads}:
            own = {f for f, atoms in factors.items() if any(a.number == atom for a in atoms)}
            if (
                not own
                or not self._is_known(node, rule)
                or not self._may_take(node, rule, atom, own)
            ):
                wrong.add(atom)
        return wrong

    def _may_take(self, node: fx.Node, rule: OpShardingRule, atom: int, padded: set[str]) -> bool:
        """Whether a node may take an atom with padding, which is in these of its factors."""
        if atom in self.tokens:
            return self._keeps_tokens(node, rule, padded)
        if atom in self.rows:
            return self._keeps_rows(node, rule, padded)
        return self._is_sound(node, rule, padded)

    def of_fixed_size(self, node: fx.Node) -> set[int]:
        """Return the rows of a node whose arguments say how many there are, in a way that is not
        written anew with the padded number.
        """
        wrong = {pad.atom for pads in self._all_pads(node) for pad in pads} & self.rows
        if not wrong or node.target in (*_SIZES, *_PIECES, *FILLS, *NEW_FILLS):
            return set()

        def padded(operand: fx.Node) -> Any:
            value = operand.meta["val"]
            if not isinstance(value, torch.Tensor):
                return value
            shape = padded_shape(shape_of(value), self.pads(producer(operand)))
            return value if shape == shape_of(value) else value.new_empty(shape)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), padded)
        assert callable(node.target)
        try:
            results = node.target(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError):
            return wrong
        results = list(results) if isinstance(results, list | tuple) else [results]
        for index, (value, own) in enumerate(zip(results, results_of(node), strict=True)):
            if isinstance(value, torch.Tensor):
                expected = padded_shape(shape_of(own), self.pads((node.name, index)))
                if shape_of(value) != expected:
                    return wrong
        return set()

    def inner(self, node: fx.Node) -> set[int]:
        """Return the padded atoms of a node that lie inside another one in a dim."""
        return {
            pad.atom
            for pads in self._all_pads(node)
            for pad in pads
            if any(other.dim == pad.dim and other.inner > pad.inner for other in pads)
        }

    def _all_pads(self, node: fx.Node) -> Iterator[tuple[Pad, ...]]:
        for operand in node.all_input_nodes:
            yield self.pads(producer(operand))
        for index in range(len(results_of(node))):
            yield self.pads((node.name, index))

    def _is_zero(self, node: fx.Node) -> bool:
        """Whether the padding of a value is zero: it is not padded yet, or carries zeros."""
        value = producer(node)
        return value not in self.padded or value in self.zeros

    def _is_sound(self, node: fx.Node, rule: OpShardingRule, padded: set[str]) -> bool:
        """Whether a node gives the same unpadded results with these factors padded, and finite
        numbers besides.
        """
        target = node.target
        if target in (*_SOFTMAXES, aten.cross_entropy_loss.default):
            return self._masks(node, rule, padded)
        if target is aten.embedding.default:
            return not bound(node)["scale_grad_by_freq"] and all(rule.splittable(f) for f in padded)
        if target is aten.scaled_dot_product_attention.default:
            return self._attends(node, rule, padded)
        if target is experts_op:  # no token has an index of an expert that is none
            return padded <= rule.uneven
        if target in _MATMULS:
            return all(self._sums_zeros(node, rule, f) for f in padded if f in rule.sum) and all(
                rule.splittable(f) for f in padded
            )
        if target is aten.dropout.default:
            values = bound(node)
            return not values["train"] or values["p"] == 0
        if target is aten.div.Tensor:
            divisor = node.args[1]
            return not isinstance(divisor, fx.Node) or not self.pads(producer(divisor))
        if target is aten.pow.Tensor_Scalar:
            return bool(bound(node)["exponent"] in (1, 2, 3))
        if target is aten.rsqrt.default:
            return _is_positive(node.args[0])
        if target in (aten.mean.dim, aten.sum.dim_IntList):
            return all(self._only_carries(rule, f) for f in padded)
        carried = target in _REORDERS or target in _FINITE or target in _NORMS
        return carried and all(self._only_carries(rule, f) for f in padded)

    def _keeps_rows(self, node: fx.Node, rule: OpShardingRule, rows: set[str]) -> bool:
        """Whether a node does the same to each of these rows by itself, or can leave the copies out
        of what it sums.
        """
        if node.target in NEW_FILLS:  # its operand says no more than dtype and device
            rows = rows & {f for dim in rule.results[0] for f in dim}
        if not all(rule.splittable(f) for f in rows):
            return False
        if _draws(node):
            # A draw hangs on the place of a number among all: only rows at the end move no other.
            pads = self.pads((node.name, 0))
            if any(pad.dim or pad.outer > 1 for pad in pads if pad.atom in self.rows):
                return False
        summed = self.summed_rows(node, rule, rows)
        return not summed or self._may_leave_out(node, rule, summed)

    def _keeps_tokens(self, node: fx.Node, rule: OpShardingRule, tokens: set[str]) -> bool:
        """Whether a node does the same to each of these tokens by itself, and gives finite numbers
        for those that are no copies; or is an attention in which no token sees a padded one.
        """
        if rule.attends is not None:
            return self._sees_no_copies(node, rule, tokens)
        mixed = any(producer(n) in self.mixed for n in node.all_input_nodes)
        return self._keeps_rows(node, rule, tokens) and (not mixed or _is_finite(node))

    def _sees_no_copies(self, node: fx.Node, rule: OpShardingRule, tokens: set[str]) -> bool:
        """Whether the padding of an attention's queries and keys lies behind all of them, where the
        band lets no query look.
        """
        band, behind = rule.band, rule.sizes["k"] - rule.sizes["q"]
        if band is None or band.after is None or band.after > behind:
            return False
        at_the_end = all(
            pad.outer == 1
            for n in node.all_input_nodes
            for pad in self.pads(producer(n))
            if pad.atom in self.tokens
        )
        return at_the_end and tokens <= {"q", "k"} and not bound(node).get("dropout_p")

    def summed_rows(self, node: fx.Node, rule: OpShardingRule, rows: set[str]) -> set[str]:
        """Return those of these rows that some result of a node lacks."""
        return {f for f in rows if not self._only_carries(rule, f)}

    def _may_leave_out(self, node: fx.Node, rule: OpShardingRule, summed: set[str]) -> bool:
        """Whether a node that sums these rows can be had to leave out the copies."""
        if node.target in _OF_CLASSES:
            target, dims = operands_of(node)[1], rule.operands[1]
            assert target is not None and dims is not None
            return summed <= {f for dim in dims for f in dim} and (
                not target.meta["val"].is_floating_point() or summed <= rule.sum
            )
        if node.target in (*_OF_ENTRIES, *_SUMS, *_MEANS):
            return summed <= rule.sum
        return node.target in _MATMULS and all(
            f in rule.sum and linear_operand(rule, f) is not None for f in summed
        )

    def _is_known(self, node: fx.Node, rule: OpShardingRule) -> bool:
        """Whether the rule knows every padded dim of the operands."""
        return all(
            dims is not None or operand is None or not self.pads(producer(operand))
            for operand, dims in zip(operands_of(node), rule.operands, strict=False)
        )

    def _only_carries(self, rule: OpShardingRule, factor: str) -> bool:
        """Whether a node only carries a factor: its results have it, and it may be split."""
        in_results = all(any(factor in dim for dim in result) for result in rule.results)
        return in_results and factor not in rule.shared and rule.splittable(factor)

    def _sums_zeros(self, node: fx.Node, rule: OpShardingRule, factor: str) -> bool:
        """Whether one of the operands that have a summed factor is zero in its padding."""
        having = [
            operand
            for operand, dims in zip(operands_of(node), rule.operands, strict=False)
            if operand is not None and dims is not None and any(factor in dim for dim in dims)
        ]
        return any(self._is_zero(operand) for operand in having) and len(having) == 2

    def _attends(self, node: fx.Node, rule: OpShardingRule, padded: set[str]) -> bool:
        """Whether an attention is padded in its heads alone, drops nothing, and has no mask of its
        own for each head.
        """
        mask = operands_of(node)[3]
        if mask is not None and self.pads(producer(mask)):
            of_weights = producer(mask) in self.padded
            if mask.meta["val"].dtype is torch.bool or not of_weights:
                return False
        heads = {KEY_HEADS, HEADS_OF_A_KEY} & rule.sizes.keys()
        return not bound(node)["dropout_p"] and all(
            f in heads and self._only_carries(rule, f) for f in padded
        )

    def _masks(self, node: fx.Node, rule: OpShardingRule, padded: set[str]) -> bool:
        """Whether a softmax or a cross entropy is padded in the dim that it reduces, which it
        masks, or else in dims that it carries.
        """
        first = operands_of(node)[0]
        dims = rule.operands[0]
        assert first is not None and dims is not None
        reduced = set(dims[_masked_dim(node)])
        if node.target is aten.cross_entropy_loss.default:
            target = operands_of(node)[1]
            indices = target is not None and not target.meta["val"].is_floating_point()
            return indices and padded <= reduced and all(f in rule.shared for f in padded)
        return all(f in reduced or self._only_carries(rule, f) for f in padded)


class _Padding:
    """The graph while it is padded. `padded` and `plain` hold the nodes that stand for a value with
    its padding and without, as far as there are any.
    """

    def __init__(self, program: Program, sizes: Mapping[int, int]) -> None:
        self.program, self.spread = program, _Spread(program, sizes)
        self.graph = copy_graph(program.module.graph)
        self.padded: dict[Value, fx.Node] = {}
        self.plain: dict[Value, fx.Node] = {}

    def run(self) -> Program:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self._take_plain(node)
            elif node.target is operator.getitem:
                self._item(node)
            elif node.op == "call_function":
                self._call(node)
        return self._program()

    def _program(self) -> Program:
        self.graph.lint()
        outputs = renamed_outputs(self.program.signature.outputs, self.graph)
        return dataclasses.replace(
            self.program,
            module=LazyGraphModule(self.program.module, self.graph),
            signature=dataclasses.replace(self.program.signature, outputs=outputs),
            annotations=None,
            chains=(),
            padding={value: self.spread.pads(value) for value in self.spread.padded},
        )

    # -- a value with its padding, and without -----------------------------------------------------
    def _with_padding(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """Return the node that has a value with its padding, made of zeros before `before`."""
        value = producer(node)
        if value not in self.padded:
            self.padded[value] = padded = self._padded_or_sliced(node, before, value, True)
            self.spread.note((padded.name, 0), self.spread.atoms(value))
        return self.padded[value]

    def _without_padding(self, node: fx.Node, before: fx.Node) -> fx.Node:
        value = producer(node)
        if value not in self.plain:
            self.plain[value] = self._padded_or_sliced(self.padded[value], before, value, False)
        return self.plain[value]

    def _padded_or_sliced(self, node: fx.Node, before: fx.Node, value: Value, add: bool) -> fx.Node:
        """Return a value padded or sliced, dim by dim."""
        with self.graph.inserting_before(before):
            for pad in self.spread.pads(value):
                cut = pad.outer > 1 or pad.inner > 1
                shape = list(shape_of(node.meta["val"]))
                dim, around = pad.dim, (shape[: pad.dim], shape[pad.dim + 1 :])
                if cut:
                    digits = [pad.outer, pad.size if add else pad.padded, pad.inner]
                    node = self._add_call(
                        before, aten.reshape.default, node, [*around[0], *digits, *around[1]]
                    )
                    dim += 1
                if add and pad.atom in self.spread.rows:
                    copies = (aten.slice.Tensor, node, dim, 0, pad.padded - pad.size)
                    node = self._add_call(
                        before, aten.cat.default, [node, self._add_call(before, *copies)], dim
                    )
                elif add:
                    behind = len(node.meta["val"].shape) - 1 - dim
                    amounts = [0, 0] * behind + [0, pad.padded - pad.size]
                    node = self._add_call(before, aten.constant_pad_nd.default, node, amounts, 0.0)
                else:
                    node = self._add_call(before, aten.slice.Tensor, node, dim, 0, pad.size)
                if cut:
                    size = pad.outer * (pad.padded if add else pad.size) * pad.inner
                    node = self._add_call(
                        before, aten.reshape.default, node, [*around[0], size, *around[1]]
                    )
        return node

    def _add_call(self, near: fx.Node, target: Any, *arguments: Any, **more: Any) -> fx.Node:
        node = add_call(self.graph, target, arguments, more)
        for key in ("nn_module_stack", "stack_trace"):
            if key in near.meta:
                node.meta[key] = near.meta[key]
        return node

    # -- nodes -------------------------------------------------------------------------------------
    def _placeholder(self, node: fx.Node) -> None:
        if self.spread.stored(node):
            value, own = (node.name, 0), node.meta["val"]
            shape = padded_shape(shape_of(own), self.spread.pads(value))
            node.meta["val"] = own.new_empty(shape)
            self.padded[value] = node

    def _item(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        node.meta["val"] = source.meta["val"][node.args[1]]
        if producer(node) in self.spread.padded:
            self.padded[producer(node)] = node

    def _take_plain(self, node: fx.Node) -> None:
        """Give a node its operands without padding."""
        for operand in node.all_input_nodes:
            if self.padded.get(producer(operand)) is operand:
                node.replace_input_with(operand, self._without_padding(operand, node))

    def _call(self, node: fx.Node) -> None:
        plain = not self.spread.begins(node) or self.spread.takes_plain(node)
        if plain or self.spread.unsound(node) or self.spread.inner(node):
            self._take_plain(node)
            return
        self.spread.spread(node)
        for operand in node.all_input_nodes:
            value = producer(operand)
            if self.spread.pads(value) and self.padded.get(value) is not operand:
                node.replace_input_with(operand, self._with_padding(operand, node))
        self._leave_out_copies(node)
        self._resize(node)
        if (node.name, 0) in self.spread.padded:
            self.padded[node.name, 0] = node

    def _leave_out_copies(self, node: fx.Node) -> None:
        """Have a node that sums padded rows sum those alone that are no copies."""
        notes, spread = self.spread.notes, self.spread
        rule, factors = notes.specs[node.name], notes.factors[node.name]
        rows = {f for f, atoms in factors.items() if any(a.number in spread.rows for a in atoms)}
        summed = spread.summed_rows(node, rule, rows)
        if not summed or node.target in NEW_FILLS or rule.attends is not None:
            return
        operands = operands_of(node)
        if node.target in _MATMULS:
            for index in sorted({linear_operand(rule, f) or 0 for f in summed}):
                self._mask_copies(node, operands[index], 0)
            return
        target = operands[1] if node.target in _OF_CLASSES else None
        if target is not None and not target.meta["val"].is_floating_point():
            self._mask_copies(node, target, bound(node)["ignore_index"])
            return
        if node.target in (*_OF_ENTRIES, *_OF_CLASSES):
            self._in_two(node)
        (source,) = node.all_input_nodes
        if node.target in _MEANS:
            true = unpadded_shape(shape_of(source.meta["val"]), spread.pads(producer(source)))
            node.meta[UNPADDED] = math.prod(true) // math.prod(shape_of(node.meta["val"]))
        self._mask_copies(node, source, 0)

    def _in_two(self, node: fx.Node) -> None:
        """Have another node compute the losses of a node, which becomes their mean or their sum."""
        assert isinstance(node.target, OpOverload)
        values, notes = bound(node), self.spread.notes
        reduction, values["reduction"] = values["reduction"], _NONE
        by_name = {a.name for a in node.target._schema.arguments if a.kwarg_only}
        args = [value for name, value in values.items() if name not in by_name]
        with self.graph.inserting_before(node):
            losses = self._add_call(node, node.target, *args, **{n: values[n] for n in by_name})
        (dims,) = TABLE[node.target](losses).results
        factors = notes.factors[node.name]
        self.spread.note((losses.name, 0), [[a for f in dim for a in factors[f]] for dim in dims])
        node.target = aten.mean.default if reduction == _MEAN else aten.sum.default
        node.args, node.kwargs = (losses,), {}

    def _mask_copies(self, node: fx.Node, operand: fx.Node | None, number: Any) -> None:
        """Have a node take an operand with this number in the rows that are copies."""
        assert operand is not None
        value, masked = producer(operand), operand
        whole = operand.meta["val"]
        pads = [pad for pad in self.spread.pads(value) if pad.atom in self.spread.rows]
        assert pads, f"{operand} has no copies that {node} could leave out"
        with self.graph.inserting_before(node):
            for pad in pads:
                index = add_node(
                    self.graph,
                    aten.arange.default,
                    (pad.padded,),
                    whole.new_empty((pad.padded,), dtype=torch.int64),
                    {"device": whole.device},
                )
                copies = self._add_call(node, aten.ge.Scalar, index, pad.size)
                digits = [pad.outer, pad.padded, pad.inner]
                if pad.outer > 1 or pad.inner > 1:
                    copies = self._add_call(node, aten.reshape.default, copies, [1, pad.padded, 1])
                    copies = self._add_call(node, aten.expand.default, copies, digits)
                shape = [1] * whole.dim()
                shape[pad.dim] = math.prod(digits)
                copies = self._add_call(node, aten.reshape.default, copies, shape)
                masked = self._add_call(node, aten.masked_fill.Scalar, masked, copies, number)
                self.spread.note((masked.name, 0), self.spread.atoms(value))
        node.replace_input_with(operand, masked)

    def _resize(self, node: fx.Node) -> None:
        """Write the padded sizes into a node's arguments and its value."""
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        shapes = [
            list(padded_shape(shape_of(v), self.spread.pads((node.name, i))))
            for i, v in enumerate(results)
        ]
        if node.target in FILLS:
            node.update_arg(0, shapes[0])
        elif node.target in (*_SIZES, *NEW_FILLS):
            node.update_arg(1, shapes[0])
        elif node.target in _PIECES:
            node.update_arg(1, shapes[0][bound(node)["dim"]])
        if node.target in (*_SOFTMAXES, aten.cross_entropy_loss.default):
            dim = _masked_dim(node)
            value = producer(node.all_input_nodes[0])
            for pad in self.spread.pads(value):
                if pad.dim == dim:
                    node.meta[UNPADDED] = pad.size
        values = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        assert callable(node.target)
        node.meta["val"] = node.target(*values[0], **values[1])
        tensors = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        for result, shape in zip(tensors, shapes, strict=True):
            assert list(shape_of(result)) == shape, (node.format_node(), shape_of(result), shape)


def linear_operand(rule: OpShardingRule, factor: str) -> int | None:
    """Return which operand has a factor and makes the results zero where it is; None if none."""
    for index, dims in enumerate(rule.operands):
        has_factor = dims is not None and any(factor in dim for dim in dims)
        if has_factor and frozenset({index}) in rule.linear:
            return index
    return None


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if node.target is aten.dropout.default:
        values = bound(node)
        return bool(values["train"] and values["p"])
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_finite(node: fx.Node) -> bool:
    """Whether a node gives finite numbers for finite ones."""
    if node.target is aten.pow.Tensor_Scalar:
        return bool(bound(node)["exponent"] in (1, 2, 3))
    if node.target is aten.rsqrt.default:
        return _is_positive(node.args[0])
    if node.target is aten.div.Tensor:
        return not isinstance(node.args[1], fx.Node) or _is_sum_of_largest(node.args[1])
    known = (_REORDERS, _FINITE, _MATMULS, _NORMS, _SOFTMAXES, _SUMS, _MEANS, _OF_CLASSES)
    others = (aten.dropout.default, aten.topk.default, experts_op)
    return node.target in others or any(node.target in x for x in known)


def _masked_dim(node: fx.Node) -> int:
    """Return the dim that a softmax or a cross entropy reduces."""
    first = operands_of(node)[0]
    assert first is not None
    count = len(shape_of(first.meta["val"]))
    if node.target is aten.cross_entropy_loss.default:
        return 1 if count > 1 else 0
    return int(bound(node)["dim"]) % count


def _is_positive(node: Any) -> bool:
    """Whether a value is a number above zero added to a mean of squares, as in a norm."""
    if not isinstance(node, fx.Node) or node.target not in (aten.add.Tensor, aten.add.Scalar):
        return False
    epsilon = node.args[1]
    return isinstance(epsilon, int | float) and epsilon > 0


def _is_sum_of_largest(node: fx.Node) -> bool:
    """Whether a value is the sum of the largest results of a softmax, by which a router divides."""
    if node.target is not aten.sum.dim_IntList:
        return False
    (largest,) = node.all_input_nodes
    if largest.target is not operator.getitem or largest.args[1] != 0:
        return False
    (top,) = largest.all_input_nodes
    if top.target is not aten.topk.default:
        return False
    (of,) = top.all_input_nodes
    if of.target not in (aten.softmax.int, aten._softmax.default):
        return False
    values, count = bound(top), len(shape_of(of.meta["val"]))
    dims = {dim % count for dim in bound(node)["dim"] or ()}
    own = values["dim"] % count
    return bool(values["largest"]) and own == _masked_dim(of) and own in dims
