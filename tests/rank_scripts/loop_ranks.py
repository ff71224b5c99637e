"""What test_loop.py starts under torchrun: `loop_ranks.py FILE LAYOUT`. Every habit is a piece of a
training script, written once, and run on a parallel model and on the original with the same data.
What both compute goes into FILE: losses, and parameters at the end; of what is refused, the reason.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.world import ranks

Run = Callable[[nn.Module], list[Tensor]]
HABITS: dict[str, Run] = {}


class Net(nn.Module):
    """Returns scores; the loss is the script's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 16, generator=generator)
    return x, torch.randint(0, 8, (8,), generator=generator)


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    x, target = batch(step)
    return F.cross_entropy(model(x), target)


def habit(run: Run) -> Run:
    HABITS[run.__name__] = run
    return run


# -- backward --------------------------------------------------------------------------------------
@habit
def retain_graph(model: nn.Module) -> list[Tensor]:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    y = model(batch(1)[0])
    first, second = y.square().mean(), y.sum()
    first.backward(retain_graph=True)
    second.backward()
    return [loss, first, second]


@habit
def two_calls_before_a_backward(model: nn.Module) -> list[Tensor]:
    left, right = model(batch(0)[0]), model(batch(1)[0])
    loss = (left - right).square().mean()
    loss.backward()
    return [loss]


@habit
def gradients_by_autograd(model: nn.Module) -> list[Tensor]:
    loss = loss_of(model)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = 2 * gradient
    return [loss]


@habit
def gradients_of_inputs(model: nn.Module) -> list[Tensor]:
    x, target = batch()
    x.requires_grad_()
    loss = F.cross_entropy(model(x), target)
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return [loss, gradient.norm()]


@habit
def results_written_over(model: nn.Module) -> list[Tensor]:
    x, target = batch()
    y = model(x)
    y += 1
    y[:, 0] = 0
    y.mul_(2)
    loss = F.cross_entropy(y, target)
    loss.backward()
    return [loss]


@habit
def checkpointed_at_once(model: nn.Module) -> list[Tensor]:
    x, target = batch()
    loss = F.cross_entropy(checkpoint(model, x, use_reentrant=False), target)
    loss.backward()
    return [loss]


@habit
def anomalies_looked_for(model: nn.Module) -> list[Tensor]:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # no op of DTensors
        loss = loss_of(model)
        loss.backward()
    return [loss]


@habit
def hooks_on_parameters(model: nn.Module) -> list[Tensor]:
    hooks = [p.register_hook(lambda gradient: gradient / 2) for p in model.parameters()]
    loss = loss_of(model)
    loss.backward()
    for hook in hooks:
        hook.remove()
    return [loss]


# -- precision -------------------------------------------------------------------------------------
def cast_forward(model: nn.Module, dtype: torch.dtype, step: int) -> Tensor:
    x, target = batch(step)
    with torch.autocast("cpu", dtype):
        scores = model(x)
    return F.cross_entropy(scores.float(), target)


@habit
def autocast_around_the_forward(model: nn.Module) -> list[Tensor]:
    loss = cast_forward(model, torch.bfloat16, 0)
    loss.backward()
    return [loss]


@habit
def autocast_around_forward_and_loss(model: nn.Module) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    return [loss]


@habit
def a_scaler_of_gradients(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(cast_forward(model, torch.float16, step))
        scaler.scale(losses[-1] * (float("inf") if step == 1 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [losses[0], losses[2], torch.tensor(scaler.get_scale())]


@habit
def parameters_in_bfloat16(model: nn.Module) -> list[Tensor]:
    model = cast(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, target = batch()
    loss = F.cross_entropy(model(x.bfloat16()).float(), target)
    loss.backward()
    optimizer.step()
    return [loss, F.cross_entropy(model(x.bfloat16()).float(), target)]


def cast(model: nn.Module) -> nn.Module:
    """The same model with parameters in bfloat16: of a parallel one, planned anew."""
    plain = Net()
    plain.load_state_dict({n: gather(x) for n, x in model.state_dict().items()})
    plain.bfloat16()
    if isinstance(model, autopar.ParallelModule):
        return autopar.parallelize(plain, inputs=(batch()[0].bfloat16(),), layout=sys.argv[2])
    return plain


# -- optimizers ------------------------------------------------------------------------------------
@habit
def accumulation_clipping_and_a_schedule(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=4)
    losses = []
    for step in range(3):
        for part in range(4):
            loss = loss_of(model, 4 * step + part) / 4
            loss.backward()
            losses.append(loss)
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=step == 1)
    return losses


@habit
def a_closure(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return float(loss)

    return [torch.tensor(optimizer.step(closure)) for _ in range(3)]


@habit
def steps_within_the_backward(model: nn.Module) -> list[Tensor]:
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    losses = []
    for _ in range(3):
        losses.append(loss_of(model))
        losses[-1].backward()
    for hook in hooks:
        hook.remove()
    return losses


@habit
def groups_of_parameters(model: nn.Module) -> list[Tensor]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, 1e-2), []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(loss_of(model, step))
        losses[-1].backward()
        optimizer.step()
    return losses


@habit
def parameters_frozen_later(model: nn.Module) -> list[Tensor]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(loss_of(model, step))
        losses[-1].backward()
        optimizer.step()
        model.get_parameter("up.weight").requires_grad_(step == 1)
    model.get_parameter("up.weight").requires_grad_(True)
    return losses


# -- both ------------------------------------------------------------------------------------------
def gather(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().float().clone()


def results(run: Run, model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a habit computes, and the parameters and gradients after it."""
    model.zero_grad()
    model.load_state_dict(state)
    values = {str(n): gather(x) for n, x in enumerate(run(model))}
    for name, parameter in model.named_parameters():
        values[name] = gather(parameter)
        if parameter.grad is not None:
            values[f"gradient of {name}"] = gather(parameter.grad)
    return values


def apart(par: nn.Module, single: nn.Module, run: Run) -> Any:
    """The largest difference, or what was raised on the parallel model alone."""
    state = copy.deepcopy(single.state_dict())
    expected = results(run, single, state)
    single.load_state_dict(state)
    try:
        actual = results(run, par, state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if actual.keys() != expected.keys():
        return f"other results: {actual.keys() ^ expected.keys()}"
    return max(float((actual[n] - x).abs().max()) for n, x in expected.items())


def penalty(model: nn.Module) -> None:
    """Train the norm of the input's gradient."""
    x = batch()[0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.norm(dim=1).mean().backward()


def refused(par: nn.Module) -> dict[str, str]:
    """What is said of what a parallel model does not do."""
    said = {}
    trials: dict[str, Callable[[], Any]] = {
        "pickle": lambda: torch.save(par, "/dev/null"),
        "create_graph": lambda: torch.autograd.grad(
            loss_of(par), list(par.parameters()), create_graph=True
        )[0].sum().backward(),
        "penalty": lambda: penalty(par),
    }  # fmt: skip
    for name, trial in trials.items():
        try:
            trial()
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    single = Net()
    par = autopar.parallelize(copy.deepcopy(single), inputs=batch()[:1], layout=sys.argv[2])
    wanted = sys.argv[3:] or HABITS
    facts = {name: apart(par, single, HABITS[name]) for name in wanted}
    everyone = ranks.all_of([facts, refused(par)])
    if not dist.get_rank():
        Path(sys.argv[1]).write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
