"""Runs a derived backward in the form that is asked for: it sums gradients across ranks, holds what
this rank would send, or sums what is held with its own (passes/overlap/accumulation.py).

Example: of four backwards three run deferred and one final, and the ranks exchange each gradient
once. Who asks is an `Accumulator`: `par.no_sync()` is one, micro-batches are another
(runtime/training). The two further forms are made when there is one, as most modules need none.
runtime/backends.py has one DeferredBackward for each derived backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import fx

from autopar.ir.graph import copy_graph
from autopar.ir.layout import Layout
from autopar.passes.overlap.accumulation import Tail, tails, with_accumulated, without_sums

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


class DeferredBackward:
    """The forms of one derived backward. `layouts`: of its gradients, None for what is not stored.
    `ends`: the tails of the gradients that can be held; none where ranks sum nothing at the end.
    """

    def __init__(self, backward: fx.Graph, layouts: Sequence[Layout | None]) -> None:
        self._graph, self._layouts = (
            copy_graph(backward),
            layouts,
        )  # scheduling changes the other one
        self.ends = tails(self._graph, layouts)
        self._summed: Run | None = None
        self._variants: dict[Form, Run] = {}

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
        if not split:
            self.ends = tuple(tail for tail in self.ends if not self._is_larger(tail))
        self._variants = {
            "deferred": compiled(without_sums(self._graph, self.ends)),
            "final": compiled(with_accumulated(self._graph, self.ends)),
        }

    def _is_larger(self, tail: Tail) -> bool:
        stored = self._layouts[tail.place]
        return stored is not None and tail.layout.local_size > stored.local_size

    def run(self, values: list[Any], accumulator: Accumulator | None) -> Any:
        """Run the backward in the form that the accumulator asks for. A deferred gradient is None
        among the results.
        """
        assert self._summed is not None
        form: Form = (
            accumulator.form() if accumulator is not None and self.has_variants else "reduced"
        )
        if form == "reduced":
            return self._summed(values)
        assert accumulator is not None
        if form == "deferred":
            results = list(self._variants["deferred"](values))
            accumulator.put(self.ends, [results[tail.place] for tail in self.ends])
            for tail in self.ends:
                results[tail.place] = None
            return results
        device = next(x.device for x in values if isinstance(x, torch.Tensor))
        kept = zip(self.ends, accumulator.take(self.ends), strict=True)
        values.extend(
            torch.zeros(tail.layout.local_shape, dtype=tail.dtype, device=device)
            if own is None
            else own
            for tail, own in kept
        )
        return self._variants["final"](values)
