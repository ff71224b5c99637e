"""Mutations of JSON documents: types, signs, extremes, names, lists, nesting, bytes, encodings.

Each takes a `Spot`, a value drawn at random from a document, and changes the document there.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Json = Any
Draw = random.Random

RAW = "raw literal: "  # strings that begin so are written as they are, without quotes
EXTREMES = (
    0, -1, 1, -0.0, 2, 3, 7, 1e308, -1e308, 5e-324, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e-9, 1e12,
    *(RAW + text for text in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 400)),
    RAW + "9" * 5000,
)  # fmt: skip
TEXTS = (
    "", " ", "x", "I", "R", "P", "S(0,1)", "S(1,2)", "S(9,9)", "S(0,0)", "S(-1,4)",
    "S(0,99999999999)", "m", "n", "k", "µ", "\u202e", "\x00", "\x1b[31m", "[/red]", "[bold]",
    "\ud800", "é" * 300, "١", "0" * 16, "adam", "float32", "bfloat16", "rank", "nccl", "all_reduce",
    "tp4", "data2.tp2", "x1.y4", "tp" + "9" * 400, ".", "blocks.0", "linear",
)  # fmt: skip
OTHERS: tuple[Json, ...] = (None, True, False, [], {}, [[]], {"a": 1}, [None], [1, 2], "1")


def places(data: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value."""
    if path:
        yield path
    children = data.items() if isinstance(data, dict) else enumerate(data) if _is_list(data) else ()
    for key, value in children:
        yield from places(value, (*path, key))


def _is_list(data: Json) -> bool:
    return isinstance(data, list)


def at(data: Json, path: tuple[Any, ...]) -> Json:
    for key in path:
        data = data[key]
    return data


class Spot:
    """One value of a document, drawn at random: first a field, then a value of it."""

    def __init__(self, data: Json, draw: Draw) -> None:
        self.data, self.draw = data, draw
        field = draw.choice(list(data))
        inside = [(field, *path) for path in places(data[field])]
        self.path = draw.choice([(field,), *inside]) if draw.random() < 0.85 else (field,)
        self.parent, self.key = at(data, self.path[:-1]), self.path[-1]

    @property
    def value(self) -> Json:
        return self.parent[self.key]

    @value.setter
    def value(self, new: Json) -> None:
        self.parent[self.key] = new

    def like(self, kind: tuple[type, ...]) -> list[Json]:
        """Other values of the document, of these types."""
        leaves = (at(self.data, path) for path in places(self.data))
        return [leaf for leaf in leaves if isinstance(leaf, kind) and not isinstance(leaf, bool)]


def typed(spot: Spot) -> None:
    spot.value = copy.deepcopy(spot.draw.choice([*OTHERS, *EXTREMES[:4], *TEXTS[:3]]))


def extreme(spot: Spot) -> None:
    spot.value = spot.draw.choice(EXTREMES)


def text(spot: Spot) -> None:
    spot.value = spot.draw.choice(TEXTS)


def scaled(spot: Spot) -> None:
    if isinstance(spot.value, int | float) and not isinstance(spot.value, bool):
        factor = spot.draw.choice([-1, 0, 2, 3, 0.5, 1e3, 1e-3, 1e9, 1e-9, 1e150])
        number = spot.value * factor
        whole = isinstance(spot.value, int) and abs(number) < 1e18 and number == int(number)
        spot.value = int(number) if whole else number
    else:
        another(spot)


def another(spot: Spot) -> None:
    """A value of the same type from elsewhere in the document."""
    kind = (int, float) if isinstance(spot.value, int | float) else (type(spot.value),)
    spot.value = copy.deepcopy(spot.draw.choice([spot.value, *spot.like(kind)]))


def dropped(spot: Spot) -> None:
    del spot.parent[spot.key]


def renamed(spot: Spot) -> None:
    if isinstance(spot.parent, dict):
        value = spot.parent.pop(spot.key)
        spot.parent[spot.draw.choice([spot.key + "_", spot.key.upper(), *TEXTS])] = value


def added(spot: Spot) -> None:
    if isinstance(spot.parent, dict):
        spot.parent[spot.draw.choice(["more", spot.key + "2", *TEXTS])] = copy.deepcopy(spot.value)
    else:
        spot.parent.insert(spot.draw.randrange(len(spot.parent) + 1), copy.deepcopy(spot.value))


def twice(spot: Spot) -> None:
    """One name twice in an object."""
    if isinstance(spot.parent, dict):
        spot.parent[RAW + spot.key] = copy.deepcopy(spot.value)
    else:
        added(spot)


def grown(spot: Spot) -> None:
    if isinstance(spot.value, list):
        spot.value = (spot.value or [0]) * spot.draw.choice([2, 3, 50])
    elif isinstance(spot.value, dict):
        spot.value |= {f"{k}{n}": v for k, v in list(spot.value.items()) for n in range(3)}
    elif isinstance(spot.value, str):
        spot.value *= spot.draw.choice([2, 1000])
    else:
        spot.value = [spot.value] * 3


def emptied(spot: Spot) -> None:
    spot.value = type(spot.value)() if spot.value is not None else {}


def swapped(spot: Spot) -> None:
    other = Spot(spot.data, spot.draw)
    deep = min(len(spot.path), len(other.path))
    if spot.path[:deep] != other.path[:deep]:  # neither lies inside the other
        spot.value, other.value = other.value, spot.value


def shuffled(spot: Spot) -> None:
    if isinstance(spot.value, list):
        spot.draw.shuffle(spot.value)
    elif isinstance(spot.value, dict):
        values = list(spot.value.values())
        spot.draw.shuffle(values)
        spot.value = dict(zip(spot.value, values, strict=True))
    else:
        another(spot)


def nested(spot: Spot) -> None:
    depth = spot.draw.choice([1, 3, 150, 5000, 200000])
    opening, closing = spot.draw.choice([("[", "]"), ('{"a":', "}")])
    spot.value = RAW + opening * depth + "1" + closing * depth


def state(spot: Spot) -> None:
    """Another state of some layout, or another split of some node."""
    lists = [at(spot.data, p) for p in places(spot.data) if p[-1] in ("states", "splits")]
    lists = [names for names in lists if isinstance(names, list) and names]
    if not lists:
        return another(spot)
    chosen = spot.draw.choice(lists)
    known = [s for names in lists for s in names if isinstance(s, str)]
    chosen[spot.draw.randrange(len(chosen))] = spot.draw.choice([*known, "I", "R", "P", "m", "n"])
    return None


def resplit(spot: Spot) -> None:
    """A plan's nodes split something else, and their layouts are to follow."""
    if not isinstance(spot.data.get("choices"), dict):
        return state(spot)
    choices = [c for c in spot.data["choices"].values() if isinstance(c, dict) and c.get("splits")]
    for choice in spot.draw.sample(choices, min(len(choices), spot.draw.choice([1, 1, 2, 99]))):
        axes, names = len(choice["splits"]), ["m", "k", "n", "R", "I", *choice["splits"]]
        choice["splits"] = [spot.draw.choice(names) for _ in range(axes)]
        for name in ("operands", "results") if spot.draw.random() < 0.8 else ():
            choice.pop(name, None)
    return None


def forged(spot: Spot) -> None:
    """A layout is changed, and the digests are blank, wrong, gone, or right."""
    state(spot)
    if "planned" in spot.data:
        blank, wrong = ["", ""], ["0" * 16, "f" * 16]
        spot.data["planned"] = spot.draw.choice([blank, wrong, spot.data["planned"], []])


MUTATIONS: tuple[Callable[[Spot], None], ...] = (
    typed, extreme, text, dropped, renamed, added, twice, grown, emptied, nested,
    *(scaled, another, swapped, shuffled, state, forged, resplit) * 2,  # what may be taken
)  # fmt: skip


def mutated(document: Json, draw: Draw) -> tuple[bytes, str]:
    """A broken file of this document, and what was done to it."""
    if draw.random() < 0.15:
        return broken_bytes(json.dumps(document).encode(), draw)
    data, done = copy.deepcopy(document), []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        if not data:
            break
        spot, mutation = Spot(data, draw), draw.choice(MUTATIONS)
        done.append(f"{mutation.__name__} at {'.'.join(map(ascii, spot.path))}")
        mutation(spot)
    return written(data), ", ".join(done)


def written(data: Json) -> bytes:
    """As JSON, with the raw literals as they are."""
    pieces = json.dumps(data).split(f'"{RAW}')
    plain = [pieces[0]]
    for piece in pieces[1:]:
        literal, _, rest = piece.partition('"')
        if literal.endswith("\\"):  # a raw object: its quotes were escaped
            literal, rest = _unescaped(piece)
        name = rest.lstrip().startswith(":") and not literal.startswith(("[", "{"))
        plain.append((f'"{literal}"' if name else literal) + rest)
    return "".join(plain).encode("utf-8", "surrogatepass")


def _unescaped(piece: str) -> tuple[str, str]:
    end = next(i for i, c in enumerate(piece) if c == '"' and piece[i - 1] != "\\")
    return json.loads(f'"{piece[:end]}"'), piece[end + 1 :]


def broken_bytes(data: bytes, draw: Draw) -> tuple[bytes, str]:
    """The file cut, flipped, filled with noise, or in another encoding."""
    content = bytearray(data)
    where = draw.randrange(len(content))
    noise = bytes(draw.randrange(256) for _ in range(draw.choice([1, 4, 64])))
    kinds: dict[str, Callable[[], bytes]] = {
        "truncated": lambda: bytes(content[:where]),
        "flipped": lambda: (
            bytes([*content[:where], content[where] ^ 1 << draw.randrange(8)])
            + content[where + 1 :]
        ),
        "noise": lambda: bytes(content[:where]) + noise + content[where:],
        "bad utf-8": lambda: bytes(content[:where]) + b"\xff\xfe\xc3(" + content[where:],
        "utf-16": lambda: data.decode().encode("utf-16"),
        "bom": lambda: b"\xef\xbb\xbf" + data,
        "twice": lambda: data + data,
        "list": lambda: b"[" + data + b"]",
        "only noise": lambda: noise,
        "empty": lambda: b"",
        "nested": lambda: b"[" * 100000,
        "digit": lambda: bytes(content[:where]) + b"9" + content[where:],
    }
    name = draw.choice(list(kinds))
    return kinds[name](), f"{name} at byte {where}"
