"""The device of a rank, and the devices in a graph.

A plan is the same on all ranks, so its graphs name devices without a number ("cuda"); on a rank,
`on_device` puts the rank's own device ("cuda:1") in their place. `of_rank` and `agree_on_device`
choose the rank's device from what the user asks for, the parameters, LOCAL_RANK and the backends of
the running process group; `home_of` and `of_inputs` say where a trace puts tensors and inputs. The
API, the planner, the runtime and the tracer call these functions.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from autopar._compat import FakeTensor, pytree
from autopar.errors import AutoparError, RankError, WorldError
from autopar.world import ranks, store

CPU = torch.device("cpu")


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator of a device that torch.manual_seed seeds; the CPU's where the device has
    none, as in a process that makes no numbers on it.
    """
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    generators: tuple[torch.Generator, ...] = getattr(module, "default_generators", ())
    if module is None or not generators:
        return torch.default_generator
    return generators[module.current_device() if device.index is None else device.index]


# -- in graphs -------------------------------------------------------------------------------------
def take_numbers_off(graph: fx.Graph) -> None:
    """Remove the number from every device that a graph names: ranks trace on different ones."""
    for node in graph.nodes:
        node.args = rename_devices(node.args, lambda device: torch.device(device.type))
        node.kwargs = rename_devices(node.kwargs, lambda device: torch.device(device.type))


def without_devices(value: Any) -> Any:
    """Return arguments of a node with every device replaced by the CPU, to compare what is computed
    and not where.
    """
    return rename_devices(value, lambda device: CPU)


def on_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a graph that makes its tensors on this device; the same module if it does so already.

    The fake tensors of its values move too, as passes read from them what a device can do.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, copied)
    assert output is not None
    graph.output(output)
    blocks = {n: m for n, m in module.named_children() if isinstance(m, fx.GraphModule)}
    placed_blocks = {name: on_device(block, device) for name, block in blocks.items()}
    changed = any(placed_blocks[name] is not block for name, block in blocks.items())
    for node, other in copied.items():
        other.args = rename_devices(other.args, lambda _: device)
        other.kwargs = rename_devices(other.kwargs, lambda _: device)
        if "val" in node.meta:
            other.meta["val"] = pytree.tree_map_only(
                FakeTensor, _fake_mover(device), node.meta["val"]
            )
        changed = changed or _devices_of(node) - {device} != set()
    if not changed:
        return module
    placed = fx.GraphModule(module, graph, class_name=type(module).__name__)
    for name, block in placed_blocks.items():
        placed.add_module(name, block)
    return placed


def _devices_of(node: fx.Node) -> set[torch.device]:
    """Return the devices that a node names and those of its values."""
    devices: set[torch.device] = set()

    def record(device: torch.device) -> torch.device:
        devices.add(device)
        return device

    rename_devices((node.args, node.kwargs), record)
    values = pytree.tree_leaves(node.meta.get("val"))
    return devices | {value.device for value in values if isinstance(value, FakeTensor)}


def _fake_mover(device: torch.device) -> Callable[[Any], Any]:
    """Return a function that moves a fake tensor to this device."""

    def move(value: Any) -> Any:
        if value.device == device:
            return value
        with value.fake_mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )

    return move


def rename_devices(value: Any, name: Callable[[torch.device], torch.device]) -> Any:
    """Return arguments of a node with each device in them replaced by `name` of it."""
    return map_aggregate(value, lambda x: name(x) if isinstance(x, torch.device) else x)


def fill_on(shape: tuple[int, ...], number: int, device: torch.device) -> torch.Tensor:
    """Return an int64 tensor filled with one number, made on its device: `torch.tensor` would make
    it on the CPU and wait for a copy.
    """
    return torch.full(shape, number, dtype=torch.int64, device=device)


# -- of a model and its inputs ---------------------------------------------------------------------
def home_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device that tensors on the meta device are taken to be on: that of the first other
    tensor, or the CPU.
    """
    candidates = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs))]
    for value in candidates:
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            return value.device
    return CPU


def of_inputs(model: nn.Module) -> torch.device | None:
    """Return the device to which the inputs of a call are moved, wherever they are, as ranks move
    them: that of all tensors of the model. None where these are on several devices, or on none but
    the meta device: then inputs stay where they are.
    """
    devices = {x.device for x in (*model.parameters(), *model.buffers()) if not x.is_meta}
    return devices.pop() if len(devices) == 1 else None


# -- of a rank -------------------------------------------------------------------------------------
def of_rank(tensors: Iterable[torch.Tensor], wanted: torch.device | str | None) -> torch.device:
    """Return the device on which this rank computes.

    It is `wanted`, else where the parameters are. Where that is the CPU, but the running process
    group has a backend for accelerators (NCCL), it is the accelerator that LOCAL_RANK numbers.
    Raises WorldError where there is no such device, or the process group cannot send from it.
    """
    if wanted is not None:
        device = torch.device(wanted)
    else:
        device = next((x.device for x in tensors if not x.is_meta), CPU)
        if device.type == "cpu":
            device = torch.device(ranks.accelerator_type() or "cpu")
    if not ranks.sends_from(device):
        backends = ", ".join(f"{kind}:{backend}" for kind, backend in ranks.backends().items())
        raise WorldError(
            f"device {device} is asked for, but the running process group ({backends}) does not "
            f"send from {device.type}: give init_process_group a backend for it (nccl for cuda), "
            "or name another device"
        )
    return _numbered(device)


def _numbered(device: torch.device) -> torch.device:
    """Return the device with a number if it is an accelerator: LOCAL_RANK, or else the current
    one.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type:
        return device
    count = torch.accelerator.device_count()
    local_rank = os.environ.get("LOCAL_RANK", "")
    index = device.index
    if index is None:
        index = (
            int(local_rank) if local_rank.isdigit() else torch.accelerator.current_device_index()
        )
    if index >= count:
        raise WorldError(
            f"rank {ranks.rank()} is to compute on {device.type}:{index}, but this node has "
            f"{count} (LOCAL_RANK is {local_rank or 'not set'}): start at most "
            f"{count} ranks on each node"
        )
    return torch.device(device.type, index)


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make a device the current one within: collectives of objects and streams use it where no
    number is given.
    """
    if device.type == "cpu" or device.index is None:
        yield
        return
    with torch.accelerator.device_index(device.index):
        yield


def agree_on_device(
    tensors: Iterable[torch.Tensor], wanted: torch.device | str | None
) -> torch.device:
    """Return `of_rank`, after all ranks have agreed: where one rank has no device, or two ranks of
    a node have the same accelerator, all of them raise.

    Ranks agree through the store, as a collective on a device that is taken twice would hang or
    fail without a message. Raises RankError or WorldError.
    """
    error: Exception | None = None
    device, device_name = CPU, ""
    try:
        device = of_rank(tensors, wanted)
        device_name = "" if device.type == "cpu" else _physical_name(device)
    except (AutoparError, RuntimeError) as caught:
        error = caught
    reports = store.all_of([socket.gethostname(), device_name, "" if error is None else str(error)])
    if error is not None:
        raise error
    failed = [(number, why) for number, (_, _, why) in enumerate(reports) if why]
    if failed:
        raise RankError(f"rank {failed[0][0]} has no device: {failed[0][1]}")
    if ranks.others():
        _refuse_shared([(host, name) for host, name, _ in reports])
    return device


def _refuse_shared(places: Iterable[tuple[str, str]]) -> None:
    """Raise WorldError where two ranks of one node compute on the same accelerator."""
    by_place: dict[tuple[str, str], list[int]] = {}
    for number, host_and_name in enumerate(places):
        by_place.setdefault(host_and_name, []).append(number)
    for (host, name), members in by_place.items():
        if len(members) > 1 and name:
            raise WorldError(
                f"{ranks.names_of(members)} of node {host} all compute on {name}: give each a "
                "device of its own, with "
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the model is made'
            )


def _physical_name(device: torch.device) -> str:
    """Return a name of the physical device, the same whatever number a rank has for it
    (CUDA_VISIBLE_DEVICES).
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{device} ({getattr(properties, 'uuid', 'no uuid')})"
    return str(device)
