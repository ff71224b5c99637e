"""The module tree of a parallel model: the user's own, with DTensors for parameters.

    tree = copied_tree(model, own)               # the same classes, names, attributes and hooks
    root = OriginalRoot(tree, ParallelModule)    # from here on the tree's root is parallel
    with as_written(tree, root, …) as model:     # for a trace: the user's class, without numbers

The copy shares nothing with the original that Python can copy, and no tensor. Its root is of a
class that is a subclass of ParallelModule and of the user's. Where both have a name, that of
ParallelModule is the root's; what the user's attribute was is kept for traces. Hooks that the root
had are in its graph, so they are taken off it. runtime/module.py makes a parallel module of the
tree, and runtime/training/call_graphs.py traces it again.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.passes.trace.export import borrow

STATE = "_autopar"  # the attribute of the root that has what a parallel module needs
_TRACED_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


# -- copying ---------------------------------------------------------------------------------------
def copied_tree(model: nn.Module, own: Mapping[int, torch.Tensor]) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are those of `own`, by the id of the
    original's. What Python cannot copy, such as an open file, is shared with the original.
    """
    memo: dict[int, Any] = dict(own)
    memo[id(memo)] = [model]  # as copy.deepcopy keeps alive what it has copied
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # whatever a __deepcopy__ of the user's raises
        return _copied_by_attribute(model, dict(own))


def _copied_by_attribute(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a module whose attributes are copied one by one, and shared where they
    cannot be.
    """
    if id(module) in memo:
        copied: nn.Module = memo[id(module)]
        return copied
    twin = module.__class__.__new__(module.__class__)
    memo[id(module)] = twin
    children = {id(child): child for child in module._modules.values() if child is not None}
    for child in children.values():
        _copied_by_attribute(child, memo)
    for name, value in module.__dict__.items():
        try:
            twin.__dict__[name] = copy.deepcopy(value, memo)
        except Exception:
            twin.__dict__[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return twin


# -- the root's class ------------------------------------------------------------------------------
def parallel_class(face: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """Return a class for the root of a parallel model whose class was `own`: a subclass of `face`,
    which is ParallelModule, and of `own`, with the name and the signature of the latter.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return face.forward(self, *args, **kwargs)

    forward.__doc__ = own.forward.__doc__
    forward.__wrapped__ = own.forward  # type: ignore[attr-defined]  # whose signature it has
    names = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "forward": forward,
    }
    return types.new_class(own.__name__, (face, own), exec_body=lambda space: space.update(names))


@functools.cache
def names_of(face: Any) -> frozenset[str]:
    """Return the names that `face` has besides those of nn.Module, and `forward`."""
    public = {name for name in dir(face) if name[0] != "_" and not hasattr(nn.Module, name)}
    return frozenset(public | {"forward"})


def shadowed_names(model: nn.Module, face: Any) -> list[str]:
    """Return the names of a model that mean something else on its parallel module."""
    return sorted(
        name
        for name in names_of(face) - {"forward"}
        if name in model.__dict__ or hasattr(type(model), name)
    )


def refuse_shadowed_tensors(names: Sequence[str], face: Any) -> None:
    """Raise PlanError where a tensor or submodule of the model lies under a name of `face`."""
    for name in names:
        root = name.split(".")[0]
        if root in names_of(face):
            raise PlanError(f"a ParallelModule has its own {root!r}: rename {name} in the model")


class OriginalRoot:
    """What the root of a parallel model was in the user's code: its class, the attributes whose
    names a ParallelModule has for itself, and the hooks that are in its graph. `elsewhere`: the
    names of parameters that ranks of other stages hold; the tree has None in their places.
    """

    def __init__(self, tree: nn.Module, face: Any, elsewhere: Sequence[str] = ()) -> None:
        self.elsewhere = {name: tree.get_parameter(name) for name in elsewhere}
        self.own_class, self._face = type(tree), face
        attributes = tree.__dict__
        self._attributes = {n: attributes[n] for n in names_of(face) & set(attributes)}
        self._hooks = {kind: attributes[kind] for kind in _TRACED_HOOKS}
        self.parallel_class = parallel_class(face, self.own_class)
        self.take(tree)

    def take(self, tree: nn.Module) -> None:
        """Make a tree of the user's class parallel."""
        attributes = tree.__dict__
        for name in names_of(self._face) & set(attributes):
            del attributes[name]
        for kind in _TRACED_HOOKS:
            attributes[kind] = type(attributes[kind])()
        for name in self.elsewhere:
            self._put(tree, name, None)
        tree.__class__ = self.parallel_class

    @staticmethod
    def _put(tree: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        path, _, last = name.rpartition(".")
        tree.get_submodule(path)._parameters[last] = parameter

    @contextmanager
    def restored(self, tree: nn.Module) -> Iterator[nn.Module]:
        """Make the root, within the context, what it was in the user's code."""
        attributes, parallel = tree.__dict__, tree.__class__
        state = attributes.pop(STATE, None)
        # what a script puts in the place of `forward` later calls the parallel module's
        later = {name: attributes.pop(name) for name in names_of(self._face) & set(attributes)}
        hooks = {kind: attributes[kind] for kind in _TRACED_HOOKS}
        tree.__class__ = self.own_class
        attributes.update(self._attributes, **self._hooks)
        for name, parameter in self.elsewhere.items():
            self._put(tree, name, parameter)
        try:
            yield tree
        finally:
            for name in self._attributes:
                attributes.pop(name, None)
            attributes.update(later, **hooks)
            tree.__class__ = parallel
            for name in self.elsewhere:
                self._put(tree, name, None)
            if state is not None:
                attributes[STATE] = state

    def copied(self, memo: dict[int, Any]) -> OriginalRoot:
        """Return the same for a copy of the module."""
        twin = object.__new__(OriginalRoot)
        twin.__dict__ = dict(self.__dict__)
        twin._attributes = copy.deepcopy(self._attributes, memo)
        twin._hooks = copy.deepcopy(self._hooks, memo)
        return twin


@contextmanager
def as_written(
    tree: nn.Module, root: OriginalRoot, trains: Callable[[torch.Tensor], bool]
) -> Iterator[nn.Module]:
    """Make a parallel module, within the context, the user's model on the meta device: of its
    class, with whole tensors without numbers. `trains`: whether a parameter requires a gradient.
    The module is then what it was, whatever was done to it.
    """

    # functional_call puts tensors that are no Parameters in their places
    parameters = {id(p) for module in tree.modules() for p in module._parameters.values()}

    def without_numbers(tensor: torch.Tensor) -> torch.Tensor:
        empty = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        if id(tensor) in parameters or isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, requires_grad=trains(tensor))
        return empty.requires_grad_(tensor.requires_grad)

    with root.restored(tree), borrow(tree, without_numbers):
        yield tree
