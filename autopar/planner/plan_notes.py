"""What a plan says of itself, in sentences: matmuls that an axis replicates, sizes of weights that
no axis divides, and how many tokens of a router it takes for granted.

Example: a vocabulary of 50,257 rows on an axis of 4 ranks is padded to 50,260 (padding.py), which
`padding_notes` says. Where an op cannot take the padding, the head splits its summed dim, so that
the logits of all classes are sent; `uneven_notes` names the vocabulary and the next multiple.
"8 experts are split over expert of 8 ranks: priced for 8,192 tokens an expert" is an
`expert_notes`. An annotated program and its plan enter, sentences leave. Called by confirm.py and
why.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.graph import chain_name, module_path, producer, where
from autopar.ir.mesh import Axis
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.sharding_rule import operands_of
from autopar.ir.strategy import IDLE

aten = torch.ops.aten

_LARGE = 1000  # entries from which a size is worth a note
_NOTICEABLE = 0.01  # share of the bytes that a rank sends, from which they are


# -- matmuls on axes that replicate them -----------------------------------------------------------
@dataclass(frozen=True)
class Replicated:
    """A matmul that an axis replicates. `divides`: the axis divides one of the matmul's dims, and
    the layout splits none of them.
    """

    node: fx.Node
    axis: Axis
    sizes: str
    divides: bool

    def __str__(self) -> str:
        reason = f"may split none of {self.sizes} here"
        if not self.divides:
            reason = f"divides none of {self.sizes}"
        return f"{where(self.node)}: axis {self.axis.name} of {self.axis.size} {reason}"


def replicated_matmuls(program: Program, plan: Plan) -> list[Replicated]:
    """Return the matmuls that axes replicate, one entry for each matmul and axis."""
    notes = program.annotations
    assert notes is not None
    replicated: list[Replicated] = []
    for node in program.module.graph.nodes:
        rule = notes.specs.get(node.name)
        if node.name not in plan.choices or rule is None or rule.product is None:
            continue
        factors = notes.factors[node.name]
        splittable = {f: factors[f] for f in rule.sizes if rule.splittable(f) and factors[f]}
        sizes = ", ".join(
            f"{f} = {' × '.join(str(a.size) for a in atoms)}" for f, atoms in splittable.items()
        )
        for axis, split in zip(plan.mesh.axes, plan.choices[node.name].splits, strict=True):
            divides = any(a.size % axis.size == 0 for atoms in splittable.values() for a in atoms)
            if split in IDLE:
                replicated.append(Replicated(node, axis, sizes, divides))
    return replicated


def idle_note(
    program: Program, plan: Plan, replicated: Sequence[Replicated], seconds: Mapping[str, float]
) -> str:
    """Return the sentence of a plan that "auto" chose, in which axes replicate matmuls that they
    could split: how many, and what splitting them could save at most. `replicated`: those matmuls;
    `seconds`: of every node's computation on a rank.
    """
    notes = program.annotations
    assert notes is not None
    count = sum(
        1 for name in plan.choices if name in notes.specs and notes.specs[name].product is not None
    )
    sizes: dict[str, int] = {}
    for each in replicated:
        sizes[each.node.name] = sizes.get(each.node.name, 1) * each.axis.size
    saved = sum(seconds.get(name, 0.0) * (1 - 1 / size) for name, size in sizes.items())
    axes = ", ".join(dict.fromkeys(f"{each.axis.name} of {each.axis.size}" for each in replicated))
    gain = (
        "fewer ranks would be as fast" if len(sizes) == count else "more ranks gain nothing there"
    )
    return (
        f"{len(sizes)} of {count} matmuls run whole on all ranks of axis {axes}: splitting them "
        f"would save {saved * 1e3:.3g} ms of a step at most, and cost more in what ranks then send "
        f"and start; {gain}"
    )


# -- sizes of weights that no axis divides ---------------------------------------------------------
@dataclass(frozen=True)
class Uneven:
    """A large dim of weights that an axis does not divide, though the nodes of these weights do not
    split the batch there.
    """

    size: int
    axis: Axis
    vocabulary: bool
    nodes: tuple[fx.Node, ...]

    @property
    def multiple(self) -> int:
        """The next size that the axis divides."""
        return math.ceil(self.size / self.axis.size) * self.axis.size

    def sentence(self, sent_bytes: float) -> str:
        """Return what the size costs and what to do about it."""
        what = "the vocabulary" if self.vocabulary else "the features"
        names = list(dict.fromkeys(module_path(n) or n.name for n in self.nodes))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (
            f"axis {self.axis.name} of {self.axis.size} cannot split {self.size:,}, {what} of "
            f"{', '.join(names[:3])}{more}, which it does not divide: a rank sends "
            f"{sent_bytes / 1e6:,.2f} MB in a step around these modules; in the model, pad it to "
            f"the next multiple, {self.multiple:,}"
        )


def uneven(program: Program, plan: Plan) -> list[Uneven]:
    """Return the large dims of weights that an axis does not divide, where it splits no batch."""
    notes = program.annotations
    assert notes is not None
    nodes_of: dict[tuple[int, Axis], list[fx.Node]] = {}
    vocabulary: set[int] = set()
    for node in program.module.graph.nodes:
        vocabulary |= {size for size in _class_sizes(program, node) if size >= _LARGE}
        if node.name not in plan.choices:
            continue
        for factor in _weight_factors(program, node):
            size = notes.specs[node.name].sizes[factor]
            for axis, split in zip(plan.mesh.axes, plan.choices[node.name].splits, strict=True):
                if size % axis.size and size >= _LARGE and not _splits_rows(program, node, split):
                    nodes_of.setdefault((size, axis), []).append(node)
    return [
        Uneven(size, axis, size in vocabulary, tuple(nodes))
        for (size, axis), nodes in nodes_of.items()
    ]


def uneven_notes(program: Program, plan: Plan) -> tuple[str, ...]:
    """Return one sentence for each size and axis of `uneven` that makes ranks send a noticeable
    share of the step's bytes. A size that the plan pads has its own note, by `padding_notes`.
    """
    return tuple(note for _, note in _notes_by_nodes(program, plan))


def uneven_notes_at(program: Program, plan: Plan, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the sentences that are about one of these nodes."""
    return tuple(
        note
        for each, note in _notes_by_nodes(program, plan)
        if any(node.name in names for node in each.nodes)
    )


def _notes_by_nodes(program: Program, plan: Plan) -> Iterator[tuple[Uneven, str]]:
    for each in uneven(program, plan):
        readers = (user for node in each.nodes for user in node.users)
        chains = {chain_name(node) for node in (*each.nodes, *readers) if node.op != "output"}
        sent = sum(
            collective.bytes
            for collective in plan.collectives
            if collective.chain in chains and each.axis.name in collective.axes
        )
        padded = any(each.size == padding.padded for padding in plan.padding)
        if sent > _NOTICEABLE * plan.comm_bytes and not padded:
            yield each, each.sentence(sent)


def padding_notes(program: Program, plan: Plan) -> tuple[str, ...]:
    """Return one sentence for each size that the plan pads: what it is of, and what that costs. The
    program is the padded one.
    """
    classes = {size for node in program.module.graph.nodes for size in _class_sizes(program, node)}
    places: dict[tuple[int, int], list[str]] = {}
    stored: dict[tuple[int, int], bool] = {}
    nodes = {node.name: node for node in program.module.graph.nodes}
    entries = {entry.node: entry.target for entry in program.signature.inputs}
    fed = {entry.node for entry in program.signature.inputs if entry.kind == "user"}
    rows = {
        ("batch" if each.dim == 0 else "sequence", each.size, each.padded)
        for each in plan.padding
        if each.node in fed
    }
    for each in (each for each in plan.padding if each.node not in fed):
        key = each.size, each.padded
        of = entries.get(each.node) or module_path(nodes[each.node]) or each.node
        places.setdefault(key, []).append(of.rpartition(".")[0] or of)
        stored[key] = stored.get(key, True) and bool(program.pads(each.node))
    return tuple(_rows_note(*key) for key in sorted(rows)) + tuple(
        _padding_note(key, key[1] in classes, names, stored[key]) for key, names in places.items()
    )


def _rows_note(what: str, size: int, padded: int) -> str:
    rows = "rows" if what == "batch" else "tokens"
    return (
        f"the {what} is padded inside the graph, from {size:,} to {padded:,} {rows}, because no "
        f"axis divides it: ops that split the {what} compute {100 * (padded / size - 1):.2g} % "
        f"more; the added {rows} are copies, which no loss counts and no output has"
    )


def _padding_note(
    sizes: tuple[int, int], vocabulary: bool, names: Sequence[str], stored: bool
) -> str:
    size, padded = sizes
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    what = "the vocabulary" if vocabulary else f"a dim of {size:,}"
    costs = f"{100 * (padded / size - 1):.2g} %"
    weights = "" if stored else ", and its weights are padded anew in every step"
    return (
        f"{what} of {', '.join(listed[:3])}{more} is padded with zeros inside the graph, from "
        f"{size:,} to {padded:,}, because no axis divides it: ops that split it compute and send "
        f"{costs} more{weights}; parameters, checkpoints and outputs keep their sizes"
    )


def _class_sizes(program: Program, node: fx.Node) -> Iterator[int]:
    """Yield the number of rows of an embedding, and of classes of a cross entropy."""
    assert program.annotations is not None
    if node.target is aten.embedding.default:
        dims = program.annotations.specs[node.name].operands[0]
        if dims:
            yield program.annotations.specs[node.name].sizes[dims[0][0]]
    elif node.target is aten.cross_entropy_loss.default:
        source = operands_of(node)[0]
        if source is not None:
            shape = source.meta["val"].shape
            yield int(shape[1 if len(shape) > 1 else 0])


def _weight_factors(program: Program, node: fx.Node) -> Iterator[str]:
    """Yield the factors of the weights of a matmul or an embedding that an axis might split."""
    notes = program.annotations
    assert notes is not None
    rule = notes.specs.get(node.name)
    if rule is None or not (rule.product or node.target is aten.embedding.default):
        return
    weights = {
        factor
        for operand, dims in zip(operands_of(node), rule.operands, strict=False)
        if operand is not None and dims is not None and producer(operand) in notes.weights
        for dim in dims
        for factor in dim
    }
    yield from (f for f in rule.sizes if f in weights and rule.splittable(f))


def _splits_rows(program: Program, node: fx.Node, split: str) -> bool:
    """Whether a node splits a dim of its batch there, which no weight has."""
    notes = program.annotations
    assert notes is not None
    rule = notes.specs[node.name]
    return split in rule.sizes and split not in set(_weight_factors(program, node))


# -- tokens of experts ----------------------------------------------------------------------------
def expert_notes(program: Program, plan: Plan) -> tuple[str, ...]:
    """Return a sentence for each size of layers whose experts a plan splits, without repeats."""
    assert program.annotations is not None
    notes: dict[str, None] = {}
    for name, choice in plan.choices.items():
        rule = program.annotations.specs.get(name)
        if rule is None or not rule.uneven:
            continue
        axes = [
            f"{axis.name} of {axis.size}"
            for axis, split in zip(plan.mesh.axes, choice.splits, strict=True)
            if split in rule.uneven
        ]
        if axes:
            sizes = rule.sizes
            tokens = sizes["k"] * sizes["t"] / sizes["e"]
            notes[
                f"{sizes['e']} experts are split over {' and '.join(axes)} ranks: priced for "
                f"{tokens:,.0f} tokens an expert (k·T/E of {sizes['k']}·{sizes['t']:,}/"
                f"{sizes['e']}), and {rule.skew:g} times as many on the busiest rank; no token is "
                "dropped, whatever the router does"
            ] = None
    return tuple(notes)
