"""Runs a derived backward in the form that is asked for: it sums gradients across ranks, holds what
this rank would send, or sums what is held with its own (passes/overlap/accumulation.py).

Example: of four backwards three run deferred and one final, and the ranks exchange each gradient
once. Who asks is an `Accumulator`: `par.no_sync()` is one, micro-batches are another
(runtime/training). The two further forms are made when there is one, as most modules need none. A
stage of a zero bubble schedule runs each form in two halves (passes/overlap/split_backward.py):
autograd the first, and who has its `Rest` the second. runtime/backends.py has one DeferredBackward
for each derived backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import fx

from autopar.ir.graph import copy_graph
from autopar.ir.layout import Layout
from autopar.passes.overlap.accumulation import Tail, tails, with_accumulated, without_sums
from autopar.passes.overlap.split_backward import Halves, input_gradients, split, weight_gradients

Form = Literal["reduced", "deferred", "final"]
Run = Callable[[list[Any]], Any]


class Accumulator(Protocol):
    """Keeps what ranks hold of gradients between backwards."""

    def form(self) -> Form:
        """Return the form in which the next backward runs."""

    def put(self, ends: Sequence[Tail], own: Sequence[torch.Tensor]) -> None:
        """Keep what a deferred backward returned for these tails."""

    def take(self, ends: Sequence[Tail]) -> Sequence[torch.Tensor | None]:
        """Return what is kept for these tails, None where there is nothing, and forget it."""


class Rest:
    """The second half of a backward, of the gradients of weights. `carried`: the values that it
    takes of the first half.
    """

    def __init__(self, backward: DeferredBackward, carried: list[Any]) -> None:
        self._backward, self.carried = backward, carried

    def run(self, accumulator: Accumulator | None) -> list[Any]:
        """Return the gradients of what the graph takes, None for those of the first half and those
        that the accumulator keeps. What is carried over is freed on the way.
        """
        carried, self.carried = self.carried, []
        with torch.no_grad():
            return self._backward.run_rest(carried, accumulator)


class DeferredBackward:
    """The forms of one derived backward. `layouts`: of its gradients, None for what is not stored.
    `ends`: the tails of the gradients that can be held; none where ranks sum nothing at the end.
    """

    def __init__(self, backward: fx.Graph, layouts: Sequence[Layout | None]) -> None:
        # scheduling changes the other one
        self._graph, self._layouts = copy_graph(backward), layouts
        self.ends = tails(self._graph, layouts)
        self._summed: Run | None = None
        self._variants: dict[Form, Run] = {}
        self.halves: Halves | None = None
        self._first: Run | None = None
        self._rests: dict[Form, Run] = {}

    @property
    def has_variants(self) -> bool:
        """Whether the further forms can run."""
        return bool(self._variants)

    def begin(self, summed: Run) -> None:
        """Take what runs the backward as it was derived."""
        self._summed = summed

    def make(self, compiled: Callable[[fx.Graph], Run], split: bool) -> None:
        """Make the further forms, each made runnable by `compiled`. `split`: hold gradients, too,
        whose own part is larger than what a rank stores, as FSDP's are.
        """
        self._leave_out_larger(split)
        self._variants = {
            "deferred": compiled(without_sums(self._graph, self.ends)),
            "final": compiled(with_accumulated(self._graph, self.ends)),
        }

    def make_halves(
        self, compiled: Callable[[fx.Graph], Run], holds_scattered: bool, places: Collection[int]
    ) -> None:
        """Make both halves of all forms. `holds_scattered`: as `split` of `make`; `places`: of the
        gradients that the first half gives.
        """
        self._leave_out_larger(holds_scattered)
        halves = split(self._graph, places)
        rests: dict[Form, fx.Graph] = {"reduced": self._graph}
        if self.ends:
            rests["deferred"] = without_sums(self._graph, self.ends)
            rests["final"] = with_accumulated(self._graph, self.ends)
        self._first = compiled(input_gradients(self._graph, halves))
        self._rests = {form: compiled(weight_gradients(g, halves)) for form, g in rests.items()}
        self.halves = halves

    def _leave_out_larger(self, holds_scattered: bool) -> None:
        if not holds_scattered:
            self.ends = tuple(tail for tail in self.ends if not self._is_larger(tail))

    def _is_larger(self, tail: Tail) -> bool:
        stored = self._layouts[tail.place]
        return stored is not None and tail.layout.local_size > stored.local_size

    def run(self, values: list[Any], accumulator: Accumulator | None) -> Any:
        """Run the backward in the form that the accumulator asks for. A deferred gradient is None
        among the results.
        """
        assert self._summed is not None
        return self._run({"reduced": self._summed, **self._variants}, values, accumulator)

    def run_first(self, values: list[Any]) -> tuple[list[Any], Rest]:
        """Run the first half. Return its gradients, None for all others, and what is left to do."""
        assert self._first is not None
        results = list(self._first(values))
        count = len(self._layouts)
        return results[:count], Rest(self, results[count:])

    def run_rest(self, carried: list[Any], accumulator: Accumulator | None) -> list[Any]:
        """Run the second half in the form that the accumulator asks for."""
        return list(self._run(self._rests, carried, accumulator))

    def _run(
        self, runs: Mapping[Form, Run], values: list[Any], accumulator: Accumulator | None
    ) -> Any:
        form: Form = accumulator.form() if accumulator is not None and len(runs) > 1 else "reduced"
        if form == "reduced":
            return runs[form](values)
        assert accumulator is not None
        if form == "deferred":
            results = list(runs[form](values))
            accumulator.put(self.ends, [results[tail.place] for tail in self.ends])
            for tail in self.ends:
                results[tail.place] = None
            return results
        device = next(x.device for x in values if isinstance(x, torch.Tensor))
        sums = zip(self.ends, accumulator.take(self.ends), strict=True)
        values.extend(
            torch.zeros(tail.layout.local_shape, dtype=tail.dtype, device=device)
            if own is None
            else own
            for tail, own in sums
        )
        return runs[form](values)
