"""Small random networks, each with a mesh and a world, to hold a search against trying all."""

from __future__ import annotations

import random

import torch
from torch import nn

from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.world import World
from traced import annotated


class RandomNet(nn.Module):
    """Up to three of: a linear, a norm, a relu, a linear with a residual around it."""

    SIZES = (2, 3, 4, 6, 8, 12)

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.kinds = [
            draw.choice(("linear", "linear", "norm", "relu", "residual"))
            for _ in range(draw.randint(1, 3))
        ]
        self.kinds[0] = "linear" if set(self.kinds) == {"relu"} else self.kinds[0]
        width = self.width = draw.choice(self.SIZES)
        self.parts = nn.ModuleList()
        for kind in self.kinds:
            after = draw.choice(self.SIZES) if kind == "linear" else width
            bias = kind == "linear" and draw.random() < 0.5
            linear = kind in ("linear", "residual")
            other = nn.LayerNorm(width) if kind == "norm" else nn.ReLU()
            self.parts.append(nn.Linear(width, after, bias=bias) if linear else other)
            width = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for kind, part in zip(self.kinds, self.parts, strict=True):
            x = x + part(x) if kind == "residual" else part(x)
        return x.square().mean()


def random_problem(seed: int) -> tuple[Program, Mesh, World]:
    draw = random.Random(seed)
    net = RandomNet(draw)
    rows = (draw.choice((2, 4, 6, 12)), *((3,) if draw.random() < 0.3 else ()))
    mesh = Mesh.parse(draw.choice(("x2.y2", "x2.y3", "x3.y2")))
    name = draw.choice(("dgx-h100", "pcie-4090", *(("laptop",) if mesh.size == 4 else ())))
    return annotated(net, (torch.randn(*rows, net.width),)), mesh, World.preset(name, mesh.size)
