"""What the dims of a model mean: its batch, its sequence and its residual stream, read off inputs
and parameters, and the loop dims m, n and k of its matrix products.

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
_CARRY_ON = (aten._to_copy.default, aten.t.default, aten.transpose.int, aten.permute.default)


@dataclass(frozen=True)
class Kinds:
    """Which atoms of a model are its batch, its sequence, and its residual stream: read off inputs
    and parameters.
    """

    batch: frozenset[int] = frozenset()
    sequence: frozenset[int] = frozenset()
    residual: frozenset[int] = frozenset()

    def allowed(self, splits: str, atom: Atom) -> bool:
        number = atom.number
        match splits:
            case "batch":
                return number in self.batch
            case "sequence":
                return number in self.sequence
            case "residual":
                return number in self.residual
            case "features":
                return number not in self.batch | self.sequence
            case "unsequenced":
                return number not in self.sequence
            case "inner":
                return number not in self.batch | self.sequence | self.residual
        return True


def goes_with_weight(notes: Annotations, node: fx.Node) -> bool:
    """Whether a node casts or transposes a parameter: it is laid out as the parameter's use wants
    it, whatever a layout asks of its module.
    """
    return node.target in _CARRY_ON and (node.name, 0) in notes.weights


def has_weight(spec: OpShardingRule) -> bool:
    """Whether a product has an operand without any dim of m: a weight."""
    if spec.product is None or not spec.product[1]:
        return False
    rows = spec.product[0]
    return any(
        dims is not None
        and not any(f in rows for dim in dims for f in dim)
        and any(f in spec.product[1] for dim in dims for f in dim)
        for dims in spec.operands
    )


def loop_dim_of(spec: OpShardingRule, factor: str) -> str:
    """The loop dim that a factor of a product belongs to."""
    assert spec.product is not None
    return next((x for x, role in zip("mnk", spec.product, strict=True) if factor in role), "")


# -- facts about a model ---------------------------------------------------------------------------
def weight_matmuls(program: Program) -> Iterator[tuple[fx.Node, OpShardingRule]]:
    """The products with a weight, in the order of the graph."""
    assert program.annotations is not None
    for node in program.module.graph.nodes:
        spec = program.annotations.specs.get(node.name)
        if spec is not None and has_weight(spec):
            yield node, spec


def loop_dim_atoms(program: Program, node: fx.Node) -> dict[str, tuple[Atom, ...]]:
    """What the loop dims m, n and k of a product are made of."""
    assert program.annotations is not None
    spec, factors = program.annotations.specs[node.name], program.annotations.factors[node.name]
    assert spec.product is not None
    return {
        letter: tuple(atom for factor in role for atom in factors[factor])
        for letter, role in zip("mnk", spec.product, strict=True)
    }


def dim_kinds(program: Program) -> Kinds:
    """Batch: the outermost atom of the first input's first dim. Sequence: the second dim of token
    ids. Residual: see `_residual`.
    """
    notes = program.annotations
    assert notes is not None
    sequence: set[int] = set()
    for entry in program.signature.inputs:
        dims = notes.dims.get((entry.node, 0), ())
        node = next(n for n in program.module.graph.nodes if n.name == entry.node)
        if entry.kind == "user" and len(dims) > 1 and not node.meta["val"].dtype.is_floating_point:
            sequence |= {atom.number for atom in dims[1]}
    batch = frozenset() if notes.batch is None else frozenset({notes.batch.number})
    residual = _residual(program)
    return Kinds(batch, frozenset(sequence) - residual, residual)


def _residual(program: Program) -> frozenset[int]:
    """Every second width in the chains of products, from the input of the first one on: that of the
    residual stream, where there is one. A product that has the same kind of width on both sides
    (BERT's head) changes nothing.
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
    """For every parameter that is the weight of a product: the loop dim of each of its dims."""
    found: dict[str, tuple[str, ...]] = {}
    parameters = {entry.node for entry in program.signature.inputs if entry.kind == "parameter"}
    for node, spec in weight_matmuls(program):
        for operand, dims in zip(operands_of(node), spec.operands, strict=True):
            if (
                operand is not None
                and dims is not None
                and producer(operand)[0] in parameters
                and len(dims) > 1
            ):
                found[producer(operand)[0]] = tuple(
                    loop_dim_of(spec, dim[0]) if dim else "" for dim in dims
                )
    return found
