"""Between what variables cost by their joint options and what values cost by their joint states.

Options and states are numbered; a joint one has a number for each axis, which is a dim of the
array, and the last dim is the mesh.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.rating.options import Floats
from autopar.rating.prices import BIG


def spread(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """From joint states to joint options, given the state of each option."""
    if states == known:
        return seconds
    axes = seconds.ndim - 1
    rows = seconds.reshape(len(known) ** axes, -1)
    found = rows.take(_rows(states, known, axes), axis=0)
    return found.reshape((len(states),) * axes + (-1,))


@cache
def _rows(states: tuple[int, ...], known: tuple[int, ...], axes: int) -> NDArray[np.intp]:
    """The place among joint states of every joint option."""
    one = np.array([known.index(state) for state in states], dtype=np.intp)
    found = np.zeros((), dtype=np.intp)
    for _ in range(axes):
        found = found[..., None] * len(known) + one
    return found.reshape(-1)


def least(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """From joint options to joint states: the least of the options that have it, BIG without.
    A new array where that differs.
    """
    if states == known:
        return seconds
    first, more, missing = _options(states, known)
    for dim in range(seconds.ndim - 1):
        before: Any = (slice(None),) * dim
        found = seconds.take(first, axis=dim)
        for place, option in more:
            into = found[(*before, place)]
            np.minimum(into, seconds[(*before, option)], out=into)
        if missing:
            found[(*before, missing)] = BIG
        seconds = found
    return seconds


@cache
def _options(
    states: tuple[int, ...], known: tuple[int, ...]
) -> tuple[NDArray[np.intp], tuple[tuple[int, int], ...], list[int]]:
    """Of every known state the first option that has it (some option where none has), then (state,
    option) of the further ones, and the states without.
    """
    first = [states.index(state) if state in states else 0 for state in known]
    more = [(known.index(s), i) for i, s in enumerate(states) if first[known.index(s)] != i]
    missing = [place for place, state in enumerate(known) if state not in states]
    return np.array(first, dtype=np.intp), tuple(more), missing


def only(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """BIG in the states that no option has; in place."""
    missing = [place for place, state in enumerate(known) if state not in states]
    for dim in range(seconds.ndim - 1) if missing else ():
        index: Any = (*(slice(None),) * dim, missing)
        seconds[index] = BIG
    return seconds
