"""The private names of torch.distributed.pipelining that autopar touches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def pipeline_actions(
    schedule: str, ranks: int, rounds: int, microbatches: int
) -> list[list[tuple[Any, int, int]]]:
    """Return for every rank of a pipeline what it runs in torch's schedule of this name, in order:
    ("F" or "B", stage, micro-batch); "I" and "W" are the parts of a backward that a schedule runs
    apart. `rounds`: stages of a rank. Raises ValueError and AssertionError as torch does.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops  # a second

    stages = rounds if rounds > 1 else None
    found: Any = get_schedule_ops(schedule, ranks, microbatches, num_stages_per_rank=stages)
    return [[leaf for action in own if action for leaf in _leaves(action)] for own in found]


def _leaves(action: Any) -> Iterator[tuple[Any, int, int]]:
    if action.sub_actions is not None:
        for each in action.sub_actions:
            yield from _leaves(each)
    elif action.computation_type.value in ("F", "B", "I", "W"):
        yield action.computation_type.value, action.stage_index, action.microbatch_index
