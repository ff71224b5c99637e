"""A shorter frame of a model with many equal blocks: a start for the whole."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Mapping

from autopar.ir.graph import alike
from autopar.rating.frame import Edge, Frame, Variable

_KEPT = 2  # equal blocks that stay at either end

Block = tuple[str, int]
Twins = Mapping[int, Variable]  # by id of a variable of the whole frame, one of the shorter frame


def shortened(frame: Frame) -> tuple[Frame, Twins]:
    """The frame without the middle of each run of equal blocks. A frame without such runs is given
    back as it is.
    """
    blocks: dict[Block, list[Variable]] = defaultdict(list)
    for variable in frame.variables:
        if variable.block is not None:
            blocks[variable.block].append(variable)
    looks = {block: _look(variables) for block, variables in blocks.items()}
    standing = {
        block: run[_KEPT - 1] for run in alike(looks) for block in run[_KEPT:-_KEPT]
    }  # a block that is left out, and the one that stands for it
    if not standing:
        return frame, {id(v): v for v in frame.variables}
    stand_in = {id(v): v for v in frame.variables}
    for gone, other in standing.items():
        stand_in.update((id(v), twin) for v, twin in zip(blocks[gone], blocks[other], strict=True))
    copies = {
        id(v): dataclasses.replace(v, edges=[]) for v in frame.variables if v.block not in standing
    }
    for variable in frame.variables:
        for edge in variable.edges if id(variable) in copies else ():
            if edge.user is variable:
                maker = copies[id(stand_in[id(edge.maker)])]
                made = dataclasses.replace(edge, maker=maker, user=copies[id(variable)])
                made.maker.edges.append(made)
                made.user.edges.append(made)
    short = dataclasses.replace(frame, variables=tuple(copies.values()))
    return short, {id(v): copies[id(stand_in[id(v)])] for v in frame.variables}


def _look(variables: list[Variable]) -> Hashable:
    return tuple(
        (v.look, frozenset((e.look, e.maker is v, _seen(e, v)) for e in v.edges)) for v in variables
    )


def _seen(edge: Edge, variable: Variable) -> Hashable:
    """Where the other end is: so many blocks on, or outside of all of them."""
    other = edge.user if edge.maker is variable else edge.maker
    if variable.block is None or other.block is None or other.block[0] != variable.block[0]:
        return id(other)
    return other.block[1] - variable.block[1], other.place
