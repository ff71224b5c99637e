"""One mask for one dropout of the model, however many copies of it the ranks make."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import autopar
from autopar import InputError, PlanError
from autopar.ir.graph import every_node
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ops.recomputation import recompute_in_backward
from autopar.ops.sharded.dropout import next_seed
from autopar.passes.pass_manager import PassManager
from autopar.planner import confirm
from dropped import DROPPED, Dropped, dropout_model
from launch import launched
from plans import Subject, named_or_refused, random_plan, subject
from training_facts import check_errors

LIMIT = 1e-5
LAYOUTS = ("ddp", "fsdp", "megatron", "megatron-sp", "atp", "auto")
NAMES = (*DROPPED, "blocks")


@functools.cache
def known(name: str) -> Subject:
    return subject(*dropout_model(name))


def random_program(name: str, mesh: str, draw: int) -> Program:
    """Rewritten by a plan that is drawn."""
    world = autopar.World.of(Mesh.parse(mesh).size)
    plan = random_plan(known(name).program, mesh, world, draw)
    program = dataclasses.replace(known(name).program, plan=plan)
    return confirm.rewrite_for_ranks(PassManager(), program, world)


def seeds(module: fx.GraphModule) -> dict[str, list[int]]:
    """By dropout of the traced graph: what each of its copies adds to the seed."""
    by_source: dict[str, list[int]] = {}
    for node, _ in every_node(module):
        if getattr(node.target, "__name__", "") in ("dropout", "attention"):
            (seed,) = (
                n.args[1]
                for n in node.all_input_nodes
                if n.target is torch.ops.aten.add.Scalar and n.args[0].name == "seed"
            )
            by_source.setdefault(node.meta["source"], []).append(seed)
    return by_source


@pytest.mark.slow_cells("ddp-blocks")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_drops_what_one_device_drops(name: str, layout: str) -> None:
    named_or_refused(known(name), 4, layout)


@pytest.mark.slow_cells("again", "attended", "between", "blocks", "masked", "normed", "twice")
@pytest.mark.parametrize("name", NAMES)
def test_so_does_any_plan(name: str) -> None:
    for seed in range(3):
        known(name).at_random("x2.y2", seed)
    known(name).at_random("x2.y3", 3)


@pytest.mark.slow_cells("between")
@pytest.mark.slow_cells("attended")
@pytest.mark.parametrize("name", NAMES)
def test_copies_have_one_seed_and_other_dropouts_another(name: str) -> None:
    copies = 0
    for mesh, draw in (("x2.y2", 0), ("x2.y2", 1), ("x2.y3", 2)):
        by_source = seeds(random_program(name, mesh, draw).module)
        assert all(len(set(numbers)) == 1 for numbers in by_source.values()), by_source
        assert len({numbers[0] for numbers in by_source.values()}) == len(by_source), by_source
        copies += sum(len(numbers) - 1 for numbers in by_source.values())
    assert copies or name not in ("attended", "twice", "normed"), "no plan makes copies"


@pytest.mark.slow_cells("megatron")
@pytest.mark.parametrize("layout", ["ddp", "megatron"])
def test_copies_in_blocks_that_run_again_have_it_too(layout: Any) -> None:
    model, inputs = dropout_model("blocks")
    plan = autopar.plan(model, 2, inputs, layout=layout, recompute="full", smaller=False)
    assert plan.context is not None
    calls = plan.context.program.module.graph.find_nodes(
        op="call_function", target=recompute_in_backward
    )
    assert len(calls) == 2
    autopar.verify(model, 2, inputs, layout=layout, recompute="full")


# -- on ranks --------------------------------------------------------------------------------------
@pytest.mark.slow
def test_scheduled_steps_drop_what_one_device_drops(tmp_path: Path) -> None:
    facts = launched(tmp_path, 2, "scheduled", "outside", script="mask_ranks.py")
    seen = facts.pop("outside")["seen"]
    assert all(text.startswith("InputError: a model with dropout") for text in seen), seen
    check_errors(facts, LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_so_do_more_models_and_ranks(tmp_path: Path, ranks: int) -> None:
    check_errors(
        launched(tmp_path, ranks, "all", "blocks", "emitted", script="mask_ranks.py"), LIMIT
    )


def test_the_seed_is_not_moved_within_a_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: gradient * next_seed(4))
    with pytest.raises(InputError, match="run again within a backward"):
        y.sum().backward()
    assert next_seed(4) == 5


# -- steps, and ops that are not repeatable --------------------------------------------------------
def test_no_dropout_draws_in_a_step_what_another_draws_in_a_later_one() -> None:
    by_source = seeds(random_program("twice", "x2.y2", 0).module)
    numbers = sorted(numbers[0] for numbers in by_source.values())
    assert len(numbers) == 3
    assert all(b - a >= 2**32 for a, b in itertools.pairwise(numbers))


_CALLS = itertools.count()


def _own_op(name: str, function: Any, results: int = 1) -> Any:
    def fake(x: Tensor) -> Any:
        outputs = [torch.empty_like(x) for _ in range(results)]
        return outputs[0] if results == 1 else tuple(outputs)

    returned = Tensor if results == 1 else tuple[(Tensor,) * results]  # type: ignore[misc]
    function.__annotations__ = {"x": Tensor, "return": returned}
    op = torch.library.custom_op(f"autopar_test_masks::{name}", function, mutates_args=())
    op.register_fake(fake)
    return op


noisy = _own_op("noisy", lambda x: x + torch.rand_like(x))
counting = _own_op("counting", lambda x: x + next(_CALLS))
unused = _own_op("unused", lambda x: (x.cumsum(0), torch.rand_like(x)), 2)
scans = _own_op("scans", lambda x: (x.sort(0)[0].cumsum(1), x.cumsum(0).sort(1)[0]), 2)


@pytest.mark.parametrize("op", [noisy, counting], ids=lambda op: op._name)
def test_an_op_that_gives_other_results_when_it_runs_again_is_refused(op: Any) -> None:
    model = Dropped(lambda m, x: m.q(op(x)).mT @ m.k(x))
    with pytest.raises(PlanError, match="draws random numbers") as caught:
        autopar.plan(model, 2, (torch.randn(12, 24),), smaller=False)
    assert op._name in str(caught.value)


def test_results_that_nobody_uses_may_be_random() -> None:
    model = Dropped(lambda m, x: m.q(unused(x)[0]).mT @ m.k(x))
    autopar.verify(model, 2, (torch.randn(12, 24),))


def test_an_op_that_nothing_splits_runs_once_for_all_its_results() -> None:
    def both(model: Any, x: Tensor) -> Tensor:
        first, other = scans(x)
        return (model.q(first) @ model.k(other).mT) @ (first * other) + model.v(other)

    model, inputs = Dropped(both), (torch.randn(12, 24),)
    plan = autopar.plan(model, 4, inputs, layout="ddp", smaller=False)
    assert plan.context is not None
    nodes = plan.context.program.module.graph.nodes
    assert sum(node.target is torch.ops.autopar_test_masks.scans.default for node in nodes) == 1
    autopar.verify(model, 4, inputs, layout="ddp")
