"""Small models with something odd in each, as (model, args, kwargs): inputs, losses, gradients.

Batches of 12 divide by 2, 3, 4 and 6 ranks. odd_shapes.py has more of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQUENCE, HIDDEN, HEADS, VOCABULARY = 12, 6, 24, 6, 36

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
ODD: dict[str, Callable[[], Example]] = {}


def odd(build: Callable[[], Example]) -> Callable[[], Example]:
    """Enters a model into ODD, with its weights and inputs made from one seed."""

    def seeded() -> Example:
        torch.manual_seed(0)
        return build()

    ODD[build.__name__] = seeded
    return seeded


class Simple(nn.Module):
    """Two linears; `body` says what is made of (model, inputs)."""

    def __init__(self, body: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        for name, part in parts.items():
            self.add_module(name, part)
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (BATCH, HIDDEN)))


def sequences() -> Tensor:
    return torch.randn(BATCH, SEQUENCE, HIDDEN)


def ids(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape or (BATCH, SEQUENCE))


# -- what goes in and what comes out ---------------------------------------------------------------


@odd
def only_a_scalar() -> Example:
    return Simple(lambda m, x: m.down(m.up(x).relu()).square().sum()), (rows(),), {}


@odd
def a_dictionary_with_none() -> Example:
    def body(m: Any, *, x: Tensor, scale: float, mask: Tensor | None = None) -> dict[str, Any]:
        y = m.down(m.up(x).tanh()) * scale
        return {"y": y, "mask": mask, "loss": y.mean(), "best": y.argmax(-1), "n": 3, "x": x}

    return Simple(body), (), {"x": rows(), "scale": 2.5, "mask": None}


@odd
def only_integers_out() -> Example:
    return Simple(lambda m, x: m.down(m.up(x)).argmax(-1)), (rows(),), {}


@odd
def inputs_that_require_gradients() -> Example:
    x = rows().requires_grad_()
    return Simple(lambda m, x, y: (m.down(m.up(x * y)).square().mean(), x * 2)), (x, rows()), {}


@odd
def a_nested_batch() -> Example:
    def body(m: Any, batch: dict[str, Any]) -> Tensor:
        x, (y, z) = batch["x"], batch["rest"]
        return F.mse_loss(m.down(m.up(x + y)), z)

    return Simple(body), ({"x": rows(), "rest": [rows(), rows()]},), {}


@odd
def a_branch_without_parameters() -> Example:
    def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        free = (x.softmax(-1) * x).cumsum(1) / x.norm(dim=-1, keepdim=True)
        return m.down(m.up(x).relu()).mul(free).sum(), free

    return Simple(body), (rows(),), {}


@odd
def an_output_that_is_an_input_and_one_that_is_constant() -> Example:
    return Simple(lambda m, x: (m.down(m.up(x)).sum(), x, torch.arange(5) * 2)), (rows(),), {}


@odd
def one_input_twice() -> Example:
    x = rows()
    return Simple(lambda m, x, y: F.mse_loss(m.down(m.up(x)), y)), (x, x), {}


# -- losses ----------------------------------------------------------------------------------------


@odd
def two_losses_and_a_mean_by_hand() -> Example:
    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = m.down(F.gelu(m.up(x)))
        by_hand = ((z - y) ** 2).sum() / (x.shape[0] * x.shape[1])
        return by_hand + 0.1 * z.abs().mean() + sum(p.square().sum() for p in m.parameters())

    return Simple(body), (rows(), rows()), {}


@odd
def log_softmax_and_nll_by_hand() -> Example:
    def body(m: Any, x: Tensor, target: Tensor) -> Tensor:
        p = m.down(m.up(x)).log_softmax(-1)
        return -p.gather(1, target[:, None]).squeeze(1).mean()

    return Simple(body), (rows(), torch.randint(0, HIDDEN, (BATCH,))), {}


@odd
def nll_with_ignored_tokens() -> Example:
    def body(m: Any, x: Tensor, target: Tensor) -> Tensor:
        return F.nll_loss(m.down(m.up(x)).log_softmax(-1), target, ignore_index=-1)

    target = torch.randint(0, HIDDEN, (BATCH,))
    target[:5] = -1
    return Simple(body), (rows(), target), {}


@odd
def other_losses() -> Example:
    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = m.down(m.up(x))
        return (
            F.binary_cross_entropy_with_logits(z, y.sigmoid()) + F.smooth_l1_loss(z, y)
            + F.huber_loss(z, y) + F.l1_loss(z, y) + F.cosine_similarity(z, y).mean()
            + F.kl_div(z.log_softmax(-1), y.softmax(-1), reduction="batchmean")
            + F.mse_loss(z, y, reduction="sum")
        )  # fmt: skip

    return Simple(body), (rows(), rows()), {}


@odd
def a_masked_mean() -> Example:
    def body(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        z = m.down(m.up(x)).square().mean(-1)
        return torch.where(mask, z, 0).sum() / mask.sum()

    return Simple(body), (sequences(), torch.rand(BATCH, SEQUENCE) > 0.4), {}


@odd
def statistics_over_the_batch() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        z = m.down(m.up(x))
        whitened = (z - z.mean(0)) / z.std(0) + z.var(1, keepdim=True) + z.amax(0)
        return (whitened.softmax(0) * x).sum() + torch.logsumexp(z, 0).sum() + z.prod(-1).sum()

    return Simple(body), (rows(),), {}


# -- gradients that stop ---------------------------------------------------------------------------


@odd
def a_branch_that_is_detached() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        z = m.up(x)
        with torch.no_grad():
            target = m.down(z.sigmoid())
        return (m.down(z.relu()) - target).square().mean() + (z.detach() * z).sum() / z.numel()

    return Simple(body), (rows(),), {}


@odd
def a_frozen_layer() -> Example:
    model = Simple(lambda m, x: m.down(m.frozen(m.up(x))).square().mean(), frozen=nn.Linear(48, 48))
    model.frozen.requires_grad_(False)
    return model, (rows(),), {}


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 5)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@odd
def adapters_on_a_frozen_base() -> Example:
    model = Simple(lambda m, x: m.down(F.silu(m.up(x))).square().mean())
    model.up, model.down = Lora(model.up), Lora(model.down)
    return model, (rows(),), {}


@odd
def nothing_to_train() -> Example:
    return Simple(lambda m, x: m.down(m.up(x)).square().mean()).requires_grad_(False), (rows(),), {}


# -- buffers ---------------------------------------------------------------------------------------


@odd
def batch_norm() -> Example:
    model = Simple(lambda m, x: m.down(m.norm(m.up(x))).square().mean(), norm=nn.BatchNorm1d(48))
    return model, (rows(),), {}


@odd
def batch_norm_of_sequences() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.norm(m.up(x).transpose(1, 2)).square().mean()

    return Simple(body, norm=nn.BatchNorm1d(48)), (sequences(),), {}


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(HIDDEN))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.steps += 1
        return x - self.mean


@odd
def a_moving_average() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.average(m.down(m.up(x))).square().mean()

    return Simple(body, average=Average()), (rows(),), {}


# -- weights used twice ----------------------------------------------------------------------------


@odd
def one_module_twice() -> Example:
    return Simple(lambda m, x: m.down(m.up(m.down(m.up(x).relu()))).mean()), (rows(),), {}


@odd
def a_weight_and_its_transpose() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        y = x @ m.up.weight.T
        return (y @ m.up.weight + m.down.weight.sum()).square().mean()

    return Simple(body), (rows(),), {}


@odd
def a_tied_embedding() -> Example:
    def body(m: Any, ids: Tensor, labels: Tensor) -> Tensor:
        x = m.down(m.up(m.table(ids)).relu())
        logits = F.linear(x, m.table.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + m.table.weight[3].sum()

    table = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=2)
    return Simple(body, table=table), (ids(), ids()), {}
