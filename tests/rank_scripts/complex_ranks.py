"""What test_complex.py starts, as on_ranks.py says: trains, saves and loads complex parameters."""

from __future__ import annotations

import copy
import itertools
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import autopar
from on_ranks import Facts, everywhere, run_tasks

LAYOUTS = ("ddp", "fsdp", "megatron")
_FULL = StateDictOptions(full_state_dict=True)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: a complex parameter, a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = nn.Parameter(torch.randn(4, 8, 8, 5, dtype=torch.complex64) * 0.1)
        self.mix = nn.Conv2d(8, 4, 1)
        self.register_buffer("turn", torch.polar(torch.ones(8, 8, 5), torch.randn(8, 8, 5)))

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.einsum("bixy,ioxy->boxy", torch.fft.rfft2(x), self.modes)
        return self.mix(torch.fft.irfft2(modes * self.turn).relu()).square().mean()


def example() -> tuple[Spectral, tuple[Tensor]]:
    torch.manual_seed(0)
    return Spectral(), (torch.randn(8, 4, 8, 8),)


def trained(model: nn.Module, inputs: tuple[Tensor], steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*inputs).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    return optimizer


def gather(model: nn.Module) -> Tensor:
    parameter = model.get_parameter("modes").detach()
    return getattr(parameter, "full_tensor", lambda: parameter)()


def training() -> Facts:
    """By layout: how far the parameter is off after two steps, on any rank."""
    model, inputs = example()
    right = copy.deepcopy(model)
    trained(right, inputs)
    facts = {}
    for layout in LAYOUTS:
        par = autopar.parallelize(copy.deepcopy(model), inputs=inputs, layout=layout)
        trained(par, inputs)
        facts[layout] = max(everywhere(float((gather(par) - right.modes).abs().max())))
    return facts


def states() -> Facts:
    """By pair of layouts, the ways in which what the first trained did not come to the second."""
    folders = everywhere(tempfile.mkdtemp())
    facts: Facts = {}
    for origin, other in itertools.product(LAYOUTS[:2], LAYOUTS[:2]):
        model, inputs = example()
        folder = Path(folders[0]) / f"{origin} {other}"
        source = autopar.parallelize(copy.deepcopy(model), inputs=inputs, layout=origin)
        optimizer = trained(source, inputs)
        right = gather(source)
        autopar.Checkpoints(folder / "run", model=source, optimizer=optimizer).save(2)
        source.save_pretrained(folder / "weights")
        state, full = source.state_dict(), get_model_state_dict(source, options=_FULL)
        target = autopar.parallelize(copy.deepcopy(model), inputs=inputs, layout=other)
        second = trained(target, inputs, steps=0)
        loaders = {
            "checkpoint": autopar.Checkpoints(folder / "run", model=target, optimizer=second).load,
            "state dict": lambda target=target, state=state: target.load_state_dict(state),
            "whole state dict": lambda target=target, full=full: set_model_state_dict(
                target, full, options=_FULL
            ),
            "pretrained": lambda target=target, folder=folder: target.load_weights(
                folder / "weights"
            ),
        }
        lost = []
        for name, load in loaders.items():
            with torch.no_grad():
                target.get_parameter("modes").zero_()
            load()
            if not torch.equal(gather(target), right):
                lost.append(name)
        moments = second.state[target.get_parameter("modes")]["exp_avg"].full_tensor()
        if not torch.equal(
            moments, optimizer.state[source.get_parameter("modes")]["exp_avg"].full_tensor()
        ):
            lost.append("moments")
        facts[f"{origin} {other}"] = [name for names in everywhere(lost) for name in names]
    return facts


if __name__ == "__main__":
    run_tasks({"training": training, "states": states})
