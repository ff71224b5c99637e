"""Rematerialization: which blocks recompute their activations, or only gather their weights again,
in the backward pass, so that a plan fits the memory.

Example: of 12 blocks that do not fit, the first 5 are recomputed, or all 12 gather their weights
again and the first 2 are recomputed, whichever costs fewer seconds. Each such set of blocks is a
rung; rungs of more and more blocks form a ladder, and the search climbs to the first that fits.

`RematerializationSteps` prices a rung exactly, on the emitted program; `Estimated` interpolates,
for deep models. `rematerialize_to_fit` is the last step of planning: an emitted program and a
budget enter, the program with its recompute regions leaves. Called by planner.py, memory_search.py
and world_size.py.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.memory import Budget, refusal
from autopar.cost.peak import peak
from autopar.cost.summary import rematerialization_seconds
from autopar.ir.graph import blocks
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.passes import emit_program, recompute
from autopar.planner.deep_models import DeepModel
from autopar.world import World


class Rematerialized(NamedTuple):
    """The blocks that are recomputed, and those that only gather their weights again."""

    recompute: tuple[str, ...]
    regather: tuple[str, ...]


class TriedRematerialization(NamedTuple):
    """A rung that was priced: the blocks, the memory at the peak, and the seconds of what runs
    twice.
    """

    rung: Rematerialized
    memory: Memory
    seconds: float


class RematerializationSearch(ABC):
    """A search over the rungs of one program.

    `names`: its blocks in order; `fetching`: those that gather weights; `start`: the rung that its
    plan has already.
    """

    def __init__(
        self, names: tuple[str, ...], fetching: tuple[str, ...], plan: Plan, budget: Budget
    ) -> None:
        self.names, self.fetching, self.budget = names, fetching, budget
        idle = {*names} - {*fetching}
        self.start = Rematerialized(
            plan.recompute, tuple(n for n in plan.regather if n not in idle)
        )
        self.known: dict[Rematerialized, TriedRematerialization] = {}

    @abstractmethod
    def seconds_of(self, rung: Rematerialized) -> float:
        """Return the seconds of what runs twice on this rung."""

    @abstractmethod
    def memory_of(self, rung: Rematerialized) -> Memory:
        """Return the memory held at the peak on this rung."""

    def tried(self, rung: Rematerialized) -> TriedRematerialization:
        """Return the rung with its memory and seconds, priced once."""
        if rung not in self.known:
            self.known[rung] = TriedRematerialization(
                rung, self.memory_of(rung), self.seconds_of(rung)
            )
        return self.known[rung]

    def planned(self) -> TriedRematerialization:
        """Return the rung that the plan has already."""
        return self.tried(self.start)

    def counted(self) -> TriedRematerialization:
        """Return the rung on which every weight that may be gathered again is."""
        auto = self.budget.recompute == "auto" and self.fetching
        return self.tried(Rematerialized((), self.fetching)) if auto else self.planned()

    def best(self) -> TriedRematerialization:
        """Return the planned rung where it fits or nothing else is allowed; else the cheapest rung
        that fits, or the one that comes nearest.
        """
        planned = self.planned()
        if self._fits(planned) or self.budget.recompute != "auto":
            return planned
        return self._cheapest(planned)

    def least(self, below: float) -> TriedRematerialization | None:
        """Return the fitting rung of fewest seconds, if these are fewer than `below`; None without
        one. Every rung is tried.
        """
        rungs = [self.start]
        if self.budget.recompute == "auto":
            recomputed, regathered, mixed = self._ladders()
            rungs += [*regathered, *mixed, *recomputed]
        best: TriedRematerialization | None = None
        for rung in dict.fromkeys(rungs):
            if self.seconds_of(rung) < below and self._fits(self.tried(rung)):
                best = self.tried(rung)
                below = best.seconds
        return best

    def settled(self, estimate: RematerializationSearch) -> TriedRematerialization:
        """Return what `best` does, starting from the rung that an estimate has planned: a little
        more is recomputed where that does not fit, less where there is room.
        """
        if self.budget.recompute != "auto" or not any(self.start):
            return self.best()
        ladders = (each for each in self._ladders() if self.start in each)
        rungs = [Rematerialized((), ()), *next(ladders, [self.start])]
        index = rungs.index(self.start)
        while not self._fits(self.tried(rungs[index])) and index + 1 < len(rungs):
            index += 1
        while index and self._has_room(rungs[index - 1], rungs[index], estimate):
            if not self._fits(self.tried(rungs[index - 1])):
                break
            index -= 1
        return self.tried(rungs[index])

    def _has_room(
        self, less: Rematerialized, rung: Rematerialized, estimate: RematerializationSearch
    ) -> bool:
        """Whether rung `less` should fit, by the estimated difference of the two peaks."""
        peak_of_less, peak_of_rung = (estimate.tried(each).memory.peak for each in (less, rung))
        limit = self.budget.memory_bytes
        return (
            limit is not None
            and self.tried(rung).memory.peak + peak_of_less - peak_of_rung <= limit
        )

    def _ladders(self) -> tuple[list[Rematerialized], list[Rematerialized], list[Rematerialized]]:
        """Return three ladders: the first n blocks recomputed; the first n gather again; all gather
        again and the first n of them are recomputed.
        """
        names, fetching = self.names, self.fetching
        recomputed = [Rematerialized(names[: n + 1], ()) for n in range(len(names))]
        regathered = [Rematerialized((), fetching[: n + 1]) for n in range(len(fetching))]
        mixed = [
            Rematerialized(rung.recompute, _without(fetching, rung))
            for rung in recomputed
            if fetching
        ]
        return recomputed, regathered, mixed

    def _cheapest(self, start: TriedRematerialization) -> TriedRematerialization:
        """Return the fitting rung of fewest seconds, or the one that comes nearest where none fits.

        Either as few blocks as possible gather their weights again, and where that is not enough as
        few as possible are recomputed as well; or as few as possible are recomputed and the others
        save all.
        """
        recomputed, regathered, mixed = self._ladders()
        ladders: list[tuple[TriedRematerialization, list[Rematerialized]]] = []
        if regathered:
            middle = self.tried(regathered[-1])
            ladders = [(start, regathered) if self._fits(middle) else (middle, mixed)]
        ladders = [(low, rungs) for low, rungs in ladders if self._fits(self.tried(rungs[-1]))]
        seconds_of_one = self.seconds_of(recomputed[0]) if recomputed else 0.0
        if recomputed and not (
            ladders and self._guess(*ladders[0])[1] <= start.seconds + seconds_of_one
        ):
            ladders += [(start, recomputed)] if self._fits(self.tried(recomputed[-1])) else []
        if not ladders:
            return min((start, *self.known.values()), key=lambda tried: tried.memory.peak)
        return self._climb(*min(reversed(ladders), key=lambda pair: self._guess(*pair)[1]))

    def _fits(self, tried: TriedRematerialization) -> bool:
        return self.budget.fits(tried.memory)

    def _guess(self, low: TriedRematerialization, rungs: list[Rematerialized]) -> tuple[int, float]:
        """Return the index of the first rung that could fit and its seconds, if every rung takes as
        much off the peak and costs as much as the next.
        """
        assert self.budget.memory_bytes is not None
        high = self.tried(rungs[-1])
        fraction = (low.memory.peak - self.budget.memory_bytes) / (
            low.memory.peak - high.memory.peak
        )
        count = min(len(rungs), max(1, math.ceil(fraction * len(rungs) - 1e-9)))
        return count - 1, low.seconds + (high.seconds - low.seconds) * count / len(rungs)

    def _climb(
        self, low: TriedRematerialization, rungs: list[Rematerialized]
    ) -> TriedRematerialization:
        """Return the first rung that fits, from the guessed one upwards."""
        index = self._guess(low, rungs)[0]
        while not self._fits(self.tried(rungs[index])):
            index = min(len(rungs) - 1, index + max(1, len(rungs) // 16))
        return self.tried(rungs[index])


class RematerializationSteps(RematerializationSearch):
    """The rungs of an emitted program, priced exactly: each is rewritten and its peak simulated."""

    def __init__(self, program: Program, world: World, budget: Budget) -> None:
        assert program.plan is not None
        self.program, self.world = program, world
        self._made: dict[Rematerialized, Program] = {}
        names = blocks(program.module.graph.nodes)
        super().__init__(names, recompute.regathers(program), program.plan, budget)

    def seconds_of(self, rung: Rematerialized) -> float:
        """Return the seconds of what runs twice on this rung."""
        return rematerialization_seconds(self.made(rung), self.world) if any(rung) else 0.0

    def memory_of(self, rung: Rematerialized) -> Memory:
        """Return the simulated memory at the peak on this rung."""
        return peak(self.made(rung), self.budget.optimizer, self.world)

    def made(self, rung: Rematerialized) -> Program:
        """Return the program rematerialized as the rung says."""
        if rung not in self._made:
            assert self.program.plan is not None
            plan = dataclasses.replace(self.program.plan, **rung._asdict())
            program = recompute.recompute(dataclasses.replace(self.program, plan=plan))
            recompute.check(program)
            self._made[rung] = program
        return self._made[rung]


class Estimated(RematerializationSearch):
    """The rungs of a deep program, estimated on straight lines between three corners: the plan as
    it is, every weight gathered again, and every block recomputed. The corners are computed on
    shorter programs.
    """

    def __init__(self, deep: DeepModel, world: World, budget: Budget) -> None:
        chosen = deep.program
        assert chosen.plan is not None
        self.deep, self.world = deep, world
        self._rungs: dict[int, RematerializationSteps] = {}
        self._corners: dict[str, NDArray[np.float64]] = {}
        self.budget = budget
        names = blocks(chosen.module.graph.nodes)
        short_fetching = {*self._of(deep.shorter()).fetching}
        fetching = tuple(name for name in names if deep.stand_in(name) in short_fetching)
        super().__init__(names, fetching, chosen.plan, budget)

    def seconds_of(self, rung: Rematerialized) -> float:
        """Return the estimated seconds of what runs twice on this rung."""
        return float(self._figures(rung)[-1])

    def memory_of(self, rung: Rematerialized) -> Memory:
        """Return the estimated memory at the peak on this rung."""
        return Memory(*(float(size) for size in self._figures(rung)[:-1]))

    def _figures(self, rung: Rematerialized) -> NDArray[np.float64]:
        """Return the rung's memory, field by field, and the seconds of what runs twice."""
        figures = start = self._corner("planned")
        if rung != self.start:
            for corner, dropped, every in (
                ("recompute", rung.recompute, self.names),
                ("regather", rung.regather, self.fetching),
            ):
                if dropped:
                    figures = figures + (self._corner(corner) - start) * (len(dropped) / len(every))
        return figures

    def _corner(self, drops: str) -> NDArray[np.float64]:
        if drops not in self._corners:
            weighted = [
                weight * np.array(self._at(short, drops)) for weight, short in self.deep.samples()
            ]
            self._corners[drops] = np.sum(weighted, axis=0)
        return self._corners[drops]

    def _at(self, short: Program, drops: str) -> tuple[float, ...]:
        rungs = self._of(short)
        corners = {
            "planned": rungs.start,
            "recompute": Rematerialized(rungs.names, ()),
            "regather": Rematerialized((), rungs.fetching),
        }
        tried = rungs.tried(corners[drops])
        return *dataclasses.astuple(tried.memory), tried.seconds

    def _of(self, short: Program) -> RematerializationSteps:
        if id(short) not in self._rungs:
            self._rungs[id(short)] = RematerializationSteps(
                emit_program(short, self.world), self.world, self.budget
            )
        return self._rungs[id(short)]


def _without(fetching: tuple[str, ...], rung: Rematerialized) -> tuple[str, ...]:
    return tuple(name for name in fetching if name not in rung.recompute)


def rematerialize_to_fit(
    program: Program,
    world: World,
    budget: Budget | None,
    larger: Callable[[Memory], str] = lambda memory: "",
) -> Program:
    """Return the emitted program with its blocks recomputed as planned, and the plan with its
    memory.

    Where that does not fit and recompute is "auto", just enough of the first blocks are
    rematerialized. Raises PlanError where nothing fits. `budget` None: as planned, without a limit.
    `larger`: returns in words the smallest world that would do for this memory. A plan whose memory
    is known and fits is not simulated again.
    """
    assert program.plan is not None
    if budget is None:
        return recompute.recompute(program)
    if (known_memory := program.plan.memory) is not None and budget.fits(known_memory):
        rungs = RematerializationSteps(program, world, budget)
        return _with_memory(rungs.made(rungs.start), known_memory, budget)
    fitted, memory = effort(program, world, budget)
    if not budget.fits(memory):
        assert budget.memory_bytes is not None and fitted.plan is not None
        all_recomputed = len(fitted.plan.recompute) == len(blocks(program.module.graph.nodes))
        name, advice = program.plan.layout, larger(memory)
        raise refusal(memory, budget.memory_bytes, world, name, all_recomputed, advice)
    return fitted


def effort(program: Program, world: World, budget: Budget) -> tuple[Program, Memory]:
    """Return what `rematerialize_to_fit` does and its memory; where nothing fits, what comes
    nearest.
    """
    rungs = RematerializationSteps(program, world, budget)
    tried = rungs.best()
    return _with_memory(rungs.made(tried.rung), tried.memory, budget), tried.memory


def _with_memory(made: Program, memory: Memory, budget: Budget) -> Program:
    """Return the program, its plan with the memory it needs."""
    assert made.plan is not None
    plan = dataclasses.replace(
        made.plan, memory=memory, peak_bytes=memory.peak, optimizer=budget.optimizer
    )
    return dataclasses.replace(made, plan=plan)
