"""The file of a plan: its fields with their types and bounds, and how they are checked and read.

Example: a layout is {"shape": [8, 6], "states": ["S(0,4)", "I"]}, one state an axis of the mesh.

`load` and `inside` validate JSON against `PlanFile`. The `Reader` that they return makes meshes and
layouts of the fields, and raises PlanError with the path of a field that contradicts another one.
ir/plan.py makes a Plan of these. People edit such files, so every fault is named.
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

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter

from autopar.errors import LayoutError, PlanError, WorldError
from autopar.ir.layout import I, Layout, P, R, State
from autopar.ir.mesh import Mesh
from autopar.ir.plan_table import STATES, Amount, Collective, Memory, Padding, Row
from autopar.world import World, json_file
from autopar.world.json_file import shown

REDUCE_DTYPES = {None: None, torch.float32: "float32"}  # their names in files
_UNSHARDED_STATES = {"I": I, "R": R, "P": P}


def read_reduce_dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which gradients of parameters are summed, from the user's argument: None
    (their own dtype), or float32 as a name or a dtype. Raises PlanError for others.
    """
    for dtype, name in REDUCE_DTYPES.items():
        if value in (dtype, name):
            return dtype
    raise PlanError(
        f"reduce_dtype is {value!r}: gradients of parameters are added up in float32, or "
        "(None) in their own dtype"
    )


def digest(facts: Any) -> str:
    """Return a hash of sixteen hexadecimal digits of facts that JSON can hold."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(layout: Layout) -> dict[str, Any]:
    """Return a layout as its file has it."""
    states = [f"S({s.dim},{s.stride})" if s.kind == "S" else s.kind for s in layout.states]
    return {"shape": list(layout.shape), "states": states}


def read(mesh: Mesh, shape: tuple[int, ...], texts: tuple[str, ...]) -> Layout:
    """Return the layout of these states, one an axis. Raises PlanError for a text that is no state,
    LayoutError for states that are no layout of this shape.
    """
    if len(texts) != len(mesh.axes):
        raise PlanError(f"{len(texts)} states, the mesh {mesh} has {len(mesh.axes)} axes")
    return Layout(mesh, shape, tuple(_parse_state(text, shape) for text in texts))


def _parse_state(text: str, shape: tuple[int, ...]) -> State:
    match = re.fullmatch(r"S\(([0-9]{1,18}), ?([0-9]{1,18})\)", text)
    if match:
        dim, stride = int(match[1]), int(match[2])
        if dim >= len(shape) or not stride:
            raise PlanError(f"state {text!r}: the tensor has {len(shape)} dims, strides are from 1")
        return State("S", dim, stride)
    if text not in _UNSHARDED_STATES:
        raise PlanError(f"state {shown(text)}: it is I, R, P or S(dim,stride), as S(0,4)")
    return _UNSHARDED_STATES[text]


VERSION = 3


def _with_world_of_today(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's document with its world as it is written today."""
    world = data.get("world")
    renewed = json_file.renewed_world(world) if isinstance(world, dict) else world
    return data if renewed is world else {**data, "world": renewed}


PLAN = json_file.Kind(
    "plan",
    "is no plan",
    PlanError,
    VERSION,
    "plan again",
    errors_inside={"world": WorldError},
    renewed=_with_world_of_today,
)
_MOST_AXES = 4  # of a mesh
_MOST_DIMS = 64  # of a tensor: torch's own limit


def _checked_optimizer(optimizer: str | float) -> str | float:
    """Return the field if it is an optimizer or a number of bytes, for pydantic."""
    if optimizer not in STATES if isinstance(optimizer, str) else not 0 <= optimizer <= 1e6:
        raise ValueError(f"it is one of {', '.join(STATES)}, or bytes for every trained number")
    return optimizer


_STRICT = ConfigDict(extra="forbid")
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Fingerprint = Annotated[str, Field(pattern="^([0-9a-f]{16})?$")]
_Count = Annotated[int, Field(ge=0, le=2**62)]
_Optimizer = Annotated[str | float, AfterValidator(_checked_optimizer)]


@dataclass(frozen=True)
class LayoutText:
    """A layout as the file has it: its states as texts, such as "S(0,4)"."""

    __pydantic_config__ = _STRICT
    shape: Annotated[tuple[_Count, ...], Field(max_length=_MOST_DIMS)]
    states: Annotated[tuple[str, ...], Field(max_length=_MOST_AXES)]


@dataclass(frozen=True)
class ChoiceText:
    """The choice for a node as the file has it: what it splits and the layouts of its tensors.
    Either may be left out, and then follows from the other.
    """

    __pydantic_config__ = _STRICT
    splits: Annotated[tuple[str, ...], Field(max_length=_MOST_AXES)] = ()
    operands: tuple[LayoutText | None, ...] = ()
    results: tuple[LayoutText, ...] = ()


_Layouts = dict[str, LayoutText]


@dataclass(frozen=True)
class PlanFile:
    """The fields of the file; `autopar.ir.plan.Plan` says what they mean."""

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
    rerun: tuple[str, ...] = ()
    reduce_dtype: Literal["float32"] | None = None
    replicated_outputs: bool = False
    microbatches: Annotated[int, Field(ge=1, le=2**20)] = 1
    sums_once: bool = True
    gathers_once: bool = False
    interleaved: bool = False
    stage_starts: tuple[str, ...] = ()
    schedule: Literal[
        "", "gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"
    ] = ""
    rounds: Annotated[int, Field(ge=1, le=2**10)] = 1
    slices_borders: bool = False
    padding: tuple[Padding, ...] = ()
    strided_from: Annotated[int, Field(ge=2, le=2**62)] | None = None


@cache
def _plan_adapter() -> TypeAdapter[PlanFile]:
    return TypeAdapter(PlanFile)


def load(path: str | os.PathLike[str]) -> Reader:
    """Return the reader of a plan's file. Raises PlanError for a file that is no plan, with every
    field that is wrong; WorldError where all faults are in its world.
    """
    text = json_file.read(path, PLAN)
    return Reader(json_file.read_json(_plan_adapter(), text, str(path), PLAN), str(path))


def inside(data: Any, where: str) -> Reader:
    """Return as `load` does the reader of what json.loads gave; messages call it `where`."""
    return Reader(json_file.checked_inside(_plan_adapter(), data, where, PLAN), where)


class Reader:
    """The mesh and the layouts of a plan's file. Raises PlanError, with the file (`where`) and the
    path of a field, where fields contradict one another.
    """

    def __init__(self, file: PlanFile, where: str) -> None:
        self.file, self.where = file, where
        self.known: dict[LayoutText, Layout] = {}  # equal layers have equal layouts
        self.mesh = self._mesh()
        self._panels()
        self._blocks()
        for index, collective in enumerate(file.collectives):
            self._axes(collective.axes, f"collectives.{index}.axes")

    def refuse(self, path: str, says: str) -> NoReturn:
        """Raise the PlanError about the field at `path`."""
        raise PlanError(f"{self.where} is no plan: {path}: {says}") from None

    def _mesh(self) -> Mesh:
        """Return the mesh; it must have as many ranks as the world."""
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
        """Check that these are axes of the mesh, each once."""
        unknown = [name for name in names if name not in self.mesh.names]
        if unknown or len(set(names)) < len(names):
            has = ", ".join(self.mesh.names) or "none"
            self.refuse(path, f"{', '.join(map(shown, names))}: the mesh has the axes {has}")

    def _panels(self) -> None:
        """Check that SUMMA has a row and a column axis of one size, or none."""
        names = self.file.panels
        self._axes(names, "panels")
        if names and (len(names) != 2 or len({self.mesh.sizes[name] for name in names}) > 1):
            self.refuse("panels", f"{', '.join(names)}: give a row and a column axis of one size")

    def _blocks(self) -> None:
        """Check that no block is named twice."""
        for path in ("recompute", "regather", "rerun"):
            names: tuple[str, ...] = getattr(self.file, path)
            if len(set(names)) < len(names):
                self.refuse(path, f"{', '.join(map(shown, names))}: name each block once")

    def layout(self, text: LayoutText, *path: str | int) -> Layout:
        """Return the layout at `path`."""
        if text not in self.known:
            try:
                self.known[text] = read(self.mesh, text.shape, text.states)
            except (LayoutError, PlanError) as error:
                self.refuse(".".join(map(str, path)), str(error))
        return self.known[text]

    def layouts(self, key: str) -> dict[str, Layout]:
        """Return the layouts in a field: "stored", "outputs" or "inputs"."""
        texts: Mapping[str, LayoutText] = getattr(self.file, key)
        return {name: self.layout(text, key, name) for name, text in texts.items()}

    def operands(self, name: str) -> tuple[Layout | None, ...]:
        """Return the operands' layouts in a node's choice."""
        return tuple(
            None if text is None else self.layout(text, "choices", name, "operands", index)
            for index, text in enumerate(self.file.choices[name].operands)
        )

    def results(self, name: str) -> tuple[Layout, ...]:
        """Return the results' layouts in a node's choice."""
        return tuple(
            self.layout(text, "choices", name, "results", index)
            for index, text in enumerate(self.file.choices[name].results)
        )

    def copies(self) -> dict[tuple[str, int], Layout]:
        """Return the second layouts of values, by (node, index of the result)."""
        layouts: dict[tuple[str, int], Layout] = {}
        for place, (name, index, text) in enumerate(self.file.copies):
            if (name, index) in layouts:
                self.refuse(f"copies.{place}", f"result {index} of {shown(name)} is there twice")
            layouts[name, index] = self.layout(text, "copies", place, 2)
        return layouts
