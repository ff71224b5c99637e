"""The `World`: devices and the links between them, and how to make, save, load and find one.

Example: World.preset("dgx-h100", ranks=16) is two nodes of eight GPUs; World.detect() is what runs
here; World.load("world.json") is what `autopar calibrate` measured.

In a file a world is one JSON object with the fields of `World`, whose names carry their units.
`running_world` prefers the file that calibration left in this folder; runtime/apply.py and `autopar
doctor` call it where the user names no world. The planner and cost take a World as it is.
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
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import TypeAdapter

from autopar.errors import WorldError
from autopar.world import json_file, machines
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

if TYPE_CHECKING:
    import networkx as nx  # imported where it is used: few worlds have an irregular network

T = TypeVar("T")

# Files from before versions were written name fields of version 1 only.
WORLD = json_file.Kind(
    "world",
    "describes no world",
    WorldError,
    version=1,
    remedy="calibrate again, or write it anew with World.save",
    unversioned=True,
    renewed=json_file.renewed_world,
)


def read(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Return the object in a JSON file. Raises WorldError with the file and every wrong field."""
    return parse(kind, json_file.read(path, WORLD), str(path))


def parse(kind: type[T], text: str, where: str) -> T:
    """Return the object in a JSON text. Raises WorldError with `where` it stands and every wrong
    field.
    """
    value: T = json_file.read_json(_adapter(kind), text, where, WORLD)
    return value


def parsed_inside(kind: type[T], data: Any, where: str) -> T:
    """Return as `parse` does an object that json.loads has read."""
    value: T = json_file.checked_inside(_adapter(kind), data, where, WORLD)
    return value


def write(kind: type[T], value: T, path: str | os.PathLike[str]) -> None:
    """Write an object as JSON, in one step."""
    json_file.write(path, _adapter(kind).dump_json(value, indent=1).decode() + "\n")


def to_json(kind: type[T], value: T) -> Any:
    """Return an object as dicts, lists and numbers, as json.dumps takes them."""
    return _adapter(kind).dump_python(value, mode="json")


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Return the validator of a class, which pydantic builds from its fields only once."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


_adapters: dict[type[Any], TypeAdapter[Any]] = {}


@dataclass(frozen=True)
class World:
    """A cluster: one device a rank, joined either by `levels` of links, innermost first, or by the
    `links` of an irregular network. Ranks are numbered from the inside out: neighbours share a
    node. These are 4 nodes of 8 GPUs:

    >>> device = Device("H100", {"bfloat16": 989e12}, memory_bytes=80e9, memory_bytes_per_s=3.35e12)
    >>> links = Level(8, 450e9, 1e-6), Level(4, 50e9, 5e-6, per="rank")
    >>> World(links, device, "nccl").ranks
    32

    World.preset, World.load, World.detect and World.from_graph make one for you. `launch_s`:
    seconds to start any collective. Calibration measures `contention`, the share of computing that
    is lost while one runs, `factors`, how much longer than modelled each kind takes, and `measured`
    patterns. `version`: the file's format. Raises WorldError where parts contradict one another.
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
    contention: float = 0.0
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        check_seconds(self, "launch_s")
        check_number("World.contention", self.contention, most=1.0)
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
        fields = self.levels, self.device, self.backend, self.links, self.launch_s, self.measured
        return hash((fields, factors, self.contention))

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        if self.links:
            return sum(isinstance(node, int) for node in self.network)
        return math.prod(level.ranks for level in self.levels)

    @cached_property
    def network(self) -> nx.Graph:
        """The irregular network as a graph, empty without `links`. Nodes are ranks (numbers) and
        switches (names); edges have `bytes_per_s` each way and `latency_s`.
        """
        import networkx as nx

        graph = nx.Graph()
        for link in self.links:
            if graph.has_edge(link.a, link.b):
                raise WorldError(f"links has {link.a!r} – {link.b!r} twice: add their bytes_per_s")
            graph.add_edge(link.a, link.b, bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)
        return graph

    def factor(self, kind: str) -> float:
        """Return how many times longer than modelled this kind of collective takes; 1.0 if unknown.

        >>> World.preset("dgx-h100").factor("all_reduce")
        1.0
        """
        return self.factors.get(kind, 1.0)

    def timing(
        self, kind: str, pattern: tuple[tuple[int, int], ...], together: bool = True
    ) -> Measured | None:
        """Return the timing of a collective over the groups of a pattern; None if not measured.
        `pattern` is of (size, stride) pairs, outer first; `together`: all its groups ran at once.

        >>> World.preset("dgx-h100").timing("all_reduce", ((8, 1),)) is None
        True
        """
        return self._timings.get((kind, pattern, together))

    @cached_property
    def _timings(self) -> dict[tuple[str, tuple[tuple[int, int], ...], bool], Measured]:
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
        levels = [level for level in self.levels if level.ranks > 1]
        links = [
            _describe_level(level, "groups" if number else "ranks")
            for number, level in enumerate(levels)
        ]
        return text + (f"; links: {', '.join(links)}" if links else "")

    # -- making one --------------------------------------------------------------------------------
    @staticmethod
    def of(world: World | int | Any | None) -> World:
        """Return a world from what a user may give: a World, a number of ranks on nodes like this
        one, a DeviceMesh, or None for what runs. Raises WorldError for anything else.

        >>> World.of(4).ranks
        4
        """
        if isinstance(world, World):
            return world
        if world is None:
            return World.detect()
        if isinstance(world, int) and not isinstance(world, bool):
            if world < 1:
                raise WorldError(f"a world of {world} ranks: at least 1 is needed")
            return World(*_world_fields(machines.like_here(world)))
        if hasattr(world, "mesh") and hasattr(world, "mesh_dim_names"):
            return World.of(world.mesh.numel())
        raise WorldError(
            "a world is a World, a number of ranks or a DeviceMesh; this is of type "
            f"{type(world).__name__}: {shown(world)}"
        )

    @staticmethod
    def detect() -> World:
        """Return the world that runs: the ranks of the process group, else of torchrun's
        environment, else this process alone; the GPU by its name; NVLink where the GPUs reach one
        another. What cannot be seen (the network between nodes) is nominal: `save`, edit and `load`
        it, or calibrate.

        >>> World.detect().ranks
        1
        """
        return World(*_world_fields(machines.like_here(*machines.running_ranks())))

    @staticmethod
    def preset(name: str, ranks: int | None = None) -> World:
        """Return a machine by name; `autopar.world.PRESETS` lists them with the sources of their
        figures. Raises WorldError for another name, and where the ranks fill no whole nodes.

        >>> World.preset("dgx-h100", ranks=1024).levels[1].ranks
        128
        """
        machine = machines.preset(name)
        levels = machine.levels(name, machine.ranks if ranks is None else ranks)
        return World(levels, machine.device, machine.backend, name, machine.launch_s)

    @staticmethod
    def from_graph(
        graph: nx.Graph, device: Device, backend: str = "nccl", launch_s: float = 0.0
    ) -> World:
        """Return a world with an irregular network. Nodes 0 to ranks-1 of the graph are ranks, the
        others are switches, named by strings; every edge has `bytes_per_s`, its capacity each way,
        and may have `latency_s`, in seconds. Raises WorldError for an edge without capacity, for
        ranks with a gap in their numbers, and for a rank that no links reach.

        >>> import networkx as nx
        >>> star, device = nx.Graph(), World.preset("dgx-h100").device
        >>> star.add_edges_from([(rank, "switch") for rank in range(3)], bytes_per_s=25e9)
        >>> World.from_graph(star, device).ranks
        3
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
        """Return the world in a JSON file. Raises WorldError with the fields that are wrong."""
        return read(World, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the world as JSON, for `load`, and to edit by hand.

        >>> import tempfile
        >>> world, path = World.preset("dgx-h100"), f"{tempfile.mkdtemp()}/world.json"
        >>> world.save(path)
        >>> World.load(path) == world
        True
        """
        write(World, self, path)

    def to_json(self) -> Any:
        """Return the world as dicts, lists and numbers, for `from_json` or for another file.

        >>> World.preset("dgx-h100").to_json()["levels"][0]["ranks"]
        8
        """
        return to_json(World, self)

    @staticmethod
    def from_json(data: Any, where: str) -> World:
        """Return the world that `to_json` gave. Raises WorldError with `where` it stands, and the
        fields that are wrong.

        >>> World.from_json({"levels": []}, "my.json")
        Traceback (most recent call last):
        autopar.errors.WorldError: my.json describes no world: ...
        """
        return parsed_inside(World, data, where)


def _world_fields(detected: machines.Detected) -> tuple[Any, ...]:
    return detected.levels, detected.device, detected.backend, "", detected.launch_s


def _describe_level(level: Level, joined: str) -> str:
    rate = f"{level.ranks} {joined} at {level.bytes_per_s / 1e9:.3g} GB/s"
    qualifiers = (" a rank" if level.per == "rank" else "") + (
        " over direct wires" if level.direct else ""
    )
    return f"{rate}{qualifiers} and {level.latency_s * 1e6:.3g} µs"


def _check_network(graph: nx.Graph) -> None:
    import networkx as nx

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
    for timing in measured:
        what = f"World.measured: {timing.kind} over {timing.pattern}"
        if timing.reach > ranks:
            raise WorldError(f"{what} reaches over {timing.reach} ranks, the world has {ranks}")
        if (timing.kind, timing.pattern, timing.together) in seen:
            raise WorldError(f"{what} is there twice: keep one")
        seen.add((timing.kind, timing.pattern, timing.together))


CALIBRATED = "world.json"  # the file that calibration writes, in the folder of the run


def read_calibration(ranks: int | None) -> tuple[World | None, str]:
    """Return the world in this folder's file and "" if it has so many ranks (None: any); else None
    and why the file does not count, "" where there is no file. Raises WorldError for a file that
    cannot be read.
    """
    if not Path(CALIBRATED).is_file():
        return None, ""
    world = World.load(CALIBRATED)
    if ranks not in (None, world.ranks):
        return None, f"{CALIBRATED} is of {world.ranks} ranks and does not count for {ranks}"
    return dataclasses.replace(world, name=CALIBRATED), ""


def running_world() -> tuple[World, str]:
    """Return the world that runs, as it was calibrated here, else as `World.detect` sees it; and a
    line for the user that says which of the two it is, "" for one rank.
    """
    seen = World.detect()
    if seen.ranks == 1:
        return seen, ""
    from_file, objection = read_calibration(seen.ranks)
    if from_file is not None and (from_file.device.name, from_file.backend) == (
        seen.device.name,
        seen.backend,
    ):
        return from_file, f"the world is {CALIBRATED}, which was calibrated"
    if from_file is not None:
        objection = (
            f"{CALIBRATED} is of {from_file.device.name} with {from_file.backend}, here is "
            f"{seen.device.name} with {seen.backend}: it does not count"
        )
    caveat = (
        f"links are assumed, not measured ({seen}): `torchrun … -m autopar calibrate` takes two "
        f"minutes and writes {CALIBRATED}, which is used from then on"
    )
    return seen, f"{objection}; {caveat}" if objection else caveat


@cache
def say_once(line: str) -> None:
    """Print a line on stderr, once in a process."""
    print(f"autopar: {line}", file=sys.stderr, flush=True)
