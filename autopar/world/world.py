"""The world: devices and the links between them.

Worlds as JSON: one object, fields as in World; units stand in the names.

The world that `autopar calibrate` has measured here, for calls that name none.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import networkx as nx
from pydantic import TypeAdapter

from autopar.errors import WorldError
from autopar.world import detect as detection
from autopar.world import json_file
from autopar.world.hardware import (
    MOST_RANKS,
    MOST_SHARE,
    STRICT,
    Device,
    Level,
    Link,
    Measured,
    check_backend,
    check_kind,
    check_number,
    check_seconds,
)
from autopar.world.json_file import shown
from autopar.world.presets import preset

T = TypeVar("T")

# Worlds written before files had a version have all the fields of version 1 that they name.
WORLD = json_file.Kind(
    "world",
    "describes no world",
    WorldError,
    version=1,
    remedy="calibrate again, or write it anew with World.save",
    unversioned=True,
)


def read(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Raises WorldError that names the file, every field that is wrong, and what it holds."""
    return parsed(kind, json_file.read(path, WORLD), str(path))


def parsed(kind: type[T], text: str, where: str) -> T:
    """From JSON. Raises WorldError that names `where` it stands and every field that is wrong."""
    found: T = json_file.checked(_adapter(kind), text, where, WORLD)
    return found


def parsed_inside(kind: type[T], data: Any, where: str) -> T:
    """The same from the objects, lists and numbers of JSON."""
    found: T = json_file.checked_inside(_adapter(kind), data, where, WORLD)
    return found


def write(kind: type[T], value: T, path: str | os.PathLike[str]) -> None:
    json_file.write(path, _adapter(kind).dump_json(value, indent=1).decode() + "\n")


def to_json(kind: type[T], value: T) -> Any:
    """As the objects, lists and numbers of JSON."""
    return _adapter(kind).dump_python(value, mode="json")


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Made once: pydantic builds a validator out of the types of all fields."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


_adapters: dict[type[Any], TypeAdapter[Any]] = {}


@dataclass(frozen=True)
class World:
    """A cluster: one device a rank, joined either by `levels` of links, innermost first, or by the
    `links` of an irregular network. Ranks are numbered from the inside out: neighbours share a
    node.

    `launch_s`: seconds to start any collective; `meeting_s`: what ranks that compute lose beyond
    that on coming together for one. `factors`: how much longer than modelled each kind
    of collective takes on this `backend`, where calibration has found out; `measured`: what it
    found for single patterns, which stands in place of the formulas. `version`: of the file. Raises
    WorldError where the parts contradict one another.

    Example: World((Level(8, 450e9, 1e-6), Level(4, 50e9, 5e-6, per="rank")), device, "nccl") is 4
    nodes of 8 GPUs. World.preset, World.load, World.detect and World.from_graph make one for you.
    """

    __pydantic_config__ = STRICT
    levels: tuple[Level, ...]
    device: Device
    backend: str = "gloo"
    name: str = ""
    launch_s: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    links: tuple[Link, ...] = ()
    measured: tuple[Measured, ...] = ()
    meeting_s: float = 0.0
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        check_seconds(self, "launch_s", "meeting_s")
        check_backend(self.backend)
        for kind, factor in self.factors.items():
            check_kind("World.factors", kind)
            check_number(f"World.factors[{kind!r}]", factor, above=True, most=MOST_SHARE)
        if bool(self.levels) == bool(self.links):
            raise WorldError("a world has either levels or links: give one of the two")
        if self.links:
            _check_network(self.network)
        if self.ranks > MOST_RANKS:
            raise WorldError(f"World has {shown(self.ranks)} ranks: {MOST_RANKS:,} are the most")
        _check_measured(self.measured, self.ranks)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        factors = tuple(sorted(self.factors.items()))
        parts = self.levels, self.device, self.backend, self.links, self.launch_s, self.measured
        return hash((parts, factors, self.meeting_s))

    @cached_property
    def ranks(self) -> int:
        if self.links:
            return sum(isinstance(node, int) for node in self.network)
        return math.prod(level.ranks for level in self.levels)

    @cached_property
    def network(self) -> nx.Graph:
        """The irregular network: ranks are numbers, switches names; links have `bytes_per_s` each
        way and `latency_s`. Without `links` it is empty.
        """
        graph = nx.Graph()
        for link in self.links:
            if graph.has_edge(link.a, link.b):
                raise WorldError(f"links has {link.a!r} – {link.b!r} twice: add their bytes_per_s")
            graph.add_edge(link.a, link.b, bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)
        return graph

    def factor(self, kind: str) -> float:
        return self.factors.get(kind, 1.0)

    def found(
        self, kind: str, pattern: tuple[tuple[int, int], ...], together: bool = True
    ) -> Measured | None:
        """What was measured of a collective over the groups of a pattern; None where nothing."""
        return self._found.get((kind, pattern, together))

    @cached_property
    def _found(self) -> dict[tuple[str, tuple[tuple[int, int], ...], bool], Measured]:
        return {(m.kind, m.pattern, m.together): m for m in self.measured}

    def __str__(self) -> str:
        device = self.device
        text = (
            f"{self.ranks} rank{'s' if self.ranks > 1 else ''} of {device.name} "
            f"({device.flops / 1e12:.3g} TFLOP/s, {device.memory_bytes / 2**30:.3g} GiB each), "
            f"{self.backend}"
        )
        text = f"{self.name}: {text}" if self.name else text
        text += ", calibrated" if self.measured else ""
        if self.links:
            slowest = min(link.bytes_per_s for link in self.links)
            return f"{text}; {len(self.links)} links of {slowest / 1e9:.3g} GB/s or more"
        links = [_describe(level) for level in self.levels if level.ranks > 1]
        return text + (f"; links: {', '.join(links)}" if links else "")

    # -- making one --------------------------------------------------------------------------------
    @staticmethod
    def of(given: World | int | Any | None) -> World:
        """A world from what a user may give: a World, a number of ranks like these here, a
        DeviceMesh, or None for what runs.
        """
        if isinstance(given, World):
            return given
        if given is None:
            return World.detect()
        if isinstance(given, int) and not isinstance(given, bool):
            if given < 1:
                raise WorldError(f"a world of {given} ranks: at least 1 is needed")
            return World(*_parts(detection.like_here(given)))
        if hasattr(given, "mesh") and hasattr(given, "mesh_dim_names"):
            return World.of(given.mesh.numel())
        raise WorldError(
            f"a world is a World, a number of ranks or a DeviceMesh, not {type(given).__name__} "
            f"{given!r}"
        )

    @staticmethod
    def detect() -> World:
        """What runs: ranks of the process group, else of torchrun's environment, else this process
        alone; the GPU by its name; NVLink where the GPUs reach one another. What cannot be seen
        (the network between nodes) is nominal: `save`, edit and `load`, or calibrate.
        """
        return World(*_parts(detection.like_here(*detection.running())))

    @staticmethod
    def preset(name: str, ranks: int | None = None) -> World:
        """A machine by name; `autopar.world.PRESETS` says which there are and whose figures they
        are. Raises WorldError for another name, and where the ranks fill no whole nodes.

        >>> World.preset("dgx-h100", ranks=1024).levels[1].ranks
        128
        """
        made = preset(name)
        levels = made.levels(name, made.ranks if ranks is None else ranks)
        return World(levels, made.device, made.backend, name, made.launch_s)

    @staticmethod
    def from_graph(
        graph: nx.Graph, device: Device, backend: str = "nccl", launch_s: float = 0.0
    ) -> World:
        """An irregular network: nodes 0 to ranks-1 are ranks, others switches, named by strings;
        every edge has `bytes_per_s`, its capacity each way, and may have `latency_s`.
        """
        links = []
        for a, b, facts in graph.edges(data=True):
            if "bytes_per_s" not in facts:
                raise WorldError(
                    f"the link {a!r} – {b!r} has no bytes_per_s: give the edge its bytes/s each way"
                )
            links.append(Link(a, b, facts["bytes_per_s"], facts.get("latency_s", 0.0)))
        return World((), device, backend, launch_s=launch_s, links=tuple(links))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> World:
        """The world in a JSON file. Raises WorldError with the fields that are wrong."""
        return read(World, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the world as JSON, for `load`, and to edit by hand."""
        write(World, self, path)

    def to_json(self) -> Any:
        """The world as it stands inside another file, for `from_json`."""
        return to_json(World, self)

    @staticmethod
    def from_json(data: Any, where: str) -> World:
        """Raises WorldError that names `where` this stands, and the fields that are wrong."""
        return parsed_inside(World, data, where)


def _parts(found: detection.Found) -> tuple[Any, ...]:
    return found.levels, found.device, found.backend, "", found.launch_s


def _describe(level: Level) -> str:
    rate = f"{level.ranks} at {level.bytes_per_s / 1e9:.3g} GB/s"
    how = (" a rank" if level.per == "rank" else "") + (
        " over direct wires" if level.direct else ""
    )
    return f"{rate}{how} and {level.latency_s * 1e6:.3g} µs"


def _check_network(graph: nx.Graph) -> None:
    ranks = sorted(node for node in graph if isinstance(node, int))
    if ranks != list(range(len(ranks))) or not ranks:
        raise WorldError(f"links join the ranks {ranks}: they must be 0, 1, … without a gap")
    if not nx.is_connected(graph):
        cut_off = sorted({*ranks} - nx.node_connected_component(graph, 0))
        listed = ", ".join(map(str, cut_off[:8])) + (", …" if len(cut_off) > 8 else "")
        raise WorldError(
            f"links leave {len(cut_off)} of {len(ranks)} ranks without a way to rank 0 ({listed}): "
            "add the links that join them"
        )


def _check_measured(measured: tuple[Measured, ...], ranks: int) -> None:
    seen = set()
    for one in measured:
        what = f"World.measured: {one.kind} over {one.pattern}"
        if one.reach > ranks:
            raise WorldError(f"{what} reaches over {one.reach} ranks, the world has {ranks}")
        if (one.kind, one.pattern, one.together) in seen:
            raise WorldError(f"{what} is there twice: keep one")
        seen.add((one.kind, one.pattern, one.together))


CALIBRATED = "world.json"  # in the folder that a program runs in


def calibrated(ranks: int | None) -> tuple[World | None, str]:
    """The world of this folder's file if it has so many ranks (None: any); else None, and what is
    wrong with it, "" where there is no file. Raises WorldError for a file that cannot be read.
    """
    if not Path(CALIBRATED).is_file():
        return None, ""
    world = World.load(CALIBRATED)
    if ranks not in (None, world.ranks):
        return None, f"{CALIBRATED} is of {world.ranks} ranks and does not count for {ranks}"
    return dataclasses.replace(world, name=CALIBRATED), ""


def running_world() -> tuple[World, str]:
    """What runs, as it was calibrated here, else as far as this process can see; and what the user
    is to know of that, in one line.
    """
    seen = World.detect()
    if seen.ranks == 1:
        return seen, ""
    found, wrong = calibrated(seen.ranks)
    if found is not None and (found.device.name, found.backend) == (seen.device.name, seen.backend):
        return found, f"the world is {CALIBRATED}, which was calibrated"
    if found is not None:
        wrong = (
            f"{CALIBRATED} is of {found.device.name} with {found.backend}, here is "
            f"{seen.device.name} with {seen.backend}: it does not count"
        )
    assumed = (
        f"links are assumed, not measured ({seen}): `torchrun … -m autopar calibrate` takes two "
        f"minutes and writes {CALIBRATED}, which is used from then on"
    )
    return seen, f"{wrong}; {assumed}" if wrong else assumed


@cache
def say_once(line: str) -> None:
    """On stderr, once in a process."""
    print(f"autopar: {line}", file=sys.stderr, flush=True)
