"""Let the running ranks act as one through collectives: fail together, agree, share a value.

Example: together("tracing", lambda: trace(model)) does the work on every rank. If it fails on rank
3 alone, every rank raises a RankError that names rank 3 and its error.

api.py, runtime, ops, cli and cost/calibration call this outside of the graph. Where no process
group runs, or one of the backend "fake", nothing is sent and this rank's value stands for all.
store.py does the same without collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import RankError

T = TypeVar("T")
_SHOWN = 8  # ranks that a message lists


def running() -> int:
    """Return the number of ranks of the running process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def others() -> bool:
    """Whether there are other ranks to talk to. A group of the backend "fake" has none: each of its
    ranks is assumed to have the value of this one.
    """
    return running() > 1 and "fake" not in backends().values()


def rank() -> int:
    """Return this process's rank; 0 where it runs alone."""
    return dist.get_rank() if running() > 1 else 0


def together(what: str, work: Callable[[], T]) -> T:
    """Do the same work on every rank and return its result; if it fails on one, it fails on all,
    within the time of one small gather.

    Where all ranks fail alike, each raises its own error. Else all raise a RankError that names the
    first failing rank and its error; `what` says in it what the ranks were doing.
    """
    error: Exception | None = None
    result: list[T] = []
    try:
        result.append(work())
    except Exception as caught:
        error = caught
    reports = all_of(None if error is None else (type(error).__name__, str(error)))
    failed = [number for number, report in enumerate(reports) if report is not None]
    if failed and len(set(reports)) > 1:
        kind, message = reports[failed[0]]
        raise RankError(
            f"rank {failed[0]} of {len(reports)} failed while {what}: {kind}: {message}"
        ) from error
    if error is not None:
        raise error
    return result[0]


def agree(what: str, value: str) -> None:
    """Raise a RankError on all ranks unless all hold the same value; `what` names it."""
    values = all_of(value)
    if len(set(values)) > 1:
        other = next(i for i, v in enumerate(values) if v != values[0])
        raise RankError(
            f"the ranks hold different {what}s: rank 0 {values[0]}, rank {other} {values[other]}; "
            "build the same model from the same "
            f"configuration and call with inputs of the same shapes on every rank"
        )


def agree_on_orders(orders: Mapping[int, str]) -> None:
    """Raise a RankError on all ranks unless all ranks of a pipeline's stage send the same
    collectives in the same order. `orders`: this rank's, by the numbers of its stages.
    """
    first: dict[int, tuple[int, str]] = {}
    for number, own in enumerate(all_of(dict(orders))):
        for stage, order in own.items():
            other, there = first.setdefault(stage, (number, order))
            if there != order:
                raise RankError(
                    f"the ranks of stage {stage} hold different collective orders: "
                    f"rank {other} {there}, rank {number} {order}; build the same model from the "
                    "same configuration"
                )


def agree_on(request: Mapping[str, str]) -> None:
    """Raise a RankError on all ranks unless every option has one value on all ranks that set it.
    The error lists each option that differs, its values, and the ranks that have them.

    `request`: this rank's options as text, {"layout": "fsdp"}.
    """
    options_by_rank = all_of(dict(request))
    differing = []
    for name in dict.fromkeys(key for options in options_by_rank for key in options):
        by_value: dict[str, list[int]] = {}
        for number, options in enumerate(options_by_rank):
            if name in options:
                by_value.setdefault(options[name], []).append(number)
        if len(by_value) > 1:
            values = ", ".join(
                f"{value} on {names_of(holders)}" for value, holders in by_value.items()
            )
            differing.append(f"{name} is {values}")
    if differing:
        raise RankError(
            f"the ranks ask for different things: {'; '.join(differing)}. Make the same call on "
            "every rank, with global inputs of the same shapes and dtypes"
        )


def meet() -> None:
    """Wait until all ranks have called this."""
    if others():
        dist.barrier()


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value, on every rank."""
    if not others():
        return value
    objects = [value]
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


def all_of(value: Any) -> list[Any]:
    """Return the values of all ranks in the order of the ranks, on every rank."""
    if not others():
        return [value] * running()
    values: list[Any] = [None] * running()
    dist.all_gather_object(values, value)
    return values


def names_of(numbers: Sequence[int]) -> str:
    """Return ranks as messages name them.

    >>> names_of([1]), names_of([0, 2, 3]), names_of(range(20))
    ('rank 1', 'ranks 0, 2, 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    shown = ", ".join(str(number) for number in numbers[:_SHOWN])
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"rank{'s' if len(numbers) != 1 else ''} {shown}{more}"


def backends() -> dict[str, str]:
    """Return the backend of the running process group for each type of device, such as
    {"cpu": "gloo", "cuda": "nccl"}; {} without a group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    return {kind: backend for kind, _, backend in pairs}


def accelerator_type() -> str | None:
    """Return the type of device that has a backend of its own in the running group, such as "cuda"
    with NCCL; None where gloo serves all devices or no group runs.
    """
    own = (kind for kind, backend in backends().items() if kind != "cpu" and backend != "gloo")
    return None if backends().get("cpu") == "fake" else next(own, None)


def sends_from(device: torch.device) -> bool:
    """Whether the running group has a backend for tensors of this device; True without a group."""
    by_device_type = backends()
    return not by_device_type or device.type in by_device_type


def device_of_collectives(device: torch.device) -> torch.device:
    """Return the device on which a tensor of `device` must be to be sent: with NCCL, the GPU."""
    if sends_from(device):
        return device
    current = torch.accelerator.current_accelerator()
    if current is None:
        return torch.device(next(iter(backends())))
    return torch.device(current.type, torch.accelerator.current_device_index())
