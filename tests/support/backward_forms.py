"""In which forms derived graphs run: backwards reduced, deferred or final
(runtime/deferred_backward.py), forwards alone, gathering or reusing (runtime/reusing_forward.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from autopar.runtime.deferred_backward import DeferredBackward
from autopar.runtime.reusing_forward import ReusingForward


@contextmanager
def recorded_forms() -> Iterator[list[str]]:
    """A list that grows by the form of every backward within the context."""
    forms: list[str] = []
    before = DeferredBackward.run

    def run(self: DeferredBackward, values: list[Any], accumulator: Any) -> Any:
        varies = accumulator is not None and self.has_variants
        forms.append(accumulator.form() if varies else "reduced")
        return before(self, values, accumulator)

    with mock.patch.object(DeferredBackward, "run", run):
        yield forms


@contextmanager
def recorded_forwards() -> Iterator[list[str]]:
    """A list that grows by the form of every derived forward within the context."""
    forms: list[str] = []
    before = ReusingForward.run

    def run(self: ReusingForward, values: list[Any], weights: Any) -> Any:
        reuses = weights is not None and self.has_variants
        forms.append(
            "alone" if not reuses else "gathering" if weights.of(self) is None else "reusing"
        )
        return before(self, values, weights)

    with mock.patch.object(ReusingForward, "run", run):
        yield forms
