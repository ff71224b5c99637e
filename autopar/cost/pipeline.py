"""The modelled step of a pipeline: every rank runs its actions in order, each as soon as what it
needs has come.

    stages of 1 s forward and 2 s backward on 2 ranks, 4 micro-batches: 12 s of work, 15 s a step

Sends run beside computation and take time on the way. Stages and a schedule enter, spans leave:
planner/pipelines.py puts them into a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rich.table import Table

from autopar.cost.simulator import Seen, Span
from autopar.ir.pipeline_schedule import Action, Pipeline


class StageSeconds(NamedTuple):
    """Seconds of one stage: of one micro-batch forward and backward, of what comes once at the end
    of a step (sums of gradients, the optimizer), of sending a border tensor to the next stage, of
    what comes once in the first forward (weights that are gathered once a step), and of a backward
    that runs in two halves: for what the stage received (`inputs`), and for its `weights`.

    >>> StageSeconds(1.0, 2.0, inputs=1.0, weights=1.0).of(Action("W", 3, 0))
    1.0
    """

    forward: float
    backward: float
    end: float = 0.0
    send: float = 0.0
    start: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0

    def recomputing(self, seconds: float) -> StageSeconds:
        """Return those of a stage whose backward takes so much longer, for what runs again in it:
        in its first half, if that computes anything.
        """
        if not self.inputs:
            return self._replace(backward=self.backward + seconds, weights=self.weights + seconds)
        return self._replace(backward=self.backward + seconds, inputs=self.inputs + seconds)

    def of(self, action: Action) -> float:
        """Return the seconds of an action of this stage, but for what comes once a step."""
        by_kind = {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}
        return by_kind[action.kind]


class PipelineSpan(NamedTuple):
    """An action on a rank of the pipeline, from `start` to `end` in seconds. `action` None: the end
    of the step, with sums and the optimizer.
    """

    rank: int
    action: Action | None
    start: float
    end: float


@dataclass(frozen=True)
class PipelineStep:
    """A simulated step of a pipeline: what ranks compute, and the `sends` of what actions hand to
    another rank, on the rank that sends.
    """

    spans: tuple[PipelineSpan, ...]
    ranks: int
    sends: tuple[PipelineSpan, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of the step: of the rank that ends last."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The part of the step in which a rank computes nothing, a mean over the ranks.

        >>> stages = [StageSeconds(1.0, 2.0)] * 2
        >>> from autopar.ir.pipeline_schedule import actions
        >>> simulate_pipeline(Pipeline(2), actions("1f1b", Pipeline(2), 4), stages).bubble
        0.19999999999999996
        """
        total = self.seconds * self.ranks
        return 1 - sum(span.end - span.start for span in self.spans) / total if total else 0.0


_PHASES = {"F": "forward", "B": "backward", "I": "backward: inputs", "W": "backward: weights"}


@dataclass(frozen=True)
class PipelineTimeline(Seen):
    """The step of a pipeline as a timeline: a track for each rank of the pipeline, one beside it
    for what that sends, and a span for each action, "F1.3" for the forward of stage 1 on
    micro-batch 3. Collectives within stages are part of the actions. `computing` and what is left
    of `seconds`, the bubble, are means over the ranks.
    """

    step: PipelineStep
    title = "a modelled step in stages"
    process = "modelled"

    @property
    def seconds(self) -> float:
        """Seconds of the step, of all its micro-batches."""
        return self.step.seconds

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The actions of every rank, and the sends between ranks."""
        actions = [_span(span, "compute", f"rank {span.rank}") for span in self.step.spans]
        sends = [_span(span, "send", f"rank {span.rank} sends") for span in self.step.sends]
        return tuple(span for span in (*actions, *sends) if span.seconds)

    @cached_property
    def computing(self) -> float:
        """Seconds in which a rank runs its actions, a mean over the ranks."""
        return math.fsum(self._by_rank) / self.step.ranks

    @cached_property
    def _by_rank(self) -> list[float]:
        spans = self.step.spans
        return [
            math.fsum(span.end - span.start for span in spans if span.rank == rank)
            for rank in range(self.step.ranks)
        ]

    def table(self) -> Table:
        """Return how long every rank of the pipeline computes and waits; print it with rich."""
        table = Table("rank", title=f"{self.title}, {self.seconds * 1e3:,.2f} ms")
        for heading in ("actions", "computes ms", "waits ms"):
            table.add_column(heading, justify="right")
        for rank, computes in enumerate(self._by_rank):
            actions = sum(span.rank == rank and span.action is not None for span in self.step.spans)
            times = (f"{x * 1e3:,.2f}" for x in (computes, self.seconds - computes))
            table.add_row(str(rank), str(actions), *times)
        table.caption = f"ranks wait {self.step.bubble:.0%}"
        return table


def _span(span: PipelineSpan, kind: str, track: str) -> Span:
    """Return an action, or what it sends, as a span of a timeline."""
    if span.action is None:
        return Span("sums, optimizer", kind, track, span.start, span.end, "end of the step")
    phase = _PHASES[span.action.kind]
    return Span(
        str(span.action), kind, track, span.start, span.end, phase, f"stage {span.action.stage}"
    )


def simulate_pipeline(
    pipeline: Pipeline,
    schedule: Sequence[Sequence[Action]],
    stages: Sequence[StageSeconds],
) -> PipelineStep:
    """Return the step in which every rank runs its part of the schedule."""
    ends: dict[Action, float] = {}
    clocks, places = [0.0] * pipeline.ranks, [0] * pipeline.ranks
    spans: list[PipelineSpan] = []
    sends: list[PipelineSpan] = []
    begun = set[int]()  # stages
    going = True
    while going:
        going = False
        for rank, own in enumerate(schedule):
            while places[rank] < len(own):
                action = own[places[rank]]
                needs = action.before(pipeline.stages)
                if needs is not None and needs not in ends:
                    break
                seconds = stages[action.stage]
                start = clocks[rank]
                if needs is not None:
                    came, source = ends[needs], pipeline.rank_of(needs.stage)
                    if source != rank:
                        began = came
                        came += stages[min(needs.stage, action.stage)].send
                        sends.append(PipelineSpan(source, needs, began, came))
                    start = max(start, came)
                took = seconds.of(action)
                if action.kind == "F" and action.stage not in begun:
                    took += seconds.start
                    begun.add(action.stage)
                clocks[rank] = ends[action.result] = start + took
                spans.append(PipelineSpan(rank, action, start, start + took))
                places[rank] += 1
                going = True
    assert all(place == len(own) for place, own in zip(places, schedule, strict=True)), (
        "a schedule in which ranks wait for one another"
    )
    for rank in range(pipeline.ranks):
        took = sum(stages[stage].end for stage in pipeline.stages_of(rank))
        spans.append(PipelineSpan(rank, None, clocks[rank], clocks[rank] + took))
    return PipelineStep(tuple(spans), pipeline.ranks, tuple(sends))
