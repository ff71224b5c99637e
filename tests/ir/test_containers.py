"""Mappings of tensors as arguments and results: a model sees the mapping that it is."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar._compat import pytree
from autopar.errors import InputError
from autopar.ir.containers import register


class Batch(dict):
    """A subclass with nothing of its own."""


class ByAttribute(dict):
    """Whose entries are attributes, too, as a stray attribute raises KeyError."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Attributes(dict):
    """Whose attributes are its entries."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.__dict__ = self


class Ordered(collections.OrderedDict):
    pass


class Wrapped(collections.UserDict):
    def __init__(self, data: Any, scale: float = 1.0) -> None:
        super().__init__(data)
        self.scale = scale


class Encoded(Wrapped):
    """As transformers' BatchEncoding."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


KINDS: list[Callable[[Any], Any]] = [
    collections.OrderedDict, collections.UserDict, Batch, ByAttribute, Attributes, Ordered,
    Wrapped, Encoded,
]  # fmt: skip


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(16, 4), ""

    def forward(self, batch: Any) -> Any:
        self.kind = type(batch).__name__
        scale = getattr(batch, "scale", 1.0) if isinstance(batch, Wrapped) else 1.0
        error = self.linear(batch["x"]) * scale - batch.get("y", 0.0)
        return type(batch)({"loss": error.square().mean(), "rows": error})


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.linear(x) - y).square().mean()


def tensors() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 16), "y": torch.randn(8, 4)}


@pytest.mark.slow_cells("Attributes")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_mapping_is_an_argument_and_a_result(kind: Callable[[Any], Any]) -> None:
    model, batch = Model(), kind(tensors())
    assert autopar.verify(model, 2, (batch,), layout="ddp").ranks == 2
    par = autopar.parallelize(model, 1, {"batch": batch})
    for call in (batch, kind(tensors())):
        outputs, right = par(call), model(call)
        assert type(outputs) is type(right) is type(batch) and list(outputs) == ["loss", "rows"]
        torch.testing.assert_close(dict(outputs), dict(right))


@pytest.mark.parametrize("kind", [Batch, Encoded])
def test_a_mapping_is_the_arguments_by_name(kind: Callable[[Any], Any]) -> None:
    batch = kind(tensors())
    autopar.parallelize(ByName(), 1, batch)(**batch).backward()
    assert autopar.verify(ByName(), 2, batch, layout="fsdp").ranks == 2


def test_other_keys_and_attributes_are_other_calls() -> None:
    model = Model()
    par = autopar.parallelize(model, 1, (Wrapped(tensors()),))
    for batch in (Wrapped(tensors(), 2.0), Wrapped({"x": torch.randn(8, 16)}), Batch(tensors())):
        torch.testing.assert_close(par(batch)["loss"], model(batch)["loss"])


def test_a_tensor_that_is_no_entry_is_refused() -> None:
    batch = Wrapped(tensors())
    batch.mask = torch.ones(8)
    with pytest.raises(InputError, match=r"attribute mask of a Wrapped holds a tensor.*'mask'"):
        autopar.plan(Model(), 2, (batch,), layout="ddp")


def test_a_mapping_is_flattened_and_made_again() -> None:
    class Own(dict):
        pass

    own = Own(b=torch.ones(1), a=2)
    register([own])
    leaves, structure = pytree.tree_flatten(own)
    assert leaves == [own["b"], 2] and type(pytree.tree_unflatten([3, 4], structure)) is Own
    assert pytree.tree_unflatten([3, 4], structure) == {"b": 3, "a": 4} and own["a"] == 2
    assert structure == pytree.tree_structure(Own(b=5, a=6)) != pytree.tree_structure(Own(b=5))
    assert [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(own)[0]] == [
        "['b']",
        "['a']",
    ]
