"""Binds a call of a model to the arguments that were planned.

An argument is the same whether it is passed by position or by name, and one that is left out is
its default.

    planned: model(ids, labels=y)        a call of model(labels=y, ids=ids) gives the same leaves

`trace` checks the example call with `check_call`, runtime/training/step_graph.py binds every call
with `as_planned_call`, and planner/planner.py traces under `without_cache`.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar._compat import pytree
from autopar.errors import InputError
from autopar.ir.containers import register
from autopar.ir.program import Program

NO_GENERATION = (
    "generate is not for a parallel model, whose graph is a step of training without a cache that "
    "grows: take par.unshard(), or par.unshard(rank=0) on all ranks, and generate with that"
)


def signature_of(model: nn.Module) -> inspect.Signature | None:
    """Return the signature of the model's forward; None where Python does not know it."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise InputError where these are no arguments of the model's forward. A decorated forward is
    not checked: what its decorator takes is left to the decorator.
    """
    signature = signature_of(model)
    if signature is not None and not hasattr(model.forward, "__wrapped__"):
        _bind_by_name(signature, args, kwargs, type(model).__name__)


def as_planned_call(
    signature: inspect.Signature | None,
    tree: pytree.TreeSpec,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[Any] | None:
    """Return the leaves of a call in the order of the planned (args, kwargs), whose structure is
    `tree`; None where the arguments are others, or nested otherwise.
    """
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    if structure == tree:
        return leaves
    register((args, dict(kwargs)))  # a call with a class that was not planned
    if signature is None:
        return None
    planned_args, planned_kwargs = pytree.tree_unflatten([_Leaf] * tree.num_leaves, tree)
    try:
        planned = _bind_by_name(signature, planned_args, planned_kwargs, "the planned model")
        arguments = _bind_by_name(signature, args, kwargs, "the model")
    except InputError:
        return None
    defaults = {p.name: p.default for p in signature.parameters.values()}
    values = {**{name: defaults.get(name, _Leaf) for name in planned}, **arguments}
    for name, value in values.items():
        if name not in planned and not _is_default(signature, name, value):
            return None
        if name in planned and pytree.tree_structure(value) != pytree.tree_structure(planned[name]):
            return None
    names = list(planned)[: len(planned_args)]
    by_position = tuple(values[name] for name in names)
    by_name = {name: values[name] for name in planned_kwargs}
    return list(pytree.tree_leaves((by_position, by_name)))


def bind(
    program: Program,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return the tensor of every Input of the program, in order. `tensors` replaces values of
    parameters, buffers and constants by their target.

    Raises InputError if the inputs are not structured as those that were traced, or if one that is
    no tensor has another value.
    """
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    if structure != program.signature.in_tree:
        raise InputError(
            f"the inputs have another structure than the traced ones:\n  {structure}\n"
            f"where {program.signature.in_tree} was traced"
        )
    for position, value in program.signature.fixed:
        if leaves[position] != value:
            raise InputError(
                f"input {position} is {leaves[position]!r}, but {value!r} was traced and is part "
                "of the graph: trace the model again for another value"
            )
    tensors_by_name = {**program.tensors, **(tensors or {})}
    return [
        tensors_by_name[entry.target] if entry.position is None else leaves[entry.position]
        for entry in program.signature.inputs
    ]


class _Leaf:
    """A placeholder for one leaf of the planned arguments."""


def _bind_by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], who: str
) -> dict[str, Any]:
    """Return the arguments by name; those of *args are named args[0], args[1] and so on."""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise InputError(
            f"{who}: {error}; it is called as forward{signature}: call it with the same arguments, "
            "or plan again with these"
        ) from None
    by_name: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            by_name |= {f"{name}[{place}]": inner for place, inner in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            by_name |= value
        else:
            by_name[name] = value
    return by_name


def _is_default(signature: inspect.Signature, name: str, value: Any) -> bool:
    """Whether an argument has the value that forward would give it."""
    parameter = signature.parameters.get(name)
    if parameter is None or isinstance(value, torch.Tensor):
        return False
    return type(value) is type(parameter.default) and value == parameter.default


_WARNED: weakref.WeakSet[nn.Module] = (
    weakref.WeakSet()
)  # models whose cache a warning has mentioned


@contextmanager
def without_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Turn off `config.use_cache` of a transformers model for the time of this context, unless the
    call asks for the cache: only generation needs it. The first time for a model, this warns, but
    not for an encoder, which makes none whatever its config says.

    What the model computes stays: with its cache on, transformers looks for no packed sequences.
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    on = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
    if not on or "use_cache" in kwargs:
        yield
        return
    if model not in _WARNED and _may_make_cache(model):
        _WARNED.add(model)
        warnings.warn(
            f"{type(model).__name__} has use_cache on: it is planned without the cache of keys and "
            "values, as training wants it (config.use_cache = False says so too)",
            stacklevel=4,
        )
    try:
        for config in on:
            config.use_cache = False
        with _no_packed_sequences():
            yield
    finally:
        for config in on:
            config.use_cache = True


def _may_make_cache(model: nn.Module) -> bool:
    """Whether a model takes former keys and values, or is no model of transformers itself."""
    taken = inspect.signature(model.forward).parameters
    return "past_key_values" in taken or not hasattr(model, "config")


@contextmanager
def _no_packed_sequences() -> Iterator[None]:
    """Let transformers take each row for one sequence, whatever its positions are: without a cache
    it would begin a new one where `position_ids` do not count on.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = find
