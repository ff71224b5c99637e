"""A model that was exported at one batch size has its graph of another without an export: the very
graph that an export gives, or one is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
import models
import moe_models
from autopar._compat import pytree
from autopar.ir.program import Program
from autopar.passes import trace
from autopar.passes.trace import resize, reuse
from autopar.planner.tracing import Call, call_arguments, trace_model
from calls import call_of
from models import Example

ROWS = 8  # of the models below, and so many are the rows of a table and the heads of a layer


def nodes(program: Program) -> list[Any]:
    """All that a graph says, node by node."""
    return [
        (
            node.name, node.op, str(node.target), str(node.args), str(node.kwargs),
            str(node.meta.get("nn_module_stack")), node.meta.get("stack_trace"),
            [(x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
             for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)],
        )
        for node in program.module.graph.nodes
    ]  # fmt: skip


def require_as_exported(model: nn.Module, call: Call, resized: Program) -> None:
    reuse._TRACES.pop(model)
    exported = trace_model(model, call)
    assert nodes(resized) == nodes(exported)
    assert resized.signature == exported.signature
    assert resized.tensors.keys() == exported.tensors.keys()


class Resnet(nn.Module):
    """Convolutions, batch norms that are written into, and ReLUs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(x)))
        x = x + self.relu(self.second(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def resnet() -> Example:
    torch.manual_seed(0)
    return Resnet(), (torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))), {}


ZOO: dict[str, Callable[[], Example]] = {
    "gpt": models.gpt,
    "gpt with dropout": lambda: models.gpt(0.1),
    "gpt2": models.gpt2,
    "llama": models.llama,
    "bert": models.bert,
    "t5": models.t5,
    "mixtral": moe_models.mixtral,
    "auxiliary loss": moe_models.with_auxiliary_loss,
    "resnet": resnet,
}


# the models that one row needs no export of, though a view needs no copy there
ONE_ROW = ("gpt", "resnet")


@pytest.mark.slow_cells("gpt with dropout", "gpt2", "llama", "bert", "t5", "mixtral")
@pytest.mark.parametrize("name", ZOO)
def test_a_resized_graph_is_the_exported_one(name: str, exports: list[nn.Module]) -> None:
    example = ZOO[name]()
    model, args, kwargs = example
    trace_model(model, Call(args, kwargs))
    traces = [*reuse._TRACES[model]]
    for rows in (4, 24, 5, 1) if name in ONE_ROW else (4, 24, 5):
        exports.clear()
        reuse._TRACES[model] = [*traces]
        resized = trace_model(model, call_of(example, rows))
        assert exports == []
        require_as_exported(model, call_of(example, rows), resized)
        assert len(exports) == 1


# -- models whose Python looks at the number of rows -----------------------------------------------
class Small(nn.Module):
    """A layer, and what follows of its result; a table of eight rows."""

    def __init__(self, then: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(16, 16), then
        self.table = nn.Parameter(torch.randn(ROWS, 16))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.then(self, self.layer(x))


def late_write(model: Any, x: Tensor) -> Tensor:
    """Writes into a buffer after all else, where there are fewer rows than eight."""
    result = x.sum()
    if len(x) < ROWS:
        model.count.add_(1)
    return result


THEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "branch": lambda m, x: x.sum() if len(x) > 6 else x.relu().sum(),
    "other op": lambda m, x: x.sum() if len(x) % 2 == 0 else x.mean(),
    "first eight": lambda m, x: x[:8].sum(),
    "clamped": lambda m, x: x[: min(8, len(x))].square().sum(),
    "arange": lambda m, x: (x * torch.arange(len(x))[:, None]).sum(),
    "as many heads": lambda m, x: x.view(len(x), 8, 2).transpose(1, 2).reshape(-1, 16).sum(),
    "other heads": lambda m, x: x.view(8, len(x), 2).transpose(0, 1).reshape(-1, 16).sum(),
    "whole table": lambda m, x: m.table[: len(x)].square().sum() + x.sum(),
    "inverse square": lambda m, x: x.sum() / len(x) + x.sum() * (1 / len(x) ** 2),
    "returned": lambda m, x: (x.sum(), len(x)),
    "two numbers": lambda m, x: F.threshold(x * 9, ROWS, len(x)).sum(),
    "late write": late_write,
    "in place": lambda m, x: x.add_(len(x)).sum(),
    "blocks": lambda m, x: torch.stack([y.sum() for y in x.chunk(2)]).prod(),
    "each row": lambda m, x: torch.stack([row.sum() for row in x]).prod(),
}


SIZES = (1, 4, 7, 24)
# where the model does something else than with eight rows
EXPORTED: dict[str, Callable[[int], bool]] = {
    "branch": lambda rows: rows <= 6,
    "other op": lambda rows: rows % 2 == 1,
    "blocks": lambda rows: rows == 1,
    "each row": lambda rows: True,
    "returned": lambda rows: True,
    "late write": lambda rows: rows < ROWS,
}


def never(rows: int) -> bool:
    return False


def values_of(program: Program, x: Tensor) -> list[float]:
    """The numbers that the graph gives on the tensors of its model."""
    values = [program.tensors.get(entry.target, x) for entry in program.signature.inputs]
    results = iter(program.module(*values))
    outputs = program.signature.outputs
    values_by_kind = [(o.kind, o.constant if o.node is None else next(results)) for o in outputs]
    return [float(value) for kind, value in values_by_kind if kind == "user"]


@pytest.mark.slow_cells("as many heads", "other heads", "in place", "blocks")
@pytest.mark.parametrize("name", THEN)
def test_a_number_of_rows_that_python_sees_is_right_or_traced(
    name: str, exports: list[nn.Module]
) -> None:
    model = Small(THEN[name])
    trace.trace(model, (torch.ones(ROWS, 16),))
    traces = [*reuse._TRACES[model]]
    traced = []
    for rows in SIZES:
        exports.clear()
        reuse._TRACES[model] = [*traces]
        x = torch.randn(rows, 16)
        resized = trace.trace(model, (x,))
        traced += [rows] * len(exports)
        results = [float(value) for value in pytree.tree_leaves(model(x))]
        assert values_of(resized, x) == pytest.approx(results)
        require_as_exported(model, Call((x,), {}), resized)
    assert traced == [rows for rows in SIZES if EXPORTED.get(name, never)(rows)]


def test_a_slice_as_long_as_its_table_comes_back(exports: list[nn.Module]) -> None:
    """The graph of eight rows has none, as it would slice nothing off."""

    def slices(program: Program) -> int:
        slicing = torch.ops.aten.slice.Tensor
        return sum(node.target is slicing for node in program.module.graph.nodes)

    model = Small(THEN["whole table"])
    counts = [slices(trace.trace(model, (torch.ones(rows, 16),))) for rows in (ROWS, 4, 24)]
    assert counts == [0, 1, 0] and len(exports) == 1


def test_a_backward_of_the_users_own_that_comes_later_is_seen(exports: list[nn.Module]) -> None:
    """It runs the operator that the forward ran before."""
    model = Small(lambda m, x: m.first(x).sum())
    model.first = lambda x: x * 1.0  # type: ignore[assignment]
    trace.trace(model, (torch.ones(ROWS, 16),))
    trace.trace(model, (torch.ones(5, 16),))
    assert len(exports) == 1
    model.first = models.Fivefold.apply  # type: ignore[assignment]
    trace.trace(model, (torch.ones(6, 16),))
    assert len(exports) == 2


def test_a_number_that_changed_since_is_that_of_now(exports: list[nn.Module]) -> None:
    model = Small(lambda m, x: (x * m.factor).sum())
    model.factor = 2.0  # type: ignore[assignment]
    trace.trace(model, (torch.ones(ROWS, 16),))
    trace.trace(model, (torch.ones(5, 16),))
    model.factor = 3.0  # type: ignore[assignment]
    x = torch.randn(6, 16)
    assert values_of(trace.trace(model, (x,)), x) == pytest.approx([model(x).item()])


def test_a_graph_that_runs_another_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever numbers are tried: they are those that the model has, or there is no graph."""

    def wrong(node: Any, became: Any) -> Any:
        for args, kwargs in honest(node, became):
            yield pytree.tree_map_only(int, lambda n: n - (n == 5), (args, kwargs))

    honest = resize._with_numbers
    model = Small(THEN["arange"])
    trace.trace(model, (torch.ones(ROWS, 16),))
    monkeypatch.setattr(resize, "_with_numbers", wrong)
    (only,) = reuse._TRACES[model]
    assert only.once is not None
    with pytest.raises(Exception, match="does not run what the model runs at this size"):
        trace.capture(model, (torch.ones(5, 16),), {}, only.once.at_size)


# -- what it is for --------------------------------------------------------------------------------
@pytest.mark.slow_cells("fsdp", "auto")
@pytest.mark.parametrize("layout", ["megatron", "fsdp", "auto"])
def test_a_resized_graph_trains_as_the_model(layout: str, exports: list[nn.Module]) -> None:
    """Every rank in lockstep, and the model itself: loss, gradients, three steps of AdamW."""
    example = models.gpt()
    autopar.plan(example[0], 4, example[1], layout=layout, smaller=False)
    check = autopar.verify(example[0], 4, call_of(example, 12), layout=layout)
    assert len(exports) == 1
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-9


def test_micro_batches_of_any_number_need_one_export(exports: list[nn.Module]) -> None:
    model, args, _ = models.mlp()
    for count in (4, 2, 8):
        check = autopar.verify(model, 2, args, layout="ddp", microbatches=count)
        assert check.grad_error < 1e-9
    assert len(exports) == 1


def test_a_parallel_module_resizes_the_graph_of_its_model(exports: list[nn.Module]) -> None:
    example = models.mlp()
    model, args, _ = example
    par = autopar.parallelize(model, 1, args)
    for rows in (5, 7):
        own = call_arguments(call_of(example, rows)).args
        assert par(*own).item() == pytest.approx(model(*own).item())
    assert len(exports) == 1
    par.eval()
    for rows in (16, 5):
        par(*call_of(example, rows).args)
    assert len(exports) == 2
