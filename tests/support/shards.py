"""One call of an op: its strategies, and its run on the shards of a mesh against one device."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import pytree
from autopar.errors import LayoutError
from autopar.ir.layout import I, Layout, P, R, S, State
from autopar.ir.mesh import Mesh
from autopar.ir.program import Atom, Input, Program, Signature
from autopar.ir.sharding_rule import OpShardingRule, operands_of, results_of, shape_of
from autopar.ir.strategy import Strategy, axis_choices, strategies
from autopar.ops.local import Call, emit_local
from autopar.passes.annotate import annotate
from autopar.runtime import lockstep

SEED = 20_011
_GRADIENT = {"I": I, "R": P, "P": R}  # the state of the gradient of a value in this state


@dataclass(frozen=True)
class Case:
    """One call of an op. `reference` computes what is expected, where the op itself is random."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    reference: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.target}{'/' + self.note if self.note else ''}"

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]


def call(
    target: Any,
    *args: Any,
    note: str = "",
    reference: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Case:
    return Case(target, args, kwargs, note, reference)


def real(*shape: int, low: float = 0.0) -> Tensor:
    """Distinct float64 numbers, above `low` where it is not 0, with a gradient."""
    generator = torch.Generator().manual_seed(math.prod(shape) + len(shape))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (numbers.abs() + low if low else numbers).requires_grad_()


def integers(limit: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape) + limit)
    return torch.randint(0, limit, shape, generator=generator)


def flags(*shape: int) -> Tensor:
    return integers(2, *shape).bool()


# -- a graph of one node ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Traced:
    """A case as the search sees it: its node, its rule, the atoms of its factors."""

    case: Case
    node: fx.Node
    rule: OpShardingRule
    factors: dict[str, tuple[Atom, ...]]
    gradient: bool

    def strategies(self, mesh: str, cut: bool = False) -> list[Strategy]:
        """All of them on a mesh.

        `cut`: as if other ops had cut every factor into two atoms, so that inner digits are tried.
        """
        factors = {n: _halved(a) for n, a in self.factors.items()} if cut else self.factors
        operand_shapes = tuple(
            None if n is None else shape_of(n.meta["val"]) for n in operands_of(self.node)
        )
        result_shapes = tuple(shape_of(v) for v in results_of(self.node))
        on = Mesh.parse(mesh)
        choices = itertools.product(*axis_choices(self.rule, factors, on, self.gradient))
        return strategies(self.rule, factors, on, operand_shapes, result_shapes, choices, True)


def _halved(atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
    halves: list[Atom] = []
    for atom in atoms:
        outer = next((p for p in (2, 3) if atom.size % p == 0 and atom.size > p), 1)
        pieces = [outer, atom.size // outer] if outer > 1 else [atom.size]
        halves.extend(
            Atom(1000 * (atom.number + 1) + i, p, atom.opaque) for i, p in enumerate(pieces)
        )
    return tuple(halves)


def graph_of(case: Case) -> tuple[fx.Graph, fx.Node]:
    """A graph that takes the tensors of the case and makes the one call."""
    graph = fx.Graph()

    def enter(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        node = graph.placeholder(f"t{len(graph.nodes)}")
        node.meta["val"] = tensor
        return node

    args, kwargs = pytree.tree_map(enter, (case.args, case.kwargs))
    node = graph.call_function(case.target, args, kwargs)
    node.meta["val"] = case.target(*case.args, **case.kwargs)
    graph.output(node)
    return graph, node


def trace(case: Case) -> Traced:
    graph, node = graph_of(case)
    inputs = tuple(
        Input("user", n.name, n.name, trainable=n.meta["val"].requires_grad)
        for n in graph.nodes
        if n.op == "placeholder"
    )
    no_arguments = pytree.tree_structure(())
    program = annotate(
        Program(fx.GraphModule({}, graph), Signature(inputs, (), no_arguments, no_arguments))
    )
    notes = program.annotations
    assert notes is not None
    return Traced(
        case, node, notes.specs[node.name], notes.factors[node.name], bool(notes.gradient)
    )


# -- layouts at random -----------------------------------------------------------------------------


def random_layout(mesh: Mesh, shape: tuple[int, ...], kinds: str, draw: random.Random) -> Layout:
    """A legal layout whose axes take states of `kinds`, in a random order; R if no digit fits."""
    layout = Layout(mesh, shape, (R,) * len(mesh.axes))
    for axis in draw.sample(mesh.axes, len(mesh.axes)):
        kind = draw.choice(kinds)
        state = _random_digit(layout, axis.name, draw) if kind == "S" else State(kind)  # type: ignore[arg-type]
        layout = layout if state is None else layout.with_state(axis.name, state)
    return layout


def _random_digit(layout: Layout, axis: str, draw: random.Random) -> State | None:
    digits = []
    for dim, size in enumerate(layout.shape):
        for stride in (n for n in range(1, size) if size % n == 0):
            try:
                layout.with_state(axis, S(dim, stride))
            except LayoutError:
                continue
            digits.append(S(dim, stride))
    return draw.choice(digits) if digits else None


# -- the call on shards ----------------------------------------------------------------------------


def gradient_layout(layout: Layout) -> Layout:
    return Layout(layout.mesh, layout.shape, tuple(_GRADIENT.get(s.kind, s) for s in layout.states))


def deal(layout: Layout, unsharded: Tensor, seed: int) -> list[Tensor]:
    """The local values by rank; the parts on P axes are random and sum up to the whole."""
    generator = torch.Generator().manual_seed(seed)
    mesh, partial = layout.mesh, layout.axes_of("P")
    cut = Layout(mesh, layout.shape, tuple(R if s.kind == "P" else s for s in layout.states))
    last = tuple(mesh.sizes[axis] - 1 for axis in partial)
    parts: dict[tuple[int, ...], Tensor] = {}
    for rank in range(mesh.size):
        place = tuple(mesh.coordinate(rank)[axis] for axis in partial)
        if place not in parts and place != last:
            parts[place] = torch.randn(
                unsharded.shape, generator=generator, dtype=torch.float64
            ).to(unsharded.dtype)
    parts[last] = unsharded - sum(parts.values()) if parts else unsharded
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    return [cut.cut(parts[tuple(c[axis] for axis in partial)], c) for c in coordinates]


def emitted(traced: Traced, strategy: Strategy, mesh: Mesh) -> fx.GraphModule:
    """The call on its shards; takes the operands that are there, coordinates, and the seed."""
    graph = fx.Graph()
    operands: list[fx.Node | None] = []
    for i, layout in enumerate(strategy.operands):
        operands.append(None if layout is None else graph.placeholder(f"operand{i}"))
    coordinates = {name: graph.placeholder(f"coordinate_{name}") for name in mesh.names}
    seed = graph.placeholder("seed")
    shards = Call(
        graph,
        traced.node,
        operands,
        strategy.operands,
        strategy.results,
        coordinates.__getitem__,
        lambda: seed,
    )
    graph.output(emit_local(shards))
    return fx.GraphModule({}, graph)


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


@dataclass(frozen=True)
class Unsharded:
    """What one device computes; None stands for what carries no gradient."""

    operands: list[Tensor | None]
    results: list[Tensor]
    cotangents: list[Tensor | None]
    gradients: list[Tensor | None]


def on_one_device(traced: Traced) -> Unsharded:
    operands = [None if n is None else n.meta["val"] for n in operands_of(traced.node)]
    case = traced.case
    if case.reference is not None:
        results = as_list(case.reference(*case.tensors))
    else:
        results = as_list(case.target(*case.args, **case.kwargs))
    generator = torch.Generator().manual_seed(SEED)
    cotangents = [
        torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype)
        if r.requires_grad
        else None
        for r in results
    ]
    leaves = [x for x in operands if x is not None and x.requires_grad]
    derivatives: Iterator[Any] = iter(())
    if leaves and any(c is not None for c in cotangents):
        pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None]
        derivatives = iter(
            torch.autograd.grad(
                [r for r, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True
            )
        )
    gradients = []
    for x in operands:
        gradient = next(derivatives, None) if x is not None and x.requires_grad else None
        gradients.append(
            torch.zeros_like(x)
            if gradient is None and x is not None and x.requires_grad
            else gradient
        )
    return Unsharded(operands, [r.detach() for r in results], cotangents, gradients)


def check(traced: Traced, unsharded: Unsharded, strategy: Strategy, mesh: Mesh) -> None:
    """Runs the call on all ranks, forward and backward, and compares with one device."""
    module = emitted(traced, strategy, mesh)
    operands = [
        (_checked(layout, x), deal(layout, x.detach(), i))
        for i, (layout, x) in enumerate(zip(strategy.operands, unsharded.operands, strict=True))
        if layout is not None and x is not None
    ]
    carrying = [
        x is not None and x.requires_grad
        for x, o in zip(unsharded.operands, strategy.operands, strict=True)
        if o
    ]
    cotangents = [
        None if c is None else deal(gradient_layout(layout), c, 100 + i)
        for i, (layout, c) in enumerate(zip(strategy.results, unsharded.cotangents, strict=True))
    ]

    def rank_fn(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        own = [
            p[rank].clone().requires_grad_(g) for (_, p), g in zip(operands, carrying, strict=True)
        ]
        places = [torch.tensor([c]) for c in mesh.coordinate(rank).values()]
        results = as_list(module(*own, *places, torch.tensor(SEED)))
        pairs = [
            (r, c[rank])
            for r, c in zip(results, cotangents, strict=True)
            if c is not None and r.requires_grad
        ]
        if pairs:
            torch.autograd.backward([r for r, _ in pairs], [c for _, c in pairs])
        return [r.detach() for r in results], [
            torch.zeros_like(x) if x.grad is None else x.grad for x in own
        ]

    ranks = lockstep.run(mesh, rank_fn)
    narrow = any(r.dtype == torch.float32 for r in unsharded.results)
    tolerance = 1e-4 if narrow else 1e-9
    for i, (layout, expected) in enumerate(zip(strategy.results, unsharded.results, strict=True)):
        compare(f"result {i}", layout, [results[i] for results, _ in ranks], expected, tolerance)
    present = [g for g, o in zip(unsharded.gradients, strategy.operands, strict=True) if o]
    for i, ((layout, _), expected_gradient) in enumerate(zip(operands, present, strict=True)):
        if expected_gradient is not None:
            parts = [gradients[i] for _, gradients in ranks]
            compare(f"gradient {i}", gradient_layout(layout), parts, expected_gradient, tolerance)


def _checked(layout: Layout, x: Tensor) -> Layout:
    assert x.dtype.is_floating_point or not layout.axes_of("P"), f"parts of a sum of {x.dtype}"
    return layout


def compare(
    what: str, layout: Layout, parts: list[Tensor], expected: Tensor, tolerance: float
) -> None:
    """The parts joined are the whole; where the layout repeats a value, all ranks have the same."""
    for rank, part in enumerate(parts):
        assert part.shape == layout.local_shape, (
            f"{what} ({layout}): {tuple(part.shape)} on rank {rank}"
        )
        assert part.dtype == expected.dtype, f"{what}: {part.dtype} for {expected.dtype}"
        first = parts[layout.mesh.group((*layout.axes_of("I"), *layout.axes_of("R")), rank)[0]]
        assert _close(part, first, tolerance), (
            f"{what} ({layout}): rank {rank} has a copy that differs"
        )
    assert _close(layout.join(parts), expected, tolerance), f"{what} ({layout}) is wrong"


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    if not expected.dtype.is_floating_point:
        return torch.equal(actual, expected)
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def sample(strategies: list[Strategy], count: int, seed: str) -> list[Strategy]:
    return strategies if len(strategies) <= count else random.Random(seed).sample(strategies, count)


# -- for people ------------------------------------------------------------------------------------


def text(strategy: Strategy) -> str:
    """A strategy on one axis, such as "k: S1 S1 P -> P"; an inner digit has its stride, "S1/2"."""
    choice = strategy.choices[0]
    if isinstance(choice, State):
        head = choice.kind
    elif hasattr(choice, "factor"):
        head = choice.factor
    else:
        head = "through " + " ".join(map(str, sorted(choice.operands)))
    sides = [
        " ".join("-" if o is None else _state(o) for o in side)
        for side in (strategy.operands, strategy.results)
    ]
    return f"{head}: {sides[0]} -> {sides[1]}"


def _state(layout: Layout) -> str:
    state = layout.states[0]
    if state.kind != "S":
        return state.kind
    outermost = state.stride * layout.mesh.axes[0].size == layout.shape[state.dim]
    return f"S{state.dim}" if outermost else f"S{state.dim}/{state.stride}"
