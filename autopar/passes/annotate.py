"""annotate: give every node its rule, and refine the dims of the whole graph into the atoms that
all ops agree on.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import producer, where
from autopar.ir.program import Annotations, Atom, Program, Value
from autopar.ir.sharding_rule import Dims, OpShardingRule, bound, operands_of, results_of, shape_of
from autopar.ops.custom_functions import is_custom
from autopar.ops.rules import rule_of, unsplit
from autopar.ops.rules.probe import function_rule, probe, unrepeatable

aten = torch.ops.aten
_RANDOM = {
    aten.dropout.default,
    aten.scaled_dot_product_attention.default,
}  # that every layout draws alike


def annotate(program: Program) -> Program:
    """Attach `Annotations`: rules, atoms, and which values are searched and carry gradients. Raises
    PlanError for random ops.
    """
    graph = program.module.graph
    _refuse_random(graph)
    specs, probed, unknown = _specs(graph)
    refined = _Refinement()
    for node in graph.nodes:
        _enter(node, specs.get(node.name), refined)
    searched, gradient = _flow(program)
    annotations = Annotations(
        specs,
        {
            value: tuple(refined.atoms(leaf) for leaf in dims)
            for value, dims in refined.values.items()
        },
        {
            name: {factor: refined.atoms(leaf) for factor, leaf in factors.items()}
            for name, factors in refined.factors.items()
        },
        searched,
        gradient,
        _batch(program, refined),
        probed,
        unknown,
        _of_parameters(program, gradient),
    )
    return dataclasses.replace(program, annotations=annotations)


def reduced_in(program: Program, dtype: torch.dtype | None) -> Program:
    """The annotated program, to add up the gradients of its parameters in `dtype`."""
    assert program.annotations is not None
    notes = dataclasses.replace(program.annotations, reduce_dtype=dtype)
    return dataclasses.replace(program, annotations=notes)


def kept_whole(program: Program) -> Program:
    """The annotated program, to store its parameters and to return its results whole on all ranks:
    only what happens in between is laid out.
    """
    assert program.annotations is not None
    notes = dataclasses.replace(program.annotations, whole=True)
    return dataclasses.replace(program, annotations=notes)


def check(program: Program) -> None:
    """The contract: every call has a rule that fits its tensors, and every value's atoms multiply
    up to its shape.
    """
    notes = program.annotations
    assert notes is not None, "annotate left no annotations"
    for node in program.module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            assert node.name in notes.specs, f"{node.name} has no rule"
            found, wanted = len(notes.specs[node.name].results), len(results_of(node))
            assert found == wanted, f"the rule of {node.name} has {found} results, not {wanted}"
        for index, value in enumerate(results_of(node)) if node.op != "output" else ():
            if isinstance(value, torch.Tensor) and node.target is not operator.getitem:
                for atoms, size in zip(notes.dims[node.name, index], shape_of(value), strict=True):
                    product = 1
                    for atom in atoms:
                        product *= atom.size
                    fits = product == size or not size
                    assert fits, f"{node.name}: atoms {atoms} for a dim of {size}"


def _refuse_random(graph: fx.Graph) -> None:
    """Random numbers other than dropout's: every rank would draw its own."""
    drawn = [node for node in graph.nodes if _draws(node) or _is_unrepeatable(node)]
    if drawn:
        listed = "\n".join(f"  {node.target} {where(node)}" for node in drawn)
        raise PlanError(
            "the model draws random numbers, which would differ between ranks that must "
            f"agree:\n{listed}\n"
            "draw them outside of the model and pass them as inputs, or use dropout (an op of your "
            "own counts if it gives other results when it runs again on the same operands)"
        )


def _is_unrepeatable(node: fx.Node) -> bool:
    """Ops are run on several ranks, and where no parameter is involved copied for each consumer."""
    return node.op == "call_function" and node.target is not operator.getitem and unrepeatable(node)


def _draws(node: fx.Node) -> bool:
    if (
        torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
        or node.target in _RANDOM
    ):
        return False
    values = bound(node)
    rate = next((values[name] for name in ("p", "dropout") if name in values), None)
    training = next((values[name] for name in ("train", "training") if name in values), None)
    return training is None or bool(training and rate != 0)


def _specs(graph: fx.Graph) -> tuple[dict[str, OpShardingRule], tuple[str, ...], tuple[str, ...]]:
    specs: dict[str, OpShardingRule] = {}
    probed: set[str] = set()
    unknown: set[str] = set()
    known: dict[object, OpShardingRule | None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        spec = rule_of(node)
        if spec is None:
            trial = function_rule if is_custom(node.target) else probe
            spec = trial(node, known)
            (probed if spec is not None else unknown).add(str(node.target))
        specs[node.name] = spec or _unknown(node)
    return specs, tuple(sorted(probed)), tuple(sorted(unknown))


def _unknown(node: fx.Node) -> OpShardingRule:
    """The rule of an op that nothing is known of; the gradients of torch's own are linear."""
    own = getattr(node.target, "namespace", "") in ("aten", "prims")
    return dataclasses.replace(unsplit(node), nonlinear=not own)


# -- atoms -----------------------------------------------------------------------------------------
class _Refinement:
    """Union-find over dims and factors, where a leaf may be cut into smaller ones; cuts reach all
    that is tied to it.
    """

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []
        self.opaque: list[bool] = []
        self.parts: list[tuple[int, ...] | None] = []
        self.values: dict[Value, tuple[int, ...]] = {}
        self.factors: dict[str, dict[str, int]] = {}

    def leaf(self, size: int, opaque: bool = False) -> int:
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.opaque.append(opaque)
        self.parts.append(None)
        return len(self.parent) - 1

    def root(self, leaf: int) -> int:
        while self.parent[leaf] != leaf:
            self.parent[leaf] = self.parent[self.parent[leaf]]
            leaf = self.parent[leaf]
        return leaf

    def expand(self, leaves: Iterable[int]) -> list[int]:
        found: list[int] = []
        stack = list(leaves)[::-1]
        while stack:
            leaf = self.root(stack.pop())
            parts = self.parts[leaf]
            if parts is None:
                found.append(leaf)
            else:
                stack.extend(reversed(parts))
        return [leaf for leaf in found if self.size[leaf] > 1]

    def atoms(self, leaf: int) -> tuple[Atom, ...]:
        return tuple(Atom(a, self.size[a], self.opaque[a]) for a in self.expand([leaf]))

    def tie(self, left: Iterable[int], right: Iterable[int]) -> None:
        """Make two lists of leaves of equal product one: cut the larger at each step; where no cut
        fits, the rest is opaque.
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
                self._cut(x, self.size[y])
            elif self.size[y] % self.size[x] == 0:
                self._cut(y, self.size[x])
            else:
                for leaf in (*a[a.index(x) :], *b[b.index(y) :]):
                    self.opaque[leaf] = True
                return

    def _cut(self, leaf: int, outer: int) -> None:
        opaque = self.opaque[leaf]
        self.parts[leaf] = (self.leaf(outer, opaque), self.leaf(self.size[leaf] // outer, opaque))


def _enter(node: fx.Node, spec: OpShardingRule | None, refined: _Refinement) -> None:
    """Make the leaves of a node's results and factors, and tie them to its operands'."""
    if node.op == "output" or node.target is operator.getitem:
        return
    values = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
    for index, value in enumerate(values):
        refined.values[node.name, index] = tuple(refined.leaf(size) for size in shape_of(value))
    if spec is None:
        return
    factors = refined.factors[node.name] = {
        name: refined.leaf(size) for name, size in spec.sizes.items()
    }

    def tie(dims: Dims, leaves: tuple[int, ...]) -> None:
        for names, leaf in zip(dims, leaves, strict=True):
            if names:
                refined.tie([factors[name] for name in names], [leaf])

    for operand, dims in zip(operands_of(node), spec.operands, strict=False):
        if operand is not None and dims is not None:
            tie(dims, refined.values[producer(operand)])
    for index, dims in enumerate(spec.results):
        tie(dims, refined.values[node.name, index])


def _batch(program: Program, refined: _Refinement) -> Atom | None:
    """The outermost atom of the first dim of the user's first tensor: by convention the samples of
    the batch.
    """
    for entry in program.signature.inputs:
        if entry.kind == "user" and refined.values[entry.node, 0]:
            atoms = refined.atoms(refined.values[entry.node, 0][0])
            return atoms[0] if atoms else None
    return None


def _of_parameters(program: Program, gradient: frozenset[Value]) -> frozenset[Value]:
    """What hangs on no input of the user and carries a gradient: a parameter, its cast, its
    transpose.
    """
    fed: set[str] = set()
    users = {entry.node for entry in program.signature.inputs if entry.kind == "user"}
    for node in program.module.graph.nodes:
        if node.name in users or any(n.name in fed for n in node.all_input_nodes):
            fed.add(node.name)
    return frozenset(value for value in gradient if value[0] not in fed)


# -- what is searched ------------------------------------------------------------------------------
def _flow(program: Program) -> tuple[frozenset[str], frozenset[Value]]:
    """Nodes whose values hang on a parameter, and values that carry a gradient."""
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
            _flow_through(node, searched, gradient)
    return frozenset(searched), frozenset(gradient)


def _flow_through(node: fx.Node, searched: set[str], gradient: set[Value]) -> None:
    if any(source.name in searched for source in node.all_input_nodes):
        searched.add(node.name)
    carried = any(producer(source) in gradient for source in node.all_input_nodes)
    if not carried or node.target is aten.detach.default:
        return
    for index, value in enumerate(results_of(node)):
        if isinstance(value, torch.Tensor) and (
            value.dtype.is_floating_point or value.dtype.is_complex
        ):
            gradient.add((node.name, index))
