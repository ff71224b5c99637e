"""What each rank of a pipeline holds, and which of its blocks run again in the backward so that it
fits.

Example: of four stages of eight blocks the first has four micro-batches in flight and recomputes
five of its blocks, the second has three and recomputes two, and the others save everything.

A rank keeps what every micro-batch in flight saves, so the first ranks hold the most, and each rank
has a rung of its own (rematerialize.py). Stages that look alike, as most of a pipeline do, are run
on meta tensors once for all of them. The stages of a program and a schedule enter; what a rank
holds, or the rungs of all ranks, leave. pipelines.py asks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.cost.memory import Budget
from autopar.cost.peak import HalvesMemory, MemoryOfStep, peak_and_saved, peak_of_halves
from autopar.cost.summary import rematerialization_seconds
from autopar.ir.graph import called_graphs
from autopar.ir.pipeline_schedule import Action, Pipeline, runs_in_halves
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.passes.stages import Stage
from autopar.planner.rematerialize import (
    RematerializationSearch,
    RematerializationSteps,
    TriedRematerialization,
)
from autopar.planner.rungs import Names, Rematerialized
from autopar.world import World

_NOTHING = Rematerialized((), ())


def memory_of_rank(
    by_stage: Mapping[int, MemoryOfStep],
    actions: Sequence[Action],
    pipeline: Pipeline,
    rank: int,
    halves: Mapping[int, HalvesMemory] | None,
) -> Memory:
    """Return what a rank of the pipeline holds at its peak: its stages' tensors, what micro-batches
    in flight keep for their backward, and what the one that computes needs besides. `actions`: of
    this rank; `by_stage`: of its stages; `halves`: of these, where backwards run in halves.
    """
    if halves is not None:
        return _memory_in_halves(by_stage, halves, actions)
    own_stages = pipeline.stages_of(rank)
    parameters, optimizer = (
        math.fsum(getattr(by_stage[number].passes, kind) for number in own_stages)
        for kind in ("parameters", "optimizer")
    )
    weights = math.fsum(by_stage[number].weights for number in own_stages)
    flying = dict.fromkeys(own_stages, 0)
    begun = set[int]()  # stages with gradients
    most: Memory | None = None
    for action in actions:
        flying[action.stage] -= action.kind == "B"
        own = by_stage[action.stage]
        now = own.passes if action.stage in begun else own.first
        flying_bytes = math.fsum(n * by_stage[number].saved for number, n in flying.items())
        memory = Memory(
            parameters=parameters,
            gradients=now.gradients
            + math.fsum(by_stage[number].unreduced for number in begun - {action.stage}),
            optimizer=optimizer,
            activations=now.activations + weights - own.weights + flying_bytes,
            transient=now.transient,
            in_flight=now.in_flight,
            peak=0.0,
        )
        memory = dataclasses.replace(memory, peak=math.fsum(dataclasses.astuple(memory)))
        if action.kind == "F":
            flying[action.stage] += 1
        else:
            begun.add(action.stage)
        if most is None or memory.peak > most.peak:
            most = memory
    assert most is not None
    return max(most, _stepping(by_stage.values()), key=lambda memory: memory.peak)


def _stepping(stages: Collection[MemoryOfStep]) -> Memory:
    """Return what a rank holds while the optimizer steps its stages' parameters."""
    each = [stage.stepping for stage in stages]
    largest = max(memory.transient for memory in each)
    kinds = ("parameters", "gradients", "optimizer", "activations", "in_flight")
    sums = {kind: math.fsum(getattr(memory, kind) for memory in each) for kind in kinds}
    return Memory(**sums, transient=largest, peak=math.fsum(sums.values()) + largest)


def _memory_in_halves(
    by_stage: Mapping[int, MemoryOfStep],
    halves: Mapping[int, HalvesMemory],
    actions: Sequence[Action],
) -> Memory:
    """Return what `memory_of_rank` does where backwards run in two halves: a micro-batch keeps what
    its forward saved until the first half, and then what that carries over until the rest.
    """
    parameters = math.fsum(own.passes.parameters for own in by_stage.values())
    optimizer = math.fsum(own.passes.optimizer for own in by_stage.values())
    there = math.fsum(own.weights for own in by_stage.values())
    there += math.fsum(own.results for own in halves.values())
    waiting = {stage: {"F": 0, "I": 0} for stage in by_stage}  # for the next half of a backward
    begun = set[int]()  # stages with gradients
    most: Memory | None = None
    for action in actions:
        own = waiting[action.stage]
        own["F"] -= action.kind in ("B", "I")
        own["I"] -= action.kind == "W"
        activations = there + math.fsum(
            n["F"] * by_stage[stage].saved + n["I"] * halves[stage].carried
            for stage, n in waiting.items()
        )
        memory = Memory(
            parameters=parameters,
            gradients=math.fsum(halves[stage].unreduced for stage in begun),
            optimizer=optimizer,
            activations=activations,
            transient=halves[action.stage].most(action.kind),
            in_flight=0.0,
            peak=0.0,
        )
        memory = dataclasses.replace(memory, peak=math.fsum(dataclasses.astuple(memory)))
        if action.kind in ("B", "W"):
            begun.add(action.stage)
        if most is None or memory.peak > most.peak:
            most = memory
        for kind in ("F", "I"):
            own[kind] += action.kind == kind
    assert most is not None
    return max(most, _stepping(by_stage.values()), key=lambda memory: memory.peak)


class StageMemory:
    """The memory of stages on any rung. Stages that look alike share what is known."""

    def __init__(self, world: World, budget: Budget) -> None:
        self.world, self.budget = world, budget
        self._keys: dict[int, str] = {}
        self._stages: list[Stage] = []  # whose keys are known by their identity
        self._firsts: dict[str, Stage] = {}  # the first stage of each key
        self._steps: dict[str, RematerializationSteps] = {}
        self._memory: dict[tuple[str, Rematerialized], MemoryOfStep] = {}
        self._halves: dict[tuple[str, Rematerialized], HalvesMemory] = {}
        self._seconds: dict[tuple[str, Rematerialized], float] = {}

    def of(self, stage: Stage, rung: Rematerialized = _NOTHING) -> MemoryOfStep:
        """Return what the stage holds with the rung's blocks, of those that it has, run again."""
        key, own = self._key_and_rung(stage, rung)
        if (key, own) not in self._memory:
            program = self.steps(stage).program_at(own) if any(own) else stage.program
            optimizer = self.budget.optimizer
            self._memory[key, own] = peak_and_saved(program, optimizer, self.world)
        return self._memory[key, own]

    def halves(self, stage: Stage, rung: Rematerialized = _NOTHING) -> HalvesMemory:
        """Return what the stage holds where its backwards run in two halves, on this rung."""
        key, own = self._key_and_rung(stage, rung)
        if (key, own) not in self._halves:
            program = self.steps(stage).program_at(own) if any(own) else stage.program
            optimizer = self.budget.optimizer
            # the names of what this stage receives, in the graph of the first that looks like it
            received = self._firsts[key].receives if any(own) else stage.receives
            peaks = peak_of_halves(program, received, optimizer, self.world)
            self._halves[key, own] = peaks
        return self._halves[key, own]

    def of_rank(
        self,
        stages: Iterable[Stage],
        actions: Sequence[Action],
        pipeline: Pipeline,
        rank: int,
        rung: Rematerialized = _NOTHING,
    ) -> Memory:
        """Return what a rank of the pipeline holds at its peak. `stages`: its own."""
        stages = list(stages)
        by_stage = {stage.number: self.of(stage, rung) for stage in stages}
        halves = None
        if runs_in_halves([actions]):
            halves = {stage.number: self.halves(stage, rung) for stage in stages}
        return memory_of_rank(by_stage, actions, pipeline, rank, halves)

    def seconds(self, stage: Stage, rung: Rematerialized) -> float:
        """Return the seconds that a micro-batch takes longer on this rung."""
        key, own = self._key_and_rung(stage, rung)
        if not any(own):
            return 0.0
        if (key, own) not in self._seconds:
            program = self.steps(stage).program_at(own)
            self._seconds[key, own] = rematerialization_seconds(program, self.world)
        return self._seconds[key, own]

    def able(self, stage: Stage) -> tuple[Names, Names]:
        """Return the blocks of a stage that gather weights, and those with cheap ops."""
        steps = self.steps(stage)
        pairs = list(zip(stage.blocks, self._firsts[self.key(stage)].blocks, strict=True))
        fetching = tuple(name for name, twin in pairs if twin in steps.fetching)
        return fetching, tuple(name for name, twin in pairs if twin in steps.cheap)

    def steps(self, stage: Stage) -> RematerializationSteps:
        """Return the rungs of the first stage that looks like this one."""
        key = self.key(stage)
        if key not in self._steps:
            program = self._firsts[key].program
            assert program.plan is not None
            bare = dataclasses.replace(program.plan, **_NOTHING._asdict(), memory=None)
            program = dataclasses.replace(program, plan=bare)
            self._steps[key] = RematerializationSteps(program, self.world, self.budget)
        return self._steps[key]

    def key(self, stage: Stage) -> str:
        """Return a name that stages of equal graphs share."""
        if id(stage) not in self._keys:
            key = self._keys[id(stage)] = stage_key(stage)
            self._firsts.setdefault(key, stage)
            self._stages.append(stage)
        return self._keys[id(stage)]

    def _key_and_rung(self, stage: Stage, rung: Rematerialized) -> tuple[str, Rematerialized]:
        """Return the key of a stage, and the rung in the names of the first stage with that key."""
        key = self.key(stage)
        if not any(rung):
            return key, _NOTHING
        twins = dict(zip(stage.blocks, self._firsts[key].blocks, strict=True))
        return key, Rematerialized(
            *(tuple(twins[n] for n in names if n in twins) for names in rung)
        )


def stage_key(stage: Stage) -> str:
    """Return a name that stages share whose graphs have the same ops on the same local shapes."""
    program = stage.program
    kinds = {e.node: (e.kind, e.trainable) for e in program.signature.inputs}
    border = len(stage.receives), len(stage.sends)
    lines = [*_lines(program.module, program, kinds), str(border)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _lines(
    module: fx.GraphModule, program: Program, kinds: Mapping[str, tuple[str, bool]]
) -> Iterable[str]:
    """Yield a line for every node, which names others by their places."""
    places: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        places[node] = len(places)
        arguments: Any = fx.map_arg((node.args, node.kwargs), lambda n: f"%{places[n]}")
        layout = node.meta.get("layout") or program.layouts.get(node.name)
        where = "" if layout is None else f"{layout.local_shape} {layout.states}"
        what = kinds.get(node.name) if node.op == "placeholder" else node.target
        yield f"{node.op} {what} {arguments} {where} {node.meta.get('dtype')}"
        for block in called_graphs(module, node):
            yield from _lines(block, program, {})


class RankRungs(RematerializationSearch):
    """The rungs of one rank of a pipeline: of the blocks of its stages, with what its micro-batches
    in flight save.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        actions: Sequence[Action],
        pipeline: Pipeline,
        rank: int,
        costs: StageMemory,
    ) -> None:
        self.stages, self.actions, self.costs = stages, actions, costs
        self.pipeline, self.rank = pipeline, rank
        names: list[str] = []
        fetching: list[str] = []
        cheap: list[str] = []
        for stage in stages:
            names += stage.blocks
            for of_rank, of_stage in zip((fetching, cheap), costs.able(stage), strict=True):
                of_rank += of_stage
        plan = stages[0].program.plan
        assert plan is not None
        bare = dataclasses.replace(plan, **_NOTHING._asdict())
        super().__init__(tuple(names), tuple(fetching), tuple(cheap), bare, costs.budget)

    def seconds_of(self, rung: Rematerialized) -> float:
        """Return the seconds that a micro-batch takes longer on this rung, in all stages."""
        return math.fsum(self.costs.seconds(stage, rung) for stage in self.stages)

    def memory_of(self, rung: Rematerialized) -> Memory:
        """Return what the rank holds at its peak on this rung."""
        return self.costs.of_rank(self.stages, self.actions, self.pipeline, self.rank, rung)


def rungs_of_ranks(
    stages: Sequence[Stage],
    actions: Sequence[Sequence[Action]],
    pipeline: Pipeline,
    costs: StageMemory,
) -> list[TriedRematerialization]:
    """Return for every rank the cheapest rung that fits its budget, or the one that comes
    nearest.
    """
    return [
        RankRungs(
            [stages[number] for number in pipeline.stages_of(rank)],
            actions[rank],
            pipeline,
            rank,
            costs,
        ).best()
        for rank in range(pipeline.ranks)
    ]


def join_rungs(rungs: Iterable[Rematerialized]) -> Rematerialized:
    """Return the rung of the whole model on which every rank is on its own.

    >>> join_rungs([Rematerialized(("a",), ()), Rematerialized((), (), ("b",))])
    Rematerialized(recompute=('a',), regather=(), rerun=('b',))
    """
    columns = zip(*rungs, strict=True)
    return Rematerialized(*(tuple(name for names in each for name in names) for each in columns))
