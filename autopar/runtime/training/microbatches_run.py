"""Runs a step in micro-batches: forward and backward of each micro-batch, one after the other.

    loss = par(tokens, targets)    # runs all micro-batches; the gradients are held
    loss.backward()                # hands them out, times the gradient of the loss

Only one micro-batch's activations exist at a time. Gradients are summed across ranks once, in the
last micro-batch's backward (runtime/deferred_backward.py); those whose own part is larger than what
a rank stores are summed in each micro-batch where the plan says so. The totals over the whole
batch, such as how many tokens count, come first. What a rank computes of the batch stays its own:
micro-batch j is the j-th of the equal parts of its rows.

passes/microbatches.py made the program of one micro-batch. api.py puts a MicrobatchesRun in the
place of what runs it; then the module is that of the whole batch (`batch_program`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import add_each
from autopar.errors import InputError, PlanError
from autopar.ir.layout import Layout
from autopar.ir.program import Input, Program
from autopar.passes.interleave import is_own
from autopar.passes.microbatches import Microbatches
from autopar.passes.overlap.accumulation import Tail
from autopar.runtime.apply import to_dtensor
from autopar.runtime.backends import Scheduled
from autopar.runtime.deferred_backward import Form
from autopar.runtime.reusing_forward import StepWeights


def batch_program(program: Program, microbatches: Microbatches) -> Program:
    """Return the program of a micro-batch with inputs, outputs and layouts of the whole batch."""
    inputs = tuple(e for e in program.signature.inputs if e.node not in microbatches.names)
    layouts = dict(program.layouts)
    for entry in inputs:
        if entry.kind == "user" and entry.position in microbatches.split:
            layouts[entry.node] = _of_all_microbatches(layouts[entry.node], microbatches.count)
    returned = [o.node for o in program.signature.outputs if o.node is not None]
    for node, state in zip(returned, microbatches.results, strict=True):
        if state == "rows":
            layouts[node] = _of_all_microbatches(program.layouts[node], microbatches.count)
    signature = dataclasses.replace(program.signature, inputs=inputs)
    return dataclasses.replace(program, signature=signature, layouts=layouts)


def _of_all_microbatches(layout: Layout, count: int) -> Layout:
    """Return where the rows of all micro-batches lie: each rank has those that it has of each."""
    states = tuple(
        s._replace(stride=s.stride * count) if s.kind == "S" and s.dim == 0 else s
        for s in layout.states
    )
    return Layout(layout.mesh, (layout.shape[0] * count, *layout.shape[1:]), states)


class MicrobatchesRun:
    """Runs the micro-batches of a step in the place of a graph of the whole batch. `count`: of the
    micro-batches. `run`: runs the graph of one.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        program: Program,
        microbatches: Microbatches,
        device_mesh: DeviceMesh | None,
    ) -> None:
        self.run, self._mesh = run, device_mesh
        self.count, self._microbatches = microbatches.count, microbatches
        self._entries = program.signature.inputs
        batch = batch_program(program, microbatches)  # not kept: it has the model's tensors
        self._own, self._batch_layouts = batch.signature.inputs, batch.layouts
        self._layouts, self._returned = program.layouts, program.signature.outputs
        self._blocks = self._row_blocks(program)
        assert program.plan is not None
        self._sums_once, self._gathers_once = program.plan.sums_once, program.plan.gathers_once
        self._at_once = 2 if program.plan.interleaved else 1  # micro-batches in a run of the graph

    # -- the graphs that run, for who asks ---------------------------------------------------------
    @property
    def forward(self) -> fx.GraphModule | None:
        return getattr(self.run, "forward", None)

    @property
    def backward(self) -> fx.GraphModule | None:
        return getattr(self.run, "backward", None)

    # -- rows --------------------------------------------------------------------------------------
    def _row_blocks(self, program: Program) -> int:
        """Return into how many blocks the ranks divide the rows of a micro-batch, at most. Raises
        PlanError where two tensors divide them over different axes.
        """
        names = [e.node for e in self._entries if e.position in self._microbatches.split]
        names += [o.node for o, s in self._results() if s == "rows" and o.node is not None]
        axes_of_rows = [_row_axes(program.layouts[name]) for name in names]
        longest = max(axes_of_rows, key=len, default=())
        for axes in axes_of_rows:
            if axes != longest[: len(axes)]:
                raise PlanError(
                    f"micro-batches: rows lie on the axes {_names(axes)} and on "
                    f"{_names(longest)}, which have no common order. Leave microbatches at 1"
                )
        return math.prod(size for _, size in longest)

    def _results(self) -> Iterator[tuple[Any, str]]:
        returned = (output for output in self._returned if output.node is not None)
        yield from zip(returned, self._microbatches.results, strict=True)

    def _rows(self, entry: Input, own: Tensor, microbatch: int) -> Tensor:
        """Return the rows of a micro-batch of those that this rank holds of an input."""
        blocks = self._blocks // math.prod(s for _, s in _row_axes(self._layouts[entry.node]))
        if blocks == 1:
            size = own.shape[0] // self.count
            return own.narrow(0, microbatch * size, size)
        return own.unflatten(0, (blocks, self.count, -1))[:, microbatch].flatten(0, 1)

    def _joined(self, node: str, rows: Sequence[Tensor]) -> Tensor:
        """Return the rows of all micro-batches in the order of this rank's rows of the batch."""
        blocks = self._blocks // math.prod(s for _, s in _row_axes(self._layouts[node]))
        if blocks == 1:
            return torch.cat(list(rows))
        each = [x.unflatten(0, (blocks, -1)) for x in rows]
        return torch.stack(each, 1).flatten(0, 2)

    # -- one step ----------------------------------------------------------------------------------
    def __call__(self, *values: Any) -> Any:
        own, seeds = values[: len(self._own)], values[len(self._own) :]
        places = [i for i, x in enumerate(own) if isinstance(x, Tensor) and x.requires_grad]
        if not places or not torch.is_grad_enabled():
            with torch.no_grad():
                runs = (
                    self._results_of_microbatches(self.run(*values))
                    for values in self._values_of_runs(own, seeds)
                )
                return self._combined([results for run in runs for results in run])
        return list(_Step.apply(self, places, own, seeds, *(own[i] for i in places)))

    def _values_of_runs(self, own: Sequence[Any], seeds: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield the values of the placeholders for each run of the graph."""
        totals = iter(self._totals(own))
        total_of = {
            e.node: next(totals) for e in self._entries if e.node in self._microbatches.names
        }
        by_node = {e.node: x for e, x in zip(self._own, own, strict=True)}
        later = iter(seeds)
        for first in range(0, self.count, self._at_once):
            values = [self._value(e, by_node, total_of, first, later) for e in self._entries]
            for microbatch in range(first + 1, first + self._at_once):
                entries = (entry for entry in self._entries if is_own(entry))
                values += [self._value(e, by_node, total_of, microbatch, later) for e in entries]
            yield values

    def _results_of_microbatches(self, results: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the results of each micro-batch, of those of one run."""
        size = len(results) // self._at_once
        return [results[place : place + size] for place in range(0, len(results), size)]

    def _value(
        self,
        entry: Input,
        own: dict[str, Any],
        totals: dict[str, Tensor],
        microbatch: int,
        later: Iterator[Any],
    ) -> Any:
        if entry.node in totals:
            return totals[entry.node]
        if entry.kind == "seed" and microbatch:
            return next(later)
        if entry.kind == "user" and entry.position in self._microbatches.split:
            return self._rows(entry, own[entry.node], microbatch)
        return own[entry.node]

    @torch.no_grad()
    def _totals(self, own: Sequence[Any]) -> list[Tensor]:
        """Return what is summed over the whole batch before the first micro-batch. The inputs that
        it is computed of, such as labels, are gathered where ranks hold parts of them.
        """
        if self._microbatches.totals is None:
            return []
        at = {e.position: i for i, e in enumerate(self._own) if e.kind == "user"}
        whole = [self._gather(self._own[at[p]], own[at[p]]) for p in self._microbatches.reads]
        shares = []
        for number in range(self.count):
            rows = (
                x.unflatten(0, (self.count, -1))[number] if p in self._microbatches.split else x
                for p, x in zip(self._microbatches.reads, whole, strict=True)
            )
            shares.append(self._microbatches.totals(*rows))
        return [torch.stack(each).sum(0, dtype=each[0].dtype) for each in zip(*shares, strict=True)]

    def _gather(self, entry: Input, own: Tensor) -> Tensor:
        layout = self._batch_layouts[entry.node]
        if self._mesh is None or not layout.axes_of("S"):
            return own
        sent = own.to(torch.uint8) if own.dtype is torch.bool else own  # gloo knows no bool
        gathered = to_dtensor(sent, layout, self._mesh)
        assert isinstance(gathered, DTensor)
        return gathered.full_tensor().to(own.dtype)

    def _combined(self, per_microbatch: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the results of the step, of those of each micro-batch."""
        results: list[Any] = []
        for place, (output, state) in enumerate(self._results()):
            each = [own[place] for own in per_microbatch]
            if state == "rows":
                results.append(self._joined(str(output.node), each))
            else:
                results.append(sum(each[1:], each[0]) if state == "sum" else each[0])
        return results

    def step(
        self, places: Sequence[int], own: Sequence[Any], seeds: Sequence[Any]
    ) -> tuple[list[Any], int, list[Tensor | None]]:
        """Return the results of a step, which of them is the loss, and its gradient for the values
        at `places`, summed across ranks.
        """
        leaves = {i: own[i].detach().requires_grad_() for i in places}
        named = [leaves.get(i, x) for i, x in enumerate(own)]
        trained = list(leaves.values())
        gradients: list[Tensor | None] = [None] * len(trained)
        per_microbatch: list[list[Any]] = []
        loss_place = -1
        scheduled = self.run if isinstance(self.run, Scheduled) else None
        sums = Sums()  # of this step alone: one that failed leaves nothing behind
        if scheduled is not None:
            scheduled.accumulator, scheduled.defers_scattered = sums, self._sums_once
        with self._gathering([self.run]):
            for number, values in enumerate(self._values_of_runs(named, seeds), start=1):
                sums.closes = number * self._at_once == self.count
                new = self._results_of_microbatches(self.run(*values))
                loss_place = self._loss_place(new[0]) if loss_place < 0 else loss_place
                losses = [results[loss_place] for results in new]
                add_gradients(gradients, torch.autograd.grad(losses, trained, allow_unused=True))
                per_microbatch += [
                    [x.detach() if isinstance(x, Tensor) else x for x in results] for results in new
                ]
        return self._combined(per_microbatch), loss_place, gradients

    @contextmanager
    def _gathering(self, runs: Iterable[Callable[..., Any]]) -> Iterator[None]:
        """Let the forwards of one step gather the weights once, where the plan says so; what they
        keep ends with the step, as the optimizer changes the weights.
        """
        scheduled = [run for run in runs if isinstance(run, Scheduled) and self._gathers_once]
        for run in scheduled:
            run.weights = StepWeights()
        try:
            yield
        finally:
            for run in scheduled:
                run.weights = None

    def _loss_place(self, results: Sequence[Any]) -> int:
        """Return the place of the loss: the first scalar that carries a gradient."""
        for place, (_, state) in enumerate(self._results()):
            if state == "sum" and results[place].requires_grad and not results[place].dim():
                return place
        raise InputError("a step in micro-batches needs a loss: a scalar that carries a gradient")


class Sums:
    """The Accumulator of a step in micro-batches: it adds up what is held, until the last one."""

    def __init__(self) -> None:
        self.closes = False
        self._accumulated: list[Tensor] = []

    @property
    def storages(self) -> set[int]:
        """The memory of what is held."""
        return {x.untyped_storage().data_ptr() for x in self._accumulated}

    def form(self) -> Form:
        return "final" if self.closes else "deferred"

    @torch.no_grad()
    def put(self, ends: Sequence[Tail], own: Sequence[Tensor]) -> None:
        if self._accumulated:
            add_each(self._accumulated, own)
        else:
            self._accumulated = apart(own)

    def take(self, ends: Sequence[Tail]) -> list[Tensor | None]:
        sums, self._accumulated = self._accumulated, []
        return list(sums) if sums else [None] * len(ends)


class _Step(torch.autograd.Function):
    """A step as one function of the parameters: its forward has the gradients already."""

    @staticmethod
    def forward(
        ctx: Any,
        run: MicrobatchesRun,
        places: Sequence[int],
        own: Sequence[Any],
        seeds: Sequence[Any],
        *trained: Tensor,
    ) -> tuple[Any, ...]:
        with torch.enable_grad():
            results, ctx.loss, ctx.gradients = run.step(places, own, seeds)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if any(x is not None for i, x in enumerate(gradients) if i != ctx.loss):
            raise InputError(
                "a step in micro-batches has the gradient of its loss alone, the first scalar that "
                "it returns; another of its results was differentiated: add it to the loss in the "
                "model's forward, or detach it"
            )
        computed, ctx.gradients = ctx.gradients, None
        if computed is None:
            raise InputError(
                "the backward of a step in micro-batches ran already: its gradients were handed "
                "out, and nothing is kept to compute them again. Call the model once more"
            )
        outer = gradients[ctx.loss]
        scaled = [None if x is None or outer is None else x.mul_(outer) for x in computed]
        return None, None, None, None, *scaled


def add_gradients(sums: list[Tensor | None], more: Sequence[Tensor | None]) -> None:
    """Add gradients to what there is of each."""
    pairs = [(a, b) for a, b in zip(sums, more, strict=True) if a is not None and b is not None]
    add_each([a for a, _ in pairs], [b for _, b in pairs])
    new = [i for i, x in enumerate(more) if sums[i] is None and x is not None]
    for i, gradient in zip(new, apart([x for i in new if (x := more[i]) is not None]), strict=True):
        sums[i] = gradient


def apart(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors that can be written over, each without the others: a backward may return one
    tensor twice, or one number for many elements.
    """
    seen, copies = set[tuple[int, int]](), []
    for x in xs:
        place = x.untyped_storage().data_ptr(), int(x.storage_offset())
        spread = 0 in x.stride() and x.numel() > 1
        copies.append(x.clone() if spread or place in seen else x)
        seen.add(place)
    return copies


def _names(axes: Sequence[tuple[str, int]]) -> str:
    return ", ".join(name for name, _ in axes) or "none"


def _row_axes(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Return the axes that divide the rows, outermost first, with their sizes."""
    return tuple((digit.axis, digit.size) for digit in layout.digits(0))
