"""Modules that stand for others. Those below a ParallelModule stand for the original's by name and
place, hold the parts of its parameters, and run nothing themselves.

    par.blocks[0].attention.weight    # a DTensor
    par.blocks[0](x)                  # InputError: it runs within the parallel model alone

A hook on one of them would never be called, so each is refused. The tensors of a model and the
graph of its plan enter, `own_tensors` gives the rank's part of each, and `hold` registers it.
runtime/module.py calls them. `Deferred` stands for a ParallelModule before its plan: what
`autopar.parallelize` returns without inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from autopar.errors import InputError
from autopar.ir.program import Input
from autopar.ops.devices import filled
from autopar.passes.trace.signature import NO_GENERATION
from autopar.runtime.apply import to_dtensor
from autopar.runtime.training.step_graph import StepGraph

_LATER = "are known after the first call; or give `inputs` to parallelize"


class Part(nn.Module):
    """Stands for a module of the original, whose class is `original`."""

    original = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError: the parallel model runs as a whole."""
        raise InputError(
            f"{self.original or 'a module'} of a parallel model runs within it alone: call the "
            "parallel model"
        )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputError(
            f"a hook on {self.original or 'a module'} of a parallel model would never be called: "
            "register it on the parallel model itself, or on a parameter"
        )

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook

    def extra_repr(self) -> str:
        return self.original


class PartList(Part, nn.ModuleList):
    """A Part with numbered modules: a ModuleList or a Sequential."""


class PartDict(Part, nn.ModuleDict):
    """A Part with named modules: a ModuleDict."""


def mirror(module: nn.Module, seen: dict[int, nn.Module] | None = None) -> nn.Module:
    """Return Parts in the places of a module and all that it holds; a module that is held twice has
    one.
    """
    seen = {} if seen is None else seen
    if id(module) not in seen:
        numbered = isinstance(module, nn.ModuleList | nn.Sequential)
        part = (
            PartList() if numbered else PartDict() if isinstance(module, nn.ModuleDict) else Part()
        )
        part.original = type(module).__name__
        seen[id(module)] = part
        for name, child in module._modules.items():  # named_children leaves out what comes twice
            if child is not None:
                part.add_module(name, mirror(child, seen))
    return seen[id(module)]


def hold(root: nn.Module, name: str, tensor: torch.Tensor, persistent: bool) -> None:
    """Register a parameter or a buffer under its qualified name; modules on the way that are not
    there are made.
    """
    module = root
    *path, last = name.split(".")
    for step in path:
        if not hasattr(module, step):
            module.add_module(step, Part())
        module = module.get_submodule(step)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor, persistent=persistent)


def own_tensors(
    root: nn.Module, graph: StepGraph, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, tuple[torch.Tensor, bool]]]:
    """Yield the rank's part of each parameter and buffer, and whether it is saved in state_dict, by
    every name that the original has for it. Coordinates and constants are registered on `root`.
    """
    for entry in graph.signature.inputs:
        if entry.kind == "coordinate":
            place = filled((1,), graph.coordinate[entry.target], graph.device)
            root.register_buffer(entry.node, place, persistent=False)
        elif entry.kind in ("parameter", "buffer", "constant"):
            tensor = _own_tensor(entry, graph, tensors[entry.target].detach())
            if entry.kind == "constant":
                root.register_buffer(entry.node, tensor, persistent=False)
                continue
            for name in entry.names or (entry.target,):
                yield name, (tensor, entry.persistent)


def _own_tensor(entry: Input, graph: StepGraph, unsharded: torch.Tensor) -> torch.Tensor:
    """Return the rank's part of a parameter, or its own copy of another tensor, on its device; a
    meta tensor becomes memory without numbers.
    """
    layout = graph.program.layouts[entry.node] if entry.kind == "parameter" else None
    part = unsharded if layout is None else layout.cut(unsharded, graph.coordinate)
    if part.is_meta:
        part = torch.empty_like(part, device=graph.device)
    elif part.device != graph.device:
        part = part.to(graph.device)
    elif layout is None:
        part = part.clone()
    if layout is None:
        return part
    return nn.Parameter(to_dtensor(part, layout, graph.device_mesh), requires_grad=entry.trainable)


class Deferred(nn.Module):
    """A model that is planned at its first call, with that call's inputs: `make` returns the
    ParallelModule, which takes its place within. `face`: what has the names that it will have.
    """

    def __init__(self, make: Callable[[Any], nn.Module], face: type[nn.Module]) -> None:
        super().__init__()
        self._make, self._face = make, face
        self.module: nn.Module | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._plan_once(args, kwargs)(*args, **kwargs)

    def timeline(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ParallelModule.timeline does; it counts as the first call."""
        return self._plan_once(args, kwargs).timeline(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError, as a ParallelModule does."""
        raise InputError(NO_GENERATION)

    def _plan_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.module is None:
            if args and kwargs:
                raise InputError(
                    "the first call takes all inputs by position or all by name; or give `inputs` "
                    "to parallelize"
                )
            self.module = self._make(kwargs or args)
        return self.module

    def __getattr__(self, name: str) -> Any:
        """Return what the ParallelModule has by this name, once there is one; before that raise
        InputError.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            if self.module is not None:
                return getattr(self.module, name)
            if name in ("plan", "graph", "graphs") or hasattr(self._face, name):
                raise InputError(f"the model's plan and its {name} {_LATER}") from None
            raise

    def parameters(self, recurse: bool = True) -> Any:
        if self.module is None:
            raise InputError(f"the parameters {_LATER}")
        return self.module.parameters(recurse)
