"""Which blocks do what again in the backward: the rungs that the memory search compares.

Example: of 12 blocks, a ladder leads from "nothing" to "all run their cheap ops again", one block a
rung; the next one goes on from there until all are recomputed. `ladders` returns every ladder;
rematerialize.py prices rungs and climbs.
"""

from __future__ import annotations

from typing import NamedTuple

Names = tuple[str, ...]


class Rematerialized(NamedTuple):
    """The blocks that are recomputed, those that gather their weights again, and those that run
    their cheap ops again; a block may do the latter two.
    """

    recompute: Names
    regather: Names
    rerun: Names = ()


class Ladder(NamedTuple):
    """Rungs that hold less and less and take longer and longer. `low` is where they start: it is
    the last rung of a ladder before, or nothing.
    """

    low: Rematerialized
    rungs: list[Rematerialized]


def ladders(names: Names, fetching: Names, cheap: Names) -> list[Ladder]:
    """Return the ladders of a model with the blocks `names`, of which `fetching` gather weights and
    `cheap` have cheap ops to run again.

    The first n blocks run cheap ops again, or gather again, with the other done by none or by all;
    or the first n are recomputed, and the others do either, both or nothing.

    >>> [ladder.rungs for ladder in ladders(("a", "b"), (), ("a",))][0]
    [Rematerialized(recompute=(), regather=(), rerun=('a',))]
    """
    nothing = Rematerialized((), ())
    gathered, cheaply = Rematerialized((), fetching), Rematerialized((), (), cheap)
    both = Rematerialized((), fetching, cheap)
    every = [
        Ladder(nothing, _rerun_first(nothing, cheap)),
        Ladder(nothing, _regather_first(nothing, fetching)),
        Ladder(cheaply, _regather_first(cheaply, fetching)),
        Ladder(gathered, _rerun_first(gathered, cheap)),
        *(Ladder(low, _recompute_first(low, names)) for low in (nothing, cheaply, gathered, both)),
    ]
    return [ladder for i, ladder in enumerate(every) if ladder.rungs and ladder not in every[:i]]


def _rerun_first(low: Rematerialized, cheap: Names) -> list[Rematerialized]:
    return [low._replace(rerun=cheap[: n + 1]) for n in range(len(cheap))]


def _regather_first(low: Rematerialized, fetching: Names) -> list[Rematerialized]:
    return [low._replace(regather=fetching[: n + 1]) for n in range(len(fetching))]


def _recompute_first(low: Rematerialized, names: Names) -> list[Rematerialized]:
    """Return the rungs on which the first blocks are recomputed; the others do as `low` says."""
    rungs = []
    for number in range(len(names)):
        done, left = names[: number + 1], {*names[number + 1 :]}
        others = (tuple(n for n in each if n in left) for each in (low.regather, low.rerun))
        rungs.append(Rematerialized(done, *others))
    return rungs
