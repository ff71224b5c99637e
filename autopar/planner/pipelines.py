"""Plans with stages: a layout for the ranks of one stage, the cut, and the step of the pipeline.

Example: for Stages(2, "fsdp") on 8 ranks the search plans "fsdp" on 4, the graph of these 4 is cut
into two stages of consecutive blocks, and their seconds are put into the schedule.

Every stage has the same mesh. `of_one_stage` gives the world and the request of one stage, which
the funnel takes as any other; `in_stages` makes a plan with stages of what it finds. api.py and
runtime/apply.py call both.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from torch import fx

from autopar.cost.memory import Budget, text_of
from autopar.cost.pipeline import PipelineStep, StageSeconds, simulate_pipeline
from autopar.cost.simulator import Timeline, halves_of_backward, timeline
from autopar.cost.summary import compute_seconds_by_node
from autopar.errors import LayoutError, PlanError
from autopar.ir.pipeline_schedule import (
    SCHEDULES,
    Action,
    Pipeline,
    actions,
    most_in_flight,
    pipeline_of,
    runs_in_halves,
)
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory, blocks_text
from autopar.ir.program import Program
from autopar.passes import stages as stage_graphs
from autopar.passes.stages import Stage
from autopar.planner.request import PlanRequest, Stages
from autopar.planner.rungs import Rematerialized
from autopar.planner.stage_memory import StageMemory, join_rungs, rungs_of_ranks
from autopar.world import World

# The schedules that "auto" tries, by the stages of a rank.
_BY_ROUNDS = {
    1: ("1f1b", "zero-bubble"),
    2: ("interleaved", "zero-bubble", "zbv"),
    4: ("interleaved",),
}

_TRIES = 3  # plans of one stage, until the pipeline fits
_MORE = 1.1  # of the bytes that a rank has too many, to take off the next plan
_FEW_STAGES = 4  # each with a note of its own
_ALIKE = 1e-3  # of their seconds
_AIM = 0.997  # of the limit: a block that runs again holds a little more beside other stages
# Whether weights are gathered, and gradients that are scattered summed, once a step.
_OFTEN = ((True, True), (False, True), (False, False))


def of_one_stage(world: World, request: PlanRequest) -> tuple[World, PlanRequest]:
    """Return the world of one stage's ranks and the request for their layout, of those of all; both
    as they are where no stages are asked for. Raises LayoutError where the stages are not for this
    world, PlanError for a schedule that is none.
    """
    requested = request.layout
    if not isinstance(requested, Stages):
        return world, request
    if requested.schedule not in (*SCHEDULES, "auto"):
        raise PlanError(
            f"{requested}: unknown schedule {requested.schedule!r}; there are "
            f"{', '.join(SCHEDULES)} and auto"
        )
    if requested.schedule == "auto" and requested.rounds != 1:
        raise PlanError(f"{requested}: schedule 'auto' finds the rounds: leave them at 1")
    if isinstance(requested.within, Stages):
        raise LayoutError(f"{requested}: stages within stages: add their counts to one")
    assert requested.count != "auto"  # division_search.py has found it
    if requested.count < 2 or requested.rounds < 1:
        raise LayoutError(f"{requested}: a pipeline has 2 or more ranks, and each 1 or more stages")
    if requested.schedule != "auto":
        pipeline_of(requested.schedule, requested.count, requested.rounds)
    budget = request.budget
    if budget is not None and budget.memory_bytes is not None:
        budget = dataclasses.replace(budget, memory_bytes=budget.memory_bytes * requested.count)
    inner = dataclasses.replace(request, layout=requested.within, budget=budget, stages=requested)
    return _world_of_stage(world, requested), inner


def require_microbatches(request: PlanRequest) -> None:
    """Raise PlanError where a step in stages has no micro-batches, or other numbers of them than
    its schedule takes.
    """
    if request.stages is not None and request.microbatches < 2:
        raise PlanError(
            f"{request.stages}: stages run micro-batches one after the other, and a step has "
            f"{request.microbatches}: plan with microbatches={4 * _count(request.stages)}, or as "
            "many as divide the batch; the more, the less the ranks wait"
        )
    if request.stages is not None and request.stages.schedule != "auto":
        requested, count = request.stages, _count(request.stages)
        pipeline = pipeline_of(requested.schedule, count, requested.rounds)
        actions(requested.schedule, pipeline, request.microbatches)


def _count(requested: Stages) -> int:
    """Return the ranks of a pipeline, where they are found."""
    assert requested.count != "auto"
    return requested.count


def _world_of_stage(world: World, requested: Stages) -> World:
    """Return the world of the first of so many equal parts of the ranks."""
    count = _count(requested)
    if world.links:
        raise LayoutError(
            f"{requested}: a pipeline on an irregular network: no equal parts are known"
        )
    left, levels = count, list(world.levels)
    for place in reversed(range(len(levels))):
        shared = math.gcd(left, levels[place].ranks)
        ranks = levels[place].ranks // shared
        levels[place] = dataclasses.replace(levels[place], ranks=ranks)
        left //= shared
        if left > 1 and ranks > 1:
            break
    if left > 1:
        sizes = " · ".join(str(level.ranks) for level in reversed(world.levels))
        raise LayoutError(
            f"{requested}: {count} stages do not divide {world.ranks} ranks ({sizes}, outer "
            "first) into equal parts: choose a divisor"
        )
    size = world.ranks // count
    measured = tuple(m for m in world.measured if m.reach <= size)
    return dataclasses.replace(world, levels=tuple(levels), measured=measured)


Search = Callable[[PlanRequest], Program]
Finish = Callable[[Program, PlanRequest], Plan]


def fit_in_stages(search: Search, finish: Finish, request: PlanRequest) -> tuple[Plan, Plan]:
    """Return the plan that is found for the ranks of a stage, and that of the step in stages, the
    same where none are asked for. `search` and `finish`: `choose_plan` and `finish_plan` of the
    model. Raises PlanError where no stage fits.

    A rank of a pipeline keeps what several micro-batches save, the first rank the most, so every
    rank recomputes as much as it must. Where all that a rank can recompute is too little, the plan
    of a stage is made with less memory, so that its layout holds less.
    """
    limited = request.stages is not None and request.memory_bytes is not None
    if limited and request.recompute == "auto":
        with suppress(PlanError):  # its layout holds too much
            return _fit_by_rank(search, finish, request)
    refused: NoRoom | None = None
    inner = request
    for _ in range(_TRIES):
        try:
            stage_plan = finish(search(inner), inner)
        except PlanError as error:
            raise refused or error from None
        try:
            return stage_plan, in_stages(stage_plan, request)
        except NoRoom as error:
            refused = refused or error
            less = stage_plan.peak_bytes - _MORE * error.excess
            if request.budget is None or request.recompute != "auto" or less <= 0:
                break
            inner = dataclasses.replace(
                request, budget=dataclasses.replace(request.budget, memory_bytes=less)
            )
    assert refused is not None
    raise refused


def _fit_by_rank(search: Search, finish: Finish, request: PlanRequest) -> tuple[Plan, Plan]:
    """Return what `fit_in_stages` does, of the layout that is the fastest where nothing runs again;
    each rank then recomputes as much as it must. Raises PlanError where that is too little.
    """
    assert request.budget is not None
    budget = dataclasses.replace(request.budget, recompute="none")
    saving_all = dataclasses.replace(request, budget=budget)
    stage_plan = finish(search(saving_all), saving_all)
    context, limit = stage_plan.context, _limit(request)
    assert context is not None and limit is not None and request.stages is not None
    tried: list[tuple[float, Plan, Stages]] = []  # seconds, a plan, and the schedule they are of
    for gathers, sums in _OFTEN:
        if gathers > stage_plan.gathers_once or sums > stage_plan.sums_once:
            continue
        plan = dataclasses.replace(
            stage_plan, gathers_once=gathers, sums_once=sums, interleaved=False
        )
        full = dataclasses.replace(context.program, plan=dataclasses.replace(plan, context=None))
        for run in _runs(full, context.source.module.graph, request.stages, None, limit):
            if tried and run.step.seconds >= min(seconds for seconds, *_ in tried):
                break  # what runs again makes it longer
            fitted = run.with_rungs(limit)
            if fitted is None or (gathers and (fitted[0].recompute or fitted[0].regather)):
                continue  # what is gathered again in the backward is not kept
            rung, seconds = fitted
            named = _named(request.stages, run, plan)
            tried.append((seconds, dataclasses.replace(plan, **rung._asdict()), named))
        if any(not (plan.recompute or plan.regather) for _, plan, _ in tried):
            break  # what comes later sends more, and holds less
    if not tried:
        raise PlanError("no rank of the pipeline can recompute enough")
    _, best, stages = min(tried, key=lambda each: each[0])
    if not best.decides_as(stage_plan):
        chosen = dataclasses.replace(context.source, plan=best)
        stage_plan = finish(chosen, dataclasses.replace(request, budget=None))
    # the rungs are those of its schedule: another one would need others
    return stage_plan, in_stages(stage_plan, dataclasses.replace(request, stages=stages))


def in_stages(plan: Plan, request: PlanRequest, like: Plan | None = None) -> Plan:
    """Return the plan of a step in stages, of one for the ranks of a stage; the plan itself where
    none are asked for. `like`: a plan of the same model, whose stages begin at the same blocks.
    Raises PlanError where a stage does not fit the memory of a device.
    """
    if request.stages is None:
        return plan
    context, requested = plan.context, request.stages
    assert context is not None
    alone = dataclasses.replace(plan, interleaved=False, context=None)
    full = dataclasses.replace(context.program, plan=alone)
    limit = _limit(request)
    slices = False
    if like is not None and like.slices_borders:
        full, slices = stage_graphs.slice_borders(full, like.stage_starts), True
    runs = _runs(full, context.source.module.graph, requested, like, limit)
    run, memory = _fastest_that_fits(runs, limit)
    if like is None:
        sliced = stage_graphs.slice_borders(full, run.starts)
        faster = None if sliced is full else _faster(run, sliced, limit)
        if faster is not None:
            (run, memory), full, slices = faster, sliced, True
    pipeline, step = run.pipeline, run.step
    most = max(memory, key=lambda each: each.peak)
    planned = dataclasses.replace(
        plan,
        context=None,
        layout=str(_named(requested, run, plan)) if like is None else like.layout,
        stage_starts=run.starts,
        schedule=run.schedule,
        rounds=pipeline.rounds,
        slices_borders=slices,
        interleaved=False,
        seconds=step.seconds,
        overlapped=step.seconds if request.overlap else None,
        bound=0.0,
        memory=most,
        peak_bytes=most.peak,
        device_limit=limit if like is None else like.device_limit,
        smaller=None,
        notes=(*plan.notes, *_notes(run, memory, slices)),
    )
    program = dataclasses.replace(full, plan=planned)
    return dataclasses.replace(planned, context=dataclasses.replace(context, program=program))


def _faster(
    run: _Run, sliced: Program, limit: float | None
) -> tuple[_Run, tuple[Memory, ...]] | None:
    """Return the run of the program with border tensors in slices, and what its ranks hold, where
    that is faster than the run of whole ones and fits.
    """
    in_slices = _Run.of(sliced, run.schedule, run.pipeline, run.starts, run.known)
    if in_slices.step.seconds >= run.step.seconds:
        return None
    with suppress(NoRoom):
        return _fastest_that_fits([in_slices], limit)
    return None


def _named(requested: Stages, run: _Run, plan: Plan) -> Stages:
    """Return the stages as they would be asked for to get this run."""
    rounds = run.pipeline.rounds
    return dataclasses.replace(requested, within=plan.layout, schedule=run.schedule, rounds=rounds)


# -- one schedule, or the best of several ----------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Run:
    """The stages of a program under one schedule, with their seconds and the simulated step."""

    schedule: str
    pipeline: Pipeline
    starts: tuple[str, ...]
    stages: tuple[Stage, ...]
    seconds: tuple[StageSeconds, ...]
    actions: tuple[tuple[Action, ...], ...]
    step: PipelineStep
    known: StageMemory

    @staticmethod
    def of(
        full: Program,
        schedule: str,
        pipeline: Pipeline,
        starts: tuple[str, ...],
        known: StageMemory,
    ) -> _Run:
        """Return the run of a program that is cut at these blocks. `known`: of its stages."""
        plan = full.plan
        assert plan is not None
        stages = stage_graphs.cut(full, starts)
        stage_graphs.check(full, stages)
        by_key: dict[str, StageSeconds] = {}
        for stage in stages:
            if known.key(stage) not in by_key:
                by_key[known.key(stage)] = _seconds(stage, full)
        seconds = tuple(by_key[known.key(stage)] for stage in stages)
        return _Run._of_stages(schedule, pipeline, starts, stages, seconds, known)

    def under(self, schedule: str) -> _Run:
        """Return the run of the same stages under another schedule."""
        pipeline = pipeline_of(schedule, self.pipeline.ranks, self.pipeline.rounds)
        known = self.known
        return _Run._of_stages(schedule, pipeline, self.starts, self.stages, self.seconds, known)

    @staticmethod
    def _of_stages(
        schedule: str,
        pipeline: Pipeline,
        starts: tuple[str, ...],
        stages: tuple[Stage, ...],
        seconds: tuple[StageSeconds, ...],
        known: StageMemory,
    ) -> _Run:
        plan = stages[0].program.plan
        assert plan is not None
        order = actions(schedule, pipeline, plan.microbatches)
        if runs_in_halves(order) and not any(own.weights for own in seconds):
            halves: dict[str, tuple[float, float]] = {}
            for stage in stages:
                if known.key(stage) not in halves:
                    program = stage.program
                    halves[known.key(stage)] = halves_of_backward(
                        program, plan.world, stage.receives
                    )
            split = (halves[known.key(stage)] for stage in stages)
            seconds = tuple(
                own._replace(inputs=inputs, weights=weights)
                for own, (inputs, weights) in zip(seconds, split, strict=True)
            )
        step = simulate_pipeline(pipeline, order, seconds)
        return _Run(schedule, pipeline, starts, stages, seconds, order, step, known)

    def memory(self) -> tuple[Memory, ...]:
        """Return what each rank of the pipeline holds at its peak."""
        return tuple(
            self.known.of_rank(
                [self.stages[number] for number in self.pipeline.stages_of(rank)],
                self.actions[rank],
                self.pipeline,
                rank,
            )
            for rank in range(self.pipeline.ranks)
        )

    def with_rungs(self, limit: float) -> tuple[Rematerialized, float] | None:
        """Return which blocks run again so that every rank fits the limit of bytes, and the seconds
        of the step then; None where some rank does not.
        """
        tried = rungs_of_ranks(self.stages, self.actions, self.pipeline, self.known)
        if any(each.memory.peak > _AIM * limit for each in tried):
            return None
        rung = join_rungs(each.rung for each in tried)
        seconds = [
            own.recomputing(self.known.seconds(stage, rung))
            for stage, own in zip(self.stages, self.seconds, strict=True)
        ]
        return rung, simulate_pipeline(self.pipeline, self.actions, seconds).seconds


def _runs(
    full: Program,
    traced: fx.Graph,
    requested: Stages,
    like: Plan | None,
    limit: float | None = None,
) -> list[_Run]:
    """Return the runs that are asked for of a program that was traced as this graph and emitted,
    the fastest first: of one schedule, or with "auto" of 1f1b, of interleaved ones, whose bubble
    shrinks with the rounds, and of zero bubble ones, which fill it with gradients of weights. GPipe
    and looped-bfs have the bubbles of the first two, and hold more. `limit`: the bytes of a device.
    """
    count, plan = _count(requested), full.plan
    assert plan is not None
    aim = None if limit is None else _AIM * limit
    run = partial(_Run.of, full, known=StageMemory(plan.world, Budget(aim, plan.optimizer)))
    if like is not None:
        return [run(like.schedule, like.pipeline, like.stage_starts)]
    by_node = compute_seconds_by_node(full, plan.world)
    by_block = stage_graphs.seconds_by_block(traced, by_node)
    if requested.schedule != "auto":
        pipeline = pipeline_of(requested.schedule, count, requested.rounds)
        starts = stage_graphs.balance(by_block, pipeline.stages)
        return [run(requested.schedule, pipeline, starts)]
    runs: list[_Run] = []
    for rounds, (first, *others) in _BY_ROUNDS.items():
        pipeline = Pipeline(count, rounds)
        if runs and pipeline.stages > len(by_block):
            break
        try:
            runs.append(run(first, pipeline, stage_graphs.balance(by_block, pipeline.stages)))
        except PlanError:  # not for this number of micro-batches, or a stage trains nothing
            if not runs:
                raise
            break
        for schedule in others:
            with suppress(PlanError):  # not for this number of micro-batches
                runs.append(runs[-1].under(schedule))
    return sorted(runs, key=lambda run: run.step.seconds)


def _fastest_that_fits(
    runs: Sequence[_Run], limit: float | None
) -> tuple[_Run, tuple[Memory, ...]]:
    """Return the first of these runs that fits a device, and what its ranks hold. Raises PlanError
    where none fits: what the one that holds the least needs.
    """
    memories = []
    for run in runs:
        memory = run.memory()
        if limit is None or max(each.peak for each in memory) <= limit:
            return run, memory
        memories.append(memory)
    assert limit is not None
    raise _no_room(min(memories, key=lambda each: max(m.peak for m in each)), limit)


def step_of(plan: Plan) -> PipelineStep:
    """Return the simulated step of a plan with stages, made in this process."""
    return _run_of(plan).step


def memory_by_rank(plan: Plan) -> tuple[Memory, ...]:
    """Return what each rank of a plan's pipeline holds at its peak; the plan was made in this
    process.
    """
    return _run_of(plan).memory()


def _run_of(plan: Plan) -> _Run:
    assert plan.context is not None and plan.stage_starts
    known = StageMemory(plan.world, Budget(None, plan.optimizer))
    return _Run.of(plan.context.program, plan.schedule, plan.pipeline, plan.stage_starts, known)


def _seconds(stage: Stage, program: Program) -> StageSeconds:
    """Return the modelled seconds of one stage. Its first micro-batch may gather weights for all,
    its last one sums gradients and steps the optimizer: what these take longer comes at the start
    and at the end.
    """
    plan = program.plan
    assert plan is not None
    last = timeline(stage.program, plan.world)
    usual = last.before if last.before is not None else last
    forward = _end_of_forward(usual)
    more = max(0.0, last.run.seconds - usual.run.seconds)
    start = min(more, max(0.0, _end_of_forward(last) - forward))
    return StageSeconds(
        forward, usual.run.seconds - forward, more - start, _send_seconds(stage, plan.world), start
    )


def _end_of_forward(microbatch: Timeline) -> float:
    """Return when the last of the forward of a micro-batch has been computed."""
    ends = [
        s.end for s in microbatch.spans if s.phase == "forward" and s.track in ("compute", "waits")
    ]
    return max(ends, default=0.0)


def _send_seconds(stage: Stage, world: World) -> float:
    """Return the seconds that border tensors take to the next stage, over the outermost links."""
    layouts, dtypes = stage.program.layouts, stage.program.dtypes
    sent = float(sum(layouts[n].local_size * dtypes[n].itemsize for n in stage.sends))
    *inner, outer = world.levels
    members = math.prod(level.ranks for level in inner)  # that send at once over one uplink
    share = outer.uplink(members) / members
    return world.launch_s + outer.latency_s + sent / share if sent else 0.0


def _limit(request: PlanRequest) -> float | None:
    """Return what a device may hold, of a budget that is for the ranks of all stages; None for no
    limit.
    """
    assert request.stages is not None
    limit = request.memory_bytes
    return None if limit is None else limit / _count(request.stages)


class NoRoom(PlanError):
    """A rank of a pipeline holds more than a device has: `excess` bytes more."""

    excess: float = 0.0


def _no_room(memory: Sequence[Memory], limit: float) -> NoRoom:
    rank, most = max(enumerate(memory), key=lambda pair: pair[1].peak)
    error = NoRoom(
        f"no plan fits: rank {rank} of the pipeline needs {most}, and a device has "
        f"{text_of(limit)}. Try recompute='full', more stages or devices, or smaller micro-batches"
    )
    error.excess = most.peak - limit
    return error


def _notes(run: _Run, memory: Sequence[Memory], slices: bool) -> tuple[str, ...]:
    """Return what people want to know of the stages, one sentence each. `slices`: whether border
    tensors are sent in slices.
    """
    stages, pipeline, step = run.stages, run.pipeline, run.step
    lines = [
        f"{len(stages)} stages, each on 1 of {pipeline.ranks} equal parts of the ranks; ranks wait "
        f"{step.bubble:.0%} (the bubble) of a step of {step.seconds * 1e3:,.2f} ms"
    ]
    for first, last in _alike(run.seconds):
        numbers, own = range(first, last + 1), run.seconds[first]
        own_blocks = tuple(b for n in numbers for b in stages[n].blocks)
        flying = [most_in_flight(run.actions[pipeline.rank_of(n)], n) for n in numbers]
        peak = max(memory[pipeline.rank_of(n)].peak for n in numbers)
        name, whose = f"stage {first}", "its rank holds"
        if last > first:
            name, whose = f"stages {first} to {last}", "a rank of them holds at most"
        lines.append(
            f"{name} ({blocks_text(own_blocks)}): {own.forward * 1e3:.2f} ms forward, "
            f"{_backward_text(own)} a micro-batch, {max(flying)} in flight; {whose} {text_of(peak)}"
        )
    if slices:
        lines.append(
            "where ranks of a stage hold the same, each sends a slice of it to the next stage"
        )
    lines.append("gap: none is proven for a plan in stages")
    return tuple(lines)


def _backward_text(own: StageSeconds) -> str:
    """Return how long a backward takes, whole or in two halves."""
    if not own.inputs:  # whole, or all of it of weights
        return f"{(own.weights or own.backward) * 1e3:.2f} ms backward"
    inputs, weights = own.inputs * 1e3, own.weights * 1e3
    return f"backward {inputs:.2f} ms for the stage before and {weights:.2f} ms for weights"


def _alike(seconds: Sequence[StageSeconds]) -> list[tuple[int, int]]:
    """Return the first and the last of every run of stages that take as long: of more than a few,
    one sentence is enough for each run.
    """
    runs = [(0, 0)]
    for stage, (before, own) in enumerate(itertools.pairwise(seconds), 1):
        same = math.isclose(own.forward, before.forward, rel_tol=_ALIKE) and math.isclose(
            own.backward, before.backward, rel_tol=_ALIKE
        )
        if same and len(seconds) > _FEW_STAGES:
            runs[-1] = runs[-1][0], stage
        else:
            runs.append((stage, stage))
    return runs
