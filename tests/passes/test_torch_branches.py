"""Functions of torch that branch on the values of tensors: traced without the branch, or named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.distributions import SigmoidTransform
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autopar
from autopar.errors import TraceError
from autopar.ops.ctc import ctc_losses
from autopar.passes.trace import trace
from autopar.passes.trace.torch_branches import (
    BRANCHLESS,
    adaptive_log_softmax,
    batch_norm,
    ctc_loss,
    gaussian_nll_loss,
)


class Calls(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.linear(x))


class Clusters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2, 4], div_value=1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x, torch.arange(8)).loss


class Predicts(Clusters):
    def forward(self, x: Tensor) -> Tensor:
        return self.loss.predict(x)


def connectionist(x: Tensor, reduction: str = "mean", tensors: bool = True) -> Tensor:
    lengths: list[Any] = [[3, 2, 3, 3, 1, 3, 3, 3], [2, 1, 0, 2, 1, 2, 1, 2]]
    if tensors:
        lengths = [torch.tensor(own) for own in lengths]
    targets = torch.tensor([[1, 2], [3, 1]]).repeat(4, 1)
    steps = torch.stack([x, x.sin(), x * x]).log_softmax(-1)
    return F.ctc_loss(steps, targets, *lengths, reduction=reduction)


def joined_targets(x: Tensor) -> Tensor:
    steps = torch.stack([x, x.sin(), x * x]).log_softmax(-1)
    return F.ctc_loss(steps, torch.tensor([1, 2, 3] * 4), (3,) * 8, (2, 1) * 4)


def own_branch(x: Tensor) -> Tensor:
    return x.sum() if x.sum() > 0 else x.mean()


def test_a_branch_inside_torch_is_said_to_be_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(BRANCHLESS, F.ctc_loss)
    with pytest.raises(TraceError) as caught:
        trace(Calls(connectionist), (torch.ones(8, 4),))
    message = str(caught.value)
    assert "inside torch.nn.functional.ctc_loss, torch's own code, a branch" in message
    assert __file__ in message


def test_a_branch_inside_torch_is_said_with_what_to_write() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Predicts(), (torch.ones(8, 4),))
    message = str(caught.value)
    assert "inside torch.nn.AdaptiveLogSoftmaxWithLoss, torch's own code, a branch" in message
    assert "m.log_prob(x).argmax(dim=1)" in message.splitlines()[-1] and __file__ in message


def test_a_branch_of_the_user_is_not_said_to_be_torchs() -> None:
    with pytest.raises(TraceError, match="cannot be one graph: a branch"):
        trace(Calls(own_branch), (torch.ones(8, 4),))


@pytest.mark.parametrize("as_numbers", [False, True])
def test_packed_sequences_are_refused_with_what_to_write(as_numbers: bool) -> None:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(4, 6, batch_first=True)

        def forward(self, x: Tensor, lengths: Any) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0].sum()

    lengths = [3, 1, 2, 3]
    inputs = torch.ones(4, 3, 4), lengths if as_numbers else torch.tensor(lengths)
    assert Packs()(*inputs).isfinite()
    with pytest.raises(TraceError, match="shapes of packed sequences depend on") as caught:
        trace(Packs(), inputs)
    assert "the padded batch" in str(caught.value) and __file__ in str(caught.value)


# -- connectionist temporal classification ---------------------------------------------------------
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("kind", ["padded", "joined", "one sample", "infinite"])
def test_a_ctc_loss_as_one_operator_is_the_same(kind: str, reduction: str) -> None:
    leaf = torch.randn(7, 4, 5, dtype=torch.float64, requires_grad=True)
    steps = leaf.log_softmax(-1)
    targets: Tensor = torch.tensor([[1, 2, 3], [4, 3, 2], [1, 3, 1], [2, 2, 2]])
    lengths: list[Any] = [(7, 6, 7, 5), (3, 2, 0, 3)]
    if kind == "joined":
        targets = torch.tensor([1, 2, 3, 4, 3, 2, 2, 2])
    if kind == "one sample":
        steps, targets, lengths = steps[:, 0], targets[0], [torch.tensor(7), torch.tensor(3)]
    if kind == "infinite":
        lengths[0] = (7, 6, 7, 4)
    options: Any = {"reduction": reduction, "zero_infinity": kind == "infinite"}
    results = [f(steps, targets, *lengths, **options) for f in (F.ctc_loss, ctc_loss)]
    torch.testing.assert_close(*results, rtol=0, atol=0)
    gradients = [torch.autograd.grad(r.square().sum(), leaf, retain_graph=True) for r in results]
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-16)


def test_the_operator_of_ctc_losses_is_one_that_torch_can_compile() -> None:
    arguments = [torch.randn(5, 4, 3).log_softmax(-1).requires_grad_(), torch.ones(4, 2).long()]
    lengths = torch.full((4,), 5), torch.full((4,), 2)
    torch.library.opcheck(ctc_losses, (*arguments, *lengths, 0, False))


@pytest.mark.slow_cells("joined-fsdp", "padded-fsdp")
@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        ("fsdp", connectionist),
        ("fsdp", joined_targets),
        ("megatron", partial(connectionist, tensors=False)),
    ],
    ids=["padded-fsdp", "joined-fsdp", "numbers-megatron"],
)
def test_a_ctc_loss_is_split_over_samples(layout: str, loss: Callable[[Tensor], Tensor]) -> None:
    model, x = Calls(loss), torch.randn(8, 4)
    plan = autopar.plan(model, 4, (x,), layout=layout)
    (choice,) = (choice for name, choice in plan.choices.items() if name.startswith("ctc_loss"))
    assert choice.splits == (("n",) if layout == "fsdp" else ("I",)), choice
    autopar.verify(model, 4, (x,), layout=layout)


# -- adaptive softmax ------------------------------------------------------------------------------
@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("head_bias", [False, True])
def test_every_cluster_for_every_row_is_the_same(head_bias: bool, one_row: bool) -> None:
    module = nn.AdaptiveLogSoftmaxWithLoss(6, 12, [3, 5, 9], div_value=1.5, head_bias=head_bias)
    module.double()
    x = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    target = torch.arange(20) % 12
    inputs = (x[7], target[7]) if one_row else (x, target)
    results = [module(*inputs), adaptive_log_softmax(module, *inputs)]
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-14)
    leaves = [x, *module.parameters()]
    gradients = [
        torch.autograd.grad(r.loss.exp() + r.output.square().sum(), leaves, materialize_grads=True)
        for r in results
    ]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
    assert adaptive_log_softmax(module, x, target + 1).output.isnan().sum() == 1


@pytest.mark.slow_cells("fsdp")
@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
def test_an_adaptive_softmax_is_split_and_a_warning_says_what_it_costs(layout: str) -> None:
    model, x, forward = Clusters(), torch.randn(8, 4), nn.AdaptiveLogSoftmaxWithLoss.forward
    with pytest.warns(UserWarning, match="computes every cluster for every row") as warned:
        autopar.verify(model, 2, (x,), layout=layout)
    assert len([w for w in warned if "cluster" in str(w.message)]) == 1
    assert nn.AdaptiveLogSoftmaxWithLoss.forward is forward, "that is torch's"
    assert not autopar.plan(model, 2, (x,), layout=layout).unsplit


# -- running averages ------------------------------------------------------------------------------
class Averages(Calls):
    """Its batch norm averages the statistics of all batches, as `update_bn` lets it."""

    def __init__(self) -> None:
        super().__init__(lambda x: x.square().mean())
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.norm(self.linear(x)))


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("momentum", [None, 0.3])
def test_a_batch_norm_without_its_branch_is_the_same(momentum: float | None, track: bool) -> None:
    pair = [nn.BatchNorm2d(4, momentum=momentum, track_running_stats=track) for _ in range(2)]
    for training in (True, True, False, True):
        x = torch.randn(6, 4, 2, 3)
        first, other = (norm.train(training) for norm in pair)
        torch.testing.assert_close(batch_norm(first, x), other(x))
        torch.testing.assert_close(first.state_dict(), other.state_dict())


def test_a_running_average_is_planned() -> None:
    forward, model = nn.BatchNorm1d.forward, Averages()
    autopar.verify(model, 2, (torch.randn(8, 4),), layout="fsdp")
    assert nn.BatchNorm1d.forward is forward and "forward" not in vars(nn.BatchNorm1d)


# -- others ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("variance", ["entries", "rows", "column", "number"])
def test_a_gaussian_loss_without_its_check_is_the_same(variance: str, reduction: str) -> None:
    x, y = torch.randn(2, 8, 4, dtype=torch.float64).requires_grad_().unbind(0)
    wide = torch.randn(8, 4, dtype=torch.float64).abs().requires_grad_()
    var = {"entries": wide, "rows": wide[:, 0], "column": wide[:, :1], "number": 0.3}[variance]
    options = {"full": reduction == "sum", "eps": 0.4, "reduction": reduction}
    results = [f(x, y, var, **options) for f in (F.gaussian_nll_loss, gaussian_nll_loss)]
    torch.testing.assert_close(*results, rtol=1e-14, atol=0)
    leaves = (x, y, wide) if isinstance(var, Tensor) else (x, y)
    gradients = [torch.autograd.grad(r.square().sum(), leaves) for r in results]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-15)


def test_a_model_with_a_gaussian_loss_is_planned() -> None:
    loss = Calls(lambda x: F.gaussian_nll_loss(x, torch.zeros_like(x), x.exp()))
    autopar.verify(loss, 4, (torch.randn(8, 4),), layout="fsdp")


def normal(x: Tensor, **options: bool) -> Tensor:
    return -distributions.Normal(x, x.exp(), **options).log_prob(x.detach()).mean()


def mixture(x: Tensor) -> Tensor:
    scale = torch.tril(x[:, :, None] * x[:, None], -1) + torch.diag_embed(x.exp())
    gaussian = distributions.MultivariateNormal(x, scale_tril=scale)
    squashed = distributions.TransformedDistribution(
        distributions.Independent(distributions.Normal(x, x.exp()), 1), [SigmoidTransform()]
    )
    prior = distributions.kl_divergence(
        distributions.Categorical(logits=x), distributions.Categorical(torch.ones(4))
    )
    coin = distributions.Bernoulli(logits=x).log_prob((x > 0).float())
    likely = gaussian.log_prob(x * 0) + squashed.log_prob(x.sigmoid()) - prior
    return (likely + coin.sum(-1)).mean()


@pytest.mark.slow_cells("mixture-fsdp", "mixture-megatron", "normal-fsdp")
@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
@pytest.mark.parametrize("loss", [normal, mixture])
def test_distributions_are_traced_without_their_checks(
    monkeypatch: pytest.MonkeyPatch, loss: Callable[[Tensor], Tensor], layout: str
) -> None:
    # dynamo turns the checks off for good where anything was compiled before
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)
    model, x = Calls(loss), torch.randn(8, 4)
    with pytest.warns(UserWarning, match="Calls has torch.distributions") as warned:
        autopar.verify(model, 4, (x,), layout=layout)
    assert len(warned) == 1
    assert distributions.Distribution._validate_args is True, "that is the user's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(model, (torch.ones(4, 4),))  # has been said of this model


def test_whoever_has_turned_the_checks_off_sees_no_warning() -> None:
    distributions.Distribution.set_default_validate_args(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trace(Calls(normal), (torch.ones(8, 4),))
        assert distributions.Distribution._validate_args is False
    finally:
        distributions.Distribution.set_default_validate_args(True)


def test_a_distribution_that_checks_its_arguments_is_refused_by_name() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Calls(lambda x: normal(x, validate_args=True)), (torch.ones(8, 4),))
    message = str(caught.value)
    assert "inside torch.distributions.Normal, torch's own code" in message
    assert "Leave out validate_args=True" in message and __file__ in message
