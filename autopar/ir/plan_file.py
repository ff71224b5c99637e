"""Layouts as JSON: {"shape": [8, 6], "states": ["S(0,4)", "I"]}, one state an axis of the mesh.

A plan's file: its fields with their types and bounds, and what it is held against as it is read.

A layout is {"shape": [8, 6], "states": ["S(0,4)", "I"]}, one state an axis of the mesh.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter

from autopar.errors import LayoutError, PlanError, WorldError
from autopar.ir.layout import I, Layout, P, R, State
from autopar.ir.mesh import Mesh
from autopar.ir.plan_table import STATES, Amount, Collective, Memory, Row
from autopar.world import World, json_file
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


VERSION = 3
PLAN = json_file.Kind(
    "plan", "is no plan", PlanError, VERSION, "plan again", parts={"world": WorldError}
)
_MOST_AXES = 4  # of a mesh
_MOST_DIMS = 64  # of a tensor, which is torch's own limit


def _optimizer(given: str | float) -> str | float:
    if given not in STATES if isinstance(given, str) else not 0 <= given <= 1e6:
        raise ValueError(f"it is one of {', '.join(STATES)}, or bytes for every trained number")
    return given


_STRICT = ConfigDict(extra="forbid")
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Fingerprint = Annotated[str, Field(pattern="^([0-9a-f]{16})?$")]
_Count = Annotated[int, Field(ge=0, le=2**62)]
_Optimizer = Annotated[str | float, AfterValidator(_optimizer)]


@dataclass(frozen=True)
class LayoutText:
    """A layout as its file has it."""

    __pydantic_config__ = _STRICT
    shape: Annotated[tuple[_Count, ...], Field(max_length=_MOST_DIMS)]
    states: Annotated[tuple[str, ...], Field(max_length=_MOST_AXES)]


@dataclass(frozen=True)
class ChoiceText:
    """What a node splits and how its tensors lie; either may be left out, and follows then."""

    __pydantic_config__ = _STRICT
    splits: Annotated[tuple[str, ...], Field(max_length=_MOST_AXES)] = ()
    operands: tuple[LayoutText | None, ...] = ()
    results: tuple[LayoutText, ...] = ()


_Layouts = dict[str, LayoutText]


@dataclass(frozen=True)
class PlanFile:
    """The fields as they stand in the file; `autopar.plan.Plan` says what they are."""

    __pydantic_config__ = _STRICT
    version: Literal[3]
    mesh: Annotated[str, Field(max_length=256)]
    layout: str
    fingerprint: _Fingerprint
    seconds: Amount
    comm_bytes: Amount
    peak_bytes: Amount
    bound: Amount
    optimizer: _Optimizer
    limit: Amount | None
    world: World
    choices: dict[str, ChoiceText]
    stored: _Layouts
    outputs: _Layouts
    inputs: _Layouts
    copies: tuple[tuple[str, _Count, LayoutText], ...]
    rows: tuple[Row, ...]
    collectives: tuple[Collective, ...]
    panels: tuple[str, ...]
    recompute: tuple[str, ...]
    regather: tuple[str, ...]
    unsplit: tuple[str, ...]
    memory: Memory | None
    meshes: tuple[tuple[str, Amount], ...]
    smaller: tuple[Annotated[int, Field(ge=1, le=2**20)], Amount] | None
    planned: tuple[_Digest, _Digest]
    overlapped: Amount | None = None
    device_limit: Amount | None = None
    groups: tuple[str, ...] = ()
    reduce_dtype: Literal["float32"] | None = None


@cache
def _adapter() -> TypeAdapter[PlanFile]:
    return TypeAdapter(PlanFile)


def load(path: str | os.PathLike[str]) -> Reader:
    """Raises PlanError for what is no plan, with every field that is wrong; WorldError where all
    that is wrong is in its world.
    """
    text = json_file.read(path, PLAN)
    return Reader(json_file.checked(_adapter(), text, str(path), PLAN), str(path))


def inside(data: Any, where: str) -> Reader:
    """The same from the objects, lists and numbers of JSON."""
    return Reader(json_file.checked_inside(_adapter(), data, where, PLAN), where)


class Reader:
    """What the fields of a file mean together. Raises PlanError with the path of a field, and the
    file (`where`).
    """

    def __init__(self, file: PlanFile, where: str) -> None:
        self.file, self.where = file, where
        self.known: dict[LayoutText, Layout] = {}  # layers lie alike
        self.mesh = self._mesh()
        self._panels()
        self._blocks()
        for place, one in enumerate(file.collectives):
            self._axes(one.axes, f"collectives.{place}.axes")

    def refuse(self, path: str, says: str) -> NoReturn:
        raise PlanError(f"{self.where} is no plan: {path}: {says}") from None

    def _mesh(self) -> Mesh:
        try:
            mesh = Mesh.parse(self.file.mesh)
        except WorldError as error:
            self.refuse("mesh", str(error))
        if len(mesh.axes) > _MOST_AXES:
            self.refuse("mesh", f"{mesh} has {len(mesh.axes)} axes, {_MOST_AXES} are the most")
        if mesh.size != self.file.world.ranks:
            self.refuse(
                "mesh",
                f"mesh {mesh} has {mesh.size} ranks, its world {self.file.world.ranks}: edit both "
                "or neither",
            )
        return mesh

    def _axes(self, names: tuple[str, ...], path: str) -> None:
        strange = [name for name in names if name not in self.mesh.names]
        if strange or len(set(names)) < len(names):
            has = ", ".join(self.mesh.names) or "none"
            self.refuse(path, f"{', '.join(map(shown, names))}: the mesh has the axes {has}")

    def _panels(self) -> None:
        names = self.file.panels
        self._axes(names, "panels")
        if names and (len(names) != 2 or len({self.mesh.sizes[name] for name in names}) > 1):
            self.refuse("panels", f"{', '.join(names)}: give a row and a column axis of one size")

    def _blocks(self) -> None:
        for path in ("recompute", "regather"):
            names: tuple[str, ...] = getattr(self.file, path)
            if len(set(names)) < len(names):
                self.refuse(path, f"{', '.join(map(shown, names))}: name each block once")

    def layout(self, found: LayoutText, *path: str | int) -> Layout:
        if found not in self.known:
            try:
                self.known[found] = read(self.mesh, found.shape, found.states)
            except (LayoutError, PlanError) as error:
                self.refuse(".".join(map(str, path)), str(error))
        return self.known[found]

    def layouts(self, key: str) -> dict[str, Layout]:
        found: Mapping[str, LayoutText] = getattr(self.file, key)
        return {name: self.layout(one, key, name) for name, one in found.items()}

    def operands(self, name: str) -> tuple[Layout | None, ...]:
        """Of the node's choice."""
        return tuple(
            None if one is None else self.layout(one, "choices", name, "operands", place)
            for place, one in enumerate(self.file.choices[name].operands)
        )

    def results(self, name: str) -> tuple[Layout, ...]:
        """Of the node's choice."""
        return tuple(
            self.layout(one, "choices", name, "results", place)
            for place, one in enumerate(self.file.choices[name].results)
        )

    def copies(self) -> dict[tuple[str, int], Layout]:
        found: dict[tuple[str, int], Layout] = {}
        for place, (name, index, one) in enumerate(self.file.copies):
            if (name, index) in found:
                self.refuse(f"copies.{place}", f"result {index} of {shown(name)} is there twice")
            found[name, index] = self.layout(one, "copies", place, 2)
        return found
