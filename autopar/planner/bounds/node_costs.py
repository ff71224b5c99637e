"""What a node costs by every joint option of its axes, on many meshes: computing, the collectives
inside it, and what it keeps, where that has a price.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.cost.activations import Price
from autopar.cost.compute import spec_seconds
from autopar.ir.graph import carries_gradient
from autopar.ir.layout import Digit
from autopar.ir.program import Annotations
from autopar.ir.sharding_rule import operands_of, results_of, shape_of, value_of
from autopar.ir.strategy import Slot
from autopar.ops.sharded.inner_collectives import HAVE_INSIDE, inside
from autopar.planner.bounds.arrays import Meshes, local, parts
from autopar.planner.bounds.factor_graph import FIRST_SLOT, AxisOption, Frame


class NodeCosts:
    """Rates the nodes of a frame on meshes."""

    def __init__(self, frame: Frame, meshes: Meshes, price: Price | None) -> None:
        assert frame.program.annotations is not None
        self.frame, self.meshes, self.price = frame, meshes, price
        self.notes: Annotations = frame.program.annotations

    def seconds(self, node: fx.Node, found: list[AxisOption]) -> Any:
        """[mesh, option of axis 0, …], each axis having these options."""
        spec = self.notes.specs[node.name]
        gradient = carries_gradient(self.notes, node)
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        dtype = results[0].dtype
        elements: Any = 0.0
        for index, operand in enumerate(operands_of(node)):
            if operand is not None and spec.operands[index] is not None:
                states = [f.operands[index] for f in found]
                elements = elements + local(self.meshes, shape_of(value_of(operand)), states)
        for index, value in enumerate(results):
            states = [f.results[index] for f in found]
            elements = elements + local(self.meshes, shape_of(value), states)
        flops = spec.flops / parts(self.meshes, [isinstance(f.choice, Slot) for f in found])
        total = spec_seconds(
            spec, flops, elements * dtype.itemsize, dtype, gradient, self.meshes.world.device
        )
        if node.target in HAVE_INSIDE:
            total = total + self._inside(node, found, gradient)
        if self.price is not None:
            total = total + self.price.seconds_per_byte * self._kept(node, found, self.price)
        return total

    def _kept(self, node: fx.Node, found: list[AxisOption], price: Price) -> Any:
        """Bytes that a rank keeps of the node for the backward."""
        share, operands = price.kept.of(node), operands_of(node)
        spec = self.notes.specs[node.name]
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        total: Any = share.inside / parts(self.meshes, [isinstance(f.choice, Slot) for f in found])
        for index, each in share.operands:
            operand = operands[index]
            if operand is not None and spec.operands[index] is not None:
                states = [f.operands[index] for f in found]
                total = total + each * local(self.meshes, shape_of(value_of(operand)), states)
        for index, each in share.results:
            states = [f.results[index] for f in found]
            total = total + each * local(self.meshes, shape_of(results[index]), states)
        return total

    def _inside(self, node: fx.Node, found: list[AxisOption], gradient: bool) -> Any:
        """The collectives inside a sharded implementation, by the dim that each axis splits."""
        source = operands_of(node)[0]
        assert source is not None
        slots = self.notes.dims[self.frame.producer(source)]
        numbers = [dim for dim, atoms in enumerate(slots) for a in atoms if not a.opaque]
        states = [f.operands[0] for f in found]
        held = [
            numbers[s - FIRST_SLOT] if s is not None and s >= FIRST_SLOT else -1 for s in states
        ]
        dims, count = sorted(set(held)), self.meshes.count
        table = np.zeros((len(self.meshes),) + (len(dims),) * count)
        for pattern in itertools.product(range(len(dims)), repeat=count):
            stub = _cut(shape_of(value_of(source)), [dims[i] for i in pattern], self.meshes.sizes)
            for one in inside(node.target, [stub]):
                if gradient or not one.backward:
                    whole = np.asarray(one.traffic.elements * one.element_bytes, dtype=np.float64)
                    axes = tuple(int(a) for a in one.axes)
                    cell: Any = (slice(None), *pattern)
                    table[cell] += self.meshes.seconds(
                        one.traffic.collective, axes, np.broadcast_to(whole, len(self.meshes)), True
                    )
        index = np.array([dims.index(h) for h in held])
        for a in range(count):
            table = np.take(table, index, axis=1 + a)
        return table


def _cut(shape: tuple[int, ...], held: list[int], sizes: NDArray[np.int64]) -> Any:
    """What `inside` asks of a layout in which axis a holds a digit of dim held[a] (-1: none), with
    arrays over meshes for numbers.
    """
    local: list[Any] = [np.full(len(sizes), float(n)) for n in shape]
    for axis, dim in enumerate(held):
        if dim >= 0:
            local[dim] = local[dim] / sizes[:, axis]
    axes = [str(axis) for axis, dim in enumerate(held) if dim >= 0]
    return SimpleNamespace(
        shape=shape,
        local_shape=local,
        local_size=math.prod(local),
        digits=lambda dim: tuple(Digit(str(a), 0, 0) for a, d in enumerate(held) if d == dim),
        axes_of=lambda letter: tuple(axes),
    )
