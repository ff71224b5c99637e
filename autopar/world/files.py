"""Worlds as JSON: one object, fields as in World; units stand in the names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ..errors import WorldError

T = TypeVar("T")


def read(kind: type[T], path: Path) -> T:
    """Raises WorldError that names the file, every field that is wrong, and what it holds."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorldError(f"cannot read the world in {path}: {error}") from None
    return parsed(kind, text, str(path))


def parsed(kind: type[T], text: str, where: str) -> T:
    """From JSON. Raises WorldError that names `where` it stands and every field that is wrong."""
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        faults = [_sentence(fault) for fault in error.errors()]
        raise WorldError(f"{where} describes no world: " + "; ".join(faults)) from None


def _sentence(fault: object) -> str:
    """levels.1.bytes_per_s: Input should be a valid number (it is 'fast')"""
    assert isinstance(fault, dict)
    where = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    given = fault["input"]
    shown = f" (it is {given!r})" if isinstance(given, str | int | float | None) else ""
    return (f"{where}: " if where else "") + message + (shown if where else "")


def write(kind: type[T], value: T, path: Path) -> None:
    path.write_bytes(TypeAdapter(kind).dump_json(value, indent=1) + b"\n")


def to_json(kind: type[T], value: T) -> Any:
    """As the objects, lists and numbers of JSON."""
    return TypeAdapter(kind).dump_python(value, mode="json")
