"""A derived backward in two halves: the same gradients, nothing computed twice, little carried."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import _compat
from autopar.passes.overlap import erase_unused
from autopar.passes.overlap.split_backward import input_gradients, split, weight_gradients


class Block(nn.Module):
    """A residual block whose norm gives all of its gradients in one op."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def derived() -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The derived backward of two blocks, with its operands; the received tensor comes last."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    names, parameters = zip(*model.named_parameters(), strict=True)
    caught: dict[str, Any] = {}

    def function(*values: torch.Tensor) -> Any:
        own = dict(zip(names, values, strict=False))
        return [torch.func.functional_call(model, own, (values[-1],))]

    def partition(joint: fx.GraphModule, inputs: Any, **more: Any) -> Any:
        forward, backward = _compat.partition(joint, inputs, **more)
        caught["graph"] = fx.GraphModule(backward, backward.graph)
        return forward, backward

    def compiled(module: fx.GraphModule, _: Any) -> Any:
        def run(*operands: torch.Tensor) -> Any:
            caught["operands"] = list(operands)
            return module(*operands)

        return run

    x = torch.randn(4, 8, dtype=torch.float64)
    values = [v.detach().requires_grad_() for v in (*parameters, x)]
    example = make_fx(function)(*values)
    (y,) = _compat.derive(example, values, compiled, partition)(*values)
    y.backward(torch.randn_like(y))
    erase_unused(caught["graph"].graph)
    return caught["graph"], caught["operands"]


def test_both_halves_give_the_gradients_of_the_whole_and_compute_nothing_twice() -> None:
    whole, operands = derived()
    expected = whole(*operands)
    last = len(expected) - 1
    halves = split(whole.graph, {last})
    first = fx.GraphModule(whole, input_gradients(whole.graph, halves))
    rest = fx.GraphModule(whole, weight_gradients(whole.graph, halves))
    results = first(*operands)
    gradients, carried = results[: last + 1], results[last + 1 :]
    assert all(x is None for x in gradients[:last])
    assert torch.equal(gradients[last], expected[last])
    later = rest(*carried)
    assert later[last] is None
    for own, right in zip(later[:last], expected[:last], strict=True):
        assert torch.equal(own, right)

    def computed(module: fx.GraphModule) -> Counter[str]:
        return Counter(n.name for n in module.graph.nodes if n.op == "call_function")

    assert computed(first) + computed(rest) == computed(whole)
    assert max((computed(first) + computed(rest)).values()) == 1
    products = [
        sum(n.target is torch.ops.aten.mm.default for n in module.graph.nodes)
        for module in (whole, first, rest)
    ]
    assert products == [8, 4, 4]


def test_what_is_carried_is_operands_and_gradients_of_products() -> None:
    whole, _ = derived()
    halves = split(whole.graph, {len(whole.graph.output_node().args[0]) - 1})
    nodes = {node.name: node for node in whole.graph.nodes}
    shapes = Counter(tuple(nodes[name].meta["val"].shape) for name in halves.carried)
    # two blocks: x and dy of `up` and `down`; the norms' gradients come with the first half
    assert shapes == {(4, 8): 4, (4, 16): 4, (8,): 4}


def test_a_backward_that_nobody_waits_for_is_all_in_the_second_half() -> None:
    whole, operands = derived()
    halves = split(whole.graph, ())
    first = fx.GraphModule(whole, input_gradients(whole.graph, halves))
    assert not [n for n in first.graph.nodes if n.op == "call_function"] and not halves.first
    expected = whole(*operands)
    carried = first(*operands)[len(expected) :]
    gradients = fx.GraphModule(whole, weight_gradients(whole.graph, halves))(*carried)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
