"""The peak memory of a deep model's step, from what each of its blocks adds to it.

Example: of 80 equal blocks seven are run once, five of them each with another rematerialization.
How the bytes of a rank rise and fall over each of these blocks, forward and backward, gives the
peak of all 80 under any rematerialization: `segments_of` measures, `peak_of` adds up.

The step is the one that peak.py runs, on tensors without storage. Every moment of it belongs to a
segment: a repeated block, or what lies before, between and after them. A segment's figures are
taken against the bytes that are held as it begins, so segments can be put together in other numbers
than those that ran.

An emitted program of few blocks enters, with some of them rematerialized; rematerialize.py puts
the segments of the whole model together.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, fx

from autopar._compat import autograd_step, next_autograd_step
from autopar.cost.memory import Optimizer
from autopar.cost.peak import LifetimeRecorder, run_step
from autopar.ir.graph import block_of
from autopar.ir.program import Program
from autopar.world import World


class Rise(NamedTuple):
    """How the bytes of a rank change over one segment, against those held as it begins: what the
    forward and the backward leave in addition, and the most that each holds in addition.
    """

    forward: float = 0.0
    forward_peak: float = 0.0
    backward: float = 0.0
    backward_peak: float = 0.0


class Segments(NamedTuple):
    """The segments of a step in the order of its forward, by name, with the bytes held as it
    begins, optimizer states apart.
    """

    start: float
    rises: Mapping[str, Rise]


class Peak(NamedTuple):
    """The most bytes held in a step, what is left as its backward ends, and what the forward leaves
    for it.
    """

    most: float
    end: float
    saved: float


def peak_of(start: float, rises: Sequence[Rise]) -> Peak:
    """Return the peak of a step that begins with `start` bytes and runs these segments forward, and
    backward in turn.

    >>> peak_of(10.0, [Rise(4, 5, -3, 2), Rise(4, 5, -3, 2)])
    Peak(most=20.0, end=12.0, saved=8.0)
    """
    forward, forward_peak, backward, backward_peak = np.array(rises, dtype=float).reshape(-1, 4).T
    ends = start + np.cumsum(forward)
    begins = ends - forward
    level = float(ends[-1]) if len(ends) else start
    back_ends = level + np.cumsum(backward[::-1])
    back_begins = back_ends - backward[::-1]
    most = max(
        start,
        float(np.max(begins + forward_peak, initial=0.0)),
        float(np.max(back_begins + backward_peak[::-1], initial=0.0)),
    )
    return Peak(most, float(back_ends[-1]) if len(back_ends) else start, level - start)


def segments_of(program: Program, optimizer: Optimizer, world: World) -> Segments:
    """Return the segments of one step of an emitted program, waiting for every collective. A
    segment that is no block is named by the block before it, and "+".
    """
    meter = _Meter()
    run_step(program, optimizer, world, meter)
    return meter.segments()


def _segment_of_nodes(graph: fx.Graph) -> dict[str, str]:
    """Return the segment of every node, by its name: its block, or where it lies between others.
    What stands between two blocks of the same modules, and between nodes of one block, is of the
    first of the two.
    """
    segments: dict[str, str] = {}
    pending: list[str] = []
    before = ""
    for node in graph.nodes:
        block = block_of(node) if node.op == "call_function" else ""
        if not block:
            pending.append(node.name)
            continue
        inside = block.rpartition(".")[0] == before.rpartition(".")[0]
        segments |= dict.fromkeys(pending, before if inside else f"{before}+")
        segments[node.name], before, pending = block, block, []
    return segments | dict.fromkeys(pending, f"{before}+")


class _Meter(LifetimeRecorder):
    """Measures, while a step runs, the bytes that are held, by segment."""

    def __init__(self) -> None:
        super().__init__()
        self._names: list[str] = []
        self._first_steps: list[int] = []  # autograd's, of each segment
        self._figures = np.zeros((0, 4))
        self._now: tuple[int, int] | None = None  # (segment, column of the figures)
        self._allocated_bytes = self._begun_with = self._start = 0
        self._last_step = 0

    def note(self, tensor: Tensor) -> Any:
        known = len(self.lifetimes)
        life = super().note(tensor)
        if len(self.lifetimes) > known:
            self._allocated_bytes += life.size
            if self._now is not None:
                place, column = self._now
                more = self._allocated_bytes - self._begun_with
                if more > self._figures[place, column + 1]:
                    self._figures[place, column + 1] = more
        return life

    def _end(self, key: int) -> None:
        self._allocated_bytes -= self.current[key].size
        super()._end(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._now is not None and self._now[1] == 2:  # the backward
            step = autograd_step()
            if 0 <= step < self._last_step:
                place = max(0, bisect.bisect_right(self._first_steps, step) - 1)
                if place < self._now[0]:
                    self._enter(place, 2)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _enter(self, place: int, column: int) -> None:
        """Begin a segment, forward (column 0) or backward (2), and close the one before."""
        self._close()
        self._now, self._begun_with = (place, column), self._allocated_bytes

    def _close(self) -> None:
        if self._now is not None:
            place, column = self._now
            self._figures[place, column] = self._allocated_bytes - self._begun_with

    def run_forward(self, module: fx.GraphModule, arguments: Sequence[Any]) -> Any:
        """Return what the module gives, node by node, and begin the segments as they come."""
        segments = _segment_of_nodes(module.graph)
        self._names = list(dict.fromkeys(segments.values()))
        self._figures = np.zeros((len(self._names), 4))
        places = {name: place for place, name in enumerate(self._names)}

        def begin(node: fx.Node) -> None:
            place = places[segments[node.name]]
            if self._now is None or place > self._now[0]:
                self._first_steps += [next_autograd_step()] * (place + 1 - len(self._first_steps))
                self._enter(place, 0)

        self._start = self._allocated_bytes
        return _Announced(module, begin).run(*arguments)

    def run_backward(self, outputs: Sequence[Any]) -> None:
        """Run the backward, from the last segment to the first."""
        self._last_step = next_autograd_step()
        self._enter(len(self._names) - 1, 2)
        super().run_backward(outputs)
        self._close()
        self._now = None

    def segments(self) -> Segments:
        """Return the segments of the step that has run."""
        rises = (Rise(*map(float, figures)) for figures in self._figures)
        return Segments(float(self._start), dict(zip(self._names, rises, strict=True)))


class _Announced(fx.Interpreter):
    """Runs a graph, and calls `begin` before each node."""

    def __init__(self, module: fx.GraphModule, begin: Callable[[fx.Node], None]) -> None:
        super().__init__(module)
        self._begin = begin

    def run_node(self, n: fx.Node) -> Any:
        self._begin(n)
        return super().run_node(n)
