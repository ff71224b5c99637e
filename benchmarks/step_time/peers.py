"""What people use: DDP, FSDP2, tensor parallelism and their product, as torch's own tutorials set
them up. And autopar, by layout. Each is made from the same single-device model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.passes import OPTIONS
from autopar.planner.request import Layouts
from autopar.runtime.backends import Overlap
from autopar.tools.decoders import Llama, LlamaAttention
from benchmarks.step_time.forced import FORCED

RATE = 1e-3  # of AdamW
Batch = tuple[Tensor, Tensor]


@dataclass
class Contestant:
    """A model on the running ranks. `share`: (place, of how many) of the batch that it is given."""

    name: str
    model: nn.Module
    share: tuple[int, int] = (0, 1)
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    plan: autopar.Plan | None = None
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        groups = by_kind(self.model.parameters())
        self.optimizer = torch.optim.AdamW([{"params": g} for g in groups], lr=RATE, fused=True)

    def cut(self, batch: Batch) -> Batch:
        place, parts = self.share
        tokens, targets = (t.chunk(parts)[place] for t in batch)
        return tokens, targets

    def loss(self, batch: Batch) -> Tensor:
        return self.model(*batch)


def by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that one fused optimizer call can take: plain ones, DTensors by mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for p in parameters:
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        groups.setdefault(mesh, []).append(p)
    return list(groups.values())


def squared_norm(model: nn.Module) -> Tensor:
    """Of the whole gradient: what a rank adds to the sum over all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    ranks = dist.get_world_size()
    for p in model.parameters():
        if p.grad is None:
            continue
        local, copies = p.grad, ranks
        if isinstance(p.grad, DTensor):
            sharded = [
                size
                for size, place in zip(p.grad.device_mesh.shape, p.grad.placements, strict=True)
                if not place.is_replicate()
            ]
            local, copies = p.grad.to_local(), ranks // math.prod(sharded)
        total += local.detach().double().square().sum() / copies
    return total


# -- peers -----------------------------------------------------------------------------------------
def ddp(model: nn.Module, per_node: int) -> Contestant:
    """Defaults: buckets of 25 MB."""
    return Contestant("DDP", DistributedDataParallel(model), _place())


def fsdp2(model: nn.Module, per_node: int) -> Contestant:
    """Each block by itself, then the rest; weights are gathered again in the backward."""
    return Contestant("FSDP2", sharded(model, init_device_mesh("cpu", (_ranks(),))), _place())


def hsdp(model: nn.Module, per_node: int) -> Contestant:
    """FSDP2 within a node, gradients summed between nodes: a mesh that a user sets by hand."""
    mesh = init_device_mesh("cpu", _grid(per_node), mesh_dim_names=("replicate", "shard"))
    return Contestant("HSDP", sharded(model, mesh), _place())


def tensor(model: nn.Module, per_node: int) -> Contestant:
    """Megatron's: columns then rows, the vocabulary split in embedding, output and loss."""
    mesh = init_device_mesh("cpu", (_ranks(),), mesh_dim_names=("tensor",))
    return Contestant("tensor", split(model, mesh), context=loss_parallel)


def fsdp2_tensor(model: nn.Module, per_node: int) -> Contestant:
    """Tensor parallelism within a node, FSDP2 between nodes."""
    mesh = init_device_mesh("cpu", _grid(per_node), mesh_dim_names=("data", "tensor"))
    wrapped = sharded(split(model, mesh["tensor"]), mesh["data"])
    place = (mesh["data"].get_local_rank(), mesh["data"].size())
    return Contestant("FSDP2 × tensor", wrapped, place, loss_parallel)


Maker = Callable[[nn.Module, int], Contestant]
PEERS: dict[str, Maker] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "HSDP": hsdp,
    "tensor": tensor,
    "FSDP2 × tensor": fsdp2_tensor,
}


def _ranks() -> int:
    return dist.get_world_size()


def _place() -> tuple[int, int]:
    return dist.get_rank(), _ranks()


def _grid(per_node: int) -> tuple[int, int]:
    """Nodes × ranks a node; where a node has one rank, as square as it gets."""
    inner = per_node if 1 < per_node < _ranks() else 1 << (_ranks().bit_length() // 2)
    if _ranks() % inner or not 1 < inner < _ranks():
        raise ValueError(f"{_ranks()} ranks make no grid of two axes")
    return _ranks() // inner, inner


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Megatron's layout by `parallelize_module`. One gradient sum for the projections that read the
    same input; logits stay split on the vocabulary, for `loss_parallel`. Raises ValueError where a
    rank would get a part of a head.
    """
    for attention in model.modules():
        if isinstance(attention, LlamaAttention) and attention.key_heads % mesh.size():
            heads = f"{attention.key_heads} key and value heads"
            raise ValueError(f"{heads} do not split over {mesh.size()} ranks")
    outer: dict[str, ParallelStyle] = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    children = dict(model.named_children())
    parallelize_module(model, mesh, {name: s for name, s in outer.items() if name in children})
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, _styles(model))
        _own_heads(block.get_submodule("attention"), mesh)
    return model


def _styles(model: nn.Module) -> dict[str, ParallelStyle]:
    columns, rows = ColwiseParallel, RowwiseParallel
    if not isinstance(model, Llama):
        return {
            "attention.qkv": columns(),
            "attention.out": rows(),
            "up": columns(),
            "down": rows(),
        }
    whole = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),), use_local_output=False
    )
    attention = PrepareModuleInput(
        input_layouts=(Replicate(), None, None),
        desired_input_layouts=(Replicate(), None, None),
        use_local_output=False,
    )
    names = {"q": columns(), "k": columns(), "v": columns(), "out": rows()}
    return {
        "attention": attention,
        **{f"attention.{name}": style for name, style in names.items()},
        "mlp": whole,
        "mlp.gate": columns(),
        "mlp.up": columns(),
        "mlp.down": rows(),
    }


def _own_heads(attention: Any, mesh: DeviceMesh) -> None:
    """A rank computes its own heads. Its rows of a fused weight become these heads' of query, key
    and value: how Megatron stores it. The numbers are those of the single device.
    """
    attention.heads //= mesh.size()
    if isinstance(attention, LlamaAttention):
        attention.key_heads //= mesh.size()
        return
    for p in attention.qkv.parameters():
        assert isinstance(p, DTensor)
        whole = p.full_tensor().unflatten(0, (3, mesh.size(), -1))
        own = whole[:, mesh.get_local_rank()].flatten(0, 1)
        with torch.no_grad():
            p.to_local().copy_(own)


# -- autopar ---------------------------------------------------------------------------------------
def wanted(text: str) -> tuple[Layouts, Overlap]:
    """A layout, one of FORCED or a name; after a "+" the one pass that derived graphs go through,
    or "waiting" if every collective is to be waited for at once. "+stages" is read by `parallel`.
    """
    layout, _, alone = text.partition("+")
    return FORCED.get(layout, layout), (alone,) if alone in OPTIONS else alone != "waiting"


def parallel(
    model: nn.Module, world: autopar.World, batch: Batch, layout: str, name: str
) -> Contestant:
    """By what `wanted` reads; "auto+stages" leaves micro-batches and stages open. Every rank gives
    the global batch and takes its own part. The model is shared: autopar copies what it takes.
    """
    which, overlap = wanted(layout)
    par = autopar.parallelize(
        model, world, batch, layout=which, overlap=overlap,
        microbatches="auto" if layout.endswith("+stages") else 1,
    )  # fmt: skip
    assert isinstance(par, autopar.ParallelModule)
    return Contestant(name, par, plan=par.plan)


def contestant_of(
    name: str, model: nn.Module, per_node: int, world: autopar.World, batch: Batch
) -> Contestant:
    """A contestant by its name: a peer's, or "autopar LAYOUT". Raises what the maker raises."""
    if name in PEERS:
        return PEERS[name](copy.deepcopy(model), per_node)
    return parallel(model, world, batch, name.removeprefix("autopar "), name)
