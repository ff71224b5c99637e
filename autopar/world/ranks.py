"""The running ranks: failing together, with the reason, and agreeing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import RankError

T = TypeVar("T")
_SHOWN = 8  # ranks that a message lists


def running() -> int:
    """How many ranks the running process group has; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def others() -> bool:
    """Whether there are other ranks to hear from. A group of the backend "fake" has none: each rank
    of it is taken to say what this one says.
    """
    return running() > 1 and "fake" not in backends().values()


def rank() -> int:
    return dist.get_rank() if running() > 1 else 0


def together(what: str, work: Callable[[], T]) -> T:
    """Do the same work on every rank; if it fails on one, it fails on all, within the time of one
    small gather.

    Where all ranks fail alike, each raises its own error. Else all raise a RankError that names the
    first failing rank and its error.
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
    """Raise a RankError on all ranks unless all hold the same value."""
    found = all_of(value)
    if len(set(found)) > 1:
        odd = next(i for i, v in enumerate(found) if v != found[0])
        raise RankError(
            f"the ranks hold different {what}s: rank 0 {found[0]}, rank {odd} {found[odd]}; build "
            "the same model from the same "
            f"configuration and call with inputs of the same shapes on every rank"
        )


def agree_on(asked: Mapping[str, str]) -> None:
    """Raise a RankError on all ranks unless all that ask for something ask for the same. It names
    whatever differs, and the ranks by what they ask for.
    """
    everyones = all_of(dict(asked))
    differing = []
    for name in dict.fromkeys(key for one in everyones for key in one):
        by_value: dict[str, list[int]] = {}
        for number, one in enumerate(everyones):
            if name in one:
                by_value.setdefault(one[name], []).append(number)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on {named(who)}" for value, who in by_value.items())
            differing.append(f"{name} is {values}")
    if differing:
        raise RankError(
            f"the ranks ask for different things: {'; '.join(differing)}. Make the same call on "
            "every rank, with global inputs of the same shapes and dtypes"
        )


def meet() -> None:
    """Wait until all ranks are here."""
    if others():
        dist.barrier()


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not others():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_of(value: Any) -> list[Any]:
    """The value of every rank, in their order, on every rank."""
    if not others():
        return [value] * running()
    found: list[Any] = [None] * running()
    dist.all_gather_object(found, value)
    return found


def named(numbers: Sequence[int]) -> str:
    """
    >>> named([1]), named([0, 2, 3]), named(range(20))
    ('rank 1', 'ranks 0, 2, 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    shown = ", ".join(str(number) for number in numbers[:_SHOWN])
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"rank{'s' if len(numbers) != 1 else ''} {shown}{more}"


def backends() -> dict[str, str]:
    """The backend that the running process group has for each type of device, such as
    {"cpu": "gloo", "cuda": "nccl"}, whichever way it was named; empty without a group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    return {kind: backend for kind, _, backend in pairs}


def accelerated() -> str | None:
    """The type of device that the running group has a backend of its own for, such as "cuda" of
    NCCL; None where gloo sends for all, or nothing runs.
    """
    own = (kind for kind, backend in backends().items() if kind != "cpu" and backend != "gloo")
    return None if backends().get("cpu") == "fake" else next(own, None)


def sends_from(device: torch.device) -> bool:
    """Whether the running ranks can send a tensor of this device; one rank sends none."""
    found = backends()
    return not found or device.type in found


def device_of_collectives(device: torch.device) -> torch.device:
    """Where a tensor of this device must be for the running ranks to send it: on NCCL the GPU."""
    if sends_from(device):
        return device
    current = torch.accelerator.current_accelerator()
    if current is None:
        return torch.device(next(iter(backends())))
    return torch.device(current.type, torch.accelerator.current_device_index())
