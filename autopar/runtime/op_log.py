"""The ops of a training step in the order in which they run, each with the node that it comes from:
what a profile, which knows ops by name alone, is read beside.

A scheduled step runs its derived graphs node by node. An emitted graph runs under autograd: a step
of it is run once with every op noted down.

When the transport worked on the collectives of a profiled step, and for how long of that on the
wire: what is left where no rank waits for another one.

gloo's threads say when they begin and end a collective, by kind and size alone.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar._compat import OpOverload, TorchDispatchMode, autograd_step, next_autograd_step, pytree
from autopar.cost.network import size
from autopar.cost.simulator.graph_events import (
    KINDS,
    bytes_sent,
    collective_named,
    group_pattern,
    origin,
)
from autopar.ir.graph import module_path
from autopar.ir.mesh import group_ranks

GRAPH = "autopar graph"  # what marks the run of a module in a profile
WAIT = torch.ops._c10d_functional.wait_tensor.default


class Entry(NamedTuple):
    """One op. `op`: its name, as in "aten::mm". Of a collective: its `kind`, the name of its group,
    `bytes` that this rank sends, and how many `numbers` it takes; of a wait: for which entry.
    """

    op: str
    node: str
    module: str
    kind: str = ""
    group: str = ""
    bytes: float = 0.0
    numbers: int = 0
    waits_for: int = -1

    @property
    def communicates(self) -> bool:
        return bool(self.kind) or self.op == WAIT._schema.name


class OpLog(NamedTuple):
    """The entries of a step, and the events of a profile within which they run."""

    entries: list[Entry]
    within: tuple[str, ...]


def log_of_graphs(graphs: Iterable[fx.Graph]) -> OpLog:
    """Of derived graphs that run one after the other."""
    found: list[Entry] = []
    issued: dict[str, int] = {}  # by the name of what the result is called
    for graph in graphs:
        for node in graph.nodes:
            if node.op != "call_function" or not isinstance(node.target, OpOverload):
                for needed in node.all_input_nodes if node.op == "call_function" else ():
                    if needed.name in issued:  # a piece of what a joint collective makes
                        issued[node.name] = issued[needed.name]
                continue
            taken, made = (_values(n) for n in (node.all_input_nodes, [node]))
            number = issued.get(node.all_input_nodes[0].name, -1) if node.target is WAIT else -1
            entry = _entry(node.target, node.args, taken, made, origin(node), number)
            if entry.kind:
                issued[node.name] = len(found)
            found.append(entry)
    return OpLog(found, ("CompiledFunction", "CompiledFunctionBackward"))  # AOTAutograd's names


def _values(nodes: Iterable[fx.Node]) -> list[torch.Tensor]:
    leaves = (pytree.tree_leaves(node.meta.get("val")) for node in nodes)
    return [value for found in leaves for value in found if isinstance(value, torch.Tensor)]


def _entry(
    target: OpOverload,
    args: tuple[Any, ...],
    taken: list[torch.Tensor],
    made: list[torch.Tensor],
    came: tuple[str, str],
    waits_for: int,
) -> Entry:
    name, collective = target._schema.name, collective_named(target)
    if collective is None:
        return Entry(name, *came, waits_for=waits_for)
    kind, group = KINDS[collective], str(args[-1])
    moved = bytes_sent(kind, size(group_pattern(group)), _bytes(taken), _bytes(made))
    numbers = sum(value.numel() for value in taken)
    return Entry(name, *came, kind, group, moved, numbers)


def _bytes(values: list[torch.Tensor]) -> float:
    return float(sum(value.numel() * value.element_size() for value in values))


def log_of_run(module: fx.GraphModule, step: Callable[[Callable[..., Any]], None]) -> OpLog:
    """Of a step that runs this module under autograd: `step` is given what to call in its place,
    and runs it forward and backward once.
    """
    log = _Log()
    named = _Named(module, log)
    with log:
        step(named.run)
    return OpLog(log.entries, (GRAPH, "autopar backward"))


class _Named(fx.Interpreter):
    """Runs a graph and tells the log at which node it is."""

    def __init__(self, module: fx.GraphModule, log: _Log) -> None:
        super().__init__(module)
        self.log = log

    def run(self, *args: Any, **more: Any) -> Any:
        found = super().run(*args, **more)
        self.log.at(None)
        return found

    def run_node(self, n: fx.Node) -> Any:
        self.log.at(n)
        return super().run_node(n)


class _Log(TorchDispatchMode):
    """Notes ops down. One that runs in the backward comes from the node whose autograd function is
    run backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.node: tuple[str, str] = ("", "")
        self.steps: list[int] = []  # of autograd, from where on they belong to a node
        self.nodes: list[tuple[str, str]] = []
        self.issued: dict[int, tuple[int, torch.Tensor]] = {}

    def at(self, node: fx.Node | None) -> None:
        self.node = ("", "") if node is None else (node.name, _chain(node))
        self.steps.append(next_autograd_step())
        self.nodes.append(self.node)

    def _came(self) -> tuple[str, str]:
        step = autograd_step()
        if step < 0:
            return self.node
        place = bisect_right(self.steps, step) - 1
        return self.nodes[place] if place >= 0 else ("", "")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        taken, made = _tensors((args, kwargs)), _tensors(result)
        number = self.issued.pop(id(args[0]), (-1, None))[0] if func is WAIT else -1
        entry = _entry(func, args, taken, made, self._came(), number)
        if entry.kind:  # held until it is waited for: an id counts while its tensor lives
            self.issued |= {id(value): (len(self.entries), value) for value in made}
        self.entries.append(entry)
        return result


def _chain(node: fx.Node) -> str:
    """The subgraph that a node belongs to; on one rank, where the graph is the traced one, its
    module.
    """
    return str(node.meta.get("chain", module_path(node)))


def _tensors(found: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(found) if isinstance(value, torch.Tensor)]


_GLOO = "gloo:"
_THREADS = (1, 2)  # that work for one group


class Issued(NamedTuple):
    """A collective of a step: its kind, the name of its group, how many `numbers` it takes; when it
    was issued, and when something had waited for it, in microseconds of the profile.
    """

    kind: str
    group: str
    numbers: int
    since: float
    until: float

    def fits(self, event: Any) -> bool:
        """Whether an event of the transport may be this one."""
        when = event.time_range
        alike = event.name == _GLOO + self.kind and _numbers(event) == self.numbers
        return alike and self.since <= when.start and when.end <= self.until


def ran(issued: Sequence[Issued], events: Sequence[Any], begin: float) -> list[tuple[float, float]]:
    """From when to when each one ran, of a step that began at `begin`: one after the other in its
    group, whose first that was issued counts as the one that runs. Issued to waited for where the
    transport says nothing.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for place, one in enumerate(issued):
        groups[one.group].append(place)
    carried = _carried(list(groups.values()), _threads(events, begin), issued)
    found, until = [], defaultdict[str, float](float)  # the end of what runs in a group
    for place, one in enumerate(issued):
        start, end = one.since, one.until
        if place in carried:
            when = carried[place].time_range
            start, end = when.start, when.end
        start = min(end, max(start, until[one.group]))
        until[one.group] = max(until[one.group], end)
        found.append((start, end))
    return found


def _threads(events: Sequence[Any], begin: float) -> list[list[Any]]:
    """The transport's own events in the step, of each of its threads in order."""
    found: dict[int, list[Any]] = defaultdict(list)
    for event in sorted(events, key=lambda e: e.time_range.start):
        if event.name.startswith(_GLOO) and event.time_range.start >= begin:
            found[event.thread].append(event)
    return list(found.values())


def _carried(
    groups: list[list[int]], threads: list[list[Any]], issued: Sequence[Issued]
) -> dict[int, Any]:
    """The event of each collective. A thread works for one group, and a group's threads take its
    collectives in the order of issue: of equal ones nothing else tells which is which.
    """
    if not groups:
        return {}
    own, *rest = groups
    best: dict[int, Any] = {}
    for mine in _some(len(threads)):
        found = _merged([(n, issued[n]) for n in own], [threads[i] for i in mine])
        if found is not None:
            left = [thread for i, thread in enumerate(threads) if i not in mine]
            best = max(best, found | _carried(rest, left, issued), key=len)
        if len(best) == sum(map(len, groups)):
            return best
    return best or _carried(rest, threads, issued)


def _some(threads: int) -> Iterator[tuple[int, ...]]:
    for count in _THREADS:
        yield from itertools.combinations(range(threads), count)


def _merged(own: list[tuple[int, Issued]], threads: list[list[Any]]) -> dict[int, Any] | None:
    """The collectives of a group on these threads; None where they are not the same ones."""
    if sum(map(len, threads)) != len(own):
        return None
    left, found = [list(reversed(thread)) for thread in threads], {}
    for place, one in own:
        able = [thread for thread in left if thread and one.fits(thread[-1])]
        if not able:
            return None
        found[place] = min(able, key=lambda thread: thread[-1].time_range.start).pop()
    return found


def _numbers(event: Any) -> int:
    """How many numbers an event of the transport took."""
    return sum(torch.Size(shape).numel() for shape in event.input_shapes)


# -- on the wire -----------------------------------------------------------------------------------
Lasted = Mapping[str, Sequence[float]]  # how long the collectives of each group ran, in their order


def lasted(issued: Sequence[Issued], when: Sequence[tuple[float, float]]) -> Lasted:
    """Of one rank: what the others need to know."""
    found: dict[str, list[float]] = defaultdict(list)
    for one, (start, end) in zip(issued, when, strict=True):
        found[one.group].append(end - start)
    return dict(found)


def threads_sending(
    issued: Sequence[Issued], rank: int, everywhere: Sequence[Lasted]
) -> list[float]:
    """How long each collective of this rank was on the wire: the least that it took on a rank of
    its group, which is the one that came last and so waited for none. `everywhere`: `lasted` of all
    ranks. No clocks are compared.
    """
    least = {
        group: [min(times) for times in zip(*(everywhere[r][group] for r in members), strict=True)]
        for group, members in ((g, group_ranks(g, rank)) for g in everywhere[rank])
    }
    left = {group: iter(times) for group, times in least.items()}
    return [next(left[one.group]) for one in issued]
