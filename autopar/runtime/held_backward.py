"""Runs a derived backward in the form that is asked for: it sums gradients across ranks, holds what
this rank would send, or sums what is held with its own (passes/overlap/accumulation.py).

Example: of four backwards three run `held` and one `closing`, and the ranks exchange each gradient
once. Who asks is a `Holder`: `par.no_sync()` and micro-batches are two (runtime/training). The two
further forms are made at the first call of a Holder, as most modules need none.
runtime/backends.py has one HeldBackward for each derived backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import fx

from autopar.ir.graph import copied
from autopar.ir.layout import Layout
from autopar.passes.overlap.accumulation import Tail, closing, held, tails

Form = Literal["summed", "held", "closing"]
Run = Callable[[list[Any]], Any]


class Holder(Protocol):
    """Keeps what ranks hold of gradients between backwards."""

    def form(self) -> Form:
        """Return the form in which the next backward runs."""

    def put(self, ends: Sequence[Tail], own: Sequence[torch.Tensor]) -> None:
        """Keep what a held backward returned for these tails."""

    def take(self, ends: Sequence[Tail]) -> Sequence[torch.Tensor | None]:
        """Return what is kept for these tails, None where there is nothing, and forget it."""


class HeldBackward:
    """The forms of one derived backward. `layouts`: of its gradients, None for what is not stored.
    `ends`: the tails of the gradients that can be held; none where ranks sum nothing at the end.
    """

    def __init__(self, backward: fx.Graph, layouts: Sequence[Layout | None]) -> None:
        self._graph, self._layouts = copied(backward), layouts  # scheduling changes the other one
        self.ends = tails(self._graph, layouts)
        self._summed: Run | None = None
        self._forms: dict[Form, Run] = {}

    @property
    def made(self) -> bool:
        """Whether the further forms can run."""
        return bool(self._forms)

    def begin(self, summed: Run) -> None:
        """Take what runs the backward as it was derived."""
        self._summed = summed

    def make(self, compiled: Callable[[fx.Graph], Run], split: bool) -> None:
        """Make the further forms, each made runnable by `compiled`. `split`: hold gradients, too,
        whose own part is larger than what a rank stores, as FSDP's are.
        """
        if not split:
            self.ends = tuple(tail for tail in self.ends if not self._is_larger(tail))
        self._forms = {
            "held": compiled(held(self._graph, self.ends)),
            "closing": compiled(closing(self._graph, self.ends)),
        }

    def _is_larger(self, tail: Tail) -> bool:
        stored = self._layouts[tail.place]
        return stored is not None and tail.layout.local_size > stored.local_size

    def run(self, values: list[Any], holder: Holder | None) -> Any:
        """Run the backward in the form that the holder asks for. A held gradient is None among the
        results.
        """
        assert self._summed is not None
        form: Form = holder.form() if holder is not None and self.made else "summed"
        if form == "summed":
            return self._summed(values)
        assert holder is not None
        if form == "held":
            results = list(self._forms["held"](values))
            holder.put(self.ends, [results[tail.place] for tail in self.ends])
            for tail in self.ends:
                results[tail.place] = None
            return results
        device = next(x.device for x in values if isinstance(x, torch.Tensor))
        kept = zip(self.ends, holder.take(self.ends), strict=True)
        values.extend(
            torch.zeros(tail.layout.local_shape, dtype=tail.dtype, device=device)
            if own is None
            else own
            for tail, own in kept
        )
        return self._forms["closing"](values)
