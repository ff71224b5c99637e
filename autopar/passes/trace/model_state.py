"""What a model holds that no graph has: attributes of its modules, and hooks of its backward.

    before = snapshot(model); model(x); before.changed(snapshot(model)); before.restore()

A snapshot covers what modules hold besides parameters, buffers and submodules: their attributes,
and the contents of their lists, dicts, sets and plain objects. export.py restores the model after
it has traced it on fake tensors, and side_effects.py compares what two calls of forward have left.

    h.register_hook(double)    ->    TraceError: … blocks.0 registers the hook double on a tensor …

A hook may change a gradient, and a parallel model would silently lose that change. Each is refused
with the name of its module. What does not change a gradient is fine: `save_on_cpu`, which packs
saved activations, is ignored. export.py calls `refuse_registered` before it traces, and traces the
model under `Watch`.
"""

from __future__ import annotations

import collections
import operator
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from autopar.ops.custom_functions import HOOK_ADVICE, Place, Refused, is_inner

_VALUES = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.Tensor)
_MOST = 1_000_000  # elements of an array that is compared by value
_OPAQUE_PACKAGES = frozenset(
    {*sys.stdlib_module_names, "torch", "numpy"}
)  # packages whose objects are opaque
_SIZED = (list, tuple, dict, set, frozenset, collections.deque)


@dataclass
class Snapshot:
    """`leaves` maps a path, such as "blocks.0.history[2]", to what can be compared there;
    `contents` holds every dict, list, set and deque that was met, with a copy of its content.
    """

    leaves: dict[str, Any] = field(default_factory=dict)
    tensors: dict[int, str] = field(default_factory=dict)  # the path of each tensor, by its id
    contents: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def restore(self) -> None:
        """Put everything back in its place; what was added since is dropped."""
        for target, content in self.contents.values():
            _refill(target, content)

    def changed(self, later: Snapshot) -> list[str]:
        """Return the paths at which `later` holds something else, nothing, or something new."""
        paths = dict.fromkeys([*self.leaves, *later.leaves])
        absent = object()
        return [p for p in paths if self.leaves.get(p, absent) != later.leaves.get(p, absent)]


def snapshot(
    model: nn.Module, known: Callable[[torch.Tensor], bool] = lambda value: True
) -> Snapshot:
    """Return what the model holds now. A tensor that is not `known` is identified by its place
    alone: another such tensor there is no change.

    >>> counts = nn.Linear(2, 2); counts.step = 0; before = snapshot(counts); counts.step += 1
    >>> before.changed(snapshot(counts))
    ['step']
    """
    state = Snapshot()
    for name, module in model.named_modules():
        _record(state, module.__dict__)
        for attribute, value in module.__dict__.items():
            path = f"{name}.{attribute}" if name else attribute
            if attribute in _REGISTRIES:
                _record(state, value)
                for key, member in value.items():
                    inner = f"{name}.{key}" if name else key
                    # forward may assign to a buffer: its new value is an output, no side effect
                    state.leaves[inner] = attribute if member is not None else None
                    if attribute != "_buffers" and member is not None:
                        state.leaves[inner] = (attribute, id(member))
            else:
                _enter(state, value, path, known)
    return state


def attribute_state(value: Any, path: str) -> Snapshot:
    """Return what a snapshot has of one attribute, which lies at `path`. What it does not look
    into, such as a function, is told from another one.

    >>> attribute_state({"layers": 2}, "config").leaves["config['layers']"]
    ('int', '2')
    """
    state = Snapshot()
    _enter(state, value, path, lambda _: True, identify=True)
    return state


def _enter(
    snapshot: Snapshot,
    root: Any,
    path: str,
    known: Callable[[torch.Tensor], bool],
    identify: bool = False,
) -> None:
    """Add `root`, which lies at `path`, and all that it contains to the snapshot. `identify`: what
    is not entered and has no value to compare is told from another such object.
    """
    pending = [(root, path)]
    while pending:
        value, path = pending.pop()
        if isinstance(value, torch.Tensor):
            snapshot.tensors[id(value)] = path
            snapshot.leaves[path] = ("tensor", id(value) if known(value) else None)
            continue
        snapshot.leaves[path] = leaf = _leaf(value)
        if not _is_entered(value):
            if identify and leaf == (type(value).__qualname__, 0):
                snapshot.leaves[path] = (*leaf, id(value))
            continue
        if id(value) in snapshot.seen:
            continue
        snapshot.seen.add(id(value))
        for target in _containers(value):
            _record(snapshot, target)
        pending.extend(_contents(value, path))


def _leaf(value: Any) -> Any:
    """Return a value that can be compared in place of this one."""
    if isinstance(value, _VALUES):
        return (type(value).__name__, repr(value))  # nan equals itself, 1 is not True
    if isinstance(value, random.Random):
        return ("random", hash(value.getstate()))
    state = _numpy_state(value)
    if state is not None:
        return state
    return (type(value).__qualname__, len(value) if isinstance(value, _SIZED) else 0)


def _numpy_state(value: Any) -> Any:
    """Return what identifies an array or a random generator of numpy; None for other values. This
    does not import numpy.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray):
        small = value.size <= _MOST and value.dtype.kind in "biufc"
        return ("array", value.shape, hash(value.tobytes()) if small else id(value))
    if isinstance(value, numpy.random.Generator):
        return ("random", hash(repr(value.bit_generator.state)))
    if isinstance(value, numpy.random.RandomState):
        return ("random", hash(repr(value.get_state(legacy=False))))
    return None


def _is_entered(value: Any) -> bool:
    """Whether the contents of a value belong to the snapshot."""
    if isinstance(value, (*_SIZED, types.SimpleNamespace)):
        return True
    if isinstance(value, nn.Module):
        return False  # submodules have their own entries, other modules are not the model's
    plain = hasattr(value, "__dict__") and not isinstance(value, _OPAQUE)
    return plain and type(value).__module__.split(".")[0] not in _OPAQUE_PACKAGES


def _containers(value: Any) -> Iterator[Any]:
    """Yield what of a value can be written into: itself, its attributes."""
    if isinstance(value, list | dict | set | collections.deque):
        yield value
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield attributes


def _contents(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield the values that this one contains, each with its path."""
    if isinstance(value, dict):
        yield from ((inner, f"{path}[{key!r}]") for key, inner in value.items())
    elif isinstance(value, list | tuple | collections.deque):
        yield from ((inner, f"{path}[{place}]") for place, inner in enumerate(value))
    elif isinstance(value, set | frozenset):
        inner_values = sorted((v for v in value if isinstance(v, _VALUES)), key=repr)
        yield from ((inner, f"{path}{{{inner!r}}}") for inner in inner_values)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((inner, f"{path}.{key}") for key, inner in attributes.items())


def _record(snapshot: Snapshot, target: Any) -> None:
    """Record a container with a copy of its content."""
    kind = next(k for k in (dict, set, list, collections.deque) if isinstance(target, k))
    snapshot.contents[id(target)] = (target, (list if kind is collections.deque else kind)(target))


def _refill(target: Any, content: Any) -> None:
    """Give a container its recorded content; an unchanged one is not written to."""
    if isinstance(target, dict):
        now, before = list(target.items()), list(content.items())
        same = [k for k, _ in now] == [k for k, _ in before]
        same = same and all(a is b for (_, a), (_, b) in zip(now, before, strict=True))
    elif isinstance(target, set):
        same = target == content
    else:
        same = len(target) == len(content) and all(map(operator.is_, target, content))
    if not same:
        target.clear()
        (target.update if isinstance(target, dict | set) else target.extend)(content)


# -- hooks -----------------------------------------------------------------------------------------
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
    return ", ".join(hook_name(hook) for hook in hooks.values())


def hook_name(hook: Any) -> str:
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
            raise self._place().refuse(
                f"registers the hook {hook_name(hook)} on a tensor", HOOK_ADVICE
            )
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
            what = f"packs saved tensors by the hook {hook_name(hooks.pack_hook)}"
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
        what = f"registers the hook {hook_name(hook)} on the autograd node {self._node.name()}"
        raise self._place.refuse(what, HOOK_ADVICE)
