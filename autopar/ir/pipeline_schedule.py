"""Schedules of pipelines: what every rank runs in a step, in order.

    actions("1f1b", Pipeline(2), 4)    rank 0: F0 F1 B0 F2 B1 F3 B2 B3; rank 1: F0 B0 F1 B1 …

A schedule has the forward (F) and the backward (B) of every stage for every micro-batch. They are
torch's lists (torch.distributed.pipelining), but for one: in torch 2.13 that of 1F1B begins on the
last rank with the second micro-batch. planner/pipelines.py and cost/pipeline.py read them, and
runtime/training/stages_run.py runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from autopar._compat import pipeline_actions
from autopar.errors import PlanError

# By our names: torch's, and whether a rank has more than one stage.
SCHEDULES: Mapping[str, tuple[str, bool]] = {
    "gpipe": ("GPipe", False),
    "1f1b": ("1F1B", False),
    "interleaved": ("Interleaved1F1B", True),
    "looped-bfs": ("LoopedBFS", True),
}


class Pipeline(NamedTuple):
    """How stages lie on ranks: stage s is on rank s mod `ranks`, so every rank has `rounds`."""

    ranks: int
    rounds: int = 1

    @property
    def stages(self) -> int:
        return self.ranks * self.rounds

    def rank_of(self, stage: int) -> int:
        """Return the rank that has this stage."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        """Return the stages of a rank."""
        return range(rank, self.stages, self.ranks)


class Action(NamedTuple):
    """The forward ("F") or the backward ("B") of a stage for one micro-batch, both from 0."""

    kind: Literal["F", "B"]
    stage: int
    part: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.part}"

    def before(self, stages: int) -> Action | None:
        """Return the action of another stage that this one needs a tensor of; None where it begins
        with inputs or with the loss.

        >>> str(Action("B", 1, 0).before(4))
        'B2.0'
        """
        if self.kind == "F":
            return Action("F", self.stage - 1, self.part) if self.stage else None
        return Action("B", self.stage + 1, self.part) if self.stage + 1 < stages else None

    def after(self, stages: int) -> Action | None:
        """Return the action of another stage that needs a tensor of this one; None for none."""
        if self.kind == "F":
            return Action("F", self.stage + 1, self.part) if self.stage + 1 < stages else None
        return Action("B", self.stage - 1, self.part) if self.stage else None


@cache
def actions(schedule: str, pipeline: Pipeline, parts: int) -> tuple[tuple[Action, ...], ...]:
    """Return for every rank of a pipeline its actions in a step of so many micro-batches; one goes
    through the stages and back in every schedule. Raises PlanError where the schedule is not for
    these numbers.

    >>> [" ".join(map(str, own)) for own in actions("1f1b", Pipeline(2), 2)]
    ['F0.0 F0.1 B0.0 B0.1', 'F1.0 B1.0 F1.1 B1.1']
    """
    name, rounds = SCHEDULES[schedule]
    if rounds != (pipeline.rounds > 1):
        wanted = "2 or more stages a rank (rounds)" if rounds else "1 stage a rank (rounds=1)"
        raise PlanError(f"stages: schedule {schedule!r} has {wanted}, not {pipeline.rounds}")
    if parts == 1:
        return _there_and_back(pipeline)
    if schedule == "1f1b":
        return tuple(
            _one_forward_one_backward(pipeline.ranks, r, parts) for r in range(pipeline.ranks)
        )
    try:
        actions = pipeline_actions(name, pipeline.ranks, pipeline.rounds, parts)
    except (ValueError, AssertionError) as error:
        raise PlanError(
            f"stages: torch's schedule {name} is not for {pipeline.ranks} ranks of "
            f"{pipeline.rounds} stages and {parts} micro-batches: {error}"
        ) from error
    own = tuple(tuple(Action(*each) for each in rank) for rank in actions)
    _check(own, pipeline, parts)
    return own


def _there_and_back(pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
    return tuple(
        (
            *(Action("F", stage, 0) for stage in pipeline.stages_of(rank)),
            *(Action("B", stage, 0) for stage in reversed(pipeline.stages_of(rank))),
        )
        for rank in range(pipeline.ranks)
    )


def _one_forward_one_backward(ranks: int, rank: int, parts: int) -> tuple[Action, ...]:
    """Return PipeDream-Flush's order (arXiv 2006.09503, section 3.1): a rank is as many forwards
    ahead of its backwards as there are ranks after it.
    """
    ahead = min(ranks - 1 - rank, parts)
    order = [Action("F", rank, part) for part in range(ahead)]
    for part in range(parts - ahead):
        order += [Action("F", rank, ahead + part), Action("B", rank, part)]
    order += [Action("B", rank, part) for part in range(parts - ahead, parts)]
    return tuple(order)


def _check(actions: tuple[tuple[Action, ...], ...], pipeline: Pipeline, parts: int) -> None:
    """Assert that every stage has every micro-batch's forward and backward once, on its rank."""
    for rank, own in enumerate(actions):
        wanted = {
            Action(kind, stage, part)
            for kind in ("F", "B")
            for stage in pipeline.stages_of(rank)
            for part in range(parts)
        }
        assert sorted(own) == sorted(wanted), f"rank {rank} runs {own}"


def most_in_flight(own: tuple[Action, ...], stage: int) -> int:
    """Return how many micro-batches have at most run forward on a stage, and not yet backward.

    >>> [most_in_flight(own, r) for r, own in enumerate(actions("1f1b", Pipeline(4), 8))]
    [4, 3, 2, 1]
    """
    held = most = 0
    for action in own:
        if action.stage == stage:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
    return most
