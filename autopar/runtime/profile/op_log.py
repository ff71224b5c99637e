"""The ops of a training step in the order in which they run, each with the node that it comes from:
what a profile, which knows ops by name alone, is read beside.

A scheduled step runs its derived graphs node by node. An emitted graph runs under autograd: a step
of it is run once with every op noted down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
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


class Script(NamedTuple):
    """The entries of a step, and the events of a profile within which they run."""

    entries: list[Entry]
    within: tuple[str, ...]


def of_graphs(graphs: Iterable[fx.Graph]) -> Script:
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
    return Script(found, ("CompiledFunction", "CompiledFunctionBackward"))  # AOTAutograd's names


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


def of_run(module: fx.GraphModule, step: Callable[[Callable[..., Any]], None]) -> Script:
    """Of a step that runs this module under autograd: `step` is given what to call in its place,
    and runs it forward and backward once.
    """
    log = _Log()
    named = _Named(module, log)
    with log:
        step(named.run)
    return Script(log.entries, (GRAPH, "autopar backward"))


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
