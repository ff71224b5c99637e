"""The roles of a model's dims: its batch, its sequence and its residual stream, read off inputs and
parameters, and the loop dims m, n and k of its matmuls.

Example: in `x @ w` of a linear layer, x is (m, k) and w is (k, n); m holds batch and sequence.
Called by the planner, for what a layout may split, and by cost/symbols.py, for names in formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.graph import producer
from autopar.ir.program import Annotations, Atom, Program
from autopar.ir.sharding_rule import OpShardingRule, operands_of

aten = torch.ops.aten

Factors = dict[str, tuple[Atom, ...]]
_BATCHED = (aten.einsum.default, aten.bmm.default, aten.matmul.default)
_CASTS_AND_TRANSPOSES = (
    aten._to_copy.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
)


@dataclass(frozen=True)
class Kinds:
    """The numbers of the atoms that are a model's batch, its sequence, its residual stream, and its
    experts.
    """

    batch: frozenset[int] = frozenset()
    sequence: frozenset[int] = frozenset()
    residual: frozenset[int] = frozenset()
    experts: frozenset[int] = frozenset()

    def allowed(self, splits: str, atom: Atom) -> bool:
        """Whether a rule that splits such dims ("batch", "features", "inner", …) may split an
        atom. "features" excludes batch and sequence, "inner" the residual stream too; any other
        word allows every atom.
        """
        number = atom.number
        match splits:
            case "batch":
                return number in self.batch
            case "sequence":
                return number in self.sequence
            case "residual":
                return number in self.residual
            case "experts":
                return number in self.experts
            case "features":
                return number not in self.batch | self.sequence
            case "unsequenced":
                return number not in self.sequence
            case "inner":
                return number not in self.batch | self.sequence | self.residual
        return True


def goes_with_weight(notes: Annotations, node: fx.Node) -> bool:
    """Whether a node casts or transposes a parameter. Such a node is laid out as the consumer of
    the parameter needs it, whatever a layout says of its module.
    """
    return node.target in _CASTS_AND_TRANSPOSES and (node.name, 0) in notes.weights


def has_weight(rule: OpShardingRule) -> bool:
    """Whether a node is a matmul that has a weight: an operand with a dim of n and none of m."""
    if rule.product is None or not rule.product[1]:
        return False
    m_factors = rule.product[0]
    return any(
        dims is not None
        and not any(f in m_factors for dim in dims for f in dim)
        and any(f in rule.product[1] for dim in dims for f in dim)
        for dims in rule.operands
    )


def loop_dim_of(rule: OpShardingRule, factor: str) -> str:
    """Return the loop dim ("m", "n" or "k") of a factor of a matmul; "" if it has none."""
    assert rule.product is not None
    return next((x for x, role in zip("mnk", rule.product, strict=True) if factor in role), "")


# -- facts about a model ---------------------------------------------------------------------------
def weight_matmuls(program: Program) -> Iterator[tuple[fx.Node, OpShardingRule]]:
    """Yield the matmuls with a weight, in the order of the graph."""
    assert program.annotations is not None
    for node in program.module.graph.nodes:
        rule = program.annotations.specs.get(node.name)
        if rule is not None and has_weight(rule):
            yield node, rule


def parameter_products(program: Program) -> Iterator[fx.Node]:
    """Yield the matmuls and convolutions of which an operand depends on parameters alone. A
    convolution is no matmul with a weight (`has_weight`): its groups are rows of the weight as well
    as of the result.
    """
    notes = program.annotations
    assert notes is not None
    for node in program.module.graph.nodes:
        rule = notes.specs.get(node.name)
        if rule is not None and rule.product is not None and rule.product[1]:
            present = [n for n in operands_of(node) if n is not None]
            if any(producer(n) in notes.weights for n in present):
                yield node


def loop_dim_atoms(program: Program, node: fx.Node) -> dict[str, tuple[Atom, ...]]:
    """Return the atoms of the loop dims "m", "n" and "k" of a matmul."""
    assert program.annotations is not None
    rule, factors = program.annotations.specs[node.name], program.annotations.factors[node.name]
    assert rule.product is not None
    return {
        letter: tuple(atom for factor in role for atom in factors[factor])
        for letter, role in zip("mnk", rule.product, strict=True)
    }


def dim_kinds(program: Program) -> Kinds:
    """Return which atoms are batch (the outermost atom of the first input's first dim, and that of
    every other input whose first dim is as large, as of images beside their captions), sequence
    (the second dim of token ids) and residual stream (every second width in the chain of matmuls).
    """
    notes = program.annotations
    assert notes is not None
    batch = set() if notes.batch is None else {notes.batch.number}
    sequence: set[int] = set()
    for entry in program.signature.inputs:
        dims = notes.dims.get((entry.node, 0), ())
        node = next(n for n in program.module.graph.nodes if n.name == entry.node)
        if entry.kind == "user" and len(dims) > 1 and not node.meta["val"].dtype.is_floating_point:
            sequence |= {atom.number for atom in dims[1]}
        if entry.kind == "user" and notes.batch is not None and dims and dims[0]:
            samples = dims[0][0]
            batch |= {samples.number} if samples.size == notes.batch.size else set()
    residual = _residual_atoms(program)
    experts = frozenset(atom.number for atom in expert_atoms(program))
    return Kinds(frozenset(batch), frozenset(sequence) - residual, residual, experts)


def expert_atoms(program: Program) -> tuple[Atom, ...]:
    """Return the atoms that number a model's experts, in the order of the graph: those of a layer
    of experts that is one op, and those that an einsum keeps of a weight and of its other operand,
    as e of "ecd,edf->ecf".
    """
    notes = program.annotations
    assert notes is not None
    atoms: dict[int, Atom] = {}
    for node in program.module.graph.nodes:
        rule = notes.specs.get(node.name)
        if rule is None or rule.product is None:
            continue
        names = rule.uneven
        operands = [n for n in operands_of(node) if n is not None]
        if not names and len(operands) == 2 and node.target in _BATCHED:
            in_weight = [producer(n) in notes.weights for n in operands]
            left, right = ({f for dim in dims or () for f in dim} for dims in rule.operands)
            in_result = {f for dim in rule.results[0] for f in dim}
            names = frozenset(left & right & in_result) if sum(in_weight) == 1 else names
        for name in sorted(names):
            atoms |= {atom.number: atom for atom in notes.factors[node.name][name]}
    return tuple(atoms.values())


def _residual_atoms(program: Program) -> frozenset[int]:
    """Return every second width in the chains of matmuls, from the input of the first one on. These
    are the widths of the residual stream, where there is one. A matmul with the same kind of width
    on both sides (BERT's head) changes nothing.
    """
    residual: set[int] = set()
    inner: set[int] = set()
    for node, _ in weight_matmuls(program):
        sides = loop_dim_atoms(program, node)
        far, near = ({atom.number for atom in sides[letter]} for letter in "nk")
        if near & inner or (far & residual and not near & residual):
            near, far = far, near
        residual |= near - inner
        inner |= far - residual
    return frozenset(residual)


def parameter_loop_dims(program: Program) -> dict[str, tuple[str, ...]]:
    """Return the loop dim of each dim of every parameter that is the weight of a matmul."""
    loop_dims: dict[str, tuple[str, ...]] = {}
    parameters = {entry.node for entry in program.signature.inputs if entry.kind == "parameter"}
    for node, rule in weight_matmuls(program):
        for operand, dims in zip(operands_of(node), rule.operands, strict=True):
            if (
                operand is not None
                and dims is not None
                and producer(operand)[0] in parameters
                and len(dims) > 1
            ):
                loop_dims[producer(operand)[0]] = tuple(
                    loop_dim_of(rule, dim[0]) if dim else "" for dim in dims
                )
    return loop_dims
