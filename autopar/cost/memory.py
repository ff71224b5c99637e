"""Memory: what a rank stores of parameters, and what is held at the peak of a step, in bytes."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import PlanError
from ..layout import Layout

STATES = {
    "adamw": 2,
    "adam": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd-momentum": 1,
    "sgd": 0,
}  # numbers that an optimizer keeps for every trained one, each in the dtype of the parameter

_STEP_COPIES = {"adamw": 2, "adam": 2, "rmsprop": 1, "adagrad": 1}  # made for a moment by a step

Optimizer = str | float  # one of STATES, or bytes of state for every trained number


def stored_bytes(
    layout: Layout, element_bytes: int, trainable: bool, optimizer: Optimizer = "adamw"
) -> float:
    """A parameter on one rank with its gradient and the optimizer's states."""
    copies = (2 if trainable else 1) * layout.local_size * float(element_bytes)
    return copies + (optimizer_bytes(layout, element_bytes, optimizer) if trainable else 0.0)


def optimizer_bytes(layout: Layout, element_bytes: int, optimizer: Optimizer) -> float:
    """The optimizer's states of one trained parameter on one rank. Raises PlanError for an
    optimizer of another name than those in STATES.

    A bfloat16 parameter with a float32 copy of itself and two float32 moments is `optimizer=12`.
    """
    if isinstance(optimizer, str):
        if optimizer not in STATES:
            raise PlanError(
                f"unknown optimizer {optimizer!r}: it is one of {', '.join(STATES)}, or a number, "
                "the bytes of state for every trained number"
            )
        return float(STATES[optimizer] * element_bytes * layout.local_size)
    return float(optimizer * layout.local_size)


def step_copies(optimizer: Optimizer) -> int:
    """How many copies of one parameter an optimizer's step makes for a moment: as torch's optimizers
    do one parameter at a time, which is their way with DTensors.
    """
    return _STEP_COPIES.get(optimizer, 0) if isinstance(optimizer, str) else 2


def activation_bytes(values: Iterable[tuple[Layout, int]]) -> float:
    """Upper bound: every value that carries a gradient is kept for the backward pass."""
    return float(sum(layout.local_size * element_bytes for layout, element_bytes in values))
