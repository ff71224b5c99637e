"""In which forms backwards run: reduced, deferred or final (runtime/deferred_backward.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from autopar.runtime.deferred_backward import DeferredBackward


@contextmanager
def recorded_forms() -> Iterator[list[str]]:
    """A list that grows by the form of every backward within the context."""
    forms: list[str] = []
    before = DeferredBackward.run

    def run(self: DeferredBackward, values: list[Any], accumulator: Any) -> Any:
        asked = accumulator is not None and self.has_variants
        forms.append(accumulator.form() if asked else "reduced")
        return before(self, values, accumulator)

    with mock.patch.object(DeferredBackward, "run", run):
        yield forms
