"""Hooks that run in the backward are refused by their module's name; those that a forward runs, and
those that change no gradient, are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import (
    get_gradient_edge,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.nn.modules.module import register_module_full_backward_hook

from autopar import TraceError
from autopar.passes import trace
from traced import run


class Act(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 8), Act(body), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))).square().mean()


def doubled(g: Tensor) -> Tensor:
    return g * 2


def halved(g: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (g[0] / 2,)


def on_tensor(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(doubled)
    return y


def on_node(x: Tensor) -> Tensor:
    y = x * 2
    y.grad_fn.register_hook(lambda g, _: (g[0] * 2, None))  # type: ignore[union-attr]
    return y


def before_node(x: Tensor) -> Tensor:
    seen: list[Any] = []
    y = x * 2
    y.grad_fn.register_prehook(seen.append)  # type: ignore[union-attr]
    return y


def on_edge(x: Tensor) -> Tensor:
    y = x * 2
    get_gradient_edge(y).node.register_hook(lambda g, _: None)
    return y


def on_several(x: Tensor) -> Tensor:
    register_multi_grad_hook([x, x * 2], lambda grads: None)
    return x


def further_back(x: Tensor) -> Tensor:
    x.grad_fn.next_functions[0][0].register_prehook(halved)  # type: ignore[union-attr]
    return x * 2


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def behind_a_function(x: Tensor) -> Tensor:
    y: Tensor = Doubled.apply(x) * 1
    if y.requires_grad:  # as it does when the model runs
        y.register_hook(doubled)
    return y


def packed(x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return x.exp()


def looked_at(x: Tensor) -> Tensor:
    y = x * 2
    assert y.grad_fn is not None
    return y


def offloaded(x: Tensor) -> Tensor:
    with save_on_cpu():
        return x.exp()


def rows() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def refused(model: nn.Module) -> str:
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(TraceError) as caught:
        trace.trace(model, (rows(),))
    assert before == {name: id(p) for name, p in model.named_parameters()}
    model(rows()).backward()  # and the model runs as before
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (on_tensor, "act registers the hook doubled ("),
        (on_node, "act registers the hook on_node.<locals>.<lambda> ("),
        (before_node, "act registers the hook list.append on the autograd node Mul"),
        (on_edge, "act registers the hook on_edge.<locals>.<lambda> ("),
        (on_several, "act registers the hook "),
        (behind_a_function, "act registers the hook doubled ("),
        (further_back, "act registers the hook halved ("),
        (packed, "act packs saved tensors by the hook packed.<locals>.<lambda> ("),
    ],
)
def test_a_hook_that_the_forward_registers_is_refused(
    body: Callable[[Tensor], Tensor], named: str
) -> None:
    message = refused(Net(body))
    assert message.startswith(f"Net cannot be one graph: {named}")
    assert f"in {body.__name__}" in message


@pytest.mark.parametrize("kind", ["full", "full pre", "oldest"])
def test_a_backward_hook_of_a_module_is_refused(kind: str) -> None:
    model = Net()
    if kind == "full":
        model.act.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
    elif kind == "full pre":
        model.act.register_full_backward_pre_hook(lambda m, o: (o[0] * 2,))
    else:
        model.act.register_backward_hook(lambda m, i, o: None)
    assert "cannot be one graph: act has a backward hook" in refused(model).replace("the ", "a ")


def test_a_backward_hook_of_all_modules_is_refused() -> None:
    handle = register_module_full_backward_hook(lambda m, i, o: None)
    try:
        assert "has a backward hook" in refused(Net())
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_a_hook_of_a_parameter_is_refused(kind: str) -> None:
    model = Net()
    if kind == "tensor":
        model.up.weight.register_hook(doubled)
    else:
        model.up.weight.register_post_accumulate_grad_hook(lambda p: None)
    assert "cannot be one graph: parameter up.weight has the hook" in refused(model)


@pytest.mark.slow_cells("offloaded")
@pytest.mark.parametrize("body", [looked_at, offloaded])
def test_what_leaves_gradients_alone_is_traced(body: Callable[[Tensor], Tensor]) -> None:
    model = Net(body)
    model.act.register_forward_hook(lambda m, i, o: o * 2)
    model.act.register_full_backward_hook(lambda m, i, o: None).remove()
    program = trace.trace(model, (rows(),))
    torch.testing.assert_close(run(program, (rows(),)), model(rows()))


def test_a_backward_hook_that_never_runs_is_no_harm() -> None:
    model = Net().requires_grad_(False)
    model.act.register_full_backward_hook(lambda m, i, o: None)
    trace.trace(model, (rows(),))


# -- functions that are more than an op of their arguments -----------------------------------------
class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2


class Stochastic(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x + torch.rand_like(x)).floor()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g


class Asking(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g if g.norm() < 1 else g / g.norm()


class Closed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return f(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


class NoTensor(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return 3


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda x: Dirty.apply(x * 1), "Dirty, which changes an argument in place"),
        (Stochastic.apply, "Stochastic, which draws random numbers (aten.rand_like.default)"),
        (Asking.apply, "Asking, which has a backward that does not run on tensors without values"),
        (
            lambda x: Closed.apply(x, lambda y: y * x),
            "Closed, which takes a tensor of shape (8, 8)",
        ),
        (lambda x: x * NoTensor.apply(x), "NoTensor, which returns no tensor"),
    ],
)
def test_a_function_that_is_more_than_an_op_is_refused(
    body: Callable[[Tensor], Tensor], why: str
) -> None:
    with pytest.raises(TraceError) as caught:
        trace.trace(Net(body), (rows(),))
    message = str(caught.value)
    assert f"cannot be one graph: act applies the autograd function {why}" in message
    assert 'File "' in message


class OfInput(nn.Module):
    """Registers a hook on what hangs on its input alone, where that carries a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(doubled)
        return y.square().mean()


def test_a_hook_behind_an_input_is_refused() -> None:
    trace.trace(OfInput(), (rows(),))
    with pytest.raises(TraceError, match="registers the hook doubled"):
        trace.trace(OfInput(), (rows().requires_grad_(),))
