"""Memory: what a rank holds at the end of the forward pass, in bytes."""

from __future__ import annotations

from collections.abc import Iterable

from ..layout import Layout

_COPIES_TRAINED = 4  # parameter, gradient, two moments of AdamW


def stored_bytes(layout: Layout, element_bytes: int, trainable: bool) -> float:
    return (_COPIES_TRAINED if trainable else 1) * layout.local_size * element_bytes


def activation_bytes(values: Iterable[tuple[Layout, int]]) -> float:
    """Upper bound: every value that carries a gradient is kept for the backward pass."""
    return float(sum(layout.local_size * element_bytes for layout, element_bytes in values))
