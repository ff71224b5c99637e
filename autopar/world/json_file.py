"""JSON documents that people edit: read with every fault named, written whole or not at all.

Example: facts = checked(TypeAdapter(World), read("world.json", WORLD), "world.json", WORLD)
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from autopar.errors import AutoparError

T = TypeVar("T")

LARGEST_BYTES = 2**28  # of a file; the plan of 80 layers takes some 4 MB
SHOWN_FAULTS = 8  # that one message lists
_SHOWN_CHARACTERS = 60  # of a value in a message


@dataclass(frozen=True)
class Kind:
    """What a document is. `name`: in messages; `none`: what they say of one that is none, "is no
    plan". `error`: what they are raised as; `parts`: the same of what stands whole in one field, as
    a plan's world does. `version`: of the format that this autopar reads and writes; `remedy`: what
    to do about another one; `unversioned`: one that names none is read as this one.
    """

    name: str
    none: str
    error: type[AutoparError]
    version: int
    remedy: str
    unversioned: bool = False
    parts: Mapping[str, type[AutoparError]] = field(default_factory=dict)


# -- reading ---------------------------------------------------------------------------------------
def read(path: str | os.PathLike[str], kind: Kind) -> str:
    """The text of a file. Raises the kind's error for what is no file of UTF-8, or too large."""
    try:
        with open(os.fspath(path), "rb") as file:
            data = file.read(LARGEST_BYTES + 1)
        if len(data) > LARGEST_BYTES:
            raise ValueError(f"it is larger than {LARGEST_BYTES / 2**20:.0f} MiB")
        return data.decode("utf-8-sig")
    except OSError as error:
        refuse(kind, f"cannot read the {kind.name} in {path}: {error.strerror or error}")
    except (ValueError, TypeError) as error:  # bad bytes, a path with a null byte, no path at all
        refuse(kind, f"cannot read the {kind.name} in {_printable(str(path))}: {error}")


def checked(adapter: TypeAdapter[T], text: str, where: str, kind: Kind) -> T:
    """What the text says. Raises the kind's error, which names `where` it stands, and every field
    that is wrong with what it holds; for a document of another version it says only that. No object
    may name a field twice.
    """
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        refuse(kind, f"{where} {kind.none}: Invalid JSON: {_plain(error)}")
    _same_version(data, where, kind)
    return _typed(adapter, text, where, kind)


def checked_inside(adapter: TypeAdapter[T], data: Any, where: str, kind: Kind) -> T:
    """The same of what json.loads gave, where it stands inside another document."""
    _same_version(data, where, kind)
    try:
        text = json.dumps(data)  # NaN too: the field is named then
    except (TypeError, ValueError, RecursionError) as error:
        refuse(kind, f"{where} {kind.none}: {_plain(error)}")
    return _typed(adapter, text, where, kind)


def _typed(adapter: TypeAdapter[T], text: str, where: str, kind: Kind) -> T:
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        inside = {str(fault["loc"][0]) for fault in error.errors() if fault["loc"]}
        part = inside.pop() if len(inside) == 1 else ""
        raise kind.parts.get(part, kind.error)(f"{where} {kind.none}: {sentences(error)}") from None


def _same_version(data: Any, where: str, kind: Kind) -> None:
    if not isinstance(data, dict):
        refuse(kind, f"{where} {kind.none}: it is a {_json_type(data)}, not an object")
    found = data.get("version")
    if type(found) is int and found == kind.version:
        return
    if "version" in data:
        says = f"is version {shown(found)}"
    elif kind.unversioned:
        return
    else:
        says = "names no version, so it is of an older one"
    refuse(kind, f"{where} {says}, this autopar reads version {kind.version}: {kind.remedy}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(one for one, after in itertools.pairwise(names) if one == after)
        raise ValueError(f"one object names {shown(twice)} twice: keep one")
    return found


def _plain(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _json_type(data: Any) -> str:
    return {list: "list", str: "string", type(None): "null"}.get(type(data), "number")


def refuse(kind: Kind, message: str) -> NoReturn:
    raise kind.error(message) from None


# -- messages --------------------------------------------------------------------------------------
def sentences(error: ValidationError) -> str:
    """levels.1.bytes_per_s: Input should be a valid number (it is 'fast'); …"""
    faults: Sequence[Any] = error.errors(include_url=False)
    listed = dict.fromkeys(map(_sentence, faults))
    more = len(listed) - SHOWN_FAULTS
    text = "; ".join([*listed][:SHOWN_FAULTS])
    return text + (f"; and {more} more" if more > 0 else "")


def _sentence(fault: Any) -> str:
    where = ".".join(_named(part) for part in fault["loc"])
    if fault["type"] == "missing":
        return f"{where}: it is missing, the file is cut short or of another kind"
    if fault["type"] == "unexpected_keyword_argument":
        return f"{where}: there is no field of this name"
    message = fault["msg"].removeprefix("Value error, ")
    given = fault["input"]
    plain = given is None or isinstance(given, str | int | float)
    return (
        (f"{where}: " if where else "")
        + message
        + (f" (it is {shown(given)})" if plain and where else "")
    )


def _named(part: str | int) -> str:
    """A step of a path, in quotes where it would not be seen."""
    return shown(part).strip("'") if str(part).strip() else repr(part)


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def shown(value: Any) -> str:
    """A value as a message quotes it: cut short, and of characters that any terminal prints."""
    try:
        plain = not isinstance(value, str) or value.isprintable()
        text = repr(value) if plain else ascii(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"
    short = len(text) <= _SHOWN_CHARACTERS
    return text if short else f"{text[:_SHOWN_CHARACTERS]}… of {len(text)} characters"


# -- writing ---------------------------------------------------------------------------------------
def write(path: str | os.PathLike[str], text: str) -> None:
    """Put the text in the place of the file, in one step: a write that fails leaves what was there.
    A link is followed, the permissions of a file that was there are kept. What is no regular file,
    such as /dev/stdout, is written to as it is.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, _mode(target))
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _mode(target: Path) -> int:
    """The permissions of the file that is there, else those that a new one gets."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
