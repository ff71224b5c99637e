"""Functions of torch that branch on the values of tensors: traced without the branch, or named."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.distributions import SigmoidTransform
from torch.nn import functional as F

import autopar
from autopar.errors import TraceError
from autopar.passes.trace import trace
from autopar.passes.trace.torch_branches import gaussian_nll_loss


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


class AllClasses(Clusters):
    """As the message says to write it."""

    def forward(self, x: Tensor) -> Tensor:
        return -self.loss.log_prob(x).gather(1, torch.arange(8)[:, None]).mean()


def connectionist(x: Tensor) -> Tensor:
    lengths = torch.full((8,), 3), torch.full((8,), 2)
    targets = torch.ones(8, 2, dtype=torch.long)
    return F.ctc_loss(x.expand(3, 8, 4).log_softmax(-1), targets, *lengths)


def own_branch(x: Tensor) -> Tensor:
    return x.sum() if x.sum() > 0 else x.mean()


@pytest.mark.parametrize(
    ("model", "owner", "instead"),
    [
        (Calls(connectionist), "torch.nn.functional.ctc_loss", "take the loss of them outside"),
        (Clusters(), "torch.nn.AdaptiveLogSoftmaxWithLoss", "-m.log_prob(x).gather(1, target"),
    ],
    ids=["ctc", "adaptive"],
)
def test_a_branch_inside_torch_is_said_to_be_torchs(
    model: nn.Module, owner: str, instead: str
) -> None:
    with pytest.raises(TraceError) as caught:
        trace(model, (torch.ones(8, 4),))
    message = str(caught.value)
    assert f"inside {owner}, torch's own code, a branch" in message
    assert instead in message.splitlines()[-1] and __file__ in message


def test_a_branch_of_the_user_is_not_said_to_be_torchs() -> None:
    with pytest.raises(TraceError, match="cannot be one graph: a branch"):
        trace(Calls(own_branch), (torch.ones(8, 4),))


def test_what_is_said_to_write_instead_is_the_same_and_splits() -> None:
    model, x = AllClasses(), torch.randn(8, 4)
    torch.testing.assert_close(model(x), Clusters.forward(model, x))
    autopar.verify(model, 4, (x,), layout="fsdp")


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


def test_whoever_has_turned_the_checks_off_is_told_nothing() -> None:
    distributions.Distribution.set_default_validate_args(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trace(Calls(normal), (torch.ones(8, 4),))
        assert distributions.Distribution._validate_args is False
    finally:
        distributions.Distribution.set_default_validate_args(True)


def test_a_distribution_that_is_told_to_check_is_refused_by_name() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Calls(lambda x: normal(x, validate_args=True)), (torch.ones(8, 4),))
    message = str(caught.value)
    assert "inside torch.distributions.Normal, torch's own code" in message
    assert "Leave out validate_args=True" in message and __file__ in message
