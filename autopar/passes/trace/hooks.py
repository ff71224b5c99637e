"""Refuses hooks that would run in a model's backward: a graph of the forward has no place for them.

    h.register_hook(double)    ->    TraceError: … blocks.0 registers the hook double on a tensor …

A hook may change a gradient, and a parallel model would silently lose that change. Each is refused
with the name of its module. What does not change a gradient is fine: `save_on_cpu`, which packs
saved activations, is ignored. export.py calls `refuse_registered` before it traces and traces the model
under `Watch`.
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

_GET_GRAD_FN: Any = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
_REGISTER_ON_TENSOR = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


def refuse_registered(model: nn.Module) -> None:
    """Raise Refused for hooks that the model's parameters have before it runs, and for backward
    hooks of the oldest kind on modules.
    """
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(parameter, kind, None):
                raise Refused(
                    f"parameter {name} has the hook {_join_names(hooks)}", "", HOOK_ADVICE
                )
    for name, module in model.named_modules():
        if module._is_full_backward_hook is False and module._backward_hooks:
            listed, where = _join_names(module._backward_hooks), name or type(module).__name__
            raise Refused(f"{where} has the backward hook {listed}", "", HOOK_ADVICE)


def _join_names(hooks: Any) -> str:
    """Return the names of these hooks, separated by commas."""
    return ", ".join(named(hook) for hook in hooks.values())


def named(hook: Any) -> str:
    """Return a hook's name, with the file and line of its code."""
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
        if func in _REGISTER_ON_TENSOR:
            hook = args[1] if len(args) > 1 else kwargs.get("hook")
            raise self._place().refuse(f"registers the hook {named(hook)} on a tensor", HOOK_ADVICE)
        result = func(*args, **kwargs)
        if func == _GET_GRAD_FN and result is not None and _hands_out(_caller()):
            return _Node(result, self._place())
        return result

    def _place(self) -> Place:
        return Place.of(self.names, self.model)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Refuse hooks on saved activations for the time of this context, but for torch's own,
        which only put them elsewhere.
        """
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
    """Return the file of the code that called into the modes that are on."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return str(frame.f_code.co_filename)


class _Node:
    """A node of the autograd graph that refuses hooks, as do the nodes behind it."""

    def __init__(self, node: Any, place: Place) -> None:
        self._node, self._place = node, place

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._node)

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            return self._refuse
        attribute = getattr(self._node, name)
        if name != "next_functions":
            return attribute
        return tuple((node and _Node(node, self._place), number) for node, number in attribute)

    def _refuse(self, hook: Any) -> None:
        what = f"registers the hook {named(hook)} on the autograd node {self._node.name()}"
        raise self._place.refuse(what, HOOK_ADVICE)
