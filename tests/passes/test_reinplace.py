"""What a derived graph may write into, and that the numbers stay the same."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.overlap import DerivedGraph, facts_of, reinplace
from derived import passed

functional = torch.ops._c10d_functional
X = torch.linspace(-1, 1, 12).view(3, 4)


def replaced(function: Callable[[Tensor], object], x: Tensor = X) -> list[str]:
    """The in-place ops of a function's graph; its results are compared with the function's own."""
    module = make_fx(function)(x)
    for node in module.graph.nodes:
        _describe(node, x)
    passed("reinplace", DerivedGraph(module.graph, "forward"))
    module.recompile()
    own = x.clone()
    torch.testing.assert_close(module(own), function(x), rtol=0, atol=0)
    assert torch.equal(own, x), "what came in was written to"
    return [node.target._opname for node in module.graph.nodes if _writes(node)]


def _writes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target._schema.is_mutable


def _describe(node: fx.Node, x: Tensor) -> None:
    if node.op == "placeholder":
        node.meta["val"] = x
    elif node.op == "call_function":
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        node.meta["val"] = node.target(*args, **kwargs)


def test_a_chain_of_pointwise_ops_has_one_memory() -> None:
    assert replaced(lambda x: ((x - 1).exp() * 2).neg()) == ["exp_", "mul_", "neg_"]


def test_what_comes_in_is_not_written_to() -> None:
    assert replaced(lambda x: x.exp()) == []
    assert replaced(lambda x: x.t().exp()) == []


def test_what_others_read_is_not_written_to() -> None:
    def later(x: Tensor) -> Tensor:
        y = x + 1
        return y.exp() + y

    def seen(x: Tensor) -> Tensor:
        y = x + 1
        return y.exp() * y.view(-1).sum()

    def returned(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y.exp()

    assert replaced(later) == ["add_"]  # the sum goes into the exponentials
    assert replaced(seen) == ["mul_"]
    assert replaced(returned) == []


def test_what_shows_an_element_twice_is_not_written_to() -> None:
    assert replaced(lambda x: (x.sum(0, keepdim=True) + 1).expand(3, 4).exp()) == ["add_"]


def test_another_dtype_or_shape_has_its_own_memory() -> None:
    assert replaced(lambda x: (x + 1) > 0) == []
    assert replaced(lambda x: x.sum(0) + x) == []


def test_views_of_what_was_made_are_written_to() -> None:
    assert replaced(lambda x: (x @ x.t()).t().unsqueeze(0).exp()) == ["exp_"]


def test_an_operand_that_is_given_twice_stays() -> None:
    def doubled(x: Tensor) -> Tensor:
        y = x + 1
        return y * y

    assert replaced(doubled) == []


def test_either_operand_of_a_sum_will_do() -> None:
    assert replaced(lambda x: x + x.exp()) == ["add_"]
    assert replaced(lambda x: x - x.exp()) == []


def test_placing_into_zeros_is_in_place() -> None:
    def placed(x: Tensor) -> Tensor:
        return torch.zeros(3, 4).index_copy(0, torch.arange(1), x[:1]) + x

    assert replaced(placed) == ["index_copy_", "add_"]


# -- rows that a scatter brought -------------------------------------------------------------------
LONG = torch.linspace(-1, 1, 4 << 16).view(4, 1 << 16)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_a_few_rows_are_added_where_they_lie(rows: int) -> None:
    """The same bits; into memory of its own where the sum goes out, as the rows would with it."""
    added = ["add_"] * (rows - 1)
    assert replaced(lambda x: (x[:rows] * 3).sum(0).view(2, -1).exp().sum(), LONG) == added
    assert replaced(lambda x: (x[:rows] * 3).sum(0).view(2, -1), LONG) == added[1:]


def test_other_sums_stay() -> None:
    assert replaced(lambda x: (x * 3).sum(0).exp().sum()) == ["exp_"]  # small
    assert replaced(lambda x: x.sum(0).exp().sum(), LONG) == ["exp_"]  # of what comes in
    assert replaced(lambda x: (x * 3).sum(1).exp().sum(), LONG) == ["exp_"]
    half = LONG.bfloat16()  # rounded after each addition
    assert replaced(lambda x: (x * 3).sum(0).exp().sum(), half) == ["exp_"]

    def seen(x: Tensor) -> Tensor:
        y = x * 3
        return y.sum(0).sum() + y.sum()

    assert replaced(seen, LONG) == ["add_"]  # of the two numbers


@pytest.mark.parametrize("own", [True, False])
def test_sums_over_ranks_are_in_place_where_the_operand_is_our_own(own: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    other = graph.call_function(torch.ops.aten.t.default, (product if own else x,))
    last = graph.call_function(torch.ops.aten.t.default, (other,))
    sent = graph.call_function(functional.all_reduce.default, (last, "sum", "g"))
    many = graph.call_function(
        functional.all_reduce_coalesced.default, ([x, graph.call_function(
            torch.ops.aten.mm.default, (x, x))], "sum", "g")
    )  # fmt: skip
    first = graph.call_function(functional.wait_tensor.default, (sent,))
    parts = [graph.call_function(operator.getitem, (many, place)) for place in range(2)]
    waited = [graph.call_function(functional.wait_tensor.default, (part,)) for part in parts]
    graph.output((first, *waited))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3, 3).t() if node is other else torch.empty(3, 3)
    passed("reinplace", DerivedGraph(graph, "forward"))
    form = functional.all_reduce_ if own else functional.all_reduce
    assert sent.target is form.default
    assert many.target is functional.all_reduce_coalesced_.default
    copied, summed = many.args[0]  # what came in is copied first
    assert copied.target is torch.ops.aten.clone.default and copied.args == (x,)
    assert summed.target is torch.ops.aten.mm.default


def test_the_contract_refuses_writing_to_what_comes_in() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.exp_.default, (x,)))
    with pytest.raises(AssertionError, match="exp__default writes to x, which is not its own"):
        reinplace.check(facts_of(graph), DerivedGraph(graph, "forward"))
