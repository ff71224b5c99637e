"""Which device a rank computes on, and where a graph makes its tensors: a plan gives no number, and
on a rank it is the rank's own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopar._compat import FakeTensor, pytree
from autopar.errors import AutoparError, RankError, WorldError
from autopar.world import ranks, store

CPU = torch.device("cpu")


# -- in graphs -------------------------------------------------------------------------------------
def take_numbers_off(graph: fx.Graph) -> None:
    """Devices that a graph names lose their number: the ranks trace on different ones."""
    for node in graph.nodes:
        node.args = renamed(node.args, lambda device: torch.device(device.type))
        node.kwargs = renamed(node.kwargs, lambda device: torch.device(device.type))


def without_devices(value: Any) -> Any:
    """Arguments of a node as they say what is computed, and not where."""
    return renamed(value, lambda device: CPU)


def on_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A graph that makes its tensors on this device; the same module where it does already.

    The fakes of its values move too, as passes read from them what a device can do.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, copied)
    assert output is not None
    graph.output(output)
    blocks = {n: m for n, m in module.named_children() if isinstance(m, fx.GraphModule)}
    inside = {name: on_device(block, device) for name, block in blocks.items()}
    moved = any(inside[name] is not block for name, block in blocks.items())
    for node, other in copied.items():
        other.args = renamed(other.args, lambda _: device)
        other.kwargs = renamed(other.kwargs, lambda _: device)
        if "val" in node.meta:
            other.meta["val"] = pytree.tree_map_only(
                FakeTensor, _moved_to(device), node.meta["val"]
            )
        moved = moved or _devices(node) - {device} != set()
    if not moved:
        return module
    made = fx.GraphModule(module, graph, class_name=type(module).__name__)
    for name, block in inside.items():
        made.add_module(name, block)
    return made


def _devices(node: fx.Node) -> set[torch.device]:
    """Those that a node names, and those of its values."""
    found: set[torch.device] = set()

    def noted(device: torch.device) -> torch.device:
        found.add(device)
        return device

    renamed((node.args, node.kwargs), noted)
    values = pytree.tree_leaves(node.meta.get("val"))
    return found | {value.device for value in values if isinstance(value, FakeTensor)}


def _moved_to(device: torch.device) -> Callable[[Any], Any]:
    def moved(value: Any) -> Any:
        if value.device == device:
            return value
        with value.fake_mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )

    return moved


def renamed(value: Any, name: Callable[[torch.device], torch.device]) -> Any:
    """Arguments of a node with each device in them replaced."""
    return map_aggregate(value, lambda x: name(x) if isinstance(x, torch.device) else x)


def filled(shape: tuple[int, ...], number: int, device: torch.device) -> torch.Tensor:
    """An int64 tensor of one number, made on its device: `torch.tensor` would make it on the CPU
    and wait for a copy.
    """
    return torch.full(shape, number, dtype=torch.int64, device=device)


# -- of a rank -------------------------------------------------------------------------------------
def of_rank(tensors: Iterable[torch.Tensor], wanted: torch.device | str | None) -> torch.device:
    """Where this rank computes: what is `wanted`; else where its parameters are; where that is the
    CPU, but the running process group has a backend for accelerators (NCCL), on the one that
    LOCAL_RANK numbers.

    Raises WorldError where there is no such device, or the process group cannot send from it.
    """
    if wanted is not None:
        found = torch.device(wanted)
    else:
        found = next((x.device for x in tensors if not x.is_meta), CPU)
        if found.type == "cpu":
            found = torch.device(ranks.accelerated() or "cpu")
    if not ranks.sends_from(found):
        told = ", ".join(f"{kind}:{backend}" for kind, backend in ranks.backends().items())
        raise WorldError(
            f"device {found} is asked for, but the running process group ({told}) does not send "
            f"from {found.type}: give init_process_group a backend for it (nccl for cuda), or name "
            "another device"
        )
    return _numbered(found)


def _numbered(device: torch.device) -> torch.device:
    """With its number: a device of a type that has several is one of them."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type:
        return device
    count = torch.accelerator.device_count()
    own = os.environ.get("LOCAL_RANK", "")
    index = device.index
    if index is None:
        index = int(own) if own.isdigit() else torch.accelerator.current_device_index()
    if index >= count:
        raise WorldError(
            f"rank {ranks.rank()} is to compute on {device.type}:{index}, but this node has "
            f"{count} (LOCAL_RANK is {own or 'not set'}): start at most {count} ranks on each node"
        )
    return torch.device(device.type, index)


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Makes a device the one that torch takes where a number is not said: collectives of objects
    and streams go by it.
    """
    if device.type == "cpu" or device.index is None:
        yield
        return
    with torch.accelerator.device_index(device.index):
        yield


def agree_on_device(
    tensors: Iterable[torch.Tensor], wanted: torch.device | str | None
) -> torch.device:
    """`of_rank`, on every rank at once: where one has none, or two of a node have the same
    accelerator, all raise. Goes through the store: a collective on a device that is taken twice
    would hang, or fail without a word.
    """
    error: Exception | None = None
    place, named = CPU, ""
    try:
        place = of_rank(tensors, wanted)
        named = "" if place.type == "cpu" else _name(place)
    except (AutoparError, RuntimeError) as caught:
        error = caught
    told = store.all_of([socket.gethostname(), named, "" if error is None else str(error)])
    if error is not None:
        raise error
    failed = [(number, why) for number, (_, _, why) in enumerate(told) if why]
    if failed:
        raise RankError(f"rank {failed[0][0]} has no device: {failed[0][1]}")
    if ranks.others():
        _refuse_shared([(host, name) for host, name, _ in told])
    return place


def _refuse_shared(places: Iterable[tuple[str, str]]) -> None:
    by_place: dict[tuple[str, str], list[int]] = {}
    for number, place in enumerate(places):
        by_place.setdefault(place, []).append(number)
    for (host, name), who in by_place.items():
        if len(who) > 1 and name:
            raise WorldError(
                f"{ranks.named(who)} of node {host} all compute on {name}: give each a device of "
                'its own, with torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the '
                "model is made"
            )


def _name(device: torch.device) -> str:
    """Of the device itself, whatever number a rank has for it (CUDA_VISIBLE_DEVICES)."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{device} ({getattr(found, 'uuid', 'no uuid')})"
    return str(device)
