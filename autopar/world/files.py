"""Worlds as JSON: one object, fields as in World; units stand in the names."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from pydantic import TypeAdapter

from .. import documents
from ..errors import WorldError

T = TypeVar("T")

# Worlds written before files had a version have all the fields of version 1 that they name.
WORLD = documents.Kind(
    "world",
    "describes no world",
    WorldError,
    version=1,
    remedy="calibrate again, or write it anew with World.save",
    unversioned=True,
)


def read(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Raises WorldError that names the file, every field that is wrong, and what it holds."""
    return parsed(kind, documents.read(path, WORLD), str(path))


def parsed(kind: type[T], text: str, where: str) -> T:
    """From JSON. Raises WorldError that names `where` it stands and every field that is wrong."""
    found: T = documents.checked(_adapter(kind), text, where, WORLD)
    return found


def parsed_inside(kind: type[T], data: Any, where: str) -> T:
    """The same from the objects, lists and numbers of JSON."""
    found: T = documents.checked_inside(_adapter(kind), data, where, WORLD)
    return found


def write(kind: type[T], value: T, path: str | os.PathLike[str]) -> None:
    documents.write(path, _adapter(kind).dump_json(value, indent=1).decode() + "\n")


def to_json(kind: type[T], value: T) -> Any:
    """As the objects, lists and numbers of JSON."""
    return _adapter(kind).dump_python(value, mode="json")


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Made once: pydantic builds a validator out of the types of all fields."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


_adapters: dict[type[Any], TypeAdapter[Any]] = {}
