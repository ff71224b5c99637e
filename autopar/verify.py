"""verify: one process runs every rank in lockstep, in float64, and compares all that can be
compared with the original.

Forward node by node (the first wrong one is named, with its layout), the loss, every gradient, and
the parameters after three steps of AdamW.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from . import lockstep
from .errors import VerificationError
from .graphs import where
from .layout import Layout
from .program import Input, Program
from .recomputed import recomputed, regathered
from .widened import double_by_default, to_double

STEPS = 3
_SEED = 20_011
_RATE = 1e-3  # of AdamW
# of AdamW, relative to the largest gradient: entries that are zero but for rounding shall not move
_EPSILON = 1e-3


@dataclass(frozen=True)
class Check:
    """The largest relative errors: of the outputs, of every gradient, of every parameter after
    three AdamW steps.

    A gradient's error is |difference| / max(|gradient|, 1e-6 · the model's largest gradient), entry
    by entry. A parameter's is its largest |difference| over its largest entry, or over the distance
    that AdamW can move an entry in these steps (rate · steps) if that is larger. AdamW's epsilon is
    1e-3 · the model's largest gradient: a gradient that is zero but for rounding, as that of the
    bias of attention's keys or of a bias before a batch norm, would else be scaled up to a whole
    step, and grow from there.
    """

    loss_error: float
    grad_error: float
    step_error: float
    nodes: int  # compared one by one
    ranks: int

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks equal one: {self.nodes} nodes, loss to {self.loss_error:.1e}, "
            f"gradients to {self.grad_error:.1e}, "
            f"parameters after {STEPS} AdamW steps to {self.step_error:.1e}"
        )


@dataclass(frozen=True)
class _Trained:
    """What one training run leaves: the outputs and the gradients of the first step, the parameters
    after the last.
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    epsilon: float  # of AdamW


def compare(program: Program, reference: Program, inputs: list[Any], tolerance: float) -> Check:
    """Run the rewritten `program` on all its ranks and `reference`, the same model on one; see the
    module's docstring.

    `inputs`: the user's leaves. Raises VerificationError where an error passes `tolerance`.
    """
    assert program.plan is not None
    mesh = program.plan.mesh
    leaves = [
        to_double(x).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs
    ]
    with double_by_default():
        single = _Rank(reference, {}, leaves)
        nodes = _compare_nodes(program, single.values(), leaves, tolerance)
        expected = single.train()
        ranks = lockstep.run(
            mesh, lambda rank: _Rank(program, mesh.coordinate(rank), leaves).train(expected.epsilon)
        )
    check = Check(
        _output_error(program, ranks, expected),
        max(_gradient_errors(program, ranks, expected).values(), default=0.0),
        max(_step_errors(program, ranks, expected).values(), default=0.0),
        nodes,
        mesh.size,
    )
    for what in ("loss_error", "grad_error", "step_error"):
        error = getattr(check, what)
        if not error <= tolerance:
            raise VerificationError(
                f"{what} is {error:.2e}, past the tolerance {tolerance:.0e}, on mesh {mesh} with "
                "layout "
                f"{program.plan.layout}: {_worst(program, ranks, expected)}"
            )
    return check


class _Rank:
    """One rank's own tensors, and what it does with them."""

    def __init__(self, program: Program, coordinate: dict[str, int], leaves: list[Any]) -> None:
        self.program, self.coordinate, self.leaves = program, coordinate, leaves
        self.held = {
            e.node: self._hold(e)
            for e in program.signature.inputs
            if e.kind in ("parameter", "buffer", "constant")
        }
        self.inputs: dict[str, Tensor] = {}

    def _hold(self, entry: Input) -> Tensor:
        tensor = self.program.tensors[entry.target]
        if entry.kind != "parameter":
            return tensor.clone()
        return (
            self.program.layouts[entry.node]
            .cut(tensor, self.coordinate)
            .requires_grad_(entry.trainable)
        )

    def feed(self, entry: Input) -> Any:
        if entry.kind == "coordinate":
            return torch.tensor([self.coordinate[entry.target]])
        if entry.kind == "seed":
            return torch.tensor(_SEED)
        if entry.kind == "user":
            assert entry.position is not None
            given = self.leaves[entry.position]
            own = self.program.layouts[entry.node].cut(given.detach(), self.coordinate)
            self.inputs[entry.node] = own.requires_grad_(given.requires_grad)
            return own
        return self.held[entry.node]

    def values(self) -> dict[Any, Tensor]:
        """Every value of the graph that stands for one of the original graph, without gradients."""
        found: dict[Any, Tensor] = {}
        with torch.no_grad():
            for node, result in _interpret(self.program, self):
                if isinstance(result, Tensor) and "value" in node.meta:
                    found.setdefault(node.meta["value"], result)
        return found

    def train(self, epsilon: float | None = None) -> _Trained:
        """Three steps of AdamW; its epsilon follows from the first gradients unless given."""
        parameters = {n: t for n, t in self.held.items() if t.requires_grad}
        outputs = self._step()
        leaves = {**parameters, **{n: t for n, t in self.inputs.items() if t.requires_grad}}
        gradients = {n: None if t.grad is None else t.grad.clone() for n, t in leaves.items()}
        if epsilon is None:
            epsilon = max(1e-8, _EPSILON * _largest(gradients))
        if parameters:
            optimizer = torch.optim.AdamW(parameters.values(), lr=_RATE, eps=epsilon)
            for _ in range(STEPS - 1):
                optimizer.step()
                optimizer.zero_grad()
                self._step()
            optimizer.step()
        first = [o.detach() if isinstance(o, Tensor) else o for o in outputs]
        return _Trained(first, gradients, {n: t.detach() for n, t in parameters.items()}, epsilon)

    def _step(self) -> list[Tensor]:
        outputs = list(self.program.module(*(self.feed(e) for e in self.program.signature.inputs)))
        self._backward(outputs)
        return outputs

    def _backward(self, outputs: list[Tensor]) -> None:
        """From the loss: the first scalar; a model without one gets random gradients for all that
        it returns.
        """
        able = [(i, o) for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.requires_grad]
        scalars = [o for _, o in able if o.dim() == 0]
        if scalars:
            scalars[0].backward()
        elif able:
            torch.autograd.backward([o for _, o in able], [self._cotangent(i) for i, _ in able])

    def _cotangent(self, index: int) -> Tensor:
        layout = _output_layouts(self.program)[index]
        generator = torch.Generator().manual_seed(index)
        return layout.cut(
            torch.randn(layout.shape, generator=generator, dtype=torch.float64), self.coordinate
        )


def _interpret(program: Program, rank: _Rank) -> Iterator[tuple[fx.Node, Any]]:
    """Run the graph node by node, within blocks too; yields (node, result)."""
    yield from _steps(program.module, [rank.feed(e) for e in program.signature.inputs])


def _steps(module: fx.GraphModule, inputs: list[Any]) -> Generator[tuple[fx.Node, Any], None, Any]:
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            env[node] = getattr(module, str(node.target))
        elif node.target in (recomputed, regathered):
            block, _, *values = args
            env[node] = yield from _steps(block, values)
        else:
            env[node] = node.target(*args, **kwargs)
        yield node, env[node]


def _output_layouts(program: Program) -> list[Layout]:
    return [program.layouts[o.node] for o in program.signature.outputs if o.node is not None]


# -- node by node ----------------------------------------------------------------------------------
def _compare_nodes(
    program: Program, expected: dict[Any, Tensor], leaves: list[Any], tolerance: float
) -> int:
    assert program.plan is not None
    mesh = program.plan.mesh
    count = 0

    def compare_one(node: fx.Node, parts: list[Tensor]) -> None:
        nonlocal count
        value = node.meta["value"]
        layout = node.meta.get("layout") or program.layouts[node.name]
        if value in expected:
            count += 1
            _check_node(node, layout, parts, expected[value], tolerance)

    def rank_fn(rank: int) -> None:
        own = _Rank(program, mesh.coordinate(rank), leaves)
        with torch.no_grad():
            for node, result in _interpret(program, own):
                if isinstance(result, Tensor) and "value" in node.meta:
                    lockstep.meet(rank, result.detach(), functools.partial(compare_one, node))

    lockstep.run(mesh, rank_fn)
    return count


def _check_node(
    node: fx.Node, layout: Layout, parts: list[Tensor], expected: Tensor, tolerance: float
) -> None:
    called = node.target.__name__ if inspect.isfunction(node.target) else node.target
    what = f"the first wrong node is {where(node)}: {called} of layout ({layout}), shape "
    what += f"{layout.shape}, "
    if parts[0].shape != layout.local_shape:
        found = tuple(parts[0].shape)
        raise VerificationError(f"{what}is {found} on a rank, not {layout.local_shape}")
    error = _relative(layout.join(parts), expected)
    if not error <= tolerance:
        raise VerificationError(f"{what}relative error {error:.2e} past {tolerance:.0e}")
    for rank, first in _copies(layout, "IR"):
        error = _relative(parts[rank], parts[first])
        if not error <= tolerance:
            raise VerificationError(
                f"{what}the copies on ranks {first} and {rank} differ by {error:.2e}"
            )


def _relative(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """Largest |difference| over the largest |expected| (`least` at least); equal infinities and
    nans count as equal.
    """
    if found.shape != expected.shape:
        return float("inf")
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        return 0.0 if torch.equal(found.to(expected.dtype), expected) else float("inf")
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, (found - expected).abs())
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return float(difference.max()) / max(scale, least) if difference.numel() else 0.0


# -- a step ----------------------------------------------------------------------------------------
def _output_error(program: Program, ranks: list[_Trained], expected: _Trained) -> float:
    errors = [0.0]
    for index, layout in enumerate(_output_layouts(program)):
        parts = [rank.outputs[index] for rank in ranks]
        errors.append(_relative(layout.join(parts), expected.outputs[index]))
        errors.extend(_copies_differ(layout, parts))
    return max(errors)


def _copies_differ(layout: Layout, parts: list[Tensor]) -> list[float]:
    """How far apart the gradients of copies are, which must be the same on every invariant axis."""
    return [_relative(parts[rank], parts[first]) for rank, first in _copies(layout, "I")]


def _copies(layout: Layout, kinds: str) -> list[tuple[int, int]]:
    """(rank, another one that holds the same) on every axis whose state is one of `kinds`."""
    pairs = [
        (rank, layout.mesh.group((axis,), rank)[0])
        for kind in kinds
        for axis in layout.axes_of(kind)
        for rank in range(layout.mesh.size)
    ]
    return [(rank, first) for rank, first in pairs if rank != first]


def _largest(gradients: dict[str, Tensor | None]) -> float:
    return max(
        (float(g.abs().max()) for g in gradients.values() if g is not None and g.numel()),
        default=0.0,
    )


def _gradient_errors(
    program: Program, ranks: list[_Trained], expected: _Trained
) -> dict[str, float]:
    largest = _largest(expected.gradients)
    errors = {}
    for name, gradient in expected.gradients.items():
        found = [rank.gradients[name] for rank in ranks]
        parts = [part for part in found if part is not None]
        if gradient is None or len(parts) < len(found):
            wrong = [p for p in (gradient, *parts) if p is not None and bool(p.any())]
            errors[name] = float("inf") if wrong else 0.0
            continue
        layout = program.layouts[name]
        floor = gradient.abs().clamp(min=max(1e-6 * largest, 1e-300))
        difference = (layout.join(parts) - gradient).abs() / floor
        errors[name] = max([float(difference.max()), *_copies_differ(layout, parts)])
    return errors


def _step_errors(program: Program, ranks: list[_Trained], expected: _Trained) -> dict[str, float]:
    moved = STEPS * _RATE
    return {
        name: _relative(
            program.layouts[name].join([rank.parameters[name] for rank in ranks]), parameter, moved
        )
        for name, parameter in expected.parameters.items()
    }


def _worst(program: Program, ranks: list[_Trained], expected: _Trained) -> str:
    """The parameters whose gradients are furthest off, with their layouts."""
    errors = _gradient_errors(program, ranks, expected)
    names = sorted(errors, key=lambda name: -errors[name])[:3]
    return "worst gradients " + ", ".join(
        f"{n} ({program.layouts[n]}) {errors[n]:.1e}" for n in names
    )
