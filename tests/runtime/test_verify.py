"""verify finds what is wrong, and says where: rules, adjoints and ranks broken on purpose."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopar
from autopar import VerificationError, World, passes
from autopar.ir.layout import Layout
from autopar.ir.sharding_rule import TABLE, OpShardingRule
from autopar.ops import autograd, comm, local
from autopar.planner import confirm
from autopar.planner.bounds.option_costs import OptionCosts
from autopar.tools.decoders import Llama, Sizes
from odd_models import ODD, Simple, rows, sequences
from plans import random_plan, subject

aten = torch.ops.aten
verify_module = importlib.import_module("autopar.runtime.verify")


def normed() -> tuple[nn.Module, tuple[Tensor]]:
    """A block whose softmax and norm run over what megatron splits."""

    def body(model: Any, x: Tensor) -> Tensor:
        return model.down(model.norm(model.up(x)).softmax(-1)).square().sum()

    torch.manual_seed(0)
    return Simple(body, norm=nn.LayerNorm(48)), (sequences(),)


def broken(monkeypatch: pytest.MonkeyPatch, target: Any, **overrides: Any) -> None:
    """Changes fields of an op's rule."""
    build = TABLE[target]

    def lie(node: fx.Node) -> OpShardingRule:
        return dataclasses.replace(build(node), **overrides)

    monkeypatch.setitem(TABLE, target, lie)


def refused(model: nn.Module, ranks: int, inputs: Any, layout: str) -> str:
    with pytest.raises(VerificationError) as caught:
        autopar.verify(model, ranks, inputs, layout=layout)
    return str(caught.value)


# -- values ----------------------------------------------------------------------------------------


def test_a_sum_that_a_rule_forgets_is_found_at_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = normed()
    autopar.verify(model, 2, inputs, layout="megatron")
    none = frozenset[str]()
    broken(monkeypatch, aten.linear.default, sum=none, shared=frozenset("k"), added=none)
    message = refused(model, 2, inputs, "megatron")
    assert message.startswith("the first wrong node is linear")
    assert " in down " in message and 'File "' in message
    assert "aten.linear.default of layout (whole), shape (12, 6, 24), relative error " in message


def test_an_op_without_its_sharded_implementation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = normed()
    case = subject(model, inputs)

    def splits(seed: int) -> bool:
        plan = random_plan(case.program, "x3", World.of(3), seed)
        return str(plan.choices["softmax"].operands[0]) == "x:S(2)"

    seed = next(seed for seed in range(100) if splits(seed))
    case.at_random("x3", seed)
    monkeypatch.delitem(local._SPECIAL, aten.softmax.int)
    with pytest.raises(VerificationError) as caught:
        case.at_random("x3", seed)
    assert str(caught.value).startswith("the first wrong node is softmax")
    assert "aten.softmax.int of layout (x:S(2)), shape (12, 6, 48)" in str(caught.value)


def test_a_mean_by_the_local_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(local._SPECIAL, aten.mean.default)
    model = Simple(lambda m, x: m.down(m.up(x).relu()).square().mean())
    message = refused(model, 2, (rows(),), "ddp")
    assert message.startswith("the first wrong node is mean")
    assert "of layout (data:P), shape (), relative error 1.00e+00" in message


def test_a_wrong_shape_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(call: local.Call) -> fx.Node:
        return call.again(call.values())

    monkeypatch.setitem(local._SPECIAL, aten.slice.Tensor, unscaled)
    # the weight stored in the digit that the slice leaves, so that a split slice costs nothing
    monkeypatch.setattr(Layout, "is_plain", property(lambda layout: True))
    monkeypatch.setattr(OptionCosts, "_plain", lambda costs, kind, states: np.True_)
    model = Simple(lambda m, x: m.up(x)[:, :24].relu().square().sum())
    message = refused(model, 2, (rows(),), "megatron")
    assert message.startswith("the first wrong node is slice")
    assert "of layout (tp:S(1)), shape (12, 24), is (12, 24) on a rank, not (12, 12)" in message


def test_ranks_that_should_agree_and_do_not_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout of a whole value whose seed differs by rank."""
    feed = verify_module._Rank.feed

    def own_seed(rank: Any, entry: Any) -> Any:
        value = feed(rank, entry)
        return value + sum(rank.coordinate.values()) if entry.kind == "seed" else value

    monkeypatch.setattr(verify_module._Rank, "feed", own_seed)
    model = Simple(lambda m, x: m.down(m.up(x)).sum() + F.dropout(m.up.weight, 0.5).sum())
    message = refused(model, 2, (rows(),), "ddp")
    assert message.startswith("the first wrong node is dropout")
    assert "dropout of layout (whole), shape (48, 24), the copies on ranks 0 and 1 " in message


# -- gradients -------------------------------------------------------------------------------------


def identity(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return grad, None, None


def test_a_broken_adjoint_is_found_and_names_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are right, but gradients of the ranks' parts of the batch are not added."""
    model, inputs = normed()
    monkeypatch.setattr(autograd.Replicate, "backward", staticmethod(identity))
    message = refused(model, 2, inputs, "ddp")
    assert message.startswith("grad_error is ") and "past the tolerance 1e-09" in message
    assert "on mesh data2 with layout ddp" in message
    worst = message.partition("worst gradients ")[2]
    assert worst.startswith("p_up_weight (whole) ") and worst.count(", ") == 2


def test_a_sum_made_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P -> I whose backward sums the gradients, which are equal: twice too much."""

    def summed(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return 2 * grad, None

    monkeypatch.setattr(autograd.AllReduceToInvariant, "backward", staticmethod(summed))
    model, inputs = normed()
    message = refused(model, 2, inputs, "fsdp")
    assert message.startswith("grad_error is ") and "(data:S(" in message


def test_gradients_of_inputs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, _ = ODD["inputs_that_require_gradients"]()
    autopar.verify(model, 2, inputs, layout="ddp")

    def own_part(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        dim, _, back = ctx.facts
        return torch.cat([grad] * comm.route_size(back), dim), None, None, None, None, None

    monkeypatch.setattr(autograd.SliceOfInvariant, "backward", staticmethod(own_part))
    message = refused(model, 2, inputs, "ddp")
    assert message.startswith("grad_error is ") and "worst gradients args_0 (whole)" in message


def test_a_gradient_that_should_not_be_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A detach that is lost on the way."""
    model, inputs, _ = ODD["a_branch_that_is_detached"]()

    *before, last = passes.PIPELINE

    def only_several(program: Any, world: Any) -> Any:
        emitted = last.run(program, world)
        if program.plan.mesh.axes:
            for node in emitted.module.graph.nodes:
                if node.target is aten.detach.default:
                    node.target = aten.alias.default
            emitted.module.recompile()
        return emitted

    monkeypatch.setattr(confirm, "PIPELINE", (*before, last._replace(run=only_several)))
    assert refused(model, 2, inputs, "ddp").startswith("grad_error is ")


# -- what it leaves and what it says ---------------------------------------------------------------


def test_a_check_says_what_was_compared() -> None:
    model, inputs = normed()
    check = autopar.verify(model, 4, inputs)
    assert check.ranks == 4 and check.nodes >= 10
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-12
    assert str(check).startswith(f"4 ranks equal one: {check.nodes} nodes, loss to ")


def test_verify_leaves_the_model_the_inputs_and_torch_as_they_were() -> None:
    model, inputs, _ = ODD["batch_norm"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    autopar.verify(model, 2, inputs)
    assert torch.get_default_dtype() is torch.float32 and torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert inputs[0].dtype is torch.float32 and inputs[0].grad is None


def test_the_tolerance_is_the_users() -> None:
    model, inputs = normed()
    with pytest.raises(VerificationError, match=r"past (the tolerance )?1e-30"):
        autopar.verify(model, 4, inputs, tolerance=1e-30)


def test_what_is_zero_but_for_rounding_raises_no_alarm() -> None:
    """A bias before a batch norm has no gradient; AdamW would scale its noise up to whole steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 6))
    assert autopar.verify(model, 4, (rows(),), layout="ddp").step_error < 1e-9


@pytest.mark.slow
def test_a_plan_that_looks_at_memory_is_verified_too() -> None:
    """Its peak is worked out in the model's own dtype; the ranks compute in float64."""
    model = Llama(Sizes("llama", 2, 32, 4, 64, 16, 4, 64))  # it makes cosines in its own dtype
    inputs = (torch.randint(0, 64, (8, 16)),) * 2
    check = autopar.verify(model, World.preset("dgx-h100", ranks=4), inputs, layout="4d")
    assert check.ranks == 4 and check.grad_error < 1e-9


# -- parametrizations ------------------------------------------------------------------------------
@pytest.mark.slow_cells(
    "orthogonal-False", "orthogonal-True", "spectral_norm-False", "spectral_norm-True",
)  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "orthogonal"])
def test_parametrized_weights_are_right_in_both_modes(kind: str, training: bool) -> None:
    """In training, spectral_norm writes into buffers: verify holds them against the model's."""
    wrap = getattr(nn.utils.parametrizations, kind)
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Linear(16, 32)), nn.ReLU(), wrap(nn.Linear(32, 8)))
    layout = "megatron" if training else "ddp"
    check = autopar.verify(model.train(training), 2, (torch.randn(8, 16),), layout=layout)
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-9


def test_a_parametrization_that_the_graph_has_otherwise_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8)))
    nn.init.normal_(model[0].parametrizations.weight.original)  # whose norm is not estimated yet
    original = importlib.import_module("autopar.passes.trace.original")
    of_model = original._of_model

    def with_more_iterations(model: Any, *inputs: Any) -> Any:
        model[0].parametrizations.weight[0].n_power_iterations = 2
        return of_model(model, *inputs)

    monkeypatch.setattr(original, "_of_model", with_more_iterations)
    with pytest.raises(VerificationError, match=r"is off by"):
        autopar.verify(model, 2, (torch.randn(8, 16),), layout="ddp")


def test_a_parameter_without_elements_is_equal_to_itself() -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        return torch.cat([model.up(x), model.none]).square().mean()

    model = Simple(body, up=nn.Linear(8, 8))
    model.none = nn.Parameter(torch.zeros(0, 8))
    autopar.verify(model, 2, (torch.randn(8, 8),), layout="fsdp")
