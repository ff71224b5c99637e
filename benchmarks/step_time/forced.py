"""Layouts that a name alone does not give: grids on four ranks, and mixtures of layouts. No two
come to the same plan: which of two equal plans is measured first would be chance.
"""

from __future__ import annotations

from autopar import Grid2D, Grid3D, Grid4D, Grid25D
from autopar.planner.request import Layouts

_MLP = ("*.up", "*.down")
FORCED: dict[str, Layouts] = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "megatron": "megatron",
    "megatron-sp": "megatron-sp",
    "atp 2,2 column": Grid2D(2, 2),
    "atp 2,2 row": Grid2D(2, 2, "row"),
    "atp 4,1 row": Grid2D(4, 1, "row"),
    "4d x2 z2": Grid4D(x=2, z=2),
    "4d x2 data2": Grid4D(x=2, data=2),
    "4d y2 z2": Grid4D(y=2, z=2),
    "4d y2 data2": Grid4D(y=2, data=2),
    "4d z2 data2": Grid4D(z=2, data=2),
    "3d 4,1,1": Grid3D(4, 1, 1),
    "3d 2,2,1": Grid3D(2, 2, 1),
    "2.5d panels": Grid25D(2, 1),
    "2.5d": Grid25D(2, 1, panels=False),
    "blocks megatron, rest ddp": {"blocks.*": "megatron", "*": "ddp"},
    "blocks megatron, rest fsdp": {"blocks.*": "megatron", "*": "fsdp"},
    "blocks ddp, rest megatron": {"blocks.*": "ddp", "*": "megatron"},
    "blocks fsdp, rest megatron": {"blocks.*": "fsdp", "*": "megatron"},
    "attention megatron, rest ddp": {"*attention*": "megatron", "*": "ddp"},
    "attention ddp, rest megatron": {"*attention*": "ddp", "*": "megatron"},
    "mlp fsdp, rest ddp": {**dict.fromkeys(_MLP, "fsdp"), "*": "ddp"},
    "mlp megatron, rest ddp": {**dict.fromkeys(_MLP, "megatron"), "*": "ddp"},
    "vocabulary megatron, rest fsdp": {"head": "megatron", "token": "megatron", "*": "fsdp"},
    "blocks y2 data2, rest ddp": {"blocks.*": Grid4D(y=2, data=2), "*": "ddp"},
    "blocks x2 data2, rest ddp": {"blocks.*": Grid4D(x=2, data=2), "*": "ddp"},
}
