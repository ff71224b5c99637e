"""Whether a module is, at a call, what it was when a graph of it was traced.

    state = ModuleState(par, graph.signature.reads)    # when the graph is traced
    state.holds()                                      # at every call
    state.differences()                                # ["blocks.0.disabled is True, was False"]

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
import itertools
import operator
import random
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    """Attributes of one module: its dict, their names, and where the values that were compared last
    stand among those of all modules.
    """

    module: str
    namespace: dict[str, Any]
    names: list[str]
    first: int


class ModuleState:
    """What a module was when a graph was traced; see the module docstring. `reads`: what its
    forward has read. `fed`: the plain attributes that are inputs of the graph, tensors or numbers.
    """

    def __init__(
        self, root: nn.Module, reads: Collection[Path], fed: Collection[Path] = ()
    ) -> None:
        self._reads, self._fed = frozenset(reads), frozenset(fed)
        modules = dict(root.named_modules(remove_duplicate=False))
        self._modules = modules
        self._children = _Contents([m._modules for m in modules.values() if m._modules])
        hooks = [getattr(m, kind) for name, m in modules.items() if name for kind in _HOOKS]
        self._no_hooks = [hook for hook in hooks if not hook]
        self._hooks = [(hook, tuple(hook.values())) for hook in hooks if hook]
        self._registries = [m._parameters for m in modules.values()]
        self._counts = [*map(len, self._registries)]
        registries = [r for m in modules.values() for r in (m._parameters, m._buffers)]
        self._unset = [(r, name) for r in registries for name, x in r.items() if x is None]
        self._unset += [
            (modules[where]._buffers, name)  # read, and not there
            for where, name in self._reads
            if where in modules and not _has(modules[where], name)
        ]
        self._classes = _class_states(modules, self._reads)
        self._class_getters: list[Any] = [vars(c.owner).get for c in self._classes for _ in c.names]
        self._class_keys = [name for c in self._classes for name in c.names]
        self._class_values = [value for c in self._classes for value in c.values]
        self._class_absent = [_ABSENT] * len(self._class_keys)
        self._attributes: list[_Attributes] = []
        self._getters: list[Any] = []
        self._keys: list[str] = []
        self._values: list[Any] = []  # that were compared last
        self._contents: dict[Path, _Contents] = {}
        self._all_contents: _Contents | None = None  # in one, until one of them is another
        self._leaves: dict[Path, Leaves] = {}
        for where, names in _names_by_module(modules, self._reads).items():
            namespace = modules[where].__dict__
            self._attributes.append(_Attributes(where, namespace, names, len(self._keys)))
            for name in names:
                value = namespace.get(name, _ABSENT)
                self._getters.append(namespace.get)
                self._keys.append(name)
                self._values.append(value)
                self._describe((where, name), value)
        self._absent = [_ABSENT] * len(self._keys)

    def of(self, root: nn.Module) -> ModuleState:
        """Return the state of a copy of the module: it holds where the copy is what the original
        was when the graph was traced.
        """
        twin = ModuleState(root, self._reads, self._fed)
        twin._leaves = dict(self._leaves)
        for place, value in enumerate(self._values):
            compared = value is _ABSENT or isinstance(value, _VALUES)
            twin._values[place] = value if compared else object()  # at the first call, by value
        return twin

    def holds(self) -> bool:
        """Whether the attributes are what they were. What was replaced or hooked is `tampered`."""
        now = map(operator.call, self._getters, self._keys, self._absent)
        same = all(map(operator.is_, now, self._values))
        if self._all_contents is None:
            self._all_contents = _Contents.of_all(self._contents.values())
        if not (same and self._all_contents.same()) and next(self.changed(), None) is not None:
            return False
        of_classes = map(operator.call, self._class_getters, self._class_keys, self._class_absent)
        return all(map(operator.is_, of_classes, self._class_values)) or not (
            self._changed_classes()
        )

    def differences(self) -> list[str]:
        """Return what is other than it was, a phrase for each attribute, alike on all ranks. A
        module that is in the mode of the root is none: the mode of a call is said once.
        """
        phrases, mode = [], self._modules[""].training
        for path, now, before in self.changed():
            if path[1] == "training" and now is mode:
                continue
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
        that was replaced, a hook that was added or taken away, a parameter that came or went.
        """
        if not self._children.same():
            return f"the submodules of {self._owner_of(self._children.changed())} were replaced"
        if any(self._no_hooks):
            added = next(hooks for hooks in self._no_hooks if hooks)
            return f"a hook of {self._owner_of(added)} was added or taken away"
        for now, hooks in self._hooks:
            if len(now) != len(hooks) or not all(map(operator.is_, now.values(), hooks)):
                return f"a hook of {self._owner_of(now)} was added or taken away"
        if [*map(len, self._registries)] != self._counts:
            pairs = zip(self._registries, self._counts, strict=True)
            other = next(registry for registry, count in pairs if len(registry) != count)
            return f"the parameters of {self._owner_of(other)} are others"
        for registry, name in self._unset:
            if registry.get(name) is not None:
                return f"{name} of {self._owner_of(registry)}, which was None, was set to a tensor"
        return ""

    def _owner_of(self, registry: Any) -> str:
        """Return the name of the module that has this dict."""
        for name, module in self._modules.items():
            if any(value is registry for value in module.__dict__.values()):
                return f"{name} ({type(module).__name__})" if name else type(module).__name__
        return "a module"

    def changed(self) -> Iterator[tuple[Path, Any, Any]]:
        """Yield each attribute that is other than it was, with its value and its value then."""
        absent = _ABSENT
        for group in self._attributes:
            namespace, values = group.namespace, self._values
            for place, name in enumerate(group.names, group.first):
                now, before = namespace.get(name, absent), values[place]
                if now is not before or (
                    (group.module, name) in self._contents
                    and not self._contents[group.module, name].same()
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
        self._all_contents = None
        self._describe(path, now, state)
        return False

    def _describe(self, path: Path, value: Any, state: Snapshot | None = None) -> None:
        if isinstance(value, _VALUES) or value is _ABSENT:
            return
        state = state or self._state(path, value)
        self._leaves[path] = state.leaves
        if state.contents:
            self._contents[path] = _Contents(*zip(*state.contents.values(), strict=True))

    def _state(self, path: Path, value: Any) -> Snapshot:
        if path in self._fed and isinstance(value, torch.Tensor):
            facts = tuple(value.shape), value.dtype, value.requires_grad
            return Snapshot({_joined(path): ("input", facts)})
        state = attribute_state(value, _joined(path))
        if isinstance(value, torch.Tensor):
            state.leaves[_joined(path)] = ("tensor", id(value), version_of(value))
        return state

    def _changed_classes(self) -> list[str]:
        return [state.owner.__name__ for state in self._classes if not _same_class(state)]

    def incomparable(self) -> list[str]:
        """Return the attributes that the forward reads whose inner changes are not seen, such as
        arrays of numpy and objects without a `__dict__`: each with its class.
        """
        names = []
        for group in self._attributes:
            for place, name in enumerate(group.names, group.first):
                value = self._values[place]
                if _is_opaque(value):
                    kind = f"{type(value).__module__}.{type(value).__qualname__}"
                    names.append(f"{_joined((group.module, name))} ({kind})")
        return names


def _names_by_module(
    modules: Mapping[str, nn.Module], reads: Iterable[Path]
) -> dict[str, list[str]]:
    """Return the attributes that were read, by module, but for tensors and submodules in registries
    and what nn.Module itself defines.
    """
    read: dict[str, set[str]] = {}
    for where, name in reads:
        if where in modules:
            read.setdefault(where, set()).add(name)
    names: dict[str, list[str]] = {}
    for where, wanted in read.items():
        module = modules[where]
        if ALL in wanted:
            wanted |= set(module.__dict__) - INTERNAL
        registered = {*module._parameters, *module._buffers, *module._modules}
        skipped = registered | _OWN_ATTRIBUTES | {ALL} | ({"forward"} if not where else set())
        names[where] = sorted((wanted - skipped) | ({"training"} & wanted))
    return names


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


class _Contents:
    """Containers and the very objects that they held; all are compared in one pass, as thousands
    may be at every call. `contents`: what each held, where that was another time.
    """

    def __init__(self, containers: Sequence[Any], contents: Sequence[Any] | None = None) -> None:
        pairs = list(zip(containers, contents or containers, strict=True))
        self._dicts = [(now, dict(then)) for now, then in pairs if isinstance(now, dict)]
        self._sets = [(now, set(then)) for now, then in pairs if isinstance(now, set)]
        self._lists = [(now, list(then)) for now, then in pairs if not isinstance(now, dict | set)]
        self._arrange()

    @staticmethod
    def of_all(contents: Iterable[_Contents]) -> _Contents:
        """Return the containers of all these as one."""
        joined = _Contents([])
        for each in contents:
            joined._dicts += each._dicts
            joined._sets += each._sets
            joined._lists += each._lists
        joined._arrange()
        return joined

    def _arrange(self) -> None:
        """Line up what `same` compares."""
        self._values_of = [now.values for now, _ in self._dicts]
        self._iterables = [now for now, _ in self._lists]
        self._sized = [*(now for now, _ in self._dicts), *self._iterables]
        self._lengths = [*(len(then) for _, then in (*self._dicts, *self._lists))]
        self._objects = [x for _, then in self._dicts for x in then.values()]
        self._objects += [x for _, then in self._lists for x in then]

    def same(self) -> bool:
        """Whether every container holds the objects that it held, in that order."""
        if list(map(len, self._sized)) != self._lengths:
            return False
        values = itertools.chain.from_iterable(map(operator.call, self._values_of))
        now = itertools.chain(values, itertools.chain.from_iterable(self._iterables))
        return all(map(operator.is_, now, self._objects)) and all(
            now == then for now, then in self._sets
        )

    def changed(self) -> Any:
        """Return the first dict that holds other objects."""
        return next(now for now, then in self._dicts if not _Contents([now], [then]).same())


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


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module or its class has this name. A property is not asked for its value, which may
    be computed of parameters, as that of a parametrized weight is.
    """
    own = module.__dict__, module._parameters, module._buffers, module._modules
    classes = (vars(kind) for kind in type(module).__mro__)
    return any(name in names for names in (*own, *classes))
