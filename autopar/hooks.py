"""Hooks that run in a model's backward. A graph of the forward has no place for what they do to a
gradient, so that it would be lost without a word: each is refused, by its module's name.

    h.register_hook(double)    ->    TraceError: … blocks.0 registers the hook double on a tensor …

What only computes something else in the backward is fine: `save_on_cpu` is forgotten.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ._compat import pytree
from .functions import HOOK_ADVICE, Place, Refused, is_inner

_GRAD_FN: Any = torch.Tensor.grad_fn.__get__  # type: ignore[attr-defined]
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
    """Refuses hooks that the forward registers on tensors, and remembers where it takes `grad_fn`,
    which may have hooks too.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.model = model
        self.taken: list[Place] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ON_TENSORS:
            hook = args[1] if len(args) > 1 else kwargs.get("hook")
            raise self._place().refuse(f"registers the hook {named(hook)} on a tensor", HOOK_ADVICE)
        if func == _GRAD_FN and not is_inner(sys._getframe(1).f_code.co_filename):
            self.taken.append(self._place())
        return func(*args, **kwargs)

    def _place(self) -> Place:
        return Place.of(self.names, self.model)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Refuses hooks on what the backward saves, but for those that only put it elsewhere."""
        enter = saved_tensors_hooks.__enter__

        def refuse(hooks: saved_tensors_hooks) -> Any:
            if type(hooks).__module__.startswith("torch.") and type(hooks) != saved_tensors_hooks:
                return enter(hooks)
            what = f"packs saved tensors by the hook {named(hooks.pack_hook)}"
            raise self._place().refuse(what, HOOK_ADVICE)

        saved_tensors_hooks.__enter__ = refuse  # type: ignore[method-assign]
        try:
            yield
        finally:
            saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


def refuse_on_nodes(places: list[Place], results: Any) -> None:
    """Runs the backward of `results`, of fake tensors, and refuses hooks on its nodes: functions in
    Python that the engine calls. `places`: where the forward takes `grad_fn`.
    """
    outputs = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
    outputs = [x for x in outputs if x.requires_grad]
    found: list[str] = []
    before = sys.getprofile()
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.callback(sys.setprofile, before)
        ones = [torch.ones_like(x) for x in outputs]
        sys.setprofile(_called_by_engine(found.append))
        if outputs:
            torch.autograd.backward(outputs, ones)
    if found:
        raise places[0].refuse(f"registers the hook {found[0]} on an autograd node", HOOK_ADVICE)


def _called_by_engine(tell: Callable[[str], None]) -> Callable[..., None]:
    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_back is not None and _engine(frame.f_back):
            code = frame.f_code
            if not is_inner(code.co_filename):
                tell(f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})")
        elif event == "c_call" and _engine(frame) and arg.__name__ != "run_backward":
            tell(getattr(arg, "__qualname__", repr(arg)))

    return profile


def _engine(frame: Any) -> bool:
    return bool(frame.f_code.co_name == "_engine_run_backward")
