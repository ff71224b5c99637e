"""Scheduled graphs on values that lie in memory otherwise than their derivation predicted: they
take what eager takes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.passes.overlap import DerivedGraph, assumptions, facts_of
from autopar.runtime.backends import _overlaps
from derived import arrived, called, passed, placed, ran
from launch import launched
from training_facts import check_errors

aten = torch.ops.aten
LIMIT = 1e-5


def of(*rest: tuple[Any, ...]) -> Callable[[fx.Graph], fx.GraphModule]:
    """A graph of one input (4, 6): each (op, *arguments) takes what the one before gave."""

    def build(graph: fx.Graph) -> fx.GraphModule:
        (node,) = placed(graph, [(4, 6)])
        for target, *arguments in rest:
            node = called(graph, target, (node, *arguments))
        graph.output(node)
        return fx.GraphModule(torch.nn.Module(), graph)

    return build


READS: dict[str, Callable[[fx.Graph], fx.GraphModule]] = {
    "view": of((aten.neg.default,), (aten.view.default, [24])),
    "unsafe view": of((aten.neg.default,), (aten._unsafe_view.default, [2, 12])),
    "view of an input": of((aten.view.default, [3, 8])),
    "view of a view": of((aten.slice.Tensor, 0, 0, 2), (aten.view.default, [12])),
    "as strided": of((aten.neg.default,), (aten.as_strided.default, [3, 3], [6, 2], 1)),
    "other numbers": of((aten.neg.default,), (aten.view.dtype, torch.int16)),
    "complex": of((aten.view.default, [4, 3, 2]), (aten.view_as_complex.default,)),
}


@pytest.mark.parametrize("name", READS)
def test_a_value_that_lies_otherwise_is_read_in_its_own_order(name: str) -> None:
    x = torch.arange(24.0).view(4, 6)
    turned = x.t().contiguous().t()
    module = READS[name](fx.Graph())
    wanted = module(x)
    passed("views", DerivedGraph(module.graph, "forward"))
    module.recompile()
    torch.testing.assert_close(module(x), wanted, rtol=0, atol=0)
    torch.testing.assert_close(module(turned), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather_into_tensor", "all_to_all_single"])
def test_a_collective_sends_what_is_contiguous(kind: str) -> None:
    more: tuple[Any, ...] = {
        "all_reduce": ("sum", "autopar/data2/data"),
        "all_gather_into_tensor": (2, "autopar/data2/data"),
        "all_to_all_single": ([2, 2], [2, 2], "autopar/data2/data"),
    }[kind]
    sent: list[bool] = []

    def send(x: Tensor, *_: Any) -> Tensor:
        sent.append(x.is_contiguous())
        return x

    for mended in (False, True):
        graph = fx.Graph()
        (x,) = placed(graph, [(4, 6)])
        graph.output(arrived(graph, kind, (called(graph, aten.neg.default, (x,)), *more)))
        if mended:
            passed("views", DerivedGraph(graph, "forward"))
        ran(graph, {kind: send, "wait_tensor": lambda x: x}, [torch.rand(6, 4).t()])
    assert sent == [False, True]


def test_what_lies_as_predicted_stays_a_view() -> None:
    graph = fx.Graph()
    x, y = placed(graph, [(4, 6), (6, 8)])
    product = called(graph, aten.mm.default, (x, y))
    gathered = arrived(graph, "all_gather_into_tensor", (product, 2, "autopar/data2/data"))
    shown = called(graph, aten.view.default, (called(graph, aten.t.default, (product,)), [8, 2, 2]))
    flat = called(graph, aten.view.default, (gathered, [64]))
    graph.output((shown, flat))
    before = [node.target for node in graph.nodes]
    passed("views", DerivedGraph(graph, "forward"))
    assert [node.target for node in graph.nodes] == before


def test_the_contract_refuses_a_view_in_doubt() -> None:
    graph = fx.Graph()
    (x,) = placed(graph, [(4, 6)])
    graph.output(called(graph, aten.view.default, (x, [24])))
    with pytest.raises(AssertionError, match="views"):
        assumptions.check(facts_of(graph), DerivedGraph(graph, "forward"))


@pytest.mark.parametrize(
    ("size", "stride", "overlap"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),
        ((3, 4), (8, 2), False),
        ((3, 4), (0, 1), True),
        ((3, 4), (1, 1), True),
        ((1, 4), (0, 1), False),
        ((), (), False),
        ((4, 2, 3), (3, 12, 1), False),
        ((4, 2, 3), (2, 8, 1), True),
    ],
)
def test_overlapping_memory_is_seen(size: Any, stride: Any, overlap: bool) -> None:
    assert _overlaps(torch.zeros(64).as_strided(size, stride)) is overlap


@pytest.mark.slow
def test_steps_on_two_ranks(tmp_path: Path) -> None:
    """The loss of what is transposed, and later inputs that lie in another order."""
    check_errors(launched(tmp_path, 2, "inputs", "returned", script="stride_ranks.py"), LIMIT)


@pytest.mark.slow
def test_losses_of_what_lies_otherwise(tmp_path: Path) -> None:
    tasks = "ddp", "fsdp", "megatron", "megatron-sp", "eager"
    check_errors(launched(tmp_path, 2, *tasks, script="stride_ranks.py", seconds=600), LIMIT)
