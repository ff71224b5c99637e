"""Whether a module is, at a call, what it was when a graph of it was traced.

    state = ModuleState(par, graph.signature.reads)    # when the graph is traced
    state.holds()                                      # at every call
    state.changes()                                    # ["blocks.0.disabled is True, was False"]

Compared is what the forward has read (passes/trace/attribute_reads.py): attributes, with what their
lists, dicts and plain objects contain; besides, in every module, its class, its submodules and its
hooks. The comparison is by identity first, which takes 1 µs for a module; what is another object is
compared by value, once. Parameters and buffers are no part of it, as a graph reads them at every
call. Tensors that are plain attributes and inputs of the graph are compared by shape and dtype.

The state of an attribute is that of passes/trace/model_state.py. runtime/training/graphs.py has one
ModuleState for each graph of a module.
"""

from __future__ import annotations

import enum
import functools
import operator
import random
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar._compat import version_of
from autopar.passes.trace.attribute_reads import ALL, INTERNAL
from autopar.passes.trace.model_state import Snapshot, attribute_state

_ABSENT = object()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes of nn.Module itself, which no user changes from call to call.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module)) - {"forward"}
_VALUES = (bool, int, float, complex, str, bytes, type(None))
_FIXED = (  # objects that do not change
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type),
    *(enum.Enum, re.Pattern, functools.partial, torch.dtype, torch.device, torch.Size),
    *(torch.memory_format, torch.layout, range, slice, property, types.MappingProxyType),
)

Leaves = Mapping[str, Any]
Path = tuple[str, str]  # the names of a module and of its attribute


class _Attributes(NamedTuple):
    """Attributes of one module: its dict, their names, and the values that were compared last."""

    module: str
    held: dict[str, Any]
    names: list[str]
    values: list[Any]


class ModuleState:
    """What a module was when a graph was traced; see the module docstring. `reads`: what its
    forward has read. `fed`: the plain attributes that are inputs of the graph, tensors or numbers.
    """

    def __init__(
        self, root: nn.Module, reads: Collection[Path], fed: Collection[Path] = ()
    ) -> None:
        self._reads, self._fed = frozenset(reads), frozenset(fed)
        modules = dict(root.named_modules(remove_duplicate=False))
        self._modules = [*modules.values()]
        self._names = [*modules]
        self._structure = [tuple(m._modules.values()) for m in self._modules]
        self._hooks = [_hooks_of(m) for m in self._modules]
        self._registries = [(tuple(m._parameters), tuple(m._buffers)) for m in self._modules]
        self._unset = [*_unset(self._modules)]
        self._classes = _class_states(modules, self._reads)
        self._attributes = [*_grouped(modules, self._reads)]
        self._contents: dict[Path, list[tuple[Any, list[Any]]]] = {}
        self._leaves: dict[Path, Leaves] = {}
        for group in self._attributes:
            for name, value in zip(group.names, group.values, strict=True):
                self._describe((group.module, name), value)

    def of(self, root: nn.Module) -> ModuleState:
        """Return the state of a copy of the module: it holds where the copy is what the original
        was when the graph was traced.
        """
        twin = ModuleState(root, self._reads, self._fed)
        twin._leaves = dict(self._leaves)
        for group, own in zip(self._attributes, twin._attributes, strict=True):
            for place, value in enumerate(group.values):
                compared = value is _ABSENT or isinstance(value, _VALUES)
                own.values[place] = value if compared else object()  # at the first call, by value
        return twin

    def holds(self) -> bool:
        """Whether the module is what it was. Raises nothing for what was replaced or hooked: see
        `tampered`.
        """
        return next(self.changed(), None) is None and self._classes_hold()

    def changes(self) -> list[str]:
        """Return what is other than it was, a phrase for each attribute, alike on all ranks."""
        phrases = []
        for path, now, before in self.changed():
            inner = self._changed_leaves(path, now)
            phrases += inner or [f"{_joined(path)} is {_text(now)}, was {_text(before)}"]
        classes = (f"an attribute of the class {name} changed" for name in self._changed_classes())
        return [*sorted(phrases), *classes]

    def _changed_leaves(self, path: Path, now: Any) -> list[str]:
        """Return what changed within a list, a dict or an object, a phrase for each value."""
        if path not in self._contents or isinstance(now, _VALUES):
            return []
        earlier, later = self._leaves[path], self._state(path, now).leaves
        return [
            f"{name} is {_leaf_text(later.get(name))}, was {_leaf_text(earlier.get(name))}"
            for name in dict.fromkeys([*earlier, *later])
            if earlier.get(name) != later.get(name)
        ]

    def tampered(self) -> str:
        """Return what of the module's structure is not what it was, "" where all is: a submodule
        that was replaced, a hook that was added or taken away.
        """
        for name, module, children, hooks in zip(
            self._names, self._modules, self._structure, self._hooks, strict=True
        ):
            now = module._modules
            if len(now) != len(children) or not all(map(operator.is_, now.values(), children)):
                return f"the submodules of {_module_name(name, module)} were replaced"
            if name and _hooks_of(module) != hooks:
                return f"a hook of {_module_name(name, module)} was added or taken away"
        for name, module, names in zip(self._names, self._modules, self._registries, strict=True):
            if tuple(module._parameters) != names[0] or tuple(module._buffers) != names[1]:
                return f"the parameters or buffers of {_module_name(name, module)} are others"
        for registry, name in self._unset:
            if registry[name] is not None:
                return f"{name}, which was None, has become a tensor"
        return ""

    def changed(self) -> Iterator[tuple[Path, Any, Any]]:
        """Yield each attribute that is other than it was, with its value and its value then."""
        absent = _ABSENT
        for group in self._attributes:
            held, values = group.held, group.values
            for place, name in enumerate(group.names):
                now, before = held.get(name, absent), values[place]
                if now is not before or (
                    (group.module, name) in self._contents
                    and not _same_contents(self._contents[group.module, name])
                ):
                    path = group.module, name
                    if self._is_other(path, now, before):
                        yield path, now, before
                    else:
                        values[place] = now

    def _is_other(self, path: Path, now: Any, before: Any) -> bool:
        """Compare an attribute by value; where that is the same, take note of the new objects."""
        if isinstance(now, _VALUES) and isinstance(before, _VALUES):
            if path in self._fed and type(now) is type(before) and type(now) in (int, float):
                return False
            return type(now) is not type(before) or repr(now) != repr(before)
        state = self._state(path, now)
        if state.leaves != self._leaves.get(path):
            return True
        self._contents.pop(path, None)
        self._describe(path, now, state)
        return False

    def _describe(self, path: Path, value: Any, state: Snapshot | None = None) -> None:
        if isinstance(value, _VALUES) or value is _ABSENT:
            return
        state = state or self._state(path, value)
        self._leaves[path] = state.leaves
        contents = [
            (target, list(content.values() if isinstance(content, dict) else content))
            for target, content in state.contents.values()
        ]
        if contents:
            self._contents[path] = contents

    def _state(self, path: Path, value: Any) -> Snapshot:
        if path in self._fed and isinstance(value, torch.Tensor):
            facts = tuple(value.shape), value.dtype, value.requires_grad
            return Snapshot({_joined(path): ("input", facts)})
        state = attribute_state(value, _joined(path))
        if isinstance(value, torch.Tensor):
            state.leaves[_joined(path)] = ("tensor", id(value), version_of(value))
        return state

    def _classes_hold(self) -> bool:
        return all(map(_same_class, self._classes))

    def _changed_classes(self) -> list[str]:
        return [state.owner.__name__ for state in self._classes if not _same_class(state)]

    def incomparable(self) -> list[str]:
        """Return the attributes that the forward reads whose inner changes are not seen, such as
        arrays of numpy and objects without a `__dict__`: each with its class.
        """
        found = []
        for group in self._attributes:
            for name, value in zip(group.names, group.values, strict=True):
                if _is_opaque(value):
                    kind = f"{type(value).__module__}.{type(value).__qualname__}"
                    found.append(f"{_joined((group.module, name))} ({kind})")
        return found


def _grouped(modules: Mapping[str, nn.Module], reads: Iterable[Path]) -> Iterator[_Attributes]:
    """Yield the attributes that were read, by module, but for tensors and submodules in registries
    and what nn.Module itself defines.
    """
    names: dict[str, set[str]] = {}
    for where, name in reads:
        names.setdefault(where, set()).add(name)
    for where, wanted in names.items():
        module = modules.get(where)
        if module is None:
            continue
        held = module.__dict__
        if ALL in wanted:
            wanted |= set(held) - INTERNAL
        registered = {*module._parameters, *module._buffers, *module._modules}
        skipped = registered | _OWN_ATTRIBUTES | {ALL} | ({"forward"} if not where else set())
        own = sorted((wanted - skipped) | ({"training"} & wanted))
        yield _Attributes(where, held, own, [held.get(name, _ABSENT) for name in own])


def _hooks_of(module: nn.Module) -> tuple[int, ...]:
    return tuple(id(hook) for kind in _HOOKS for hook in getattr(module, kind).values())


def _unset(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the parameters and buffers that are None, each by its registry and name."""
    for module in modules:
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for registry in registries:
            yield from ((registry, name) for name, value in registry.items() if value is None)


class _Class(NamedTuple):
    """What a class of the user's has, or has not, by the names that were read of its modules."""

    owner: type
    names: list[str]
    values: list[Any]


def _class_states(modules: Mapping[str, nn.Module], reads: Iterable[Path]) -> list[_Class]:
    names: dict[type, set[str]] = {}
    for where, name in reads:
        if where in modules and name not in _OWN_ATTRIBUTES:
            for owner in type(modules[where]).__mro__:
                names.setdefault(owner, set()).add(name)
    for base in nn.Module.__mro__:
        names.pop(base, None)
    return [
        _Class(owner, sorted(read), [vars(owner).get(name, _ABSENT) for name in sorted(read)])
        for owner, read in names.items()
    ]


def _same_class(state: _Class) -> bool:
    now = vars(state.owner)
    for name, before in zip(state.names, state.values, strict=True):
        value = now.get(name, _ABSENT)
        if value is not before and not (
            isinstance(value, _VALUES) and type(value) is type(before) and value == before
        ):
            return False
    return True


def _same_contents(contents: list[tuple[Any, list[Any]]]) -> bool:
    """Whether containers hold the very objects that they held."""
    for target, before in contents:
        if isinstance(target, dict):
            if len(target) != len(before) or not all(map(operator.is_, target.values(), before)):
                return False
        elif isinstance(target, set):
            if target != set(before):
                return False
        elif len(target) != len(before) or not all(map(operator.is_, target, before)):
            return False
    return True


def _is_opaque(value: Any) -> bool:
    """Whether a value may change without becoming another object, and is not looked into."""
    if value is _ABSENT or isinstance(value, (*_VALUES, *_FIXED, torch.Tensor, nn.Module)):
        return False
    if isinstance(value, tuple | list | dict | set | frozenset | types.SimpleNamespace):
        return False
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.random.Generator):
        return True
    if isinstance(value, random.Random):
        return True
    return not attribute_state(value, "x").contents


def _joined(path: Path) -> str:
    return f"{path[0]}.{path[1]}" if path[0] else path[1]


def _module_name(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _text(value: Any) -> str:
    """Return a value as messages show it, without what differs between processes."""
    if value is _ABSENT:
        return "absent"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)} {value.dtype}"
    if isinstance(value, _VALUES):
        return repr(value)
    return str(getattr(value, "__qualname__", None) or f"a {type(value).__qualname__}")


def _leaf_text(leaf: Any) -> str:
    """Return what a snapshot has of a value as messages show it."""
    if leaf is None:
        return "absent"
    is_value = len(leaf) == 2 and isinstance(leaf[1], str)
    return leaf[1] if is_value else f"a {leaf[0]}"
