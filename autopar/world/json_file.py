"""Read and write the JSON documents that people edit: worlds, and plans with a world inside.

Example: facts = read_json(TypeAdapter(World), read("world.json", WORLD), "world.json", WORLD)

Reading checks a document against its dataclass and names every wrong field in one error. Writing
replaces the file in one step, or leaves it as it was. Called by world/world.py, ir/plan_file.py
and ir/plan.py; `shown` quotes values in error messages elsewhere too.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from autopar.errors import AutoparError

T = TypeVar("T")

LARGEST_BYTES = 2**28  # of a file; the plan of 80 layers takes some 4 MB
SHOWN_FAULTS = 8  # that one message lists
_SHOWN_CHARACTERS = 60  # of a value in a message
_OF_CONTENTION = {"takes_s", "slows"}  # fields of measured collectives in 0.1.0


@dataclass(frozen=True)
class Kind:
    """A kind of document, such as "plan" or "world".

    `name`: its name in messages; `none`: what they say of a file that is no such document, "is no
    plan". `error`: the class of errors to raise; `errors_inside`: another class for faults that all
    lie in one field, as WorldError for a plan's `world`. `version`: the format that this autopar
    reads and writes; `remedy`: what to do about a file of another version; `unversioned`: a file
    that names no version is read as this one. `renewed`: makes the fields of today of those that an
    earlier autopar wrote in this version.
    """

    name: str
    none: str
    error: type[AutoparError]
    version: int
    remedy: str
    unversioned: bool = False
    errors_inside: Mapping[str, type[AutoparError]] = field(default_factory=dict)
    renewed: Callable[[dict[str, Any]], dict[str, Any]] = lambda data: data


# -- reading ---------------------------------------------------------------------------------------
def read(path: str | os.PathLike[str], kind: Kind) -> str:
    """Return the text of a file. Raises the kind's error where it is too large or not UTF-8."""
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


def read_json(adapter: TypeAdapter[T], text: str, where: str, kind: Kind) -> T:
    """Parse and validate a JSON text. Raises the kind's error, which names `where` the text stands
    and every wrong field with its value; for a document of another version it says only that. An
    object that names a field twice is an error too.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique_fields)
    except (ValueError, RecursionError) as error:
        refuse(kind, f"{where} {kind.none}: Invalid JSON: {_parse_fault(error)}")
    _check_version(data, where, kind)
    renewed = kind.renewed(data)
    text = text if renewed is data else json.dumps(renewed)
    return _validated(adapter, text, where, kind)


def checked_inside(adapter: TypeAdapter[T], data: Any, where: str, kind: Kind) -> T:
    """Validate as `read_json` does what json.loads gave, from inside another document."""
    _check_version(data, where, kind)
    try:
        text = json.dumps(kind.renewed(data))  # NaN too: the field is named then
    except (TypeError, ValueError, RecursionError) as error:
        refuse(kind, f"{where} {kind.none}: {_parse_fault(error)}")
    return _validated(adapter, text, where, kind)


def _validated(adapter: TypeAdapter[T], text: str, where: str, kind: Kind) -> T:
    """Validate the text; faults that all lie in one of `kind.errors_inside` raise its error."""
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        inside = {str(fault["loc"][0]) for fault in error.errors() if fault["loc"]}
        place = inside.pop() if len(inside) == 1 else ""
        incomplete = any(fault["type"] == "missing" for fault in error.errors())
        remedy = f". {kind.remedy[0].upper()}{kind.remedy[1:]}" if incomplete else ""
        message = f"{where} {kind.none}: {sentences(error)}{remedy}"
        raise kind.errors_inside.get(place, kind.error)(message) from None


def renewed_world(data: dict[str, Any]) -> dict[str, Any]:
    """Return a world's document with `contention` in place of what 0.1.0 wrote of it: `meeting_s`,
    and `takes_s` and `slows` of every measured collective, of which it is the median.
    """
    rows = data.get("measured")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if "meeting_s" not in data and not any(_OF_CONTENTION & row.keys() for row in rows):
        return data
    renewed = {name: value for name, value in data.items() if name != "meeting_s"}
    slows = [row.get("slows", 0.0) for row in rows if row.get("together", True)]
    known = [share for share in slows if isinstance(share, int | float)]
    if known:
        renewed["contention"] = min(1.0, max(0.0, statistics.median(known)))
    if rows:
        renewed["measured"] = [
            {name: value for name, value in row.items() if name not in _OF_CONTENTION}
            if isinstance(row, dict)
            else row
            for row in data["measured"]
        ]
    return renewed


def _check_version(data: Any, where: str, kind: Kind) -> None:
    """Raise the kind's error unless the document is an object of the version that is read."""
    if not isinstance(data, dict):
        refuse(kind, f"{where} {kind.none}: it is a {_json_type(data)}, not an object")
    version = data.get("version")
    if type(version) is int and version == kind.version:
        return
    if "version" in data:
        says = f"is version {shown(version)}"
    elif kind.unversioned:
        return
    else:
        says = "names no version, so it is of an older one"
    refuse(kind, f"{where} {says}, this autopar reads version {kind.version}: {kind.remedy}")


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of an object as a dict. Raises ValueError where a name comes twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(name for name, following in itertools.pairwise(names) if name == following)
        raise ValueError(f"one object names {shown(twice)} twice: keep one")
    return fields


def _parse_fault(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _json_type(data: Any) -> str:
    return {list: "list", str: "string", type(None): "null"}.get(type(data), "number")


def refuse(kind: Kind, message: str) -> NoReturn:
    """Raise the kind's error, without the exception that led to it."""
    raise kind.error(message) from None


# -- messages --------------------------------------------------------------------------------------
def sentences(error: ValidationError) -> str:
    """Return up to SHOWN_FAULTS faults in one line, each as a sentence with its path.

    Example: "levels.1.bytes_per_s: Input should be a valid number (it is 'fast'); …"
    """
    faults: Sequence[Any] = error.errors(include_url=False)
    listed = dict.fromkeys(map(_sentence, faults))
    more = len(listed) - SHOWN_FAULTS
    text = "; ".join([*listed][:SHOWN_FAULTS])
    return text + (f"; and {more} more" if more > 0 else "")


def _sentence(fault: Any) -> str:
    where = ".".join(_step_of_path(step) for step in fault["loc"])
    if fault["type"] == "missing":
        return (
            f"{where}: it is missing, the file is cut short, of another kind or of an old autopar"
        )
    if fault["type"] == "unexpected_keyword_argument":
        return f"{where}: there is no field of this name"
    message = fault["msg"].removeprefix("Value error, ")
    value = fault["input"]
    plain = value is None or isinstance(value, str | int | float)
    return (
        (f"{where}: " if where else "")
        + message
        + (f" (it is {shown(value)})" if plain and where else "")
    )


def _step_of_path(step: str | int) -> str:
    """Return a step of a fault's path, in quotes where it is blank."""
    return shown(step).strip("'") if str(step).strip() else repr(step)


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def shown(value: Any) -> str:
    """Return a value as messages quote it: cut short, in characters that any terminal prints."""
    try:
        plain = not isinstance(value, str) or value.isprintable()
        text = repr(value) if plain else ascii(value)
        text = text if isinstance(value, str) else " ".join(text.split())
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"
    short = len(text) <= _SHOWN_CHARACTERS
    return text if short else f"{text[:_SHOWN_CHARACTERS]}… of {len(text)} characters"


# -- writing ---------------------------------------------------------------------------------------
def write(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file by the text in one step: a write that fails leaves the old file.

    A link is followed, and the permissions of the old file are kept. What is no regular file, such
    as /dev/stdout, is written to directly.
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
        os.chmod(name, _permissions(target))
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _permissions(target: Path) -> int:
    """Return the permissions of the file if it exists, else those that a new file gets."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
