"""What test_outputs.py starts under torchrun: `outputs_ranks.py FILE LAYOUT…`. The model hands out
scores, and the script computes its losses from them, as one does on one device. Losses, gradients
and an incomplete batch are held against the original; the largest differences go into FILE.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.world import ranks
from on_ranks import unsharded

BATCH, SEQUENCE, WORDS, WIDTH = 8, 12, 64, 32


class Scorer(nn.Module):
    """Scores of every token, softmaxed ones too, and a number that the model computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids)
        x = x + self.down(F.gelu(self.up(x)))
        scores = self.head(x)
        return {"scores": scores, "shares": scores.softmax(-1), "size": x.square().mean()}


def batch(rows: int = BATCH) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, WORDS, (rows, SEQUENCE + 1), generator=torch.manual_seed(rows))
    return tokens[:, :-1], tokens[:, 1:]


def cross_entropy(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["scores"].flatten(0, 1), targets.flatten())


def of_all(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    chosen = outputs["shares"].gather(-1, targets[..., None])
    return outputs["size"] + cross_entropy(outputs, targets) - chosen.log().mean()


def within(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """The model's own number alone: no gradient comes back through the scores."""
    return outputs["size"]


LOSSES: tuple[Callable[[dict[str, Tensor], Tensor], Tensor], ...] = (cross_entropy, of_all, within)


def apart(par: Any, single: nn.Module, rows: int, loss: Callable[..., Tensor]) -> float:
    """The largest difference of a loss, an output or a gradient."""
    ids, targets = batch(rows)
    par.zero_grad(), single.zero_grad()
    outputs, expected = par(ids), single(ids)
    differences = [float((unsharded(outputs[n]) - expected[n]).abs().max()) for n in expected]
    actual, right = loss(outputs, targets), loss(expected, targets)
    differences.append(float((unsharded(actual) - right).abs()))
    actual.backward(), right.backward()
    for name, parameter in single.named_parameters():
        gradient = par.get_parameter(name).grad
        if parameter.grad is None:
            assert gradient is None or not unsharded(gradient).any()
        else:
            differences.append(float((unsharded(gradient) - parameter.grad).abs().max()))
    return max(differences)


def facts_of(layout: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Scorer()
    par: Any = autopar.parallelize(copy.deepcopy(model), inputs=batch()[:1], layout=layout)
    kinds = {type(value).__name__ for value in par(batch()[0]).values()}
    facts = {
        f"{loss.__name__} {rows}": apart(par, model, rows, loss)
        for loss in LOSSES
        for rows in (BATCH, 5)
    }
    facts["with others"] = with_others(par, model)
    with torch.no_grad():
        ids, _ = batch(3)
        facts["eval"] = float((par.eval()(ids)["scores"] - model(ids)["scores"]).abs().max())
    return {"apart": facts, "kinds": sorted(kinds), "written": written(par.train())}


def written(par: Any) -> str:
    """What is said of a result that is written over before the backward needs it."""
    outputs = par(batch()[0])
    shares = outputs["shares"]
    loss = shares.square().mean()
    with torch.no_grad():
        shares.zero_()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def with_others(par: Any, single: nn.Module) -> float:
    """How far torch.func.functional_call with half of every parameter is from one device's."""
    ids, _ = batch()
    halves = [{n: p.detach() / 2 for n, p in module.named_parameters()} for module in (par, single)]
    actual, right = (
        torch.func.functional_call(module, half, (ids,))["scores"]
        for module, half in zip((par, single), halves, strict=True)
    )
    return float((actual - right).detach().abs().max())


def sharded() -> dict[str, Any]:
    """The same with outputs that stay where they are computed."""
    par: Any = autopar.parallelize(Scorer(), inputs=batch()[:1], layout="fsdp", outputs="sharded")
    outputs = par(batch()[0])
    par.eval()
    with torch.no_grad():
        odd = par(batch(5)[0])  # nothing divides 5 rows: they are whole on every rank
    return {
        "kinds": [type(value).__name__ for value in outputs.values()],
        "kinds of an odd batch": [type(value).__name__ for value in odd.values()],
        "rows": outputs["scores"].to_local().shape[0],
    }


def main() -> None:
    path, *layouts = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    facts: dict[str, Any] = {layout: facts_of(layout) for layout in layouts}
    facts["sharded"] = sharded()
    assert len(set(ranks.all_of(json.dumps(facts["sharded"])))) == 1
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
