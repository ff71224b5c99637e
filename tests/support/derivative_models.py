"""Models whose forward takes derivatives, each with the inputs of a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional as F


def mlp(*sizes: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


class Differentiated(nn.Module):
    """A net and a forward that takes derivatives of it."""

    def __init__(self, net: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.call = net, call

    def forward(self, *args: Tensor) -> Any:
        return self.call(self.net, *args)


def derivative(y: Tensor, x: Tensor, create_graph: bool = True) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=create_graph)[0]


def forces(net: nn.Module, x: Tensor, energies: Tensor, wanted: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    energy = net(x).sum(-1)
    return F.mse_loss(energy, energies) + F.mse_loss(-derivative(energy, x), wanted)


def penalty(critic: nn.Module, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    slope = derivative(critic(mixed), mixed).norm(2, dim=1)
    return critic(fake).mean() - critic(real).mean() + (slope - 1).square().mean()


def burgers(net: nn.Module, points: Tensor) -> Tensor:
    x, t = (column.clone().requires_grad_() for column in points.split(1, dim=1))
    u = net(torch.cat([x, t], 1))
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    return (u_t + u * u_x - 0.01 * derivative(u_x, x)).square().mean()


def laplacian(net: nn.Module, x: Tensor) -> Tensor:
    second = vmap(hessian(lambda point: net(point).squeeze(-1)))(x)
    return (second.diagonal(dim1=-2, dim2=-1).sum(-1) - x.sum(-1)).square().mean()


def per_sample(net: nn.Module, x: Tensor) -> Tensor:
    slopes = vmap(grad(lambda point: net(point).squeeze(-1)))(x)
    return (slopes @ torch.tensor([1.0, -1.0])).square().mean()


def adapted(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    own = dict(net.named_parameters())
    loss = F.cross_entropy(functional_call(net, own, (x,)), y)
    slopes = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    fast = {n: p - 0.1 * s for (n, p), s in zip(own.items(), slopes, strict=True)}
    return F.cross_entropy(functional_call(net, fast, (x.flip(0),)), y)


def directional(net: nn.Module, x: Tensor) -> Tensor:
    value, slope = jvp(net, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level():
        dual = net(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(dual).tangent
    return (value - slope * tangent).square().mean()


def jacobians(net: nn.Module, x: Tensor) -> Tensor:
    return (vmap(jacrev(net))(x) + vmap(jacfwd(net))(x)).square().mean()


def of_images(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return derivative(net(x).tanh(), x).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24)
        self.mlp = mlp(8, 16, 8, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).movedim(2, 0).transpose(2, 3)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.mlp(x)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ELU(), nn.AvgPool2d(2),
        nn.ConvTranspose2d(4, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Softplus(),
        nn.Conv2d(4, 2, 2, stride=2), nn.Flatten(), nn.Linear(8, 1),
    )  # fmt: skip


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 1)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embed(ids)
        energy = self.head(self.blocks(embedded)).square().mean()
        return energy + derivative(energy, embedded).square().sum()


ModelAndInputs = tuple[nn.Module, tuple[Tensor, ...]]
MODELS: dict[str, Callable[[], ModelAndInputs]] = {
    "forces": lambda: (
        Differentiated(mlp(4, 16, 16, 1, act=nn.SiLU), forces),
        (torch.randn(8, 4), torch.randn(8), torch.randn(8, 4)),
    ),
    "gradient penalty": lambda: (
        Differentiated(
            nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), mlp(16, 8, 1, act=nn.LeakyReLU)),
            penalty,
        ),
        (torch.randn(8, 4), torch.randn(8, 4), torch.rand(8, 1)),
    ),
    "burgers": lambda: (Differentiated(mlp(2, 16, 16, 1), burgers), (torch.rand(16, 2),)),
    "laplacian": lambda: (
        Differentiated(mlp(2, 8, 1, act=nn.Sigmoid), laplacian),
        (torch.rand(8, 2),),
    ),
    "vmap of grad": lambda: (Differentiated(mlp(2, 16, 1), per_sample), (torch.rand(8, 2),)),
    "a step of MAML": lambda: (
        Differentiated(mlp(4, 16, 4, act=nn.ReLU), adapted),
        (torch.randn(8, 4), torch.randint(0, 4, (8,))),
    ),
    "jvp": lambda: (
        Differentiated(mlp(2, 16, 1, act=nn.Softplus), directional),
        (torch.rand(8, 2),),
    ),
    "jacobians": lambda: (Differentiated(mlp(2, 8, 2), jacobians), (torch.rand(8, 2),)),
    "convolutions": lambda: (Differentiated(images(), of_images), (torch.randn(4, 2, 4, 4),)),
    "attention": lambda: (Tokens(), (torch.randint(0, 12, (4, 4)),)),
}


def model_and_inputs(name: str) -> ModelAndInputs:
    """Return a model and its inputs, the same at every call."""
    torch.manual_seed(0)
    return MODELS[name]()
