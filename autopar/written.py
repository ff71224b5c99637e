"""Layouts as JSON: {"shape": [8, 6], "states": ["S(0,4)", "I"]}, one state an axis of the mesh."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from autopar.errors import PlanError
from autopar.layout import I, Layout, P, R, State
from autopar.mesh import Mesh
from autopar.world.json_file import shown

_WHOLE = {"I": I, "R": R, "P": P}


def digest(facts: Any) -> str:
    """Sixteen hexadecimal digits that name facts which JSON can hold."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(layout: Layout) -> dict[str, Any]:
    states = [f"S({s.dim},{s.stride})" if s.kind == "S" else s.kind for s in layout.states]
    return {"shape": list(layout.shape), "states": states}


def read(mesh: Mesh, shape: tuple[int, ...], texts: tuple[str, ...]) -> Layout:
    """Raises PlanError or LayoutError where a state is no state, or no layout of this shape."""
    if len(texts) != len(mesh.axes):
        raise PlanError(f"{len(texts)} states, the mesh {mesh} has {len(mesh.axes)} axes")
    return Layout(mesh, shape, tuple(_state(text, shape) for text in texts))


def _state(text: str, shape: tuple[int, ...]) -> State:
    found = re.fullmatch(r"S\(([0-9]{1,18}), ?([0-9]{1,18})\)", text)
    if found:
        dim, stride = int(found[1]), int(found[2])
        if dim >= len(shape) or not stride:
            raise PlanError(f"state {text!r}: the tensor has {len(shape)} dims, strides are from 1")
        return State("S", dim, stride)
    if text not in _WHOLE:
        raise PlanError(f"state {shown(text)}: it is I, R, P or S(dim,stride), as S(0,4)")
    return _WHOLE[text]
