"""What test_one_mask.py starts, as on_ranks.py says: models that drop inputs, on gloo ranks,
against one device that drops the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.runtime.reference import double_by_default
from autopar.runtime.verify import _SEED, _Rank
from dropped import dropout_model
from on_ranks import Facts, caught, everywhere, run_tasks
from one_device import joined, together
from plans import subject


class Loss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x).square().mean()
        return result


def example(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    inner, inputs = dropout_model(name)
    return Loss(inner), inputs


def one_device(model: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients) of the model in one graph, by the seed of `verify`."""
    single = subject(model, inputs).single
    with double_by_default():
        trained = _Rank(single, {}, [x.double() for x in inputs]).train(1e-8)
    names = {e.node: e.target for e in single.signature.inputs}
    gradients = {names[n]: g for n, g in trained.gradients[0].items() if g is not None}
    return trained.outputs[0], gradients


def compared(names: tuple[str, ...], layouts: tuple[str, ...], **more: Any) -> Facts:
    """Of each model and layout the larger error, of the loss or of all gradients together."""
    facts = {}
    for name in names:
        model, inputs = example(name)
        loss, gradients = one_device(model, inputs)
        for layout in layouts:
            par: Any = autopar.parallelize(model, None, inputs, layout=layout, **more)
            par.seed = _SEED - 1  # of the call before the first
            actual = par(*inputs)
            actual.backward()
            own = {
                n: joined(p.grad, par.layout(n)).double()
                for n, p in par.named_parameters()
                if p.grad is not None
            }
            away = abs(float((actual - loss) / loss))
            facts[f"{name} {layout} {more}"] = max(away, together(own, gradients))
    return facts


def outside() -> Facts:
    """A checkpoint around the parallel model, which would drop other elements when run again."""
    model, (x,) = example("attended")
    par = autopar.parallelize(model, None, (x,), layout="ddp")

    def step() -> None:
        checkpoint(par, x, use_reentrant=False).backward()

    return {"seen": everywhere(caught(step))}


TASKS: dict[str, Callable[[], Facts]] = {
    "scheduled": lambda: compared(("attended", "twice", "between"), ("ddp", "auto")),
    "all": lambda: compared(("added", "masked", "normed", "again"), ("ddp", "fsdp", "auto")),
    "blocks": lambda: compared(("blocks",), ("ddp", "fsdp", "auto"), recompute="full"),
    "emitted": lambda: compared(("attended", "blocks"), ("ddp",), overlap=False),
    "outside": outside,
}


if __name__ == "__main__":
    run_tasks(TASKS)
