"""Bad input gets a ValueError: what, where, which sizes, what to do. The model is as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import autopar
from autopar import InputError, LayoutError, PlanError, RankError, TraceError, WorldError
from autopar.world import ranks
from odd_models import BATCH, HIDDEN, Simple, rows
from refusals import Options, refused, two_layers

# -- what cannot be one graph ----------------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if y.sum() > 0 else -y  # the line to be named


CALLS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "plan": lambda model, inputs: autopar.plan(model, 4, inputs),
    "verify": lambda model, inputs: autopar.verify(model, 4, inputs),
    "parallelize": lambda model, inputs: autopar.parallelize(model, 1, inputs),
    "first call": lambda model, inputs: autopar.parallelize(model, 1)(*inputs),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_model_that_cannot_be_traced_is_refused_with_its_own_line(call: str) -> None:
    model = Branch()
    line = Path(__file__).read_text().splitlines().index(
        "        return y if y.sum() > 0 else -y  # the line to be named"
    )  # fmt: skip
    says = (
        "Branch cannot be one graph: a branch or a shape depends on the values of a tensor",
        f'File "{__file__}", line {line + 1}, in forward',
        "torch.where",
    )
    with refused(TraceError, *says, model=model):
        CALLS[call](model, (torch.ones(3, 4),))


@pytest.mark.parametrize("inputs", [None, 7, "text"])
def test_inputs_of_no_known_kind(inputs: Any) -> None:
    model = two_layers()
    with refused(InputError, "a tuple of positional arguments, a dict", model=model):
        autopar.plan(model, 2, inputs)


def test_a_first_call_by_position_and_by_name_at_once() -> None:
    par = autopar.parallelize(two_layers(), 1)
    with refused(InputError, "all inputs by position or all by name"):
        par(rows(), scale=2)
    with refused(InputError, "the parameters are known after the first call"):
        list(par.parameters())


# -- worlds and layouts ----------------------------------------------------------------------------


def test_worlds_that_are_none() -> None:
    model = two_layers()
    with refused(WorldError, "a world of 0 ranks", model=model):
        autopar.plan(model, 0, (rows(),))
    with refused(WorldError, "type str: 'eight'", "a number of ranks", model=model):
        autopar.plan(model, "eight", (rows(),))


def test_a_world_that_is_not_the_one_that_runs() -> None:
    model = two_layers()
    plan = autopar.plan(model, 4, (rows(),))
    with refused(WorldError, "for 4 ranks", "1 are running", "torchrun", model=model):
        autopar.apply(model, plan)
    with refused(WorldError, "4 ranks", "1 ", model=model):
        autopar.parallelize(model, 4, (rows(),))


def test_an_unknown_layout_lists_the_known_ones() -> None:
    model = two_layers()
    names = ("unknown layout 'megatorn'", "auto", "ddp", "fsdp", "megatron", "4d", "2.5d")
    with refused(LayoutError, *names, model=model):
        autopar.plan(model, 4, (rows(),), layout="megatorn")


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_batch_that_the_ranks_do_not_divide(layout: str) -> None:
    model = two_layers()
    says = (f"layout {layout!r}", "axis data of 25 ranks", "a batch of 12", "use a batch that 25")
    with refused(LayoutError, *says, model=model):
        autopar.plan(model, 25, (rows(),), layout=layout)


def test_weights_that_the_ranks_do_not_divide() -> None:
    model = two_layers()
    says = ("layout 'megatron'", "axis tp of 101 ranks", "101 divides none",
            "up (k = 24 stays whole, n = 48)", "down (k = 48, n = 24 stays whole)")  # fmt: skip
    with refused(LayoutError, *says, model=model):
        autopar.plan(model, 101, (rows(),), layout="megatron")


def test_weights_of_which_a_layout_may_split_little() -> None:
    """Sizes that the axis divides are not enough where they belong to the residual stream."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.top = nn.GRU(8, 8), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(self.layer(x)[0]).square().mean()

    says = ("2 divides none", "top (k = 8 stays whole, n = 5)")
    with refused(LayoutError, *says):
        autopar.plan(Recurrent(), 2, (torch.randn(3, 4, 8),), layout="megatron")


def test_grids_that_do_not_fit_the_world() -> None:
    model = two_layers()
    with refused(LayoutError, "Grid4D", "= 8 ranks, the world has 4: choose sizes", model=model):
        autopar.plan(model, 4, (rows(),), layout=autopar.Grid4D(x=2, y=2, z=2))


# -- plans -----------------------------------------------------------------------------------------


def saved(tmp_path: Path, **overrides: Any) -> Path:
    path = tmp_path / "plan.json"
    autopar.plan(two_layers(), 1, (rows(),)).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **overrides}))
    return path


def test_a_saved_plan_is_for_the_model_that_it_was_made_for(tmp_path: Path) -> None:
    plan = autopar.Plan.load(saved(tmp_path))
    model = two_layers()
    with refused(InputError, "holds no graph", "give apply the inputs", model=model):
        autopar.apply(model, plan)
    with refused(PlanError, "this model with these inputs gives", "plan again", model=model):
        autopar.apply(model, plan, (rows(BATCH, 3, HIDDEN),))
    x = rows()
    torch.testing.assert_close(autopar.apply(model, plan, (x,))(x), model(x))


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    with refused(PlanError, "is version 99, this autopar reads version", "plan again"):
        autopar.Plan.load(saved(tmp_path, version=99))
    (tmp_path / "plan.json").write_text("no json")
    with refused(PlanError, "plan.json is no plan"):
        autopar.Plan.load(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text("[]")
    with refused(PlanError, "plan.json is no plan: it is a list, not an object"):
        autopar.Plan.load(tmp_path / "plan.json")


def resized(model: Simple) -> None:
    model.down = nn.Linear(48, 30)


def halved(model: Simple) -> None:
    model.down.half()


def frozen(model: Simple) -> None:
    model.down.weight.requires_grad_(False)


def removed(model: Simple) -> None:
    model.down.bias = None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (resized, "parameter down.weight was (24, 48) torch.float32 when the model was planned and "
         "is (30, 48) torch.float32 now: plan again"),
        (halved, "down.weight was (24, 48) torch.float32 when the model was planned and is "
         "(24, 48) torch.float16 now"),
        (frozen, "is (24, 48) torch.float32, frozen now"),
        (removed, "parameter down.bias was (24,) torch.float32 when the model was planned and is "
         "gone now"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_model_that_changed_after_planning(change: Callable[[Simple], None], says: str) -> None:
    model = two_layers()
    plan = autopar.plan(model, 1, (rows(),))
    change(model)
    with refused(PlanError, says, model=model):
        autopar.apply(model, plan)


def test_weights_that_were_tied_when_planned() -> None:
    model = two_layers()
    model.again = nn.Linear(24, 48)
    model.again.weight = model.up.weight
    plan = autopar.plan(model, 1, (rows(),))
    model.again.weight = nn.Parameter(model.up.weight.detach().clone())
    says = ("up.weight, again.weight were one tensor when the model was planned", "plan again")
    with refused(PlanError, *says, model=model):
        autopar.apply(model, plan)


def test_names_that_a_parallel_module_has_itself() -> None:
    model = Simple(lambda m, x: m.plan(m.down(m.up(x))).sum(), plan=nn.Linear(24, 24))
    with refused(PlanError, "has its own 'plan': rename plan.weight", model=model):
        autopar.parallelize(model, 1, (rows(),))


def test_verify_refuses_random_numbers_too() -> None:
    model = Simple(lambda m, x: m.down(m.up(x) + torch.poisson(torch.ones(48))).sum())
    with refused(PlanError, "draws random numbers", "aten.poisson.default", model=model):
        autopar.verify(model, 4, (rows(),))


# -- calls -----------------------------------------------------------------------------------------


def parallel(model: nn.Module, inputs: Any, layout: str = "ddp") -> Any:
    return autopar.parallelize(model, 2, inputs, layout=layout)


def test_batches_that_the_model_does_not_take(two_ranks: None) -> None:
    model = Options()
    par = parallel(model, {"x": rows(), "scale": 2.0})
    with pytest.raises(RuntimeError, match="same dtype"):
        par(x=rows().double(), scale=2.0)
    with refused(TraceError, "Options", "must be Tensor, not int"):
        par(x=3, scale=2.0)
    assert par(x=rows()[:6], scale=2.0).shape == ()
    torch.testing.assert_close(par.shard(rows().fill_(1), 2.0)[1]["scale"], 2.0)  # as planned
    assert par.shard(x=rows()[:6], scale=2.0)[1]["x"].shape == (6, 24)


def test_gradients_of_inputs_that_were_not_planned(two_ranks: None) -> None:
    model = two_layers()
    par = parallel(model, (rows(),))
    x = rows().requires_grad_()
    par(x).sum().backward()
    assert x.grad is not None and len(par._autopar.graphs.others) == 1
    planned = parallel(model, (rows().requires_grad_(),))
    (entry,) = planned._autopar.first.user_inputs
    for x in (rows(), rows().requires_grad_()):  # planned with one: both are welcome
        assert planned._autopar.first._own_part(entry, x) is x


def test_a_parameter_that_was_frozen_is_planned_anew(two_ranks: None) -> None:
    model = two_layers()
    model.down.weight.requires_grad_(False)
    par = parallel(model, (rows(),))
    assert not par.get_parameter("down.weight").requires_grad
    par.get_parameter("down.weight").requires_grad_(True)
    par(rows())
    entries = [graph.parameters for graph in par._autopar.graphs.others]
    assert len(entries) == 1 and all(entry.trainable for entry in entries[0])
    par.get_parameter("down.weight").requires_grad_(False)
    par(rows())
    assert len(par._autopar.graphs.others) == 1


def test_distributed_inputs_that_lie_otherwise(two_ranks: None) -> None:
    par = parallel(two_layers(), (rows(),))
    mesh: DeviceMesh = par._autopar.device_mesh
    x = rows()
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    own = par._autopar.first._own_part(par._autopar.first.user_inputs[0], whole)
    assert own.placements == (Shard(0),)
    torch.testing.assert_close(own.to_local(), x[:6])
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    part = DTensor.from_local(rows()[:6], other, [Shard(0)], run_check=False)
    with refused(InputError, "input args[0] is a DTensor on", "the plan wants one on", "`shard`"):
        par(part)
    part = DTensor.from_local(rows()[:6], mesh, [Shard(0)], run_check=False)
    assert par._autopar.first._own_part(par._autopar.first.user_inputs[0], part) is part
    torch.testing.assert_close(par.shard(rows().fill_(2)).to_local(), torch.full((6, 24), 2.0))


@pytest.mark.slow
def test_each_mode_has_its_graph(two_ranks: None) -> None:
    model = nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.5)).train()
    par = parallel(model, (rows(),))
    assert par.training
    draws = ["dropout" in str(graph.run.module.graph) for graph in graphs_of(par.eval(), rows())]
    assert draws == [True, False]
    par = parallel(model.eval(), (rows(),))
    assert not par.training
    draws = ["dropout" in str(graph.run.module.graph) for graph in graphs_of(par.train(), rows())]
    assert draws == [False, True]


def graphs_of(par: Any, x: Tensor) -> list[Any]:
    """The planned graph and those of a call."""
    par(x)
    return [par._autopar.first, *par._autopar.graphs.others]


def test_a_parameter_that_is_not_there(two_ranks: None) -> None:
    par = parallel(two_layers(), (rows(),))
    assert str(par.layout("up.weight")) == "whole"
    with refused(InputError, "no parameter 'up.wieght'"):
        par.layout("up.wieght")


# -- ranks that disagree ---------------------------------------------------------------------------


def test_all_ranks_name_the_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "all_of", lambda value: [value, ("KeyError", "'x'")])
    with refused(RankError, "rank 1 of 2 failed while reading the arguments: KeyError: 'x'"):
        autopar.parallelize(two_layers(), 1, (rows(),))


def test_ranks_with_different_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(value: Any) -> list[Any]:
        return [value, "another" if isinstance(value, str) else value]

    monkeypatch.setattr(ranks, "all_of", gathered)
    with refused(RankError, "the ranks hold different models", "rank 1 another"):
        autopar.parallelize(two_layers(), 1, (rows(),))
