"""Gives every node of the traced graph its sharding rule, and refines all dims into atoms.

An atom is the smallest unit of a dim that all ops agree on. For example a view of a dim of size 12
as (3, 4) makes the atoms 3 and 4 of that dim, in every value that shares it. Ops without a rule are
probed on small tensors, and where that finds no rule, they run unsharded.

A traced Program enters and leaves with its `Annotations`. planner/planner.py runs this pass after
`trace`, and runtime/calibrate_on_ranks.py runs it to list the matmuls that are timed.

The pass `chains` groups the annotated nodes: the two matmuls of an MLP and the activation between
them are the chain "blocks.3.mlp". The planner chooses the layouts of a chain together, and the
plan's table shows a row for each.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.band import Band
from autopar.ir.graph import chain_name, is_inexact, producer, where
from autopar.ir.program import Annotations, Atom, Chain, Program, Value
from autopar.ir.sharding_rule import Dims, OpShardingRule, bound, operands_of, results_of, shape_of
from autopar.ops.custom_functions import is_custom
from autopar.ops.rules import unsplit
from autopar.ops.rules.probe import function_rule, probe, rule_of, unrepeatable
from autopar.ops.rules.shapes import DRAWS

aten = torch.ops.aten
_RANDOM = {
    *DRAWS,
    aten.dropout.default,
    aten.scaled_dot_product_attention.default,
}  # random ops that draw the same numbers in every layout


_MOST_TURNS = 1024  # the largest inner atom of a sequence


def annotate(program: Program, strided_from: int | None = None) -> Program:
    """Return the program with `Annotations`: the rules, the atoms, and which values depend on
    parameters and carry gradients.

    Sequences of `strided_from` tokens or more that attention by positions reads are cut into two
    atoms, none of them without it: a mesh axis may then take every n-th run of tokens, which gives
    all ranks as many pairs of a query and a key that it sees.

    Raises PlanError where the model draws random numbers in a way that no layout repeats.
    """
    graph = program.module.graph
    _refuse_random(graph)
    rules, probed, unknown = _find_rules(graph)
    refinement = _Refinement()
    for node in graph.nodes:
        _enter(node, rules.get(node.name), refinement)
    long = strided_from is not None and _cut_sequences(program, rules, refinement, strided_from)
    searched, gradient = _searched_and_gradient(program)
    weights = _values_of_parameters(program, gradient)
    for node in graph.find_nodes(op="call_function", target=aten.einsum.default):
        rules[node.name] = _with_weight_second(node, rules[node.name], weights)
    annotations = Annotations(
        rules,
        {
            value: tuple(refinement.atoms(leaf) for leaf in dims)
            for value, dims in refinement.values.items()
        },
        {
            name: {factor: refinement.atoms(leaf) for factor, leaf in factors.items()}
            for name, factors in refinement.factors.items()
        },
        searched,
        gradient,
        _batch_atom(program, refinement),
        probed,
        unknown,
        weights,
        strided_from=strided_from if long else None,
    )
    return dataclasses.replace(program, annotations=annotations)


def with_uncut_sequences(program: Program) -> Program:
    """Return the annotated program with each sequence in one atom, to be padded as a whole."""
    before = program.annotations
    assert before is not None
    if before.strided_from is None:
        return program
    whole = annotate(dataclasses.replace(program, annotations=None)).annotations
    assert whole is not None
    settings = ("strided_from", "reduce_dtype", "replicated_parameters", "replicated_outputs")
    notes = dataclasses.replace(whole, **{name: getattr(before, name) for name in settings})
    return dataclasses.replace(program, annotations=notes)


def with_unsplit_queries(program: Program) -> Program:
    """Return the annotated program with the queries of causal attention never split. Where they are
    short that seldom pays, and a search among more options takes longer and proves less.
    """
    notes = program.annotations
    assert notes is not None
    specs = {
        name: dataclasses.replace(rule, whole=rule.whole | {"q"})
        if rule.attends is not None and rule.attends.causal and rule.attends.share is None
        else rule
        for name, rule in notes.specs.items()
    }
    notes = dataclasses.replace(notes, specs=specs, unsplit_queries=True)
    return dataclasses.replace(program, annotations=notes)


def reduced_in(program: Program, dtype: torch.dtype | None) -> Program:
    """Return the annotated program with its gradients to be summed over ranks in `dtype`."""
    assert program.annotations is not None
    notes = dataclasses.replace(program.annotations, reduce_dtype=dtype)
    return dataclasses.replace(program, annotations=notes)


def count_microbatch(program: Program, count: int, sums: float, gathers: float) -> Program:
    """Return the annotated program as one of so many micro-batches of a step, in which a search
    counts these shares of the sums of weights' gradients and of the gathers of weights, as they
    come once in a step.
    """
    counting = dataclasses.replace(program.counting, sums=sums, gathers=gathers, microbatches=count)
    return dataclasses.replace(program, counting=counting)


def replicate(program: Program, parameters: bool, outputs: bool) -> Program:
    """Return the annotated program with its parameters stored, or its outputs returned, unsharded
    on all ranks. What happens in between is sharded all the same.
    """
    assert program.annotations is not None
    notes = dataclasses.replace(
        program.annotations, replicated_parameters=parameters, replicated_outputs=outputs
    )
    return dataclasses.replace(program, annotations=notes)


def check(program: Program) -> None:
    """The contract: every call has a rule with as many results as the node has, and the sizes of
    the atoms of every dim multiply to its size.
    """
    notes = program.annotations
    assert notes is not None, "annotate left no annotations"
    for node in program.module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            assert node.name in notes.specs, f"{node.name} has no rule"
            count, needed = len(notes.specs[node.name].results), len(results_of(node))
            assert count == needed, f"the rule of {node.name} has {count} results, not {needed}"
        for index, value in enumerate(results_of(node)) if node.op != "output" else ():
            if isinstance(value, torch.Tensor) and node.target is not operator.getitem:
                for atoms, size in zip(notes.dims[node.name, index], shape_of(value), strict=True):
                    product = 1
                    for atom in atoms:
                        product *= atom.size
                    fits = product == size or not size
                    assert fits, f"{node.name}: atoms {atoms} for a dim of {size}"


def _refuse_random(graph: fx.Graph) -> None:
    """Raise PlanError for random numbers that every rank would draw for itself."""
    random_nodes = [node for node in graph.nodes if _draws(node) or _is_unrepeatable(node)]
    if random_nodes:
        listed = "\n".join(f"  {node.target} {where(node)}" for node in random_nodes)
        raise PlanError(
            "the model draws random numbers, which would differ between ranks that must "
            f"agree:\n{listed}\n"
            "draw them outside of the model and pass them as inputs, or make them of torch.rand, "
            "randn, randint or dropout (an op of your own counts if it gives other results when it "
            "runs again on the same operands)"
        )


def _is_unrepeatable(node: fx.Node) -> bool:
    """Whether an op gives other results when it runs again. Ops run on several ranks, and those
    that take no parameter are copied for each consumer, so such an op is refused.
    """
    return node.op == "call_function" and node.target is not operator.getitem and unrepeatable(node)


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers that would differ between layouts."""
    if (
        torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
        or node.target in _RANDOM
    ):
        return False
    arguments = bound(node)
    rate = next((arguments[name] for name in ("p", "dropout") if name in arguments), None)
    training = next((arguments[name] for name in ("train", "training") if name in arguments), None)
    return training is None or bool(training and rate != 0)


def _find_rules(
    graph: fx.Graph,
) -> tuple[dict[str, OpShardingRule], tuple[str, ...], tuple[str, ...]]:
    """Return the rule of every node by name, and the ops that were probed and those without a
    rule.
    """
    rules: dict[str, OpShardingRule] = {}
    probed: set[str] = set()
    without_rule: set[str] = set()
    rules_by_probe: dict[object, OpShardingRule | None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        rule = rule_of(node)
        if rule is None:
            probe_rule = function_rule if is_custom(node.target) else probe
            rule = probe_rule(node, rules_by_probe)
            (probed if rule is not None else without_rule).add(str(node.target))
        rules[node.name] = rule or _rule_of_unknown(node)
    return rules, tuple(sorted(probed)), tuple(sorted(without_rule))


def _with_weight_second(
    node: fx.Node, rule: OpShardingRule, weights: frozenset[Value]
) -> OpShardingRule:
    """Return the rule of an einsum with the roles m and n exchanged where its first operand is a
    weight and its second is not: "oi,bi->bo" is a matmul of rows b with columns o.
    """
    is_weight = [n is not None and producer(n) in weights for n in operands_of(node)]
    if rule.product is None or is_weight != [True, False]:
        return rule
    rows, columns, summed = rule.product
    first, second = (frozenset(f for dim in dims or () for f in dim) for dims in rule.operands)
    shared = first & second - summed
    product = (columns | shared, rows - shared, summed)
    return dataclasses.replace(rule, product=product)


def _rule_of_unknown(node: fx.Node) -> OpShardingRule:
    """Return the rule of an op that nothing is known about: no dim is split. Ops of other
    namespaces than torch's own count as nonlinear.
    """
    is_torch_op = getattr(node.target, "namespace", "") in ("aten", "prims")
    return dataclasses.replace(unsplit(node), nonlinear=not is_torch_op)


# -- atoms -----------------------------------------------------------------------------------------
class _Refinement:
    """A union-find over dims and factors. A leaf may be cut into smaller leaves, and a cut applies
    to all dims and factors that are tied to it.
    """

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []
        self.opaque: list[bool] = []
        self.cut_into: list[tuple[int, ...] | None] = []
        self.values: dict[Value, tuple[int, ...]] = {}
        self.factors: dict[str, dict[str, int]] = {}

    def leaf(self, size: int, opaque: bool = False) -> int:
        """Add a leaf of this size and return its number."""
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.opaque.append(opaque)
        self.cut_into.append(None)
        return len(self.parent) - 1

    def root(self, leaf: int) -> int:
        """Return the leaf that stands for all that this one is tied to."""
        while self.parent[leaf] != leaf:
            self.parent[leaf] = self.parent[self.parent[leaf]]
            leaf = self.parent[leaf]
        return leaf

    def expand(self, leaves: Iterable[int]) -> list[int]:
        """Return the uncut leaves that these consist of, outermost first, but for those of
        size 1.
        """
        uncut: list[int] = []
        stack = list(leaves)[::-1]
        while stack:
            leaf = self.root(stack.pop())
            cut_into = self.cut_into[leaf]
            if cut_into is None:
                uncut.append(leaf)
            else:
                stack.extend(reversed(cut_into))
        return [leaf for leaf in uncut if self.size[leaf] > 1]

    def atoms(self, leaf: int) -> tuple[Atom, ...]:
        """Return the atoms that a leaf consists of, outermost first."""
        return tuple(Atom(a, self.size[a], self.opaque[a]) for a in self.expand([leaf]))

    def tie(self, left: Iterable[int], right: Iterable[int]) -> None:
        """Unite two lists of leaves whose sizes have equal products. Each step cuts the larger of
        the first two leaves that differ; where the sizes do not divide, the remaining leaves become
        opaque.

        Example: tying [6] to [2, 3] cuts the leaf of 6 into 2 and 3.
        """
        left, right = list(left), list(right)
        while True:
            a, b = self.expand(left), self.expand(right)
            pair = next(((x, y) for x, y in zip(a, b, strict=False) if x != y), None)
            if pair is None:
                return
            x, y = pair
            if self.size[x] == self.size[y]:
                self.opaque[x] = self.opaque[x] or self.opaque[y]
                self.parent[y] = x
            elif self.size[x] % self.size[y] == 0:
                self.cut(x, self.size[y])
            elif self.size[y] % self.size[x] == 0:
                self.cut(y, self.size[x])
            else:
                for leaf in (*a[a.index(x) :], *b[b.index(y) :]):
                    self.opaque[leaf] = True
                return

    def cut(self, leaf: int, outer: int) -> None:
        """Cut a leaf into an outer one of this size and an inner one."""
        opaque = self.opaque[leaf]
        inner = self.size[leaf] // outer
        self.cut_into[leaf] = (self.leaf(outer, opaque), self.leaf(inner, opaque))


def _enter(node: fx.Node, rule: OpShardingRule | None, refined: _Refinement) -> None:
    """Add leaves for a node's results and factors, and tie them to those of its operands."""
    if node.op == "output" or node.target is operator.getitem:
        return
    values = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
    for index, value in enumerate(values):
        refined.values[node.name, index] = tuple(refined.leaf(size) for size in shape_of(value))
    if rule is None:
        return
    factors = refined.factors[node.name] = {
        name: refined.leaf(size) for name, size in rule.sizes.items()
    }

    def tie(dims: Dims, leaves: tuple[int, ...]) -> None:
        for names, leaf in zip(dims, leaves, strict=True):
            if names:
                refined.tie([factors[name] for name in names], [leaf])

    for operand, dims in zip(operands_of(node), rule.operands, strict=False):
        if operand is not None and dims is not None:
            tie(dims, refined.values[producer(operand)])
    for index, dims in enumerate(rule.results):
        tie(dims, refined.values[node.name, index])


def _cut_sequences(
    program: Program, rules: dict[str, OpShardingRule], refined: _Refinement, shortest: int
) -> bool:
    """Cut the sequences of token ids that attention by positions reads, of so many tokens or more,
    into an outer atom and an inner one, where their size has divisors. Return whether there are
    any such sequences.
    """
    banded = {
        leaf
        for name, rule in rules.items()
        if rule.band not in (None, Band())
        for leaf in refined.expand([refined.factors[name]["q"]])
    }
    any_cut = False
    for entry in program.signature.inputs:
        dims = refined.values.get((entry.node, 0), ())
        if entry.kind != "user" or len(dims) < 2:
            continue
        for leaf in refined.expand([dims[1]]):
            size = refined.size[leaf]
            inner = _turns(size)
            if leaf in banded and not refined.opaque[leaf] and size >= shortest:
                any_cut = True
                if inner > 1:
                    refined.cut(leaf, size // inner)
    return any_cut


def _turns(size: int) -> int:
    """Return the size of the inner atom of a sequence: a divisor that mesh axes divide, most often
    a power of two.

    >>> _turns(131072), _turns(16), _turns(12), _turns(15)
    (1024, 8, 4, 5)
    """
    twos = size & -size
    if 1 < twos < size:
        return min(twos, _MOST_TURNS)
    limit = min(size // 2, _MOST_TURNS)
    return next(n for n in range(max(1, limit), 0, -1) if size % n == 0)


def _batch_atom(program: Program, refined: _Refinement) -> Atom | None:
    """Return the outermost atom of the first dim of the user's first tensor, which by convention
    holds the samples of the batch; None where no input has one.
    """
    for entry in program.signature.inputs:
        if entry.kind == "user" and refined.values[entry.node, 0]:
            atoms = refined.atoms(refined.values[entry.node, 0][0])
            return atoms[0] if atoms else None
    return None


def _values_of_parameters(program: Program, gradient: frozenset[Value]) -> frozenset[Value]:
    """Return the values that carry a gradient and depend on no input of the user: parameters, their
    casts and their transposes.
    """
    fed_by_user: set[str] = set()
    users = {entry.node for entry in program.signature.inputs if entry.kind == "user"}
    for node in program.module.graph.nodes:
        if node.name in users or any(n.name in fed_by_user for n in node.all_input_nodes):
            fed_by_user.add(node.name)
    return frozenset(value for value in gradient if value[0] not in fed_by_user)


# -- what is searched ------------------------------------------------------------------------------
def _searched_and_gradient(program: Program) -> tuple[frozenset[str], frozenset[Value]]:
    """Return the nodes that depend on a parameter, and the values that carry a gradient."""
    kinds = {entry.node: entry for entry in program.signature.inputs}
    searched: set[str] = set()
    gradient: set[Value] = set()
    for node in program.module.graph.nodes:
        if node.op == "placeholder":
            entry = kinds[node.name]
            if entry.kind == "parameter" or entry.trainable:
                searched.add(node.name)
            if entry.trainable:
                gradient.add((node.name, 0))
        elif node.op == "call_function":
            _propagate(node, searched, gradient)
    return frozenset(searched), frozenset(gradient)


def _propagate(node: fx.Node, searched: set[str], gradient: set[Value]) -> None:
    """Add a node to `searched`, and its results to `gradient`, where its operands are there."""
    if any(source.name in searched for source in node.all_input_nodes):
        searched.add(node.name)
    carries_gradient = any(producer(source) in gradient for source in node.all_input_nodes)
    if not carries_gradient or node.target is aten.detach.default:
        return
    for index, value in enumerate(results_of(node)):
        if isinstance(value, torch.Tensor) and is_inexact(value.dtype):
            gradient.add((node.name, index))


# -- the pass `chains` -----------------------------------------------------------------------------
def chains(program: Program) -> Program:
    """Return the program with its searched nodes grouped by the module that they belong to.

    The module is a block's part ("blocks.3.mlp") or a child of the model ("head").
    """
    assert program.annotations is not None
    groups: dict[str, list[str]] = {}
    for node in program.module.graph.nodes:
        if node.op == "call_function" and node.name in program.annotations.searched:
            groups.setdefault(chain_name(node), []).append(node.name)
    rules = program.annotations.specs
    grouped = tuple(
        Chain(
            name,
            tuple(nodes),
            tuple(n for n in nodes if n in rules and rules[n].product is not None),
        )
        for name, nodes in groups.items()
    )
    return dataclasses.replace(program, chains=grouped)


def check_chains(program: Program) -> None:
    """The contract: every searched node is in exactly one chain."""
    assert program.annotations is not None
    members = [name for chain in program.chains for name in chain.nodes]
    calls = {n.name for n in program.module.graph.nodes if n.op == "call_function"}
    assert len(members) == len(set(members)), "a node is in two chains"
    assert set(members) == program.annotations.searched & calls, "a searched node is in no chain"
