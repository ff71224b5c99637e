"""Runs a derived forward such that the forwards of one step gather their weights once
(passes/overlap/weight_reuse.py).

Example: the first of four micro-batches runs the form that also returns what it gathers, which is
kept in the step's `StepWeights`; the other three take it from there. The further forms are made
when a step first has StepWeights, as most modules need none. runtime/backends.py has one
ReusingForward for each derived forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import copy_graph, with_more_results
from autopar.passes.overlap.weight_reuse import from_gathered, gathered_weights

Run = Callable[[list[Any]], Any]


class StepWeights:
    """The gathered weights of one step, once its first forward has run, and of which forward they
    are: one that is derived anew within a step gathers its own.
    """

    def __init__(self) -> None:
        self._of: ReusingForward | None = None
        self._tensors: list[torch.Tensor] = []

    def of(self, forward: ReusingForward) -> list[torch.Tensor] | None:
        """Return what this forward has gathered, None where it has not run."""
        return self._tensors if self._of is forward else None

    def put(self, forward: ReusingForward, tensors: list[torch.Tensor]) -> None:
        """Keep what a forward has gathered, in place of any other's."""
        self._of, self._tensors = forward, tensors


class ReusingForward:
    """The forms of one derived forward. `parameters`: the names of the placeholders that no forward
    of a step changes. `names`: the nodes that are kept; none where ranks gather no weight.
    """

    def __init__(self, forward: fx.Graph, parameters: Collection[str]) -> None:
        self._graph = copy_graph(forward)  # scheduling changes the other one
        self.names = gathered_weights(self._graph, parameters)
        self._alone: Run | None = None
        self._gathering: Run | None = None
        self._reusing: Run | None = None

    @property
    def has_variants(self) -> bool:
        """Whether the further forms can run."""
        return self._reusing is not None

    def begin(self, alone: Run) -> None:
        """Take what runs the forward as it was derived."""
        self._alone = alone

    def make(self, compiled: Callable[[fx.Graph], Run]) -> None:
        """Make the further forms, each made runnable by `compiled`."""
        self._gathering = compiled(with_more_results(self._graph, self.names))
        self._reusing = compiled(from_gathered(self._graph, self.names))

    def run(self, values: list[Any], weights: StepWeights | None) -> Any:
        """Run the forward: as it was derived where there are no `weights` to keep, else gather them
        or take them from there.
        """
        if weights is None or self._gathering is None or self._reusing is None:
            assert self._alone is not None
            return self._alone(values)
        if (gathered_before := weights.of(self)) is not None:
            values.extend(gathered_before)
            return self._reusing(values)
        results = self._gathering(values)
        own = len(results) - len(self.names)
        weights.put(self, list(results[own:]))
        return results[:own]
