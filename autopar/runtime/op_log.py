"""The op log of a training step: its ops in the order in which they run, each with its graph node.

A profile knows ops by name alone; profiler.py reads it next to this log to learn which node and
module each op belongs to. A scheduled step runs its derived graphs node by node, so its log is read
off the graphs (`log_of_graphs`). An emitted graph runs under autograd: one step of it is run with
every op written down (`log_of_run`).

The second half reads when gloo's threads ran each collective of a profiled step
(`collective_periods`; a thread reports kind and size alone), and for how long data was on its way
without waiting for another rank (`seconds_sending`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar._compat import OpOverload, TorchDispatchMode, autograd_step, next_autograd_step
from autopar.cost.network import size
from autopar.cost.simulator.graph_events import (
    KINDS,
    bytes_sent,
    collective_named,
    group_pattern,
    origin,
)
from autopar.ir.containers import tensors_in
from autopar.ir.graph import module_path
from autopar.ir.mesh import group_ranks

GRAPH = "autopar graph"  # the name in a profile under which a module runs
WAIT = torch.ops._c10d_functional.wait_tensor.default


class Entry(NamedTuple):
    """One op of a step. `op`: its name, as in "aten::mm". A collective has its `kind`, the name of
    its `group`, the `bytes` that this rank sends, and how many `numbers` it takes; a wait has the
    index of the entry that it `waits_for`.
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
    """The entries of a step, and the names of the profiler events `within` which they run."""

    entries: list[Entry]
    within: tuple[str, ...]


def log_of_graphs(graphs: Iterable[fx.Graph]) -> OpLog:
    """Return the log of derived graphs that run one after the other."""
    entries: list[Entry] = []
    issued: dict[str, int] = {}  # the entry of a collective, by the name of its result's node
    for graph in graphs:
        for node in graph.nodes:
            if node.op != "call_function" or not isinstance(node.target, OpOverload):
                for needed in node.all_input_nodes if node.op == "call_function" else ():
                    if needed.name in issued:  # a piece of a fused collective's result
                        issued[node.name] = issued[needed.name]
                continue
            operands, results = (_tensors_of_nodes(n) for n in (node.all_input_nodes, [node]))
            number = issued.get(node.all_input_nodes[0].name, -1) if node.target is WAIT else -1
            entry = _entry(node.target, node.args, operands, results, origin(node), number)
            if entry.kind:
                issued[node.name] = len(entries)
            entries.append(entry)
    return OpLog(entries, ("CompiledFunction", "CompiledFunctionBackward"))  # AOTAutograd's names


def _tensors_of_nodes(nodes: Iterable[fx.Node]) -> list[torch.Tensor]:
    return [value for node in nodes for value in tensors_in(node.meta.get("val"))]


def _entry(
    target: OpOverload,
    args: tuple[Any, ...],
    operands: list[torch.Tensor],
    results: list[torch.Tensor],
    node_and_module: tuple[str, str],
    waits_for: int,
) -> Entry:
    name, collective = target._schema.name, collective_named(target)
    if collective is None:
        return Entry(name, *node_and_module, waits_for=waits_for)
    kind, group = KINDS[collective], str(args[-1])
    sent = bytes_sent(kind, size(group_pattern(group)), _bytes(operands), _bytes(results))
    numbers = sum(value.numel() for value in operands)
    return Entry(name, *node_and_module, kind, group, sent, numbers)


def _bytes(values: list[torch.Tensor]) -> float:
    return float(sum(value.numel() * value.element_size() for value in values))


def log_of_run(module: fx.GraphModule, step: Callable[[Callable[..., Any]], None]) -> OpLog:
    """Return the log of a step that runs this module under autograd. `step` is called once with
    what it runs in the place of the module, and runs it forward and backward.
    """
    log = _Log()
    named = _NodeTracker(module, log)
    with log:
        step(named.run)
    return OpLog(log.entries, (GRAPH, "autopar backward"))


class _NodeTracker(fx.Interpreter):
    """Runs a graph and tells the log which node it is at."""

    def __init__(self, module: fx.GraphModule, log: _Log) -> None:
        super().__init__(module)
        self.log = log

    def run(self, *args: Any, **more: Any) -> Any:
        result = super().run(*args, **more)
        self.log.at(None)
        return result

    def run_node(self, n: fx.Node) -> Any:
        self.log.at(n)
        return super().run_node(n)


class _Log(TorchDispatchMode):
    """Writes ops down. An op that runs in the backward belongs to the node whose autograd function
    is running.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.node: tuple[str, str] = ("", "")
        self.steps: list[int] = []  # autograd's sequence numbers at which each node begins
        self.nodes: list[tuple[str, str]] = []
        self.issued: dict[int, tuple[int, torch.Tensor]] = {}

    def at(self, node: fx.Node | None) -> None:
        self.node = ("", "") if node is None else (node.name, _chain(node))
        self.steps.append(next_autograd_step())
        self.nodes.append(self.node)

    def _current_node(self) -> tuple[str, str]:
        step = autograd_step()
        if step < 0:
            return self.node
        place = bisect_right(self.steps, step) - 1
        return self.nodes[place] if place >= 0 else ("", "")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operands, results = tensors_in((args, kwargs)), tensors_in(result)
        number = self.issued.pop(id(args[0]), (-1, None))[0] if func is WAIT else -1
        entry = _entry(func, args, operands, results, self._current_node(), number)
        if entry.kind:  # held until it is waited for: an id counts while its tensor lives
            self.issued |= {id(value): (len(self.entries), value) for value in results}
        self.entries.append(entry)
        return result


def _chain(node: fx.Node) -> str:
    """Return the subgraph that a node belongs to; on one rank, where the graph is the traced one,
    its module.
    """
    return str(node.meta.get("chain", module_path(node)))


_GLOO = "gloo:"
_THREADS = (1, 2)  # gloo threads that work for one group


class IssuedCollective(NamedTuple):
    """A collective of a step: its kind, the name of its group, how many `numbers` it takes; when it
    was issued, and when something had waited for it, in microseconds of the profile.
    """

    kind: str
    group: str
    numbers: int
    since: float
    until: float

    def fits(self, event: Any) -> bool:
        """Whether an event of a gloo thread may be this collective."""
        when = event.time_range
        alike = event.name == _GLOO + self.kind and _numbers(event) == self.numbers
        return alike and self.since <= when.start and when.end <= self.until


def collective_periods(
    issued: Sequence[IssuedCollective], events: Sequence[Any], begin: float
) -> list[tuple[float, float]]:
    """Return when each collective ran, as (start, end) in microseconds, in a step that began at
    `begin`. Within a group they run one after the other in the order of issue. Where no gloo thread
    reports it, a collective counts from issue to the end of its wait.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for place, collective in enumerate(issued):
        groups[collective.group].append(place)
    carried = _match_events(list(groups.values()), _gloo_threads(events, begin), issued)
    periods, until = [], defaultdict[str, float](float)  # the end of what runs in a group
    for place, collective in enumerate(issued):
        start, end = collective.since, collective.until
        if place in carried:
            period = carried[place].time_range
            start, end = period.start, period.end
        start = min(end, max(start, until[collective.group]))
        until[collective.group] = max(until[collective.group], end)
        periods.append((start, end))
    return periods


def _gloo_threads(events: Sequence[Any], begin: float) -> list[list[Any]]:
    """Return the events of gloo's threads in the step, a list for each thread, in order."""
    by_thread: dict[int, list[Any]] = defaultdict(list)
    for event in sorted(events, key=lambda e: e.time_range.start):
        if event.name.startswith(_GLOO) and event.time_range.start >= begin:
            by_thread[event.thread].append(event)
    return list(by_thread.values())


def _match_events(
    groups: list[list[int]], threads: list[list[Any]], issued: Sequence[IssuedCollective]
) -> dict[int, Any]:
    """Return the event of each collective, by its place in `issued`. A thread works for one group,
    and the threads of a group take its collectives in the order of issue: nothing else tells equal
    ones apart.
    """
    if not groups:
        return {}
    first_group, *other_groups = groups
    best: dict[int, Any] = {}
    places = range(len(threads))
    choices = (itertools.combinations(places, count) for count in _THREADS)
    for choice in itertools.chain.from_iterable(choices):
        matched = _match_threads(
            [(n, issued[n]) for n in first_group], [threads[i] for i in choice]
        )
        if matched is not None:
            other_threads = [thread for i, thread in enumerate(threads) if i not in choice]
            best = max(best, matched | _match_events(other_groups, other_threads, issued), key=len)
        if len(best) == sum(map(len, groups)):
            return best
    return best or _match_events(other_groups, threads, issued)


def _match_threads(
    own: list[tuple[int, IssuedCollective]], threads: list[list[Any]]
) -> dict[int, Any] | None:
    """Return the events of a group's collectives, by place, on these threads; None where the
    threads ran other collectives.
    """
    if sum(map(len, threads)) != len(own):
        return None
    remaining, matched = [list(reversed(thread)) for thread in threads], {}
    for place, collective in own:
        matching = [thread for thread in remaining if thread and collective.fits(thread[-1])]
        if not matching:
            return None
        matched[place] = min(matching, key=lambda thread: thread[-1].time_range.start).pop()
    return matched


def _numbers(event: Any) -> int:
    """Return how many numbers the collective of an event took."""
    return sum(torch.Size(shape).numel() for shape in event.input_shapes)


# -- seconds of communication ----------------------------------------------------------------------
# How long the collectives of each group ran, in their order.
Durations = Mapping[str, Sequence[float]]


def durations_by_group(
    issued: Sequence[IssuedCollective], when: Sequence[tuple[float, float]]
) -> Durations:
    """Return how long the collectives of each group ran on this rank, which the other ranks need to
    know.
    """
    durations: dict[str, list[float]] = defaultdict(list)
    for collective, (start, end) in zip(issued, when, strict=True):
        durations[collective.group].append(end - start)
    return dict(durations)


def seconds_sending(
    issued: Sequence[IssuedCollective], rank: int, everywhere: Sequence[Durations]
) -> list[float]:
    """Return for how many microseconds each collective of this rank communicated.

    It is the least that the collective took on any rank of its group: the rank that came last
    waited for none. `everywhere`: `durations_by_group` of all ranks. No clocks are compared.
    """
    least = {
        group: [min(times) for times in zip(*(everywhere[r][group] for r in members), strict=True)]
        for group, members in ((g, group_ranks(g, rank)) for g in everywhere[rank])
    }
    remaining = {group: iter(times) for group, times in least.items()}
    return [next(remaining[collective.group]) for collective in issued]
