"""Tables of what conversions cost between the layouts in which a value is made and is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopar.cost.communication import path_seconds
from autopar.elimination import LARGEST, too_large
from autopar.ir.layout import Element, Layout
from autopar.ir.reshard import steps
from autopar.regions import Array, Known
from autopar.world import World


class Want(NamedTuple):
    """One use (or the making) of a value: its variable, and the layout that each option has."""

    variable: int
    key: Hashable
    layouts: tuple[Layout, ...]


class Conversions:
    """Seconds between layouts; tables of the same layouts are made once."""

    def __init__(self, world: World, known: Known) -> None:
        self._known = known
        self._seconds = _pricer(world)

    def direct(self, native: Want, want: Want, element: Element) -> Array:
        """From each option of the maker to each of the user."""
        key = ("direct", native.key, want.key, element)
        return self._known.array(key, lambda: self._between(native.layouts, want.layouts, element))

    def copied(self, native: Want, copy: Want, element: Element) -> Array:
        """From each option of the maker to each copy; the first option of a copy is none."""

        def make() -> Array:
            matrix = self._between(native.layouts, copy.layouts, element)
            return np.concatenate([np.zeros((len(native.layouts), 1)), matrix], axis=1)

        return self._known.array(("copied", native.key, copy.key, element), make)

    def nearer(self, native: Want, copy: Want, want: Want, element: Element) -> Array:
        """To each option of the user from the maker or from the copy, whichever is nearer. Raises
        PlanError where that is a larger table than elimination takes.
        """
        sizes = (len(native.layouts), 1 + len(copy.layouts), len(want.layouts))
        if math.prod(sizes) > LARGEST:
            raise too_large(sizes)

        def make() -> Array:
            direct = self._between(native.layouts, want.layouts, element)[:, None, :]
            through = self._between(copy.layouts, want.layouts, element)[None, :, :]
            return np.concatenate([direct, np.minimum(direct, through)], axis=1)

        return self._known.array(("nearer", native.key, copy.key, want.key, element), make)

    def _between(
        self, sources: Sequence[Layout], targets: Sequence[Layout], element: Element
    ) -> Array:
        rows = {layout: i for i, layout in enumerate(dict.fromkeys(sources))}
        columns = {layout: i for i, layout in enumerate(dict.fromkeys(targets))}
        small = np.array([[self._seconds(a, b, element) for b in columns] for a in rows])
        return small[np.ix_([rows[a] for a in sources], [columns[b] for b in targets])]


@lru_cache(maxsize=4)
def _pricer(world: World) -> Callable[[Layout, Layout, Element], float]:
    """Seconds of the way between two layouts. To plan takes many searches on the same few meshes,
    so it is remembered.
    """

    @lru_cache(maxsize=1 << 20)
    def seconds(source: Layout, target: Layout, element: Element) -> float:
        return path_seconds(steps(source, target), element, world)

    return seconds
