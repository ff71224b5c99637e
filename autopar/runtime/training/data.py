"""Each rank reads its own rows of a dataset, and no others.

    loader = par.loader(dataset, 64, shuffle=True)
    for tokens, targets in loader:  # DTensors of the global batch: a rank holds its rows alone
        par(tokens, targets).backward()

A plan says which rows of a batch a rank computes with. `RowShare` cuts a batch that way,
`RowSampler` chooses the rows of a dataset batch by batch, in an order that hangs on seed and epoch
alone, and `Loader` makes DTensors of what a DataLoader gives. A StepGraph enters, batches leave.
runtime/module.py makes these.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, Sampler

from autopar._compat import pytree
from autopar.errors import InputError
from autopar.ir.layout import Layout, R, S
from autopar.ir.mesh import Axis, Mesh
from autopar.runtime.apply import to_dtensor
from autopar.runtime.training.sequence_buckets import Buckets, PaddedRows, buckets_of
from autopar.runtime.training.step_graph import StepGraph
from autopar.world import ranks


class RowShare:
    """Which rows of a batch a rank reads: block `index` of `blocks` equal ones."""

    def __init__(self, graph: StepGraph) -> None:
        self.device_mesh: DeviceMesh | None = graph.device_mesh
        assert graph.program.plan is not None
        self.mesh: Mesh = graph.program.plan.mesh
        self.device = graph.device
        layouts = [graph.program.layouts[entry.node] for entry in graph.user_inputs]
        layouts = [layout for layout in layouts if layout.shape]
        if not layouts:
            raise InputError(
                "the model takes no tensor with rows: there is nothing to load by rank"
            )
        self.batch = layouts[0].shape[0]
        self.axes = _common_start([_row_axes(x) for x in layouts if x.shape[0] == self.batch])
        self.blocks = math.prod(axis.size for axis in self.axes)
        self.index = 0
        for axis in self.axes:
            self.index = self.index * axis.size + graph.coordinate[axis.name]

    def rows(self, count: int) -> slice:
        """Return the rows that this rank reads of a batch of `count`: all where they cannot be
        divided.
        """
        if count % self.blocks:
            return slice(0, count)
        own = count // self.blocks
        return slice(self.index * own, (self.index + 1) * own)

    def placed(self, batch: Any, count: int) -> Any:
        """Return the batch with a DTensor of `count` rows in place of each tensor, which holds the
        rank's own rows. Raises InputError where a tensor has other rows than these.
        """
        own = len(range(count)[self.rows(count)])

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != own:
                raise InputError(
                    f"a tensor of {tuple(tensor.shape)} among the rows of this rank, which are "
                    f"{own} of a batch of {count}: every tensor's first dim is that of the rows"
                )
            layout = self._layout((count, *tensor.shape[1:]))
            moved = tensor.to(self.device, non_blocking=True)
            return to_dtensor(moved, layout, self.device_mesh)

        return pytree.tree_map_only(torch.Tensor, place, batch)

    def _layout(self, shape: tuple[int, ...]) -> Layout:
        states, stride = {axis.name: R for axis in self.mesh.axes}, shape[0]
        if stride % self.blocks == 0:
            for axis in self.axes:
                stride //= axis.size
                states[axis.name] = S(0, stride)
        return Layout(self.mesh, shape, tuple(states[axis.name] for axis in self.mesh.axes))


def _row_axes(layout: Layout) -> list[Axis]:
    """Return the axes that split the rows of an input, outermost first."""
    axes = {axis.name: axis for axis in layout.mesh.axes}
    return [axes[digit.axis] for digit in layout.digits(0)]


def _common_start(lists: list[list[Axis]]) -> list[Axis]:
    """Return what all lists begin with: where one input is not split so far, all are read whole."""
    common = []
    for axes in zip(*lists, strict=False):
        if len(set(axes)) > 1:
            break
        common.append(axes[0])
    return common


class RowSampler(Sampler[list[Any]]):
    """The rows that this rank reads, a list for every batch: a `batch_sampler` for a DataLoader.
    Every iteration is another epoch, and is shuffled otherwise. With `buckets` a row comes with the
    length that its batch is padded to.

    `state_dict` says which batch comes next. After `load_state_dict` the next iteration goes on
    there, on any number of ranks, as the order of the rows hangs on seed and epoch alone.
    """

    def __init__(
        self,
        share: RowShare,
        length: int,
        batch: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        buckets: Buckets | None = None,
    ) -> None:
        self._buckets = buckets
        self._share, self._length, self._batch = share, length, batch
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.epoch, self._done = 0, 0  # of the batches that were given
        self._next = 0, 0  # where the next iteration starts
        self._counts: deque[int] = deque()

    def __len__(self) -> int:
        whole, rest = divmod(self._length, self._batch)
        return whole + (1 if rest and not self._drop_last else 0)

    def __iter__(self) -> Iterator[list[Any]]:
        epoch, start = self._next
        if start >= len(self):
            epoch, start = epoch + 1, 0
        self.epoch, self._done, self._next = epoch, start, (epoch + 1, 0)
        self._counts.clear()
        order = self._order()
        for number in range(start, len(self)):
            rows = order[number * self._batch : (number + 1) * self._batch]
            self._counts.append(len(rows))
            own = rows[self._share.rows(len(rows))]
            size = self._buckets.of(rows) if self._buckets else None
            yield own if size is None else [(row, size) for row in own]

    def dataset(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """Return what is asked for the rows as this sampler names them."""
        return PaddedRows(dataset, self._buckets) if self._buckets else dataset

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        count, generator = self._length, torch.Generator().manual_seed(self._seed + self.epoch)
        return torch.randperm(count, generator=generator).tolist()

    def placed(self, batch: Any) -> Any:
        """Return the next batch, as a DataLoader gives it, with DTensors of the global batch in
        place of its tensors. Batches are handed in in the order of the sampler.
        """
        if not self._counts:
            raise InputError("there is no batch under way: iterate over the sampler's DataLoader")
        placed = self._share.placed(batch, self._counts[0])
        self._counts.popleft()
        self._done += 1
        return placed

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data: the epoch, and how many of its batches were given."""
        return {"epoch": self.epoch, "batch": self._done, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at a position in the data. Raises InputError where that was another order."""
        if state["seed"] != self._seed:
            raise InputError(
                f"the position in the data is of an order with seed {state['seed']}, this one has "
                f"{self._seed}: give the loader that seed"
            )
        self.epoch, self._done = self._next = state["epoch"], state["batch"]


def row_sampler(
    graph: StepGraph,
    dataset: Sized,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    padding: tuple[Sequence[int] | None, Sequence[int] | None, Any] = (None, None, None),
) -> RowSampler:
    """Return the sampler of a dataset's rows for the ranks of a plan; `padding` is the sizes of
    buckets, the lengths of the rows and what they are padded with. Collective.
    """
    share = RowShare(graph)
    batch = share.batch if batch_size is None else batch_size
    if not hasattr(dataset, "__len__"):
        raise InputError(
            f"a dataset without a length ({type(dataset).__name__}) has no rows to choose from: "
            "let each rank read the rows `par.rows()` of every batch, or all of them"
        )
    if not isinstance(batch, int) or batch < 1:
        raise InputError(f"batch_size is {batch!r}: it is a number of rows, 1 or more")
    options: dict[str, Any] = {
        "rows": len(dataset),
        "batch_size": batch,
        "shuffle": shuffle,
        "seed": seed,
    }
    buckets = buckets_of(*padding, rows=len(dataset))
    options |= {"drop_last": drop_last, "buckets": buckets.described() if buckets else None}
    ranks.agree_on({name: str(value) for name, value in options.items()})
    return RowSampler(share, len(dataset), batch, shuffle, seed, drop_last, buckets)


class Loader:
    """A DataLoader that gives DTensors of the global batch, of which each rank read its own rows.
    `sampler` holds the position in the data, as do `state_dict` and `load_state_dict`.
    """

    def __init__(self, loader: DataLoader[Any], sampler: RowSampler) -> None:
        self._loader, self.sampler = loader, sampler
        self.state_dict, self.load_state_dict = sampler.state_dict, sampler.load_state_dict

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield self.sampler.placed(batch)
