"""The private names of torch.distributed.pipelining that autopar touches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def pipeline_actions(
    schedule: str, ranks: int, rounds: int, microbatches: int
) -> list[list[tuple[Any, int, int]]]:
    """Return for every rank of a pipeline what it runs in torch's schedule of this name, in order:
    ("F" or "B", stage, micro-batch); "I" and "W" are the halves of a backward that a schedule runs
    apart. `rounds`: stages of a rank. Raises ValueError and AssertionError as torch does.
    """
    from unittest import mock

    from torch.distributed.pipelining import schedules  # a second
    from torch.distributed.pipelining.stage import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages = 0, ranks, ranks * rounds
    stage.submod = None
    schedule_class: Any = schedules.get_schedule_class(schedule)
    single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
    # sends are not asked for, and zero bubble schedules take seconds to list theirs
    runtime: Any = schedules._PipelineScheduleRuntime
    with mock.patch.object(runtime, "_prepare_schedule_with_comms", create=True):
        order = schedule_class(stage if single else [stage] * rounds, microbatches).pipeline_order
    return [[leaf for action in order[rank] for leaf in _leaves(action)] for rank in range(ranks)]


def _leaves(action: Any) -> Iterator[tuple[Any, int, int]]:
    if action is None:  # a moment in which the rank waits
        return
    if action.sub_actions is not None:
        for each in action.sub_actions:
            yield from _leaves(each)
    elif action.computation_type.value in ("F", "B", "I", "W"):
        yield action.computation_type.value, action.stage_index, action.microbatch_index
