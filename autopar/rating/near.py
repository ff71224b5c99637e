"""From the options that a bound leaves on one mesh to the joint choices that search.py takes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from autopar.ir.layout import I, R
from autopar.ir.strategy import Choice, Slot
from autopar.rating.bound import Bound, Joint
from autopar.rating.frame import FIRST_SLOT, WHOLE, Variable

Choices = tuple[tuple[Choice, ...], ...]


def near(bound: Bound, margin: float, most: int) -> Mapping[str, Choices]:
    """Of every node and stored tensor: the joint choices whose bound is at most `margin` seconds
    above the least, of every region at most so many.
    """
    left = bound.near(margin, most)
    found: dict[str, Choices] = {}
    known: dict[Hashable, Choices] = {}
    for variable in bound.frame.variables:
        if variable.name not in left:
            continue
        names = [variable.name] if variable.region is None else variable.region.nodes
        for position, name in enumerate(names):
            key = (variable.look, left[variable.name], position)
            if key not in known:
                known[key] = _choices(variable, left[variable.name], position)
            found[name] = known[key]
    return found


def _choices(variable: Variable, left: Joint, position: int) -> Choices:
    if variable.region is not None:
        single = [option[position].choice for option in variable.options]
    else:
        single = [_stored(variable, state) for state in variable.options]
    return tuple(dict.fromkeys(tuple(single[i] for i in each) for each in sorted(left)))


def _stored(variable: Variable, state: int) -> Choice:
    if state < FIRST_SLOT:
        return I if state == WHOLE else R
    dim, place = variable.slots[state - FIRST_SLOT]
    return Slot(str(dim), place)
