"""What test_step_in_microbatches.py starts on gloo ranks: `microbatches_ranks.py FILE LAYOUT...`. A
model trains in micro-batches, and the original on the whole batches; FILE says for each layout how
far losses, gradients and parameters are apart, and which forms the backwards had.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autopar
from backward_forms import recorded_forms, recorded_forwards
from on_ranks import run_everywhere

GRIDS: dict[str, Any] = {"4d": autopar.Grid4D(z=2, data=2), "2.5d": autopar.Grid25D(q=2)}
ROWS, TOKENS = 16, 4


class Net(nn.Module):
    """Its losses are a mean over the tokens that count, a masked mean, a mean and a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.embedding(ids)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        scores = self.head(h)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        masked = (scores.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)
        penalty = 1e-3 * self.head.weight.square().sum()
        return loss + 0.1 * masked + 0.01 * scores.mean() + penalty, scores, mask.sum()


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Micro-batches have very different numbers of tokens that count; one has none."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 32, (ROWS, TOKENS), generator=generator)
    labels = torch.randint(0, 32, (ROWS, TOKENS), generator=generator)
    mask = (torch.rand(ROWS, TOKENS, generator=generator) < 0.5).double()
    labels[:4], labels[5, 1:], mask[8:10] = -100, -100, 0
    return ids, labels, mask


def full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def trained(model: nn.Module) -> list[Tensor]:
    """Losses, scores, gradients and parameters of three steps."""
    optimizer, seen = torch.optim.AdamW(model.parameters(), 1e-2), []
    for step in range(3):
        loss, scores, count = model(*batch(step))
        (2 * loss).backward()
        seen += [full(loss), full(scores), full(count)]
        seen += [full(p.grad) for p in model.parameters() if p.grad is not None]
        seen.append(full(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen += [full(x) for x in model(*batch(7))]
    return [*seen, *map(full, model.parameters())]


def facts_of(name: str, count: int | Literal["auto"], turns: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    plain, layout = Net(), GRIDS.get(name, name)
    model = copy.deepcopy(plain)
    if turns:
        assert count != "auto"
        plan = autopar.plan(model, 4, batch(0), layout, microbatches=count)
        plan = dataclasses.replace(plan, interleaved=True)
        plan = autopar.Plan.from_json(plan.to_json())  # as one from a file, it is not decided anew
        parallel = autopar.apply(model, plan, batch(0))
        assert parallel.plan.interleaved
    else:
        parallel = autopar.parallelize(model, inputs=batch(0), layout=layout, microbatches=count)
    with recorded_forms() as forms, recorded_forwards() as forwards:
        pairs = list(zip(trained(parallel), trained(plain), strict=True))
    apart = max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in pairs)
    same = all(a.shape == b.shape for a, b in pairs)
    return {
        "apart": apart,
        "same shapes": same,
        "forms": forms,
        "forwards": forwards,
        "compared": len(pairs),
    }


def refusals(parallel: nn.Module) -> dict[str, str]:
    """What is said where more is differentiated than the loss, or twice."""

    def another_result() -> None:
        loss, scores, _ = parallel(*batch(0))
        (loss + scores.square().mean()).backward()

    def twice() -> None:
        loss, _, _ = parallel(*batch(0))
        loss.backward(retain_graph=True)
        loss.backward()

    def timeline() -> None:
        autopar.ParallelModule.timeline(parallel, *batch(0))

    said = {}
    for trial in (another_result, twice, timeline):
        try:
            trial()
            said[trial.__name__] = ""
        except Exception as error:
            said[trial.__name__] = f"{type(error).__name__}: {error}"
    return said


def dropped(rate: float) -> dict[str, Any]:
    """Whether micro-batches of equal rows drop other elements, and a seed gives the same again."""

    class RandomMask(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = F.dropout(super().forward(x), rate)
            return y.square().mean(), y

    torch.manual_seed(1)
    parallel = autopar.parallelize(
        RandomMask(8, 8), inputs=(torch.ones(8, 8),), layout="ddp", microbatches=2
    )
    results = []
    for _ in range(2):
        parallel.seed = 5
        results += [parallel(torch.ones(8, 8))[1].detach() for _ in range(2)]
    first, second, again, _ = results
    own = first.unflatten(0, (4, 2))  # rows of a rank: one of each micro-batch
    return {
        "micro-batches differ": not torch.equal(own[:, 0], own[:, 1]),
        "calls differ": not torch.equal(first, second),
        "a seed repeats": torch.equal(first, again),
    }


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def square_error(scores: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(scores[..., 0], labels.double())


def mean(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.square().mean()


class Alone(nn.Module):
    """Returns what its loss gives, and nothing is done with it before."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.head, self.loss = nn.Embedding(32, 16), nn.Linear(16, 32), loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.embedding(ids))), labels)


def losses_alone() -> dict[str, float]:
    """How far a mean that is returned as it is, and its gradients, are from one device's."""
    worst = {}
    for loss in (cross_entropy, square_error, mean):
        torch.manual_seed(2)
        plain, call = Alone(loss), batch(3)[:2]
        parallel = autopar.parallelize(
            copy.deepcopy(plain), inputs=call, layout="fsdp", microbatches=2
        )
        losses = [model(*call) for model in (parallel, plain)]
        for each in losses:
            each.backward()
        pairs = [losses, *zip(parallel.parameters(), plain.parameters(), strict=True)]
        each_pair = [(full(a), full(b)) for a, b in pairs]
        each_pair += [(full(a.grad), full(b.grad)) for a, b in pairs[1:]]
        worst[loss.__name__] = max(float((a - b).norm() / b.norm()) for a, b in each_pair)
    return worst


def others() -> dict[str, Any]:
    """What goes on besides training: DTensors of a loader, another batch size, plans from files."""
    torch.manual_seed(0)
    plain = Net()
    parallel = autopar.parallelize(
        copy.deepcopy(plain), inputs=batch(0), layout="fsdp", microbatches=4
    )
    rows = torch.utils.data.TensorDataset(
        *(torch.cat(x) for x in zip(batch(0), batch(1), strict=True))
    )
    apart = [
        float((full(parallel(*sample)[0]) - full(plain(*batch(step))[0])).abs())
        for step, sample in enumerate(parallel.loader(rows))
    ]
    fewer = tuple(x[:8] for x in batch(0))
    apart.append(float((full(parallel(*fewer)[0]) - full(plain(*fewer)[0])).abs()))
    plan = autopar.Plan.from_json(parallel.plan.to_json())
    from_file = autopar.apply(copy.deepcopy(plain), plan, batch(0))
    apart.append(float((full(from_file(*batch(0))[0]) - full(plain(*batch(0))[0])).abs()))
    same = autopar.parallelize(plain, inputs=batch(0), layout="fsdp", microbatches="auto")
    facts = {
        "apart": max(apart),
        "micro-batches of auto": same.plan.microbatches,
        "drops": dropped(0.5),
    }
    facts["alone"] = losses_alone()
    for _ in range(4):
        parallel(*batch(0))[0].backward()
    stats = parallel.stats()
    assert stats is not None and stats.measured is not None and stats.planned is not None
    tokens = stats.measured.rate * stats.seconds  # those of a whole step
    return facts | {"said": refusals(parallel), "tokens": tokens}


def facts_of_task(task: str) -> dict[str, Any]:
    name, count, turns = (*task.split(":"), "", "")[:3]
    try:
        number = count if count == "auto" else int(count or 0)
        return facts_of(name, number, turns == "turns") if count else others()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    run_everywhere(facts_of_task)
