"""From the layout wanted of a node's result to the layouts of its operands: how slices reach back
to constants and inputs.
"""

from __future__ import annotations

import math

from autopar.ir.layout import Layout, R, S, State
from autopar.ir.sharding_rule import Dims, Spec

Shapes = tuple[tuple[int, ...] | None, ...]


def pushed_back(
    spec: Spec, wanted: Layout, result: int, operands: Shapes
) -> tuple[Layout, tuple[Layout | None, ...]]:
    """(the layout in which the node can make its result, the layouts of its operands for that).

    An axis whose digit lies inside one factor that may be split reaches back; every other axis of
    the result is made whole (R), to be sliced afterwards.
    """
    mesh = wanted.mesh
    reached: list[State] = []
    back: list[list[State]] = []
    for axis, state in zip(mesh.axes, wanted.states, strict=True):
        found = _factor(spec, spec.results[result], state, axis.size) if state.kind == "S" else None
        reached.append(state if found else R)
        back.append(
            [_state(spec, dims, found) if dims is not None else R for dims in spec.operands]
        )
    columns = [tuple(states[i] for states in back) for i in range(len(spec.operands))]
    layouts = tuple(
        None if shape is None or dims is None else Layout(mesh, shape, column)
        for shape, dims, column in zip(operands, spec.operands, columns, strict=True)
    )
    return Layout(mesh, wanted.shape, tuple(reached)), layouts


def _units(spec: Spec, names: tuple[str, ...]) -> list[tuple[str, int]]:
    """The factors of one dim with their units: the product of the sizes of the factors inside."""
    return [
        (name, math.prod(spec.sizes[n] for n in names[i + 1 :])) for i, name in enumerate(names)
    ]


def _factor(spec: Spec, dims: Dims, state: State, size: int) -> tuple[str, int] | None:
    """The factor in which a digit lies and its stride there; None where it spans two, or where the
    factor may not be split.
    """
    for name, unit in _units(spec, dims[state.dim]):
        inside = state.stride % unit == 0 and state.stride * size <= unit * spec.sizes[name]
        if (
            inside
            and (unit * spec.sizes[name]) % (state.stride * size) == 0
            and spec.splittable(name)
        ):
            return name, state.stride // unit
    return None


def _state(spec: Spec, dims: Dims, found: tuple[str, int] | None) -> State:
    if found is None:
        return R
    for dim, names in enumerate(dims):
        for name, unit in _units(spec, names):
            if name == found[0]:
                return S(dim, found[1] * unit)
    return R
