"""Products that write into the buckets they were copied into: the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.overlap import DerivedGraph, facts_of, reinplace
from derived import passed

X = torch.linspace(-1, 1, 12).view(3, 4)
mm = torch.mm


def traced(function: Callable[[Tensor], object]) -> fx.GraphModule:
    module = make_fx(function)(X)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = X
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
    return module


def filled(function: Callable[[Tensor], object], room: float = math.inf) -> int:
    module = traced(function)
    passed("fill_buckets", DerivedGraph(module.graph, "forward", room=room))
    module.recompile()
    torch.testing.assert_close(module(X), function(X), rtol=0, atol=0)
    return sum("mm.out" in str(node.target) for node in module.graph.nodes)


def bucket(x: Tensor) -> Tensor:
    """A gradient as autograd gives it, turned twice, one of a bias and one as it is."""
    parts = mm(x.t(), x).t().t(), x.sum(0), mm(x, x.t())
    return torch.cat([part.reshape(-1) for part in parts]).neg()


def test_products_write_into_their_bucket() -> None:
    assert filled(bucket) == 2


@pytest.mark.parametrize(
    ("room", "count"), [(3 * 116, 4), (2 * 116, 4), (2 * 116 - 1, 2), (115, 0)]
)
def test_no_more_than_there_is_room_for(room: float, count: int) -> None:
    assert filled(lambda x: (bucket(x), bucket(x + 1)), room) == count


def test_what_others_read_or_what_is_turned_stays() -> None:
    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        square = mm(x, x.t())
        return torch.cat([square.reshape(-1), x.reshape(-1)]), square

    assert filled(read) == 0
    assert filled(lambda x: torch.cat([mm(x.t(), x).t().reshape(-1), x.reshape(-1)])) == 0
    twice = torch.cat
    assert filled(lambda x: twice([part := mm(x, x.t()).reshape(-1), part])) == 0
    assert filled(lambda x: torch.cat([mm(x, x.t()), x], 1)) == 0


def test_the_contract_refuses_a_bucket_with_a_gap_or_read_too_early() -> None:
    graph = traced(bucket).graph
    before = facts_of(graph)
    after = passed("fill_buckets", DerivedGraph(graph, "forward"))
    (buffer,) = graph.find_nodes(op="call_function", target=torch.ops.aten.empty.memory_format)
    (reader,) = graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    place = reader.prev
    buffer.append(reader)
    with pytest.raises(AssertionError, match=r"not full where .'neg'. read it"):
        reinplace.check_filled(before, after)
    place.append(reader)
    reinplace.check_filled(before, after)
    (copy,) = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    graph.erase_node(copy)
    with pytest.raises(AssertionError, match="has a gap"):
        reinplace.check_filled(before, after)
