"""Schedules of pipelines: what every rank runs in a step, in order.

    actions("1f1b", Pipeline(2), 4)    rank 0: F0 F1 B0 F2 B1 F3 B2 B3; rank 1: F0 B0 F1 B1 …

A schedule has the forward (F) and the backward (B) of every stage for every micro-batch. Zero
bubble schedules (arXiv 2401.10241) run a backward in two halves: the gradients of what the stage
received (I), for which the stage before waits, and those of its weights (W), for which nobody does.
They are torch's lists (torch.distributed.pipelining), but for one: in torch 2.13 that of 1F1B
begins on the last rank with the second micro-batch. planner/pipelines.py and cost/pipeline.py read
them, and runtime/training/stages_run.py runs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple

from autopar._compat import pipeline_actions
from autopar.errors import PlanError

Kind = Literal["F", "B", "I", "W"]


class Schedule(NamedTuple):
    """A schedule: `torch`'s name for it, the stages that a rank may have (`most_rounds` None: any
    number), whether backwards run in two halves, and whether stages lie on ranks as a V.
    """

    torch: str
    least_rounds: int = 1
    most_rounds: int | None = 1
    splits: bool = False
    folds: bool = False

    @property
    def rounds_text(self) -> str:
        """How many stages a rank has, for messages.

        >>> SCHEDULES["interleaved"].rounds_text, SCHEDULES["zbv"].rounds_text
        ('2 or more stages a rank (rounds)', '2 stages a rank (rounds=2)')
        """
        if self.most_rounds is None:
            return f"{self.least_rounds} or more stages a rank (rounds)"
        plural = "s" * (self.least_rounds > 1)
        return f"{self.least_rounds} stage{plural} a rank (rounds={self.least_rounds})"


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule("GPipe"),
    "1f1b": Schedule("1F1B"),
    "interleaved": Schedule("Interleaved1F1B", 2, None),
    "looped-bfs": Schedule("LoopedBFS", 2, None),
    "zero-bubble": Schedule("InterleavedZeroBubble", 1, None, splits=True),
    "zbv": Schedule("ZBVZeroBubble", 2, 2, splits=True, folds=True),
    "dualpipev": Schedule("DualPipeV", 2, 2, splits=True, folds=True),
}


class Pipeline(NamedTuple):
    """How stages lie on ranks: stage s is on rank s mod `ranks`, so every rank has `rounds`; where
    the pipeline `folds`, every second round goes back from the last rank to the first.
    """

    ranks: int
    rounds: int = 1
    folds: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.rounds

    def rank_of(self, stage: int) -> int:
        """Return the rank that has this stage.

        >>> [Pipeline(3, 2, folds=True).rank_of(stage) for stage in range(6)]
        [0, 1, 2, 2, 1, 0]
        """
        number, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.folds and number % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)


class Action(NamedTuple):
    """What a stage does with one micro-batch, both from 0: the forward ("F"), the backward ("B"),
    or of the backward the gradients of what was received ("I") or those of the weights ("W").
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @property
    def result(self) -> Action:
        """The action as other stages know it, which are handed the same by a whole backward and by
        its first half.

        >>> str(Action("I", 1, 0).result)
        'B1.0'
        """
        return self._replace(kind="B") if self.kind == "I" else self

    def before(self, stages: int) -> Action | None:
        """Return the action of another stage that this one needs a tensor of, as a `result`; None
        where it begins with inputs, with the loss, or with what this stage holds.

        >>> str(Action("I", 1, 0).before(4))
        'B2.0'
        """
        if self.kind == "F":
            return Action("F", self.stage - 1, self.microbatch) if self.stage else None
        last = self.kind == "W" or self.stage + 1 == stages
        return None if last else Action("B", self.stage + 1, self.microbatch)

    def after(self, stages: int) -> Action | None:
        """Return the action of another stage that needs a tensor of this one, as a `result`; None
        for none.
        """
        if self.kind == "F":
            return Action("F", self.stage + 1, self.microbatch) if self.stage + 1 < stages else None
        first = self.kind == "W" or not self.stage
        return None if first else Action("B", self.stage - 1, self.microbatch)


def pipeline_of(schedule: str, ranks: int, rounds: int) -> Pipeline:
    """Return how the stages lie under a schedule. Raises PlanError where it has other rounds.

    >>> pipeline_of("zbv", 4, 2).stages_of(0)
    (0, 7)
    """
    known = SCHEDULES[schedule]
    most = rounds if known.most_rounds is None else known.most_rounds
    if not known.least_rounds <= rounds <= most:
        raise PlanError(f"stages: schedule {schedule!r} has {known.rounds_text}, not {rounds}")
    return Pipeline(ranks, rounds, known.folds)


@cache
def actions(schedule: str, pipeline: Pipeline, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return for every rank of a pipeline its actions in a step of so many micro-batches; one goes
    through the stages and back in every schedule. Raises PlanError where the schedule is not for
    these numbers.

    >>> [" ".join(map(str, own)) for own in actions("1f1b", Pipeline(2), 2)]
    ['F0.0 F0.1 B0.0 B0.1', 'F1.0 B1.0 F1.1 B1.1']
    """
    known, pipeline = SCHEDULES[schedule], pipeline_of(schedule, pipeline.ranks, pipeline.rounds)
    if microbatches == 1:
        return _there_and_back(pipeline)
    if schedule == "1f1b":
        return tuple(
            _one_forward_one_backward(pipeline.ranks, r, microbatches)
            for r in range(pipeline.ranks)
        )
    try:
        listed = pipeline_actions(known.torch, pipeline.ranks, pipeline.rounds, microbatches)
    except (ValueError, AssertionError) as error:
        raise PlanError(
            f"stages: torch's schedule {known.torch} is not for {pipeline.ranks} ranks of "
            f"{pipeline.rounds} stages and {microbatches} micro-batches: {error}"
        ) from error
    own = tuple(tuple(Action(*each) for each in rank) for rank in listed)
    _check(own, pipeline, microbatches)
    return own


def _there_and_back(pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
    return tuple(
        (
            *(Action("F", stage, 0) for stage in pipeline.stages_of(rank)),
            *(Action("B", stage, 0) for stage in reversed(pipeline.stages_of(rank))),
        )
        for rank in range(pipeline.ranks)
    )


def _one_forward_one_backward(ranks: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    """Return PipeDream-Flush's order (arXiv 2006.09503, section 3.1): a rank is as many forwards
    ahead of its backwards as there are ranks after it.
    """
    ahead = min(ranks - 1 - rank, microbatches)
    order = [Action("F", rank, number) for number in range(ahead)]
    for number in range(microbatches - ahead):
        order += [Action("F", rank, ahead + number), Action("B", rank, number)]
    order += [Action("B", rank, number) for number in range(microbatches - ahead, microbatches)]
    return tuple(order)


def _check(actions: tuple[tuple[Action, ...], ...], pipeline: Pipeline, microbatches: int) -> None:
    """Assert that every stage has every micro-batch's forward and then its backward once, on its
    rank: whole, or in halves.
    """
    for rank, own in enumerate(actions):
        by_microbatch: dict[tuple[int, int], str] = {}
        for action in own:
            key = action.stage, action.microbatch
            by_microbatch[key] = by_microbatch.get(key, "") + action.kind
        wanted = {*itertools.product(pipeline.stages_of(rank), range(microbatches))}
        assert by_microbatch.keys() == wanted, f"rank {rank} runs {own}"
        assert {*by_microbatch.values()} <= {"FB", "FIW"}, f"rank {rank} runs {own}"


def runs_in_halves(schedule: Iterable[Iterable[Action]]) -> bool:
    """Whether the actions have a backward in two halves; of one micro-batch none has.

    >>> runs_in_halves(actions("zero-bubble", Pipeline(2), 4))
    True
    """
    return any(action.kind == "I" for own in schedule for action in own)


def most_in_flight(own: tuple[Action, ...], stage: int) -> int:
    """Return how many micro-batches have at most run forward on a stage, and not yet backward, at
    least not for what the stage received.

    >>> [most_in_flight(own, r) for r, own in enumerate(actions("1f1b", Pipeline(4), 8))]
    [4, 3, 2, 1]
    """
    in_flight = most = 0
    for action in own:
        if action.stage == stage and action.kind != "W":
            in_flight += 1 if action.kind == "F" else -1
            most = max(most, in_flight)
    return most
