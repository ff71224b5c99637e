"""Models on batches of any number of rows, as (model, inputs), and the losses that reduce rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import padded_models

Case = tuple[nn.Module, Any]
Loss = Callable[["Rows", Tensor, Tensor], Any]


class Rows(nn.Module):
    """An MLP whose loss is a function of (the model, its output, the targets)."""

    def __init__(self, loss: Loss, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, hidden), nn.LayerNorm(hidden), None
        self.down = nn.Linear(hidden, 16)
        self.batch_norm, self.offsets = nn.BatchNorm1d(16), nn.Parameter(torch.randn(7, 16))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self, self.down(self.norm(F.gelu(self.up(x)))), y)


def mlp(rows: int, loss: Loss = lambda m, x, y: F.mse_loss(x, y)) -> Case:
    torch.manual_seed(0)
    return Rows(loss), (torch.randn(rows, 16), torch.randn(rows, 16))


def _labels(y: Tensor) -> Tensor:
    """Classes of rows, of which the second counts for nothing."""
    return torch.where(torch.arange(len(y)) == 1, -100, y.argmax(-1))


COUNTED: dict[str, Loss] = {
    "mean squares": lambda m, x, y: F.mse_loss(x, y),
    "sum of squares": lambda m, x, y: F.mse_loss(x, y, reduction="sum"),
    "squares of rows": lambda m, x, y: F.mse_loss(x, y, reduction="none").mean(1).sum(),
    "absolute": lambda m, x, y: F.smooth_l1_loss(x, y) + F.huber_loss(x, y, reduction="sum"),
    "binary": lambda m, x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), weight=y.exp()),
    "divergence": lambda m, x, y: F.kl_div(
        x.log_softmax(1), y.log_softmax(1), reduction="batchmean", log_target=True
    ),
    "cosine": lambda m, x, y: F.cosine_embedding_loss(x, y, y[:, 0].sign()),
    "cross entropy": lambda m, x, y: F.cross_entropy(x, _labels(y), label_smoothing=0.1),
    "weighted": lambda m, x, y: F.cross_entropy(
        x, _labels(y), weight=m.norm.weight[:16].detach() + 1
    ),
    "sum of entropies": lambda m, x, y: F.cross_entropy(x, _labels(y), reduction="sum"),
    "entropies": lambda m, x, y: (
        F.cross_entropy(x, _labels(y), reduction="none").sum() / (_labels(y) >= 0).sum()
    ),
    "soft targets": lambda m, x, y: F.cross_entropy(x, y.softmax(1), label_smoothing=0.1),
    "likelihood": lambda m, x, y: F.nll_loss(x.log_softmax(1), _labels(y)),
    "contrastive": lambda m, x, y: F.cross_entropy(x @ y.T, torch.arange(len(x))),
    "mean": lambda m, x, y: (x * y).mean(),
    "mean of rows": lambda m, x, y: (x - y).mean(0).square().sum() + x.mean((0, 1), True).sum(),
    "sum": lambda m, x, y: (x * y).exp().sum(),
    "covariance": lambda m, x, y: (x.T @ y).square().sum() + torch.einsum("bi,bj->ij", x, x).std(),
    "rows inside": lambda m, x, y: ((x.T * y.T).flatten() * 2).sum() + (x.T @ y).mean(),
    "two outputs": lambda m, x, y: (F.mse_loss(x, y), x, {"row": x.sum(1), "columns": x.sum(0)}),
    "a division": lambda m, x, y: (x / y).tanh().mean() + (1 / (x * x).sum(1)).log().mean(),
    "a full mask": lambda m, x, y: torch.where(torch.ones_like(x).bool(), x, y).mean(),
    "a repeated row": lambda m, x, y: (x * m.down.bias.expand(len(x), -1)).mean(),
    "zeros": lambda m, x, y: (torch.cat([x.new_zeros(len(x), 2), x], 1) * 2).square().mean(),
}
# Ops that mix rows otherwise than by a sum, or that hold something for every row.
REFUSED: dict[str, Loss] = {
    "batch norm": lambda m, x, y: F.mse_loss(m.batch_norm(x), y),
    "largest": lambda m, x, y: x.amax(0).sum(),
    "deviation": lambda m, x, y: x.std(0).sum(),
    "cumulative": lambda m, x, y: x.cumsum(0).square().mean(),
    "sorted": lambda m, x, y: (x.sort(0).values * y).mean(),
    "turned": lambda m, x, y: (x.roll(1, 0) * y).mean(),
    "both ways": lambda m, x, y: F.cross_entropy(x @ x.T, torch.arange(len(x))),
    "first rows": lambda m, x, y: x[:3].square().mean(),
    "a parameter of rows": lambda m, x, y: ((x + m.offsets[: len(x)]) * y).mean(),
}


def gpt2(rows: int, dropout: float = 0.0) -> Case:
    model, inputs = padded_models.gpt2(words=64, heads=4)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model, {name: x[:rows] for name, x in inputs.items()}


def bert(rows: int) -> Case:
    model, inputs = padded_models.bert(words=64, heads=4)
    return model, {name: x[:rows] for name, x in inputs.items()}


def convolutions(rows: int) -> Case:
    """Its batch norms take their statistics over the rows."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8),
            )  # fmt: skip

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.body(x), y)

    return Net(), (torch.randn(rows, 4, 8, 8), torch.randint(0, 8, (rows,)))


CASES = {"mlp": mlp, "gpt2": gpt2, "bert": bert}
