"""Micro-batches: a step as k equal parts of the batch, one after the other.

    loss = cross_entropy(logits, y)                       the mean over the tokens that count
    loss = cross_entropy(logits, y, "sum") / total_0      in a micro-batch; total_0: of the batch

A micro-batch is a mesh axis in time. What the batch reaches is rows (of each micro-batch its own),
a sum over the micro-batches, or, where no parameter is in it, a total that is taken over the whole
batch before the first micro-batch runs (`totals`). Else micro-batches are independent: a value that
one micro-batch would need of another is refused, with the node. What a mean over all rows gives is
divided by k; a value that is the same in all micro-batches and is added to a sum, such as a penalty
on weights, is too.

A number that the model takes from the size of its batch, as in `loss / x.shape[0]`, is that of the
whole batch: both are traced, and compared node by node.

The program of one micro-batch enters, traced on a k-th of the rows, and that of the whole batch
with its annotations; the first leaves, changed as above, with its `Microbatches`.
planner/tracing.py runs it; runtime/training/microbatches_run.py runs the micro-batches.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import add_node, ancestors, copy_graph, producer, where
from autopar.ir.program import (
    Annotations,
    Input,
    Program,
    renamed_outputs,
    same_inputs,
    same_outputs,
)
from autopar.ir.sharding_rule import OpShardingRule, bound, operands_of, results_of
from autopar.ops.rules.losses import ENTRYWISE_LOSSES, ROW_LOSSES
from autopar.ops.rules.shapes import DRAWS, FILLS, NEW_FILLS
from autopar.passes.batch_numbers import COUNTS, REORDERS, take_numbers

aten = torch.ops.aten

# "numbers": 0, 1, 2, … for the rows of a micro-batch, by which masks of padding are read.
State = Literal["same", "rows", "sum", "numbers"]
_MEANS = (aten.mean.dim, aten.mean.default)
_TOKEN_LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
_MEAN_LOSSES = (*ENTRYWISE_LOSSES, *ROW_LOSSES, aten.cross_entropy_loss.default)
_MEAN, _SUM = 1, 2  # aten's numbers of reductions
_ADDS = (aten.add.Tensor, aten.sub.Tensor)
_PRODUCTS = (aten.mul.Tensor, aten.dot.default)
_SPREADS = (*FILLS, *NEW_FILLS, *DRAWS, aten.expand.default, aten.full_like.default)


@dataclass(frozen=True)
class Microbatches:
    """How a step is run in `count` micro-batches by the program of one.

    `names`: the program's inputs that take the totals. `totals`: the graph that gives a
    micro-batch's share of each, from the user's inputs at `reads` (positions in the flattened
    arguments); None where there are none. `split`: the positions of the inputs whose rows are
    divided. `results`: what each of the graph's results is, in order.
    """

    count: int
    names: tuple[str, ...]
    totals: fx.GraphModule | None
    reads: tuple[int, ...]
    split: frozenset[int]
    results: tuple[State, ...]


def without_microbatches(program: Program) -> Microbatches:
    """Return how an emitted program of a whole step runs as one micro-batch."""
    results: list[State] = [
        "rows" if program.layouts[output.node].shape else "sum"
        for output in program.signature.outputs
        if output.node is not None
    ]
    return Microbatches(1, (), None, (), frozenset(), tuple(results))


def in_microbatches(
    program: Program, full_batch: Program, count: int, split: frozenset[int]
) -> tuple[Program, Microbatches]:
    """Return the program of one micro-batch, and how a step runs it. `program`: traced on the rows
    of a micro-batch; `full_batch`: on all rows, annotated; `split`: the positions of the inputs of
    which a micro-batch has its own rows. Raises PlanError with the node where a micro-batch would
    need another one, where the model computes otherwise on fewer rows, and where no result is a sum
    over the micro-batches.
    """
    names = [
        [(n.name, n.op, n.target) for n in p.module.graph.nodes] for p in (program, full_batch)
    ]
    if names[0] != names[1]:
        raise PlanError(
            f"micro-batches: the model computes otherwise on a {count}th of the rows than on all. "
            "Leave microbatches at 1"
        )
    divided = _Division(program, full_batch, count, split).divide()
    same_inputs(divided[0])
    same_outputs(divided[0])
    return divided


class _Division:
    """One walk through a graph, from its inputs to its outputs."""

    def __init__(
        self, program: Program, full_batch: Program, count: int, split: frozenset[int]
    ) -> None:
        assert full_batch.annotations is not None
        self.program, self.full_batch, self.count, self.split = program, full_batch, count, split
        self.notes: Annotations = full_batch.annotations
        self.twins = {node.name: node for node in full_batch.module.graph.nodes}
        self.graph = copy_graph(program.module.graph)
        self.states: dict[fx.Node, State] = {}
        self.trained = set[fx.Node]()  # the nodes that depend on a parameter
        self.totals: dict[fx.Node, fx.Node] = {}  # own share -> the placeholder of the total
        self.batch = self._batch_atoms()
        self._placed = self.graph.find_nodes(op="placeholder")[-1]

    def divide(self) -> tuple[Program, Microbatches]:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                self.states[node] = self._placeholder(node)
            elif node.op == "call_function":
                if not self.trained.isdisjoint(node.all_input_nodes):
                    self.trained.add(node)
                if not take_numbers(node, self.twins[node.name]):  # of a step of the whole batch
                    raise self._refusal(node, "depends on the number of rows")
                self._walk(node)
        states = self._results()
        shares = list(self.totals)
        totals, reads = self._totals_graph(shares)
        self.graph.eliminate_dead_code()
        module = fx.GraphModule(self.program.module, self.graph)
        program = dataclasses.replace(self.program, module=module, signature=self._signature())
        names = tuple(total.name for total in self.totals.values())
        return program, Microbatches(self.count, names, totals, reads, self.split, states)

    # -- states ------------------------------------------------------------------------------------
    def _batch_atoms(self) -> set[int]:
        """Return the atoms of the first dims of the inputs that are divided."""
        entries = (e for e in self.program.signature.inputs if e.position in self.split)
        first = (self.notes.dims[entry.node, 0][0] for entry in entries)
        return {atom.number for atoms in first for atom in atoms}

    def _placeholder(self, node: fx.Node) -> State:
        (entry,) = (e for e in self.program.signature.inputs if e.node == node.name)
        if entry.kind == "parameter" or entry.trainable:
            self.trained.add(node)
        return "rows" if entry.kind == "user" and entry.position in self.split else "same"

    def _walk(self, node: fx.Node) -> None:
        """Find the state of a call, and change the call where a micro-batch needs it otherwise."""
        if node.target is operator.getitem:
            self.states[node] = self.states[node.all_input_nodes[0]]
            return
        operands = [n for n in operands_of(node) if n is not None]
        kinds = {self.states[n] for n in operands}
        if "numbers" in kinds:
            self._use_numbers(node, operands)
        elif "sum" in kinds:
            self._use_sum(node, operands)
        elif "rows" in kinds:
            self._use_rows(node)
        else:
            self.states[node] = self._output_state(node) if self._has_rows(node) else "same"

    def _output_state(self, node: fx.Node) -> State:
        """Return the state of what has rows and is made of nothing that has."""
        if node.target in COUNTS:
            arguments = bound(node)
            if arguments.get("start", 0) == 0 and arguments.get("step", 1) == 1:
                return "numbers"
        elif node.target in _SPREADS or node.all_input_nodes:
            self._grow_batch(node)
            return "rows"
        raise self._refusal(node, "numbers its rows")

    def _grow_batch(self, node: fx.Node) -> None:
        """Enter the atoms of rows that nothing ties to those of an input: ones for each row."""
        for index, value in enumerate(results_of(node)):
            twin = results_of(self.twins[node.name])[index]
            sizes = zip(value.shape, twin.shape, self.notes.dims[node.name, index], strict=True)
            for own, full_batch, atoms in sizes:
                numbers = {atom.number for atom in atoms}
                if own != full_batch and not numbers & self.batch:
                    self.batch |= numbers

    def _use_numbers(self, node: fx.Node, operands: Sequence[fx.Node]) -> None:
        """Pass numbers of rows on, or read each row of a value by its own number."""
        if node.target in REORDERS and len(operands) == 1:
            self.states[node] = "numbers"
            return
        source, *_ = operands
        places: Any = node.args[1] if len(node.args) > 1 else ()
        if node.target is aten.index.Tensor and self.states[source] == "rows":
            dims = self.notes.dims[producer(source)]
            own = [d for d, atoms in enumerate(dims) if {a.number for a in atoms} & self.batch]
            numbered = [
                d for d, n in enumerate(places) if n is not None and self.states[n] == "numbers"
            ]
            if own == numbered and len(own) == 1:
                self.states[node] = "rows"
                return
        raise self._refusal(node, "computes with the numbers of its rows")

    def _has_rows(self, node: fx.Node) -> bool:
        """Whether a result of a node has a row for each of the inputs': more in the whole batch."""
        pairs = zip(results_of(node), results_of(self.twins[node.name]), strict=True)
        return any(
            isinstance(own, torch.Tensor) and own.shape != other.shape for own, other in pairs
        )

    def _use_rows(self, node: fx.Node) -> None:
        rule = self.notes.specs[node.name]
        factors = self.notes.factors[node.name]
        own = {f for f, atoms in factors.items() if {a.number for a in atoms} & self.batch}
        in_results = {f for f in own if all(any(f in dim for dim in r) for r in rule.results)}
        if own & (rule.whole | (set() if _counts_tokens(node) else rule.shared)):
            raise self._refusal(node, "computes with the rows of all micro-batches")
        if own and own == in_results:
            self.states[node] = "rows"
        elif own and _counts_tokens(node) and bound(node)["reduction"] == _MEAN:
            self._divide_by_total(node)
        elif own and not in_results and own <= rule.sum and not rule.added:
            self.states[node] = "sum"
            if _is_mean(node):
                self._scale(node)
        else:
            raise self._refusal(node, "computes with the rows of all micro-batches")

    def _use_sum(self, node: fx.Node, operands: Sequence[fx.Node]) -> None:
        """Pass a sum through a linear op; a total takes the place of one without parameters that is
        used otherwise.
        """
        rule = self.notes.specs[node.name]
        if self._passes(node, rule):
            self.states[node] = "sum"
            return
        sums = [n for n in operands if self.states[n] == "sum"]
        untrained = [n for n in sums if n not in self.trained]
        if not untrained and len(set(sums)) > 1 and node.target in _PRODUCTS:
            why = "is a product of two sums over the batch, as a router's auxiliary loss is"
            raise self._refusal(node, why)
        if not untrained:
            why = "needs a sum over all micro-batches, which is there at the end"
            raise self._refusal(node, why)
        for operand in untrained:  # other uses may take the micro-batch's share
            node.replace_input_with(operand, self._total(operand))
        self._walk(node)

    def _passes(self, node: fx.Node, rule: OpShardingRule) -> bool:
        """Whether the result is the sum over the micro-batches; what is added once is divided
        first.
        """
        places = {i: n for i, n in enumerate(operands_of(node)) if n is not None}
        summed = frozenset(i for i, n in places.items() if self.states[n] == "sum")
        if any(self.states[n] == "rows" for n in places.values()):
            return False
        if any(summed == group & frozenset(places) for group in rule.linear):
            return True
        others = [places[i] for i in sorted(frozenset(places) - summed)]
        if node.target not in _ADDS or len(others) != 1 or node.kwargs.get("alpha", 1) != 1:
            return False
        if not others[0].meta["val"].is_floating_point():  # a share of it is no whole number
            return False
        with self.graph.inserting_before(node):
            share = self._divided(others[0])
        node.replace_input_with(others[0], share)
        return True

    def _refusal(self, node: fx.Node, why: str) -> PlanError:
        return PlanError(
            f"micro-batches: {node.name} {where(node)} {why}: a step in {self.count} "
            "micro-batches would compute something else than a step of the whole batch. Leave "
            "microbatches at 1"
        )

    # -- changes -----------------------------------------------------------------------------------
    def _divided(self, node: fx.Node) -> fx.Node:
        """Add a node that is a count-th of another."""
        share = add_node(self.graph, aten.mul.Tensor, (node, 1 / self.count), node.meta["val"])
        share.meta.update({k: v for k, v in node.meta.items() if k not in share.meta})
        self.states[share] = "sum"
        if node in self.trained:
            self.trained.add(share)
        return share

    def _scale(self, node: fx.Node) -> None:
        """Divide a mean over the rows of a micro-batch by the number of micro-batches."""
        with self.graph.inserting_after(node):
            share = self._divided(node)
        node.replace_all_uses_with(share, delete_user_cb=lambda user: user is not share)

    def _total(self, share: fx.Node) -> fx.Node:
        """Return the placeholder of the total of a value without parameters."""
        if share not in self.totals:
            with self.graph.inserting_after(self._placed):
                total = self.graph.placeholder(f"total_{len(self.totals)}")
            total.meta["val"] = share.meta["val"]
            self._placed, self.totals[share] = total, total
            self.states[total] = "same"
        return self.totals[share]

    def _divide_by_total(self, node: fx.Node) -> None:
        """Make a mean over tokens their sum, divided by the number of those of the whole batch."""
        values = bound(node)
        target, ignored = values["target"], values["ignore_index"]
        if values["weight"] is not None:
            raise self._refusal(node, "weighs tokens by their class, and their weight is not known")
        with self.graph.inserting_before(node):
            counts = self._call(node, aten.ne.Scalar, target, ignored)
            own = self._call(node, aten._to_copy.default, counts, dtype=torch.float32)
            share = self._call(node, aten.sum.default, own)
        total, loss = self._total(share), node.meta["val"]
        rest = (values["label_smoothing"],) if "label_smoothing" in values else ()
        node.args, node.kwargs = (values["self"], target, None, _SUM, ignored, *rest), {}
        with self.graph.inserting_after(node):
            mean = add_node(self.graph, aten.div.Tensor, (node, total), loss / total.meta["val"])
        with self.graph.inserting_after(mean):  # the number of tokens is exact in float32
            result = add_node(
                self.graph, aten._to_copy.default, (mean,), loss, {"dtype": loss.dtype}
            )
        for new in (mean, result):
            new.meta.update({k: v for k, v in node.meta.items() if k not in new.meta})
            self.states[new] = "sum"
            self.trained |= {new} if node in self.trained else set()
        self.states[node] = "sum"
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not mean)

    def _call(
        self, like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Add a node computed of others, which belongs to the module of `like`."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta = dict(like.meta)
        operands: Any = fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*operands, **kwargs)
        if not self.trained.isdisjoint(node.all_input_nodes):
            self.trained.add(node)
        self.states[node] = "rows"
        return node

    # -- what leaves -------------------------------------------------------------------------------
    def _results(self) -> tuple[State, ...]:
        (results,) = self.graph.output_node().args
        assert isinstance(results, tuple | list)
        kinds = [output.kind for output in self.program.signature.outputs if output.node]
        states: list[State] = []
        for kind, node in zip(kinds, results, strict=True):
            assert isinstance(node, fx.Node)
            if kind == "mutation" and self.states[node] != "same":
                raise self._refusal(node, "writes what differs between micro-batches into a buffer")
            if self.states[node] == "numbers":
                raise self._refusal(node, "numbers its rows")
            states.append(self.states[node])
        if not any(
            state == "sum" and n in self.trained for state, n in zip(states, results, strict=True)
        ):
            raise PlanError(
                "micro-batches: the model returns no loss, that is no sum or mean over the rows of "
                "its inputs. Compute the loss in the model's forward, as each micro-batch "
                "needs its own backward"
            )
        return tuple(states)

    def _totals_graph(
        self, shares: Sequence[fx.Node]
    ) -> tuple[fx.GraphModule | None, tuple[int, ...]]:
        """Return the graph of the micro-batch's share of each total, and what it reads."""
        if not shares:
            return None, ()
        graph, twins = fx.Graph(), dict[fx.Node, fx.Node]()
        positions = {e.node: e.position for e in self.program.signature.inputs}
        needed = ancestors(shares)
        reads = [n for n in self.graph.find_nodes(op="placeholder") if n in needed]
        for node in self.graph.nodes:
            if node in needed:
                twins[node] = graph.node_copy(node, lambda n: twins[n])
        graph.output(tuple(twins[share] for share in shares))
        for node in needed:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                why = "draws random numbers that a sum over all micro-batches needs"
                raise self._refusal(node, why)
        for node in reads:
            if positions.get(node.name) is None:
                raise self._refusal(node, "is a buffer that a sum over all micro-batches needs")
        return fx.GraphModule(self.program.module, graph), tuple(
            position for n in reads if (position := positions[n.name]) is not None
        )

    def _signature(self) -> Any:
        signature = self.program.signature
        leaves = max((e.position for e in signature.inputs if e.position is not None), default=-1)
        leaves = max(leaves + 1, signature.in_tree.num_leaves)
        totals = tuple(
            Input("user", total.name, f"the total of {share.name}", position=leaves + number)
            for number, (share, total) in enumerate(self.totals.items())
        )
        # with the numbers of the whole batch
        outputs = renamed_outputs(self.full_batch.signature.outputs, self.graph)
        return dataclasses.replace(signature, inputs=(*signature.inputs, *totals), outputs=outputs)


def _counts_tokens(node: fx.Node) -> bool:
    """Whether a node is a loss whose mean divides by the number of tokens that count."""
    if node.target not in _TOKEN_LOSSES:
        return False
    target = operands_of(node)[1]
    return target is not None and not target.meta["val"].is_floating_point()


def _is_mean(node: fx.Node) -> bool:
    """Whether a node is a mean over all that it reads."""
    if node.target in _MEANS:
        return True
    return node.target in _MEAN_LOSSES and bound(node)["reduction"] == _MEAN
