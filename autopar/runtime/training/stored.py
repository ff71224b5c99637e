"""The tensors that a ParallelModule holds: each rank's own parts, under the names of the original.

    stored = StoredTensors(par, layouts, coordinate, device, device_mesh)
    stored.fill("head.weight", value)    # cut, moved and written

Values enter whole, or as DTensors that lie otherwise, and are stored as the plan says. A tensor of
a model on the meta device has no numbers until it is filled. runtime/module.py makes one for each
ParallelModule; initialize.py, pretrained.py and load_state_dict write through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import local_of, version_of
from autopar.errors import InputError
from autopar.ir.layout import Layout
from autopar.ir.padding import Pads, cut_unpadded, part_box, unpadded_shape
from autopar.ir.program import Input
from autopar.runtime.apply import to_dtensor
from autopar.runtime.parallel_tensor import become_parallel, own_part, parallel_parameter
from autopar.runtime.training.step_graph import StepGraph


class StoredTensor(NamedTuple):
    """A parameter or persistent buffer: all of its names, its layout (None: unsharded), and the
    tensor, a DTensor where a rank holds a part. `pads`: of the layout, which the tensor has not.
    """

    names: tuple[str, ...]
    layout: Layout | None
    tensor: torch.Tensor
    pads: Pads = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.tensor.shape)

    @property
    def local(self) -> torch.Tensor:
        """The rank's own part; writing to it writes to the tensor."""
        tensor = self.tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def box(self, coordinate: Mapping[str, int]) -> tuple[slice, ...]:
        """Return the indices of the rank's own part, a slice for each dim."""
        if self.layout is None:
            return tuple(slice(0, size) for size in self.shape)
        box = part_box(self.layout, self.pads, coordinate)
        return tuple(slice(start, start + size) for start, size in box)


class StoredTensors:
    """The parameters and persistent buffers of a module. `layouts`: of parameters, by each of their
    names. `empty`: the names of tensors without numbers, which they get by whatever writes to them.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: StepGraph,
        layouts: Mapping[str, Layout],
        empty: Iterable[str] = (),
    ) -> None:
        self._module, self._graph, self._layouts = module, graph, layouts
        self._pads = graph.pads_of_parameters()
        self.coordinate = graph.coordinate
        self._empty = {name: _written_state(self._tensor(name)) for name in empty}

    def of(self, module: nn.Module) -> StoredTensors:
        """Return the tensors of a copy of the module."""
        return StoredTensors(module, self._graph, self._layouts, self.empty)

    @property
    def empty(self) -> list[str]:
        """The names of tensors that nothing has been written to yet."""
        for name, before in list(self._empty.items()):
            if _written_state(self._tensor(name)) != before:
                del self._empty[name]
        return [*self._empty]

    def _tensor(self, name: str) -> torch.Tensor:
        path, _, last = name.rpartition(".")
        tensor: torch.Tensor = getattr(self._module.get_submodule(path), last)
        return tensor

    def filled(self, names: Iterable[str]) -> None:
        """Note that tensors have got their numbers in a way that leaves no trace at them."""
        for name in names:
            self._empty.pop(name, None)

    def by_name(self) -> dict[str, StoredTensor]:
        """Return every tensor that is saved, by each of its names."""
        tensors, saved = self.all_tensors(), {*_saved_names(self._module)}
        return {
            name: x._replace(names=tuple(n for n in x.names if n in saved))
            for name, x in tensors.items()
            if not saved.isdisjoint(x.names)
        }

    def each(self) -> list[StoredTensor]:
        """Return every tensor that is saved, once."""
        return [x for name, x in self.by_name().items() if x.names[0] == name]

    def place(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a value for a parameter as it is stored. Collective where it is a DTensor that
        lies otherwise. One of another shape is left as it is.
        """
        parameter, layout, pads = self._tensor(name), self._layouts[name], self._pads.get(name, ())
        if tuple(value.shape) != unpadded_shape(layout.shape, pads):
            return value
        if isinstance(parameter, DTensor) and isinstance(value, DTensor):
            own = own_part(value, parameter)
        else:
            own = cut_unpadded(layout, value, pads, self.coordinate).to(self._graph.device)
        return become_parallel(to_dtensor(own, layout, self._graph.device_mesh, pads))

    def all_tensors(self) -> dict[str, StoredTensor]:
        """Return every parameter and buffer, saved or not, by each of its names."""
        named: dict[str, torch.Tensor] = dict(self._module.named_parameters(remove_duplicate=False))
        named |= dict(self._module.named_buffers(remove_duplicate=False))
        names: dict[int, list[str]] = {}
        for name, x in named.items():
            names.setdefault(id(x), []).append(name)
        return {
            name: StoredTensor(
                tuple(names[id(x)]), self._layouts.get(name), x, self._pads.get(name, ())
            )
            for name, x in named.items()
        }

    @torch.no_grad()
    def fill(self, stored: StoredTensor, value: torch.Tensor) -> None:
        """Write the numbers of a whole tensor."""
        stored.local.copy_(value[stored.box(self.coordinate)])
        self.filled(stored.names)

    def has_numbers(self) -> None:
        """Raise InputError where a tensor has none yet."""
        if self._empty and (empty := self.empty):
            more = f", nor have {len(empty) - 1} more" if len(empty) > 1 else ""
            raise InputError(
                f"{min(empty)} has no numbers yet{more}: the model was made on the meta "
                "device. Call par.init_weights(), par.load_weights(path) or par.load_state_dict; "
                "what none of these fills is to be made outside of torch.device('meta')"
            )


def _saved_names(module: nn.Module) -> Iterator[str]:
    """Yield the names of parameters and buffers that torch saves."""
    for prefix, inner in module.named_modules(remove_duplicate=False):
        saved = [name for name, x in inner._parameters.items() if x is not None]
        saved += [
            name
            for name, x in inner._buffers.items()
            if x is not None and name not in inner._non_persistent_buffers_set
        ]
        yield from (f"{prefix}.{name}" if prefix else name for name in saved)


def _written_state(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is written to."""
    own = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return id(own), version_of(tensor)


def cut_state(stored: StoredTensors, state: dict[str, Any], prefix: str) -> None:
    """Put the rank's parts in the place of whole tensors, and of DTensors that lie otherwise, in a
    state that is about to be loaded into a ParallelModule.
    """
    for name, tensor in stored.by_name().items():
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor):
            if isinstance(tensor.tensor, DTensor):
                state[prefix + name] = stored.place(name, value)
            if tuple(value.shape) == tensor.shape:  # of others load_state_dict raises
                stored.filled(tensor.names)


def own_tensors(
    model: nn.Module,
    graph: StepGraph,
    tensors: Mapping[str, torch.Tensor],
    elsewhere: Sequence[str],
) -> dict[int, torch.Tensor]:
    """Return the rank's part of each parameter and its copy of each buffer, by the id of the
    original's. `tensors`: the model's, by the names of the graph. `elsewhere`: the names of
    parameters of other stages, of which the rank has none: they are on the meta device.
    """
    own: dict[int, torch.Tensor] = {}
    for name in elsewhere:
        original = model.get_parameter(name)
        empty = torch.empty_like(original, device="meta")
        own.setdefault(id(original), nn.Parameter(empty, original.requires_grad))
    for entry in graph.signature.inputs:
        if entry.kind in ("parameter", "buffer"):
            own[id(tensors[entry.target])] = _own_tensor(entry, graph, tensors[entry.target])
    for tensor in (*model.parameters(), *model.buffers()):  # what the graph has no use for
        if id(tensor) not in own:
            own[id(tensor)] = _on_device(tensor.detach(), graph.device, True)
    return own


def _own_tensor(entry: Input, graph: StepGraph, unsharded: torch.Tensor) -> torch.Tensor:
    """Return the rank's part of a parameter, or its own copy of a buffer, on its device."""
    layout = graph.program.layouts[entry.node] if entry.kind == "parameter" else None
    if layout is None:
        return _on_device(unsharded.detach(), graph.device, True)
    pads = graph.program.pads(entry.node)
    cut = cut_unpadded(layout, unsharded.detach(), pads, graph.coordinate)
    part = _on_device(cut, graph.device, False)
    return parallel_parameter(to_dtensor(part, layout, graph.device_mesh, pads), entry.trainable)


def _on_device(part: torch.Tensor, device: torch.device, cloned: bool) -> torch.Tensor:
    """Return a tensor on a device; a meta tensor becomes memory without numbers."""
    if part.is_meta:
        return torch.empty_like(part, device=device)
    return part.to(device, copy=cloned)
