"""Under autocast a graph casts where the operators inside of a composite one would cast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.passes.trace import trace
from autopar.passes.trace.original import compare_original

aten = torch.ops.aten
Forward = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A linear, then `work` of its result and of a weight in float32."""

    def __init__(self, work: Forward) -> None:
        super().__init__()
        self.linear, self.work = nn.Linear(8, 8), work
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self.linear(x), self.weight)


def _in_float16(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return torch.einsum("bi,ij->bj", weight, weight).sum() + x.sum()


def _without(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.einsum("bi,ij->bj", x.float(), weight)


COMPOSITES: dict[str, Forward] = {
    "einsum": lambda x, weight: torch.einsum("bi,ij->bj", x, weight),
    "einsum of three": lambda x, weight: torch.einsum("bi,ij,jk->bk", x, weight, weight),
    "matrix power": lambda x, weight: torch.linalg.matrix_power(weight, 3),
    "einsum of a product": lambda x, weight: torch.einsum("bi,bi,bk->bk", x, weight, weight),
    "cross-entropy": lambda x, weight: F.cross_entropy(x, torch.arange(8)),
    "norm": lambda x, weight: F.rms_norm(x, (8,), weight[0]),
    "in float16": _in_float16,
    "without": _without,
}


@pytest.mark.slow_cells("matrix power")
@pytest.mark.slow_cells("cross-entropy")
@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_gives_what_eager_gives(name: str) -> None:
    torch.manual_seed(0)
    model, x = Model(COMPOSITES[name]), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        program = trace(model, (x,))
    tensors = [program.tensors.get(entry.target, x) for entry in program.signature.inputs]
    (y,) = program.module(*tensors)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):  # gradients, too
        assert compare_original(model, program, ((x,), {}), 1.0)


def test_an_operator_stays_where_a_cast_of_its_operands_is_enough() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain_graph = trace(Model(COMPOSITES["einsum"]), (torch.randn(8, 8),)).module.graph
        apart = trace(Model(COMPOSITES["einsum of a product"]), (torch.randn(8, 8),)).module.graph
    (einsum,) = plain_graph.find_nodes(op="call_function", target=aten.einsum.default)
    assert {x.meta["val"].dtype for x in einsum.all_input_nodes} == {torch.bfloat16}
    assert not apart.find_nodes(op="call_function", target=aten.einsum.default)
    assert apart.find_nodes(op="call_function", target=aten.bmm.default)
