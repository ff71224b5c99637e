"""Containers of tensors that torch's pytree does not know: dataclasses, and subclasses of dict and
UserDict, such as the BatchEncoding of transformers.

    register({"batch": BatchEncoding({"ids": ids})})
    pytree.tree_leaves(batch)    # [ids]; the batch alone before that

Arguments and results of models enter `register`. planner/planner.py and passes/trace/export.py call
it before they flatten them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Hashable, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch

from autopar._compat import pytree
from autopar.errors import InputError

_MAPPINGS: set[type] = set()  # the classes that are registered here
_PLAIN = (bool, int, float, str, bytes, type(None))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of nested containers, in their order.

    >>> [tuple(x.shape) for x in tensors_in({"ids": torch.ones(2, 3), "scale": 0.5})]
    [(2, 3)]
    """
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def register(tree: Any) -> None:
    """Register the class of every container in `tree` that pytree takes for a leaf. Raises
    InputError for a mapping with a tensor that is an attribute and no entry: it would be lost.
    """
    for leaf in pytree.tree_leaves(tree, is_leaf=lambda x: type(x) in _MAPPINGS):
        kind = type(leaf)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(kind)
            register(leaf)
        elif isinstance(leaf, dict | UserDict):
            if kind not in _MAPPINGS:
                _register_mapping(kind)
            _refuse_tensor_attributes(leaf)
            register(list(leaf.values()))


def _refuse_tensor_attributes(mapping: Any) -> None:
    for name, value in _attributes(mapping).items():
        if tensors_in(value):
            kind = type(mapping).__name__
            raise InputError(
                f"the attribute {name} of a {kind} holds a tensor, and a {kind} is an input by its "
                f"entries: give the tensor as {name!r}, an entry of its own"
            )


class _Kind:
    """What a mapping has besides the values of its entries. Two kinds are equal where the keys are
    and the attributes that are plain values; `template` has None for every value.
    """

    def __init__(self, mapping: Any) -> None:
        self.keys: tuple[Hashable, ...] = tuple(mapping.keys())
        attributes = _attributes(mapping).items()
        self.plain = {name: value for name, value in attributes if isinstance(value, _PLAIN)}
        self.template = _with_values(mapping, self.keys, [None] * len(self.keys))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind) and (self.keys, self.plain) == (other.keys, other.plain)

    def __hash__(self) -> int:
        return hash(self.keys)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kind:
        return self  # nothing changes it

    def __repr__(self) -> str:
        return repr([*self.keys, *(f"{name}={value!r}" for name, value in self.plain.items())])


def _attributes(mapping: Any) -> dict[str, Any]:
    """Return the attributes that are no entries."""
    attributes = getattr(mapping, "__dict__", {})
    if attributes is mapping or is_dataclass(mapping):
        return {}
    in_data = isinstance(mapping, UserDict)  # which has its entries in an attribute
    return {name: value for name, value in attributes.items() if not (in_data and name == "data")}


def _with_values(mapping: Any, keys: Sequence[Hashable], values: Sequence[Any]) -> Any:
    """Return a copy of a mapping with other values for its keys."""
    twin = copy.copy(mapping)
    if getattr(mapping, "__dict__", None) is mapping:  # attributes that are the entries
        twin.__dict__ = twin
    base: Any = OrderedDict if isinstance(twin, OrderedDict) else dict
    for key, value in zip(keys, values, strict=True):
        if isinstance(twin, UserDict):
            twin.data[key] = value
        else:
            base.__setitem__(twin, key, value)
    return twin


def _register_mapping(kind: type) -> None:
    def flatten(mapping: Any) -> tuple[list[Any], _Kind]:
        return list(mapping.values()), _Kind(mapping)

    def flatten_with_keys(mapping: Any) -> tuple[list[tuple[Any, Any]], _Kind]:
        return [(pytree.MappingKey(k), v) for k, v in mapping.items()], _Kind(mapping)

    def unflatten(values: Any, context: _Kind) -> Any:
        return _with_values(context.template, context.keys, list(values))

    _MAPPINGS.add(kind)
    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
