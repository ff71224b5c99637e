"""Every change of state as a call, and the tensors that ranks hold before it."""

from __future__ import annotations

import zlib

import torch

from autopar.ops import collectives as c

SEED = 20261


def random(shape, *key):
    generator = torch.Generator().manual_seed(zlib.crc32(repr((SEED, *key)).encode()))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def same(state, gradient=False):
    """Whether a value (or a gradient) in this state is the same on all ranks of the axis."""
    return state in ("IP" if gradient else "IR")


def own(mesh, rank, axis):
    """The coordinate on an axis, or the joint one in mesh order, as graphs get it."""
    place = mesh.group(mesh.ordered(axis), rank).index(rank)
    return torch.tensor([place])


# name → (from, to, whether the dim grows, the call). `n` is the local inner, `k` the coordinate.
RESHARDS = {
    "replicate": ("I", "R", 0, lambda x, k, a, d, m, n: c.replicate(x, a, m)),
    "slice of I": ("I", "S", -1, lambda x, k, a, d, m, n: c.take_slice(x, k, a, d, m, n, of="I")),
    "slice of R": ("R", "S", -1, lambda x, k, a, d, m, n: c.take_slice(x, k, a, d, m, n, of="R")),
    "gather to R": ("S", "R", 1, lambda x, k, a, d, m, n: c.all_gather(x, a, d, m, n)),
    "gather to I": ("S", "I", 1, lambda x, k, a, d, m, n: c.all_gather(x, a, d, m, n, k, to="I")),
    "reduce to I": ("P", "I", 0, lambda x, k, a, d, m, n: c.all_reduce(x, a, m, to="I")),
    "reduce to R": ("P", "R", 0, lambda x, k, a, d, m, n: c.all_reduce(x, a, m, to="R")),
    "scatter": ("P", "S", -1, lambda x, k, a, d, m, n: c.reduce_scatter(x, a, d, m, n)),
    "invariant": ("R", "I", 0, lambda x, k, a, d, m, n: c.invariant(x, a, m)),
    "part of I": ("I", "P", 0, lambda x, k, a, d, m, n: c.partial(x, a, m, of="I")),
    "part of R": ("R", "P", 0, lambda x, k, a, d, m, n: c.partial(x, a, m, of="R")),
    "place": ("S", "P", 1, lambda x, k, a, d, m, n: c.place(x, k, a, d, m, n)),
}


def deal(mesh, axis, shape, same, *key):
    """A random tensor for every rank; the same one within a group where the state says so."""
    tensors = []
    for rank in range(mesh.size):
        group = mesh.group(mesh.ordered(axis), rank)
        tensors.append(random(shape, *key, group[0] if same else rank))
    return tensors
