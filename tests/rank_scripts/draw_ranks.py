"""What test_draws_in_training.py starts, as on_ranks.py says: models that draw random numbers train
on gloo ranks; FILE has what they lost and where their parameters ended, as sums.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.world import ranks
from on_ranks import Facts, run_tasks, unsharded

ROWS, WIDTH, STEPS, TIMES = 8, 16, 3, 50


class Block(nn.Module):
    """An MLP with noise on its inner activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(x))
        return x + self.down(inner + 0.1 * torch.randn_like(inner))


class Diffusion(nn.Module):
    """Learns the noise that it adds, at timesteps that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.linspace(0.99, 0.01, TIMES))
        self.times = nn.Embedding(TIMES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, TIMES, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        share = self.kept[t][:, None]
        y = share.sqrt() * x + (1 - share).sqrt() * noise + self.times(t)
        for block in self.blocks:
            y = block(y)
        return F.mse_loss(y, noise)


class VAE(nn.Module):
    """Draws its latent, and one of its classes."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 16), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread, scores = self.encode(x).split((6, 6, 4), -1)
        latent = mean + (0.5 * spread).exp() * torch.randn_like(mean)
        kind = F.gumbel_softmax(scores).repeat(1, 2)[:, :6]
        y = self.decode(torch.cat((latent, kind), -1))
        prior = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return F.mse_loss(y, x) + 0.1 * prior


MODELS: dict[str, Callable[[], nn.Module]] = {"diffusion": Diffusion, "vae": VAE}


def example(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    """Rows are all the same, so that it does not matter which part of a step has which."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    return model, (torch.randn(1, WIDTH, dtype=torch.float64).expand(ROWS, -1).clone(),)


def trained(par: Any, inputs: tuple[Tensor], steps: int = STEPS) -> list[float]:
    """Losses, and the sum of every parameter at the end."""
    optimizer, losses = torch.optim.AdamW(par.parameters(), 1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = par(*inputs)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [*losses, *(float(unsharded(p.detach()).sum()) for p in par.parameters())]


def run(name: str, world: int | None, layout: Any = "auto", **more: Any) -> list[float]:
    model, inputs = example(name)
    return trained(autopar.parallelize(model, world, inputs, layout=layout, **more), inputs)


def layouts(name: str, *layouts: str, **more: Any) -> Facts:
    return {layout: run(name, None, layout, **more) for layout in layouts}


def resumed() -> Facts:
    """What a run loses after a checkpoint, and what one does that goes on from it."""
    model, inputs = example("diffusion")
    folder = ranks.from_rank_0(tempfile.mkdtemp())
    par = autopar.parallelize(model, None, inputs, layout="fsdp")
    trained(par, inputs, 1)
    autopar.Checkpoints(Path(folder), model=par).save(1)
    later = trained(par, inputs)
    other, _ = example("diffusion")
    torch.manual_seed(9)
    again = autopar.parallelize(other, None, inputs, layout="megatron")
    autopar.Checkpoints(Path(folder), model=again).load()
    return {"later": later, "again": trained(again, inputs), "folder": folder}


TASKS: dict[str, Callable[[], Facts]] = {
    "diffusion": lambda: layouts("diffusion", "ddp", "fsdp", "megatron"),
    "vae": lambda: layouts("vae", "fsdp", "megatron"),
    "microbatches": lambda: layouts("diffusion", "fsdp", microbatches=2),
    "recomputed": lambda: layouts("diffusion", "megatron", recompute="full"),
    "resumed": resumed,
}


if __name__ == "__main__":
    run_tasks(TASKS)
