"""A graph whose distinct calls were decomposed is the one that torch's decomposition makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar._compat import pytree
from autopar.passes.trace import functional
from autopar.passes.trace.functional import written_functionally
from autopar.passes.trace.simplify import inline_no_grad
from models import Example, bert, gpt, llama

CHECK = torch.ops.aten._assert_tensor_metadata.default


class Calls(nn.Module):
    """Calls that are copies, views or nothing, by the strides and dtypes of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.up(x).chunk(3, -1)
        a = q.reshape(4, 16).to(torch.float64)
        b = k.transpose(0, 1).reshape(4, 16).to(torch.float32)
        c = v.contiguous().flatten(1).contiguous()
        d = q.transpose(0, 1).contiguous()
        return a, b, c, torch.dropout(d, 0.5, False), torch.dropout(d, 0.5, True), x


def calls() -> Example:
    return Calls(), (torch.randn(4, 2, 8),), {}


class Forms(nn.Module):
    """Every view and copy that is taken apart without an export, of operands that are contiguous,
    turned and expanded, so that the same call is a view, a copy or nothing.
    """

    def forward(self, x: Tensor, scalar: Tensor) -> list[Tensor]:
        results = []
        for y in (x, x.transpose(0, 2), x[:, :1].expand(4, 6, 4), x[1:3, ::2]):
            square = torch.broadcast_to(y[:, :1, :1], (len(y), 4, 4))
            results += [
                torch.atleast_1d(scalar), torch.atleast_2d(scalar), torch.atleast_3d(y[0]),
                *y.chunk(3, 1), *y.chunk(2), y.contiguous(), y.transpose(0, 1).contiguous(),
                y[:, :1].expand_as(y), y.flatten(), y.flatten(1), y.flatten(0, 1), y.mT,
                y.moveaxis(0, 1), y.moveaxis((0, 1), (1, 0)), y.movedim(0, 2),
                y.movedim((0, 2), (1, 0)), y.narrow(1, 1, 2), y[0].T, torch.positive(y),
                y.ravel(), y.reshape(-1), y.reshape(len(y), -1), y.reshape(y.shape),
                y.reshape_as(y.contiguous()),
                *torch.ops.aten.split.sizes(y, [1, y.shape[1] - 1], 1),
                y.swapaxes(0, 1), y.swapdims(0, 2), *y.tensor_split((1, 3), 1),
                *y.tensor_split(2, 1), y.to(torch.float32), y.to(torch.float64),
                y.to(torch.float32, copy=True), y.to("cpu"), y.to("cpu", torch.float64),
                y.to(memory_format=torch.contiguous_format), torch.ops.aten.to.other(y, scalar),
                y.unflatten(2, (2, -1)),
                y.view_as(y), square, square.contiguous(), torch.dropout(y, 0.0, True),
                torch.dropout(y, 0.3, True), torch.dropout(y, 0.3, False),
            ]  # fmt: skip
        return results


def forms() -> Example:
    return Forms(), (torch.randn(4, 6, 4), torch.tensor(2.0, dtype=torch.float64)), {}


class Writes(nn.Module):
    """Writes into what it makes: whole, through slices, with views from before and after."""

    def forward(self, x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        pieces = x.new_empty(4, 8)
        pieces[:, :3] = y
        pieces[:, 3:] = x[:, 3:]
        shares = x.gather(1, index)
        shares /= shares.sum(-1, keepdim=True) + 1  # the sum is of the shares before
        ones = torch.zeros_like(x).scatter_(1, index, 1)
        row = torch.zeros(4, 8)
        row[1, 2:4] = 5.0
        row[0] = x[0]
        return pieces @ ones.t(), shares * 2, torch.relu_(x @ x.t()), row + 1


class WritesUnderViews(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = x * 2
        flat, turned, (left, _) = h.view(8, 4), h.t(), h.chunk(2, -1)
        h += x
        h.mul_(3.0)
        between = flat + 1
        h[2] += 1
        q, k = h.chunk(2, -1)
        h.masked_fill_(h > 0, 0.0).clamp_(min=-1)
        return between, turned * 2, left, q, k, h.reshape(8, 4), h.t().reshape(4, 8), h[0], h, flat


def writes() -> Example:
    return Writes(), (torch.randn(4, 8), torch.randn(4, 3), torch.randint(0, 8, (4, 2))), {}


def writes_under_views() -> Example:
    return WritesUnderViews(), (torch.randn(4, 8),), {}


def exported(example: Example) -> torch.export.ExportedProgram:
    model, args, kwargs = example
    program = torch.export.export(model, args, kwargs, strict=False)
    inline_no_grad(program.graph_module)
    return program


def lines(graph: fx.Graph) -> list[str]:
    """Return the calls with their names, operands, shapes and strides; without checks of dtypes,
    whose operands torch passes by position.
    """

    def fact(value: Any) -> Any:
        tensor = isinstance(value, Tensor)
        return (value.shape, value.stride(), value.dtype) if tensor else value

    return [
        f"{node.format_node()} {[fact(x) for x in pytree.tree_leaves(node.meta.get('val'))]}"
        for node in graph.nodes
        if node.op != "get_attr" and node.target is not CHECK
    ]


@pytest.mark.slow_cells("<lambda>", "bert", "gpt", "llama")
@pytest.mark.parametrize(
    "build", [calls, forms, writes, writes_under_views, gpt, lambda: gpt(0.1), bert, llama]
)
def test_same_as_torchs_decomposition(build: Callable[[], Example]) -> None:
    program = exported(build())
    graph = written_functionally(program)
    assert graph is not None
    assert lines(graph) == lines(program.run_decompositions({}).graph)


def test_every_simple_call_is_among_the_forms() -> None:
    targets = {node.target for node in exported(forms()).graph.nodes}
    assert functional._SIMPLE - targets == set()


class WritesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1) * 2


class WritesChunk(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        h.chunk(2, -1)[0].add_(1)
        return h


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).uniform_()


class OtherType(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = (x * 2).to(torch.float16)
        h *= x  # of float32: the product has another type than h
        return h


class Region(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x


class Mean(nn.Module):
    def forward(self, x: Tensor, mul: Tensor) -> Tensor:
        return x * mul.reshape(4, 4)


@pytest.mark.parametrize(
    "model",
    [
        WritesInput(), WritesChunk(), Draws(), OtherType(), nn.Sequential(nn.BatchNorm1d(4)),
        Region(), Mean(),
    ],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_writes_that_are_not_followed_are_left_to_torch(model: nn.Module) -> None:
    """Writes that are not followed, regions, and an input by the name of a call."""
    count = 2 if isinstance(model, Mean) else 1
    assert written_functionally(exported((model, (torch.randn(4, 4),) * count, {}))) is None
