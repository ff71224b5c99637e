"""A call in the form that was planned: the same argument by position or by name is one argument,
and what is missing, unknown or nested otherwise is named.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar._compat import pytree
from autopar.errors import InputError

NO_GENERATION = (
    "generate is not for a parallel model, whose graph is a step of training without a cache that "
    "grows: load its state_dict into the original model and generate with that"
)
_SPREAD = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signature_of(model: nn.Module) -> inspect.Signature | None:
    """Of the model's forward; None where Python does not know it."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises InputError where these are no arguments of the model's forward. What a decorator of it
    takes is left to the decorator.
    """
    signature = signature_of(model)
    if signature is not None and not hasattr(model.forward, "__wrapped__"):
        _named(signature, args, kwargs, type(model).__name__)


def as_planned_call(
    signature: inspect.Signature | None,
    spec: pytree.TreeSpec,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[Any]:
    """The leaves of a call in the order of the planned (args, kwargs), whose structure is `spec`.
    Raises InputError that names the argument which does not fit.
    """
    leaves, found = pytree.tree_flatten((args, dict(kwargs)))
    if found == spec:
        return leaves
    planned_args, planned_kwargs = pytree.tree_unflatten([_Leaf] * spec.num_leaves, spec)
    if signature is None:
        raise _nested("the arguments", (args, kwargs), (planned_args, planned_kwargs))
    planned = _named(signature, planned_args, planned_kwargs, "the planned model")
    given = _named(signature, args, kwargs, "the model")
    values = {name: _value(signature, name, given, planned) for name in {**planned, **given}}
    for name in values:
        if name not in planned and not _is_default(signature, name, values[name]):
            raise InputError(
                f"argument {name!r} was not given when the model was planned, with "
                f"{', '.join(planned) or 'none'}: call it with the same arguments, or plan again "
                "with these"
            )
        if name in planned and not _alike(values[name], planned[name]):
            raise _nested(f"argument {name!r}", values[name], planned[name])
    names = list(planned)[: len(planned_args)]
    by_position = tuple(values[name] for name in names)
    by_name = {name: values[name] for name in planned_kwargs}
    return list(pytree.tree_leaves((by_position, by_name)))


class _Leaf:
    """Stands for a planned leaf."""


def _named(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], who: str
) -> dict[str, Any]:
    """The arguments by name; those of *args are args[0], args[1] and so on."""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise InputError(
            f"{who}: {error}; it is called as forward{signature}: call it with the same arguments, "
            "or plan again with these"
        ) from None
    found: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found |= {f"{name}[{place}]": inner for place, inner in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        else:
            found[name] = value
    return found


def _value(
    signature: inspect.Signature, name: str, given: dict[str, Any], planned: dict[str, Any]
) -> Any:
    """What was given, or the default of what was not."""
    if name in given:
        return given[name]
    parameter = signature.parameters.get(name)
    if parameter is None or parameter.kind in _SPREAD or parameter.default is parameter.empty:
        raise InputError(
            f"argument {name!r} is missing, the model was planned with {', '.join(planned)}: call "
            "it with the same arguments, or plan again with these"
        )
    return parameter.default


def _is_default(signature: inspect.Signature, name: str, value: Any) -> bool:
    parameter = signature.parameters.get(name)
    if parameter is None or isinstance(value, torch.Tensor):
        return False
    return type(value) is type(parameter.default) and value == parameter.default


def _alike(value: Any, planned: Any) -> bool:
    return bool(pytree.tree_structure(value) == pytree.tree_structure(planned))


def _nested(what: str, given: Any, planned: Any) -> InputError:
    return InputError(
        f"{what} is {_form(given)}, planned was {_form(planned)}: call it with the same arguments, "
        "or plan again with these"
    )


def _form(value: Any) -> str:
    """A tensor; a dict of x, y; a tuple of 2."""
    if value is _Leaf:
        return "one value"
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, list | tuple):
        inner = ", ".join(_form(v) for v in value[:4]) + (", …" if len(value) > 4 else "")
        return f"a {type(value).__name__} of {len(value)}" + (f" ({inner})" if value else "")
    return repr(value)[:60]


_TOLD: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose cache was spoken of


@contextmanager
def without_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """A transformers model runs without the cache of keys and values that only generation wants,
    unless the call asks for it. That is said, once a model.
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    on = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
    if not on or "use_cache" in kwargs:
        yield
        return
    if model not in _TOLD:
        _TOLD.add(model)
        warnings.warn(
            f"{type(model).__name__} has use_cache on: it is planned without the cache of keys and "
            "values, as training wants it (config.use_cache = False says so too)",
            stacklevel=4,
        )
    try:
        for config in on:
            config.use_cache = False
        yield
    finally:
        for config in on:
            config.use_cache = True
