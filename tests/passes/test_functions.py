"""Custom autograd functions: each kind has the gradients that its model has on one device, traced,
under verify, and on ranks; what a graph cannot say is refused by its module's name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.ops.custom_functions import is_custom
from autopar.passes import annotate, trace
from autopar.runtime import dynamo_backend
from custom_functions import KINDS, Clipped, Mixed, Net, rows, straight_through
from traced import run


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.slow_cells("reentrant")
@pytest.mark.slow_cells("listed", "mixed")
@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_function_has_its_own_gradient(kind: str) -> None:
    model = Net(KINDS[kind])
    program = trace.trace(model, (rows(),))
    torch.testing.assert_close(run(program, (rows(),)), model(rows()))
    actual = gradients(model, run(program, (rows(),)))
    torch.testing.assert_close(actual, gradients(model, model(rows())))


@pytest.mark.parametrize("kind", KINDS)
def test_verify_holds_a_function_under_layouts(kind: str) -> None:
    layout = ("ddp", "fsdp", "megatron")[list(KINDS).index(kind) % 3]
    autopar.verify(Net(KINDS[kind]), 2, (rows(),), layout=layout)


@pytest.mark.slow_cells("reentrant", "several")
@pytest.mark.parametrize("kind", ["straight through", "several", "listed", "reentrant"])
def test_what_dynamo_captures_has_the_gradient_too(kind: str) -> None:
    model, grads = Net(KINDS[kind]), {}

    def backend(graph: fx.GraphModule, values: Any) -> Any:
        names = {i: f"p{i}" for i, v in enumerate(values) if isinstance(v, nn.Parameter)}
        piece = dynamo_backend._Graph(graph, names, values)
        rest = tuple(v for i, v in enumerate(values) if i not in names)
        (loss,) = run(trace.trace(piece, rest), rest)
        loss.backward()
        grads.update({id(p): p.grad.clone() for p in model.parameters() if p.grad is not None})
        return graph

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(rows())
    expected = gradients(model, model(rows()))
    assert len(grads) == len(expected)
    torch.testing.assert_close([grads[id(p)] for p in model.parameters()], expected)


def test_the_same_call_is_the_same_op_in_every_trace() -> None:
    def targets() -> list[str]:
        program = trace.trace(Net(KINDS["twice"]), (rows(),))
        return [str(n.target) for n in program.module.graph.nodes if is_custom(n.target)]

    first = targets()
    assert len(set(first)) == 2  # another number of steps is another op
    assert targets() == first


@pytest.mark.slow
def test_a_large_function_is_split_by_what_a_smaller_trial_says() -> None:
    class Large(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.up, self.function = nn.Linear(2048, 2048, device="meta"), function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.up(x)).square().sum()

    def factors(function: Any) -> list[int]:
        x = torch.empty(64, 512, 2048, device="meta")
        notes = annotate.annotate(trace.trace(Large(function), (x,))).annotations
        (rule,) = (s for s in notes.specs.values() if s.source != "rule")
        return [size for name, size in rule.sizes.items() if rule.splittable(name)]

    assert factors(lambda x: straight_through(x, 4)) == [64, 512, 2048]
    assert factors(Mixed.apply) == [512, 2048]
    assert factors(Clipped.apply) == []
