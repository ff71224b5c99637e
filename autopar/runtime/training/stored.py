"""The tensors that a ParallelModule holds: each rank's own parts, under the names of the original.

    stored = StoredTensors(par, layouts, coordinate, device, device_mesh)
    stored.fill("head.weight", value)    # cut, moved and written

Values enter whole, or as DTensors that lie otherwise, and are stored as the plan says. A tensor of
a model on the meta device has no numbers until it is filled. runtime/module.py makes one for each
ParallelModule; initialize.py, pretrained.py and load_state_dict write through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.ir.layout import Layout
from autopar.runtime.apply import to_dtensor


class StoredTensor(NamedTuple):
    """A parameter or persistent buffer: all of its names, its layout (None: unsharded), and the
    tensor, a DTensor where a rank holds a part.
    """

    names: tuple[str, ...]
    layout: Layout | None
    tensor: torch.Tensor

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
        starts = [
            sum(coordinate[axis] * stride for axis, stride, _ in self.layout.digits(dim))
            for dim in range(len(self.shape))
        ]
        sizes = self.layout.local_shape
        return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


class StoredTensors:
    """The parameters and persistent buffers of a module. `layouts`: of parameters, by each of their
    names. `empty`: the names of tensors without numbers.
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        coordinate: Mapping[str, int],
        device: torch.device,
        device_mesh: DeviceMesh | None,
        empty: Iterable[str] = (),
    ) -> None:
        self._module, self._layouts, self.empty = module, layouts, set(empty)
        self.coordinate, self._device, self._device_mesh = dict(coordinate), device, device_mesh

    def of(self, module: nn.Module) -> StoredTensors:
        """Return the tensors of a copy of the module."""
        own = self.coordinate, self._device, self._device_mesh, self.empty
        return StoredTensors(module, self._layouts, *own)

    def by_name(self) -> dict[str, StoredTensor]:
        """Return every tensor that is saved, by each of its names."""
        named: dict[str, torch.Tensor] = dict(self._parameters())
        named |= dict(self._module.named_buffers(remove_duplicate=False))
        names: dict[int, list[str]] = {}
        for name in self._module.state_dict():
            names.setdefault(id(named[name]), []).append(name)
        return {
            name: StoredTensor(tuple(names[id(x)]), self._layouts.get(name), x)
            for name, x in named.items()
            if id(x) in names
        }

    def each(self) -> list[StoredTensor]:
        """Return every tensor that is saved, once."""
        return [x for name, x in self.by_name().items() if x.names[0] == name]

    def place(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a value for a parameter as it is stored. Collective where it is a DTensor that
        lies otherwise. One of another shape is left as it is.
        """
        parameter, layout = self._module.get_parameter(name), self._layouts[name]
        if isinstance(value, DTensor):
            same = isinstance(parameter, DTensor) and value.device_mesh == parameter.device_mesh
            if same and value.placements == parameter.placements:  # type: ignore[attr-defined]
                return value
            value = value.full_tensor()
        if tuple(value.shape) != layout.shape:
            return value
        own = layout.cut(value, self.coordinate).to(self._device)
        return to_dtensor(own, layout, self._device_mesh)

    @torch.no_grad()
    def fill(self, name: str, value: torch.Tensor) -> None:
        """Write the numbers of a whole tensor, by any of its names."""
        if name in self._layouts:
            part = self._module.get_parameter(name)
            stored = StoredTensor((name,), self._layouts[name], part)
            stored.local.copy_(value[stored.box(self.coordinate)])
            same = {n for n, x in self._parameters() if x is part}
        else:
            self._module.get_buffer(name).copy_(value)
            same = {name}
        self.empty -= same

    def _parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._module.named_parameters(remove_duplicate=False)

    def has_numbers(self) -> None:
        """Raise InputError where a tensor has none yet."""
        if self.empty:
            more = f", nor have {len(self.empty) - 1} more" if len(self.empty) > 1 else ""
            raise InputError(
                f"{min(self.empty)} has no numbers yet{more}: the model was made on the meta "
                "device. Call par.init_weights(), par.load_weights(path) or par.load_state_dict; "
                "what none of these fills is to be made outside of torch.device('meta')"
            )


def cut_state(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Put the rank's parts in the place of whole tensors, and of DTensors that lie otherwise, in a
    state that is about to be loaded into a ParallelModule.
    """
    stored: StoredTensors = module._stored
    for name, tensor in stored.by_name().items():
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor):
            if isinstance(tensor.tensor, DTensor):
                state[prefix + name] = stored.place(name, value)
            if tuple(value.shape) == tensor.shape:  # of others load_state_dict raises
                stored.empty -= {*tensor.names}
