"""What a program may drop of what it makes and make again in the backward, and how little of that
makes it fit.

Making a plan fit: the modelled peak against the memory that there is, and as little gathered
again or recomputed as it takes.
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
    """What is dropped, what is held at the peak then, and the seconds of what runs twice."""

    rung: Rematerialized
    memory: Memory
    seconds: float


class RematerializationSearch(ABC):
    """What a program may drop: more and more of it.

    `names`: its blocks in order; `fetching`: those that gather weights; `start`: what its plan
    drops already.
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
        """Of what runs twice."""

    @abstractmethod
    def memory_of(self, rung: Rematerialized) -> Memory:
        """What is held at the peak."""

    def tried(self, rung: Rematerialized) -> TriedRematerialization:
        if rung not in self.known:
            self.known[rung] = TriedRematerialization(
                rung, self.memory_of(rung), self.seconds_of(rung)
            )
        return self.known[rung]

    def planned(self) -> TriedRematerialization:
        return self.tried(self.start)

    def counted(self) -> TriedRematerialization:
        """With every weight gathered again that may be."""
        auto = self.budget.recompute == "auto" and self.fetching
        return self.tried(Rematerialized((), self.fetching)) if auto else self.planned()

    def best(self) -> TriedRematerialization:
        """As planned where that fits or nothing else may be; else the cheapest that fits, or what
        comes nearest.
        """
        planned = self.planned()
        if self._fits(planned) or self.budget.recompute != "auto":
            return planned
        return self._cheapest(planned)

    def least(self, below: float) -> TriedRematerialization | None:
        """What takes the fewest seconds of all that fits, if it is fewer than `below` for what runs
        twice: every rung is tried. None where nothing does.
        """
        rungs = [self.start]
        if self.budget.recompute == "auto":
            every, fetched, mixed = self._ladders()
            rungs += [*fetched, *mixed, *every]
        best: TriedRematerialization | None = None
        for rung in dict.fromkeys(rungs):
            if self.seconds_of(rung) < below and self._fits(self.tried(rung)):
                best = self.tried(rung)
                below = best.seconds
        return best

    def settled(self, estimate: RematerializationSearch) -> TriedRematerialization:
        """As `best`, starting from what is planned to be dropped by an estimate: a little more
        where that does not fit, less where there is room for it.
        """
        if self.budget.recompute != "auto" or not any(self.start):
            return self.best()
        several = (each for each in self._ladders() if self.start in each)
        rungs = [Rematerialized((), ()), *next(several, [self.start])]
        number = rungs.index(self.start)
        while not self._fits(self.tried(rungs[number])) and number + 1 < len(rungs):
            number += 1
        while number and self._has_room(rungs[number - 1], rungs[number], estimate):
            if not self._fits(self.tried(rungs[number - 1])):
                break
            number -= 1
        return self.tried(rungs[number])

    def _has_room(
        self, less: Rematerialized, rung: Rematerialized, estimate: RematerializationSearch
    ) -> bool:
        """Whether dropping less should fit, by what an estimate says that makes of a difference."""
        one, other = (estimate.tried(each).memory.peak for each in (less, rung))
        limit = self.budget.memory_bytes
        return limit is not None and self.tried(rung).memory.peak + one - other <= limit

    def _ladders(self) -> tuple[list[Rematerialized], list[Rematerialized], list[Rematerialized]]:
        """Blocks recomputed, the first ones; blocks that gather again; and all that gather again,
        some of these recomputed.
        """
        names, fetching = self.names, self.fetching
        every = [Rematerialized(names[: n + 1], ()) for n in range(len(names))]
        fetched = [Rematerialized((), fetching[: n + 1]) for n in range(len(fetching))]
        mixed = [
            Rematerialized(rung.recompute, _without(fetching, rung)) for rung in every if fetching
        ]
        return every, fetched, mixed

    def _cheapest(self, start: TriedRematerialization) -> TriedRematerialization:
        """What takes the fewest seconds of those that fit; what comes nearest where nothing does.

        Either as few blocks as it takes gather again, and where that is not enough as few as it
        takes of these are recomputed; or as few as it takes are recomputed and the others keep all.
        """
        every, fetched, mixed = self._ladders()
        found: list[tuple[TriedRematerialization, list[Rematerialized]]] = []
        if fetched:
            middle = self.tried(fetched[-1])
            found = [(start, fetched) if self._fits(middle) else (middle, mixed)]
        found = [(low, rungs) for low, rungs in found if self._fits(self.tried(rungs[-1]))]
        one = self.seconds_of(every[0]) if every else 0.0
        if every and not (found and self._guess(*found[0])[1] <= start.seconds + one):
            found += [(start, every)] if self._fits(self.tried(every[-1])) else []
        if not found:
            return min((start, *self.known.values()), key=lambda tried: tried.memory.peak)
        return self._climb(*min(reversed(found), key=lambda pair: self._guess(*pair)[1]))

    def _fits(self, tried: TriedRematerialization) -> bool:
        return self.budget.fits(tried.memory)

    def _guess(self, low: TriedRematerialization, rungs: list[Rematerialized]) -> tuple[int, float]:
        """The first rung that could fit, and its seconds, if every one takes as much off the peak
        and costs as much as the next.
        """
        assert self.budget.memory_bytes is not None
        high = self.tried(rungs[-1])
        part = (low.memory.peak - self.budget.memory_bytes) / (low.memory.peak - high.memory.peak)
        number = min(len(rungs), max(1, math.ceil(part * len(rungs) - 1e-9)))
        return number - 1, low.seconds + (high.seconds - low.seconds) * number / len(rungs)

    def _climb(
        self, low: TriedRematerialization, rungs: list[Rematerialized]
    ) -> TriedRematerialization:
        """From the guessed rung upwards until it fits."""
        number = self._guess(low, rungs)[0]
        while not self._fits(self.tried(rungs[number])):
            number = min(len(rungs) - 1, number + max(1, len(rungs) // 16))
        return self.tried(rungs[number])


class RematerializationSteps(RematerializationSearch):
    """Of an emitted program: every rung is made and run without storage."""

    def __init__(self, program: Program, world: World, budget: Budget) -> None:
        assert program.plan is not None
        self.program, self.world = program, world
        self._made: dict[Rematerialized, Program] = {}
        names = blocks(program.module.graph.nodes)
        super().__init__(names, recompute.regathers(program), program.plan, budget)

    def seconds_of(self, rung: Rematerialized) -> float:
        return rematerialization_seconds(self.made(rung), self.world) if any(rung) else 0.0

    def memory_of(self, rung: Rematerialized) -> Memory:
        return peak(self.made(rung), self.budget.optimizer, self.world)

    def made(self, rung: Rematerialized) -> Program:
        """The program that drops so much."""
        if rung not in self._made:
            assert self.program.plan is not None
            plan = dataclasses.replace(self.program.plan, **rung._asdict())
            made = recompute.recompute(dataclasses.replace(self.program, plan=plan))
            recompute.check(made)
            self._made[rung] = made
        return self._made[rung]


class Estimated(RematerializationSearch):
    """Of a chosen program with many equal blocks: rungs lie on straight lines between the plan as
    it is, every weight gathered again, and every block recomputed. These are worked out on shorter
    programs.
    """

    def __init__(self, deep: DeepModel, world: World, budget: Budget) -> None:
        chosen = deep.program
        assert chosen.plan is not None
        self.deep, self.world = deep, world
        self._rungs: dict[int, RematerializationSteps] = {}
        self._corners: dict[str, NDArray[np.float64]] = {}
        self.budget = budget
        names = blocks(chosen.module.graph.nodes)
        known = {*self._of(deep.shorter()).fetching}
        fetching = tuple(name for name in names if deep.stand_in(name) in known)
        super().__init__(names, fetching, chosen.plan, budget)

    def seconds_of(self, rung: Rematerialized) -> float:
        return float(self._figures(rung)[-1])

    def memory_of(self, rung: Rematerialized) -> Memory:
        return Memory(*(float(size) for size in self._figures(rung)[:-1]))

    def _figures(self, rung: Rematerialized) -> NDArray[np.float64]:
        """What a rung needs, and the seconds of what runs twice."""
        found = start = self._corner("planned")
        if rung != self.start:
            for corner, dropped, every in (
                ("recompute", rung.recompute, self.names),
                ("regather", rung.regather, self.fetching),
            ):
                if dropped:
                    found = found + (self._corner(corner) - start) * (len(dropped) / len(every))
        return found

    def _corner(self, drops: str) -> NDArray[np.float64]:
        if drops not in self._corners:
            self._corners[drops] = self.deep.extrapolated(lambda short: self._at(short, drops))
        return self._corners[drops]

    def _at(self, short: Program, drops: str) -> tuple[float, ...]:
        rungs = self._of(short)
        corners = {
            "planned": rungs.start,
            "recompute": Rematerialized(rungs.names, ()),
            "regather": Rematerialized((), rungs.fetching),
        }
        found = rungs.tried(corners[drops])
        return *dataclasses.astuple(found.memory), found.seconds

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
    """The emitted program with its blocks recomputed as planned, and the plan with its memory.

    Where that does not fit and recompute is "auto": with as little as it takes made again in the
    backward, in the first blocks. Raises PlanError where nothing does. `budget` None: as planned,
    whatever it needs. `larger`: from what is needed here to the smallest world that it would fit,
    in words. A plan whose memory is known by now is not run again to find out.
    """
    assert program.plan is not None
    if budget is None:
        return recompute.recompute(program)
    if (known := program.plan.memory) is not None and budget.fits(known):
        rungs = RematerializationSteps(program, world, budget)
        return _with(rungs.made(rungs.start), known, budget)
    found, memory = effort(program, world, budget)
    if not budget.fits(memory):
        assert budget.memory_bytes is not None and found.plan is not None
        every = len(found.plan.recompute) == len(blocks(program.module.graph.nodes))
        name, advice = program.plan.layout, larger(memory)
        raise refusal(memory, budget.memory_bytes, world, name, every, advice)
    return found


def effort(program: Program, world: World, budget: Budget) -> tuple[Program, Memory]:
    """As `fitted`, but where nothing fits what comes nearest."""
    rungs = RematerializationSteps(program, world, budget)
    found = rungs.best()
    return _with(rungs.made(found.rung), found.memory, budget), found.memory


def _with(made: Program, memory: Memory, budget: Budget) -> Program:
    """With what is known that it needs."""
    assert made.plan is not None
    plan = dataclasses.replace(
        made.plan, memory=memory, peak_bytes=memory.peak, optimizer=budget.optimizer
    )
    return dataclasses.replace(made, plan=plan)
