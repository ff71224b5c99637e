"""Memory that is taken and not written to: not compared, unless what a model gives hangs on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar import VerificationError
from autopar.ops import local
from autopar.passes.pass_manager import PassManager
from autopar.planner import confirm, planner, tracing
from autopar.planner.request import PlanRequest
from autopar.runtime import reference
from autopar.world import World
from odd_models import Simple, rows

aten = torch.ops.aten


def inverted(model: Any, x: Tensor) -> Tensor:
    """As Mixtral's experts: a permutation and back."""
    order = torch.sort(x[:, 0].detach() > 0)[1]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return model.down(model.up(x[order]).relu()[inverse]).square().sum()


def halves(model: Any, x: Tensor) -> Tensor:
    """As DeepSeek-V3's keys: two parts written into one tensor."""
    y = model.up(x)
    both = y.new_empty(12, 60)
    both[:, :48] = y
    both[:, 48:] = x[:, :12]
    return model.down(both[:, 6:54].relu()).square().sum()


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "megatron", "auto"])
@pytest.mark.parametrize("body", [inverted, halves])
def test_what_is_written_before_it_is_read_raises_no_alarm(body: Any, layout: str) -> None:
    autopar.verify(Simple(body), 2, (rows(),), layout=layout)


def test_written_parts_of_such_memory_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first half is there yet, and that is wrong."""

    def doubled(call: local.Call) -> Any:
        values = call.values()
        if call.results[0].axes_of("S"):  # one device runs through here, too
            values["src"] = call.emit(aten.mul.Tensor, values["src"], 2.0)
        return call.again(values)

    def body(model: Any, x: Tensor) -> Tensor:
        both = x.new_empty(12, 72)
        return torch.slice_scatter(both, model.up(x), 1, 0, 48)[:, :48].square().sum()

    autopar.verify(Simple(body), 2, (rows(),), layout="ddp")
    monkeypatch.setitem(local._SPECIAL, aten.slice_scatter.default, doubled)
    with pytest.raises(VerificationError, match=r"the first wrong node is slice_scatter"):
        autopar.verify(Simple(body), 2, (rows(),), layout="ddp")


def test_memory_that_only_the_ranks_leave_unwritten_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fresh memory is often zero: nothing may hang on that."""

    def forgotten(call: local.Call) -> Any:
        size = list(call.results[0].local_shape)
        if call.results[0].mesh.size == 1:  # one device runs through here, too
            return call.emit(aten.full.default, size, 0.0)
        return call.emit(aten.empty.memory_format, size)

    monkeypatch.setitem(local._SPECIAL, aten.full.default, forgotten)
    model = Simple(lambda m, x: m.down(m.up(x) + torch.zeros(48)).square().sum())
    with pytest.raises(VerificationError, match="the first wrong node is"):
        autopar.verify(model, 2, (rows(),), layout="ddp")


def read(m: Any, x: Tensor) -> Tensor:
    return (m.up(x) + torch.empty(48)).sum()


def compared(m: Any, x: Tensor) -> Tensor:
    return torch.where(torch.empty(48) > 0, m.up(x), 0).sum()


def returned(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.up(x).sum(), torch.empty(3)


def multiplied(m: Any, x: Tensor) -> Tensor:
    """The backward of what is not taken multiplies zero by it, which may be infinite."""
    y = m.up(x)
    never = torch.zeros(48, dtype=torch.bool)
    return torch.where(never, y * torch.empty(48), y).sum()


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (read, "output 0"),
        (compared, "output 0"),
        (returned, "output 1"),
        (multiplied, "gradient of p_up_"),
    ],
)
def test_what_a_model_gives_may_not_hang_on_it(body: Any, name: str) -> None:
    with pytest.raises(VerificationError) as caught:
        autopar.verify(Simple(body), 2, (rows(),), layout="ddp")
    message = str(caught.value)
    assert message.startswith(f"the {name}") and "hangs on memory that is never written" in message
    assert 'aten.empty.memory_format at empty_memory_format (File "' in message


def inverted_into_new_memory(model: Any, x: Tensor) -> Tensor:
    """As `inverted`, in memory that no tensor's shape gives."""
    order = torch.sort(x[:, 0].detach() > 0)[1]
    inverse = torch.empty(len(order), dtype=torch.int64)
    inverse[order] = torch.arange(len(order))
    return model.down(model.up(x[order]).relu()[inverse]).square().sum()


def test_filling_leaves_the_program_as_it_was() -> None:
    pipeline, world = PassManager(), World.of(1)
    source = tracing.trace_model(Simple(inverted_into_new_memory), (rows(),))
    program = planner.analyse(pipeline, source)
    chosen = planner.choose_plan(pipeline, program, world, PlanRequest("ddp"))
    program = confirm.rewrite_for_ranks(pipeline, chosen, world)
    before = str(program.module.graph)
    (node,) = reference.unwritten_memory(program)
    filled = reference.fill_unwritten(program, reference.poison)
    assert str(program.module.graph) == before and "poison" in filled.module.code
    tamed = reference.fill_unwritten(program, reference.poison, only=f"not {node.name}")
    assert "poison" not in tamed.module.code and "tame" in tamed.module.code
    source = tracing.trace_model(Simple(lambda m, x: m.up(x).sum()), (rows(),))
    assert reference.fill_unwritten(source, reference.poison) is source
