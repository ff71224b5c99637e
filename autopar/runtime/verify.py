"""verify: compare a plan on all its ranks, simulated in one process, with one device, in float64.

`compare` checks the forward node by node (naming the first wrong node and its layout), the loss,
every gradient, and the parameters after three AdamW steps. `api.verify` calls it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import VerificationError
from autopar.ir.graph import where
from autopar.ir.layout import Layout
from autopar.ir.padding import (
    Pads,
    cut_unpadded,
    filled_up,
    join_unpadded,
    without_padding,
)
from autopar.ir.plan_table import format_ranks
from autopar.ir.program import Input, Program
from autopar.ops.collectives import groups_of
from autopar.ops.recomputation import Visit, interpret
from autopar.runtime import lockstep
from autopar.runtime.reference import (
    Observed,
    Reference,
    differences,
    double_by_default,
    fill_unwritten,
    poison,
    reference_step,
    relative_error,
    tame,
    tensor_to_float64,
)

STEPS = 3
_OUTPUT_NAME = "output {}"
_GRADIENT_NAMES = ("gradient of ", "gradient beside the loss of ")
_SEED = 20_011
_LEARNING_RATE = 1e-3  # of AdamW
# AdamW's eps, over the largest gradient: entries that are zero but for rounding shall not move
_EPSILON = 1e-3


@dataclass(frozen=True)
class Check:
    """The largest relative errors that `verify` measured: of the outputs, of every gradient, of
    every parameter after three AdamW steps; how many `nodes` were compared one by one, on how many
    `ranks`.

    >>> import autopar
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    >>> check = autopar.verify(model, 4, (torch.randn(4, 8),), layout="megatron")
    >>> max(check.loss_error, check.grad_error, check.step_error) < 1e-9
    True

    - A gradient's error, entry by entry: |difference| / max(|gradient|, 1e-6 · the model's largest
      gradient).
    - A parameter's error: its largest |difference| over its largest entry, or over the distance
      that AdamW can move it in these steps (rate · steps) if that is larger.
    - Values that are zero but for rounding are compared relative to a thousandth of the terms that
      cancel in them. Values that depend on unwritten memory are not compared (reference.py).

    AdamW's epsilon is 1e-3 · the model's largest gradient, or, where all gradients are zero but for
    rounding, 1e-3 · the largest terms that cancel in them. With a smaller one a gradient that is
    zero but for rounding, as that of a bias before a batch norm, would move by a full step.
    """

    loss_error: float
    grad_error: float
    step_error: float
    nodes: int  # compared one by one
    ranks: int

    def __str__(self) -> str:
        equal = "equals" if self.ranks == 1 else "equal"
        return (
            f"{format_ranks(self.ranks)} {equal} one: {self.nodes} nodes, "
            f"loss to {self.loss_error:.1e}, gradients to {self.grad_error:.1e}, "
            f"parameters after {STEPS} AdamW steps to {self.step_error:.1e}"
        )


_Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class _Trained:
    """The results of one training run: the outputs and gradients of the first step (those of the
    loss, those of the auxiliary outputs), and the parameters after the last.
    """

    outputs: list[Tensor]
    gradients: tuple[_Gradients, ...]
    parameters: dict[str, Tensor]


def compare(program: Program, reference: Program, inputs: list[Any], tolerance: float) -> Check:
    """Return the errors of `program` on all its ranks against `reference`, the same model on one.

    `inputs`: the user's leaves. Raises VerificationError where an error passes `tolerance`.
    """
    assert program.plan is not None
    mesh = program.plan.mesh
    leaves = [
        tensor_to_float64(x).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in inputs
    ]
    with double_by_default():
        single = reference_step(reference, lambda p, visit: _Rank(p, {}, leaves).observe(visit))
        epsilon = _adam_epsilon(single)
        poisoned = fill_unwritten(program, poison)
        nodes = _compare_nodes(poisoned, single, leaves, tolerance)
        expected = _Rank(fill_unwritten(reference, tame), {}, leaves).train(epsilon)
        ranks = lockstep.run(
            mesh,
            lambda rank: _Rank(poisoned, mesh.coordinate(rank), leaves).train(epsilon),
            groups_of(poisoned.module),
        )
    gradients = _gradient_errors(program, ranks, expected, single)
    check = Check(
        _output_error(program, ranks, expected, single),
        max(gradients.values(), default=0.0),
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
                f"{program.plan.layout}: {_worst_text(program, gradients)}"
            )
    return check


class _Rank:
    """One rank of the run: its own tensors, and its steps on them."""

    def __init__(self, program: Program, coordinate: dict[str, int], leaves: list[Any]) -> None:
        self.program, self.coordinate, self.leaves = program, coordinate, leaves
        self.tensors = {
            e.node: self._own_tensor(e)
            for e in program.signature.inputs
            if e.kind in ("parameter", "buffer", "constant")
        }
        self.inputs: dict[str, Tensor] = {}

    def _own_tensor(self, entry: Input) -> Tensor:
        tensor = self.program.tensors[entry.target].detach()
        if entry.kind != "parameter":
            return tensor.clone()
        layout, pads = self.program.layouts[entry.node], self.program.pads(entry.node)
        own = cut_unpadded(layout, tensor, pads, self.coordinate)
        return own.requires_grad_(entry.trainable)

    def feed(self, entry: Input) -> Any:
        if entry.kind == "coordinate":
            return torch.tensor([self.coordinate[entry.target]])
        if entry.kind == "seed":
            return torch.tensor(_SEED)
        if entry.kind == "user":
            assert entry.position is not None
            leaf = self.leaves[entry.position]
            own = self.program.layouts[entry.node].cut(leaf.detach(), self.coordinate)
            self.inputs[entry.node] = own.requires_grad_(leaf.requires_grad)
            return own
        own = self.tensors[entry.node]
        if entry.kind == "parameter" and self.coordinate:
            return filled_up(own, self.program.layouts[entry.node].local_shape)
        return own

    def feed_all(self) -> list[Any]:
        return [self.feed(entry) for entry in self.program.signature.inputs]

    def observe(self, visit: Visit) -> Observed:
        """Run one step node by node. Return every value that stands for one of the original graph,
        every output and gradient, as `visit` left them.
        """
        observed: Observed = {}

        def keep(node: fx.Node, result: Any) -> Any:
            result = visit(node, result)
            if isinstance(result, Tensor) and "value" in node.meta:
                observed.setdefault(node.meta["value"], result.detach())
            return result

        outputs = interpret(self.program.module, self.feed_all(), keep)
        named = {_OUTPUT_NAME.format(i): o for i, o in enumerate(outputs) if isinstance(o, Tensor)}
        observed.update({name: output.detach() for name, output in named.items()})
        for kind, prefix in enumerate(_GRADIENT_NAMES):
            gradients = self._backward(outputs, bool(kind), retain_graph=True)
            observed.update({prefix + n: grad for n, grad in gradients.items() if grad is not None})
        return observed

    def train(self, epsilon: float) -> _Trained:
        """Run three steps of AdamW."""
        parameters = {n: t for n, t in self.tensors.items() if t.requires_grad}
        outputs, auxiliary = self._outputs(), {}
        if self._starts(outputs, auxiliary=True):
            auxiliary = self._backward(outputs, auxiliary=True)
            outputs = self._outputs()
        gradients = self._backward(outputs), auxiliary
        if parameters:
            optimizer = torch.optim.AdamW(parameters.values(), lr=_LEARNING_RATE, eps=epsilon)
            for _ in range(STEPS - 1):
                optimizer.step()
                self._step()
            optimizer.step()
        first = [o.detach() if isinstance(o, Tensor) else o for o in outputs]
        return _Trained(first, gradients, {n: t.detach() for n, t in parameters.items()})

    def _step(self) -> None:
        self._backward(self._outputs())

    def _outputs(self) -> list[Any]:
        return list(self.program.module(*self.feed_all()))

    def _starts(self, outputs: list[Any], auxiliary: bool) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors at which a backward begins, with their cotangents: the loss (the first
        scalar), or the auxiliary outputs; all outputs where there is no loss.
        """
        outs = {i: o for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.requires_grad}
        loss = next((i for i, o in outs.items() if o.dim() == 0), None)
        return [
            (output, torch.ones_like(output) if i == loss else self._cotangent(i))
            for i, output in outs.items()
            if (loss not in (None, i)) == auxiliary
        ]

    def _backward(
        self, outputs: list[Any], auxiliary: bool = False, retain_graph: bool = False
    ) -> _Gradients:
        leaves = {n: t for n, t in (self.tensors | self.inputs).items() if t.requires_grad}
        for leaf in leaves.values():
            leaf.grad = None
        if starts := self._starts(outputs, auxiliary):
            tensors, cotangents = zip(*starts, strict=True)
            torch.autograd.backward(tensors, cotangents, retain_graph=retain_graph)
        return {n: None if t.grad is None else t.grad.clone() for n, t in leaves.items()}

    def _cotangent(self, index: int) -> Tensor:
        layout = _output_layouts(self.program)[index]
        generator = torch.Generator().manual_seed(index)
        return layout.cut(
            torch.randn(layout.shape, generator=generator, dtype=torch.float64), self.coordinate
        )


def _output_layouts(program: Program) -> list[Layout]:
    return [program.layouts[o.node] for o in program.signature.outputs if o.node is not None]


# -- node by node ----------------------------------------------------------------------------------
def _compare_nodes(program: Program, single: Reference, leaves: list[Any], tolerance: float) -> int:
    assert program.plan is not None
    mesh = program.plan.mesh
    count = 0

    def compare_node(node: fx.Node, parts: list[Tensor]) -> None:
        nonlocal count
        value = node.meta["value"]
        layout = node.meta.get("layout") or program.layouts[node.name]
        if value in single.values:
            count += 1
            _check_node(node, layout, parts, program.padding.get(value, ()), single, tolerance)

    def rank_fn(rank: int) -> None:
        def visit(node: fx.Node, result: Any) -> Any:
            if isinstance(result, Tensor) and "value" in node.meta:
                lockstep.meet_ranks(rank, result.detach(), functools.partial(compare_node, node))
            return result

        own = _Rank(program, mesh.coordinate(rank), leaves)
        with torch.no_grad():
            interpret(program.module, own.feed_all(), visit)

    lockstep.run(mesh, rank_fn, groups_of(program.module))
    return count


def _check_node(
    node: fx.Node,
    layout: Layout,
    parts: list[Tensor],
    pads: Pads,
    single: Reference,
    tolerance: float,
) -> None:
    value = node.meta["value"]
    expected, floor = single.values[value], single.floor(value)
    op_name = node.target.__name__ if inspect.isfunction(node.target) else node.target
    description = f"the first wrong node is {where(node)}: {op_name} of layout ({layout}), shape "
    description += f"{layout.shape}, "
    if parts[0].shape != layout.local_shape:
        actual = tuple(parts[0].shape)
        raise VerificationError(f"{description}is {actual} on a rank, not {layout.local_shape}")
    joined = without_padding(layout.join(parts), pads)
    if value in single.undefined:
        joined = torch.where(single.undefined[value], expected, joined)
    error = relative_error(joined, expected, floor)
    if not error <= tolerance:
        raise VerificationError(f"{description}relative error {error:.2e} past {tolerance:.0e}")
    for rank, first in _copies(layout, "IR"):
        error = relative_error(parts[rank], parts[first], floor)
        if not error <= tolerance:
            raise VerificationError(
                f"{description}the copies on ranks {first} and {rank} differ by {error:.2e}"
            )


# -- outputs, gradients and parameters of a step ---------------------------------------------------
def _output_error(
    program: Program, ranks: list[_Trained], expected: _Trained, single: Reference
) -> float:
    errors = [0.0]
    for index, layout in enumerate(_output_layouts(program)):
        parts = [rank.outputs[index] for rank in ranks]
        floor = single.floor(_OUTPUT_NAME.format(index))
        errors.append(relative_error(layout.join(parts), expected.outputs[index], floor))
        errors.extend(_copy_errors(layout, parts, floor))
    return max(errors)


def _copy_errors(layout: Layout, parts: list[Tensor], floor: float) -> list[float]:
    """Return how far apart copies are that must be equal: those on every invariant axis."""
    return [
        relative_error(parts[rank], parts[first], floor) for rank, first in _copies(layout, "I")
    ]


def _copies(layout: Layout, kinds: str) -> list[tuple[int, int]]:
    """Return (rank, a rank that holds the same) on every axis whose state is one of `kinds`."""
    pairs = [
        (rank, layout.mesh.group((axis,), rank)[0])
        for kind in kinds
        for axis in layout.axes_of(kind)
        for rank in range(layout.mesh.size)
    ]
    return [(rank, first) for rank, first in pairs if rank != first]


def _largest_gradient(gradients: Mapping[Any, Tensor | None]) -> float:
    return max(
        (float(g.abs().max()) for g in gradients.values() if g is not None and g.numel()),
        default=0.0,
    )


def _adam_epsilon(single: Reference) -> float:
    named = {n: t for n, t in single.values.items() if str(n).startswith(_GRADIENT_NAMES[0])}
    floor = max((single.floor(name) for name in named), default=0.0)
    largest = _largest_gradient(named)
    return max(1e-8, _EPSILON * largest if largest > floor else floor)


def _gradient_errors(
    program: Program, ranks: list[_Trained], expected: _Trained, single: Reference
) -> dict[str, float]:
    errors: dict[str, float] = {}
    fed = {e.node for e in program.signature.inputs if e.kind == "user"}  # without padding
    for kind, prefix in enumerate(_GRADIENT_NAMES):
        largest = _largest_gradient(expected.gradients[kind])
        for name, gradient in expected.gradients[kind].items():
            rank_gradients = [rank.gradients[kind].get(name) for rank in ranks]
            least = max(1e-6 * largest, single.floor(prefix + name))
            stored = program.layouts[name], () if name in fed else program.pads(name)
            error = _gradient_error(*stored, rank_gradients, gradient, least)
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def _gradient_error(
    layout: Layout,
    pads: Pads,
    rank_gradients: list[Tensor | None],
    expected: Tensor | None,
    least: float,
) -> float:
    parts = [part for part in rank_gradients if part is not None]
    if expected is None or len(parts) < len(rank_gradients):
        wrong = [p for p in (expected, *parts) if p is not None and bool(p.any())]
        return float("inf") if wrong else 0.0
    difference = differences(join_unpadded(layout, parts, pads), expected)
    error = difference / expected.abs().clamp(min=least).nan_to_num(nan=1.0, posinf=1.0)
    largest = float(error.max()) if error.numel() else 0.0
    return max([largest, *_copy_errors(layout, parts, least)])


def _step_errors(program: Program, ranks: list[_Trained], expected: _Trained) -> dict[str, float]:
    reach = STEPS * _LEARNING_RATE
    return {
        name: relative_error(
            join_unpadded(
                program.layouts[name], [r.parameters[name] for r in ranks], program.pads(name)
            ),
            parameter,
            reach,
        )
        for name, parameter in expected.parameters.items()
    }


def _worst_text(program: Program, errors: dict[str, float]) -> str:
    """Return the parameters whose gradients are furthest off, with their layouts."""
    names = sorted(errors, key=lambda name: -errors[name])[:3]
    return "worst gradients " + ", ".join(
        f"{n} ({program.layouts[n]}) {errors[n]:.1e}" for n in names
    )
