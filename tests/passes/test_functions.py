"""Custom autograd functions: each kind has the gradients that its model has on one device, traced,
under verify, and on ranks; what a graph cannot say is refused by its module's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.ops.custom_functions import is_custom
from autopar.passes import annotate, trace
from autopar.runtime import dynamo_backend
from traced import run


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


class Reversed(Function):
    @staticmethod
    def forward(x: Tensor, scale: float = 0.5) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.scale * g, None


class Several(Function):
    """Three results: one without a gradient, one that nobody uses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x * w, signs, x + w

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor, h: Tensor) -> Any:
        x, w = ctx.saved_tensors
        wanted = (x + w * 0).sum(0) if ctx.needs_input_grad[1] else None
        return 3 * g * w + h, None if wanted is None else (wanted * g.sum(0) + h.sum(0))


class Unmaterialised(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> Any:
        return 7 * g if h is None and g is not None else h


class Clipped(Function):
    """A backward that is not linear: a rank's part of a gradient may not be clipped by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g / (1e-3 + g.norm()) + g.clamp(-0.01, 0.01)


class Mixed(Function):
    """Row by row forward, not so backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g + g.flip(0)


class Outer(Function):
    """Calls another in its forward, whose backward does not count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return StraightThrough.apply(x, 2) * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 5 * g


class Listed(Function):
    @staticmethod
    def forward(ctx: Any, parts: list[Tensor], x: Tensor, how: dict[str, Any]) -> Any:
        return x * parts[0] + how["shift"], how["name"]

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        return None, 2 * g, None


straight_through = StraightThrough.apply


class Inner(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body, self.scale = body, nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.scale)


class Net(nn.Module):
    """Linears around a body; `h + f(h)` leaves a gradient to each parameter if f's is lost."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.middle, self.down = nn.Linear(8, 8), Inner(body), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x)) * self.middle.scale).square().mean()


def without_gradient(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = straight_through(x, 4)
    return x + fixed


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "straight through": lambda x, w: x + straight_through(x, 4),
    "reversal": lambda x, w: x * w + Reversed.apply(x),
    "several": lambda x, w: (lambda a, b, c: a + b * x)(*Several.apply(x, w)),
    "unmaterialised": lambda x, w: x + Unmaterialised.apply(x)[0],
    "clipped": lambda x, w: x + Clipped.apply(x * w),
    "mixed": lambda x, w: x + Mixed.apply(x),
    "twice": lambda x, w: straight_through(straight_through(x, 4) * w, 8),
    "nested": lambda x, w: x + Outer.apply(x),
    "listed": lambda x, w: Listed.apply([w], x, {"shift": 1.0, "name": "a"})[0],
    "no grad": without_gradient,
    "frozen operand": lambda x, w: (lambda a, b, c: a + c)(*Several.apply(x, w.detach())),
    "checkpointed": lambda x, w: checkpoint(
        lambda y: y + straight_through(y * w, 4), x, use_reentrant=False
    ),
    "reentrant": lambda x, w: checkpoint(
        lambda y: y * w + straight_through(y, 4), x, use_reentrant=True
    ),
    "reentrant without": lambda x, w: (
        x + checkpoint(lambda y: y * w, x.detach(), use_reentrant=True)
    ),
}


def rows() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


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
