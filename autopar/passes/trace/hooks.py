"""Hooks that run in a model's backward. A graph of the forward has no place for what they do to a
gradient, so that it would be lost without a word: each is refused, by its module's name.

    h.register_hook(double)    ->    TraceError: … blocks.0 registers the hook double on a tensor …

What only computes something else in the backward is fine: `save_on_cpu` is forgotten.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from autopar.ops.custom_functions import HOOK_ADVICE, Place, Refused, is_inner

_GRAD_FN: Any = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
_ON_TENSORS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


def refuse_held(model: nn.Module) -> None:
    """Refuses the hooks that the model's parameters have before it runs, and the oldest kind of
    hook on modules.
    """
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(parameter, kind, None):
                raise Refused(f"parameter {name} has the hook {_listed(hooks)}", "", HOOK_ADVICE)
    for name, module in model.named_modules():
        if module._is_full_backward_hook is False and module._backward_hooks:
            listed, where = _listed(module._backward_hooks), name or type(module).__name__
            raise Refused(f"{where} has the backward hook {listed}", "", HOOK_ADVICE)


def _listed(hooks: Any) -> str:
    return ", ".join(named(hook) for hook in hooks.values())


def named(hook: Any) -> str:
    """What a person calls a hook, with its line."""
    code = getattr(hook, "__code__", None)
    name = getattr(hook, "__qualname__", None) or repr(hook)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


class Watch(TorchFunctionMode):
    """Refuses hooks that the forward registers on tensors and on nodes of the autograd graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ON_TENSORS:
            hook = args[1] if len(args) > 1 else kwargs.get("hook")
            raise self._place().refuse(f"registers the hook {named(hook)} on a tensor", HOOK_ADVICE)
        found = func(*args, **kwargs)
        if func == _GRAD_FN and found is not None and _hands_out(_caller()):
            return _Node(found, self._place())
        return found

    def _place(self) -> Place:
        return Place.of(self.names, self.model)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Refuses hooks on what the backward saves, but for those that only put it elsewhere."""
        plain, enter = saved_tensors_hooks, saved_tensors_hooks.__enter__

        def refuse(hooks: saved_tensors_hooks) -> Any:
            if type(hooks).__module__.startswith("torch.") and type(hooks) is not plain:
                return enter(hooks)
            what = f"packs saved tensors by the hook {named(hooks.pack_hook)}"
            raise self._place().refuse(what, HOOK_ADVICE)

        saved_tensors_hooks.__enter__ = refuse  # type: ignore[method-assign]
        try:
            yield
        finally:
            saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


def _hands_out(filename: str) -> bool:
    """Whether a `grad_fn` that code in this file takes may reach the user."""
    return filename == torch.autograd.graph.__file__ or not is_inner(filename)


def _caller() -> str:
    """The file of the code that called into the modes that are on."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return str(frame.f_code.co_filename)


class _Node:
    """A node of the autograd graph that takes no hooks, nor do those behind it."""

    def __init__(self, node: Any, place: Place) -> None:
        self._node, self._place = node, place

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._node)

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            return self._refuse
        found = getattr(self._node, name)
        if name != "next_functions":
            return found
        return tuple((node and _Node(node, self._place), number) for node, number in found)

    def _refuse(self, hook: Any) -> None:
        what = f"registers the hook {named(hook)} on the autograd node {self._node.name()}"
        raise self._place.refuse(what, HOOK_ADVICE)
