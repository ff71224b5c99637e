"""autopar.rule: rules of the user's own ops, which are tried as they are entered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from autopar.ir.sharding_rule import TABLE
from autopar.passes import annotate, trace

library = torch.library


def op(name: str, forward: Callable[..., Tensor], schema: str) -> Any:
    """A custom op whose backward is that of its formula."""
    custom_op = library.custom_op(f"tests_rules::{name}", forward, mutates_args=(), schema=schema)
    custom_op.register_fake(lambda *args: torch.empty_like(forward(*args)))

    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            leaves = [
                x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in ctx.saved
            ]
            result = forward(*leaves)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        gradients = iter(torch.autograd.grad(result, tensors, gradient))
        return tuple(next(gradients) if isinstance(x, Tensor) else None for x in leaves)

    custom_op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "saved", inputs)
    )
    return custom_op


TWO, THREE = "(Tensor x, Tensor y) -> Tensor", "(Tensor x, Tensor y, Tensor z) -> Tensor"
matmul = op("product", lambda x, y: x @ y, TWO)
affine = op("affine", lambda x, y, z: x @ y + z, THREE)
shares = op("shares", lambda x: x.softmax(-1), "(Tensor x) -> Tensor")
mean = op("mean", lambda x: x.mean(0), "(Tensor x) -> Tensor")
bent = op("bent", lambda x, y: x.tanh() * y, TWO)
powers = op("powers", lambda x, p: x.abs() ** p, "(Tensor x, float p) -> Tensor")
heads = op(
    "heads", lambda x: x.unflatten(-1, (2, -1)).softmax(-1).flatten(-2), "(Tensor x) -> Tensor"
)
noise = op("noise", lambda x: x + torch.rand(()), "(Tensor x) -> Tensor")


@pytest.fixture(autouse=True)
def the_table_is_put_back() -> Iterator[None]:
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


@pytest.mark.parametrize(
    ("own", "pattern", "options"),
    [
        (matmul, "m k, k n -> m n", {"sum": "k", "linear": ("0", "1"), "product": "m | n | k"}),
        (affine, "m k, k n, n -> m n", {"sum": "k", "added": "2", "linear": ("0 2", "1 2")}),
        (shares, "... n -> ... n", {"whole": "n"}),
        (bent, "m n, m n -> m n", {"linear": ("1",)}),
        (powers, "m n -> m n", {"example": (torch.randn(4, 6), 1.5)}),
    ],
    ids=lambda x: getattr(x, "_name", None),
)
def test_what_is_right_is_entered(own: Any, pattern: str, options: Any) -> None:
    autopar.rule(own, pattern, **options)
    assert own._opoverload in TABLE
    autopar.rule(own, pattern, **options)  # once more is the same


@pytest.mark.parametrize(
    ("own", "pattern", "options", "said"),
    [
        (matmul, "m k, n k -> m n", {"sum": "k"}, "does not fit|fails on its example"),
        (affine, "m k, k n, n -> m n", {"sum": "k"}, "split on 'k', result 0 does not add up"),
        (shares, "m n -> m n", {}, "split on 'n', result 0 is not a part of that of one device"),
        (mean, "m n -> n", {"sum": "m"}, "split on 'm', result 0 does not add up"),
        (bent, "m n, m n -> m n", {"linear": ("0",)}, "operand 0 in two terms, result 0 does not"),
        (powers, "m n -> m n", {}, r"takes more than tensors, so give example=\(arguments\)"),
        (powers, "m n -> m n", {"example": (torch.ones(3, 4), 1.0)}, "'m' is 3 in the example"),
        (noise, "m -> m", {}, "other numbers when it runs again"),
        (torch.ops.aten.mm, "m k, k n -> m n", {"sum": "k"}, "has a rule of autopar's own"),
        (torch.relu, "m -> m", {}, "takes an op of torch.ops or of torch.library.custom_op"),
        (matmul, "m k, k n -> m n", {"sum": "n"}, "factor 'n' is in a result, so it is not"),
        (matmul, "m k, k n -> m n", {"whole": "h"}, "no dim has the factor 'h'"),
        (mean, "m n", {}, "is no pattern such as"),
        (heads, "m (h e) -> m (h e)", {"whole": "e"}, "factors h e of sizes"),  # the op has h
    ],
)
def test_what_is_wrong_is_refused(own: Any, pattern: str, options: Any, said: str) -> None:
    before = dict(TABLE)
    with pytest.raises(InputError, match=said):
        autopar.rule(own, pattern, **options)
    assert before == TABLE


def test_a_backward_that_clips_is_run_on_no_partial_gradient() -> None:
    clipped = library.custom_op(
        "tests_rules::clipped", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    clipped.register_fake(lambda x: torch.empty_like(x))
    clipped.register_autograd(lambda ctx, gradient: gradient.clamp(-1, 1) * 2)
    autopar.rule(clipped, "m n -> m n")
    notes = annotated(clipped, torch.randn(4, 8))
    assert notes.specs["clipped"].nonlinear


def annotated(own: Any, x: Tensor) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return own(self.up(x)).square().mean()

    return annotate.annotate(trace.trace(Model(), (x,))).annotations


class Own(nn.Module):
    """A model of two products, which are ops of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(size) / 4) for size in ((16, 32), (32, 16))
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return matmul(matmul(x, self.up).relu(), self.down).square().mean()


@pytest.mark.slow_cells("megatron")
@pytest.mark.parametrize("layout", ["megatron", "fsdp", autopar.Grid2D(2, 2)])
def test_a_model_of_own_products_is_right_under_every_layout(layout: Any) -> None:
    autopar.rule(matmul, "m k, k n -> m n", sum="k", linear=("0", "1"), product="m | n | k")
    torch.manual_seed(0)
    model, inputs = Own(), (torch.randn(8, 16),)
    autopar.verify(model, 4, inputs, layout)
    if layout == "megatron":
        plan = autopar.plan(model, 4, inputs, layout)
        assert {str(layout) for layout in plan.stored.values()} == {"tp:S(1)", "tp:S(0)"}
