"""Rematerialization: which blocks run their cheap ops again in the backward pass, gather their
weights again or recompute all their activations, so that a plan fits the memory.

Example: of 12 blocks that do not fit, the first 5 are recomputed, or all 12 run their cheap ops
again and the first 2 are recomputed, whichever costs fewer seconds. Each such set of blocks is a
rung; rungs of more and more blocks form a ladder (ladders.py), and the search climbs to the first
that fits.

`RematerializationSteps` prices a rung exactly, on the emitted program; `Estimated` interpolates,
for deep models. `rematerialize_to_fit` is the last step of planning: an emitted program and a
budget enter, the program with its recompute regions leaves. Called by planner.py, memory_search.py
and world_size.py.
"""

from __future__ import annotations

import bisect
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
from autopar.planner.ladders import Ladder, Names, Rematerialized, ladders
from autopar.world import World

_GUESSES = 3  # of the first rung that fits; after that what is left is halved


class TriedRematerialization(NamedTuple):
    """A rung that was priced: the blocks, the memory at the peak, and the seconds of what runs
    twice.
    """

    rung: Rematerialized
    memory: Memory
    seconds: float


class RematerializationSearch(ABC):
    """A search over the rungs of one program.

    `names`: its blocks in order; `fetching`: those that gather weights; `cheap`: those that have
    cheap ops to run again; `start`: the rung that its plan has already.
    """

    def __init__(
        self, names: Names, fetching: Names, cheap: Names, plan: Plan, budget: Budget
    ) -> None:
        self.names, self.fetching, self.cheap, self.budget = names, fetching, cheap, budget
        self.start = Rematerialized(
            plan.recompute,
            tuple(n for n in plan.regather if n in fetching or n not in names),
            tuple(n for n in plan.rerun if n in cheap or n not in names),
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
        return self._cheapest()

    def least(self, below: float) -> TriedRematerialization | None:
        """Return the fitting rung of fewest seconds, if these are fewer than `below`; None without
        one. Rungs are tried in the order of their seconds.
        """
        rungs = [self.start]
        if self.budget.recompute == "auto":
            rungs += [rung for ladder in self._ladders() for rung in ladder.rungs]
        for rung in sorted(dict.fromkeys(rungs), key=self.seconds_of):
            if self.seconds_of(rung) >= below:
                break
            if self._fits(self.tried(rung)):
                return self.tried(rung)
        return None

    def settled(self, estimate: RematerializationSearch) -> TriedRematerialization:
        """Return what `best` does, starting from the rung that an estimate has planned: a little
        more is recomputed where that does not fit, less where there is room.
        """
        if self.budget.recompute != "auto" or not any(self.start):
            return self.best()
        nothing = Rematerialized((), ())
        found = (ladder for ladder in self._ladders() if self.start in ladder.rungs)
        low, above = next(found, Ladder(nothing, [self.start]))
        rungs = [low, *above] if low == nothing else [nothing, low, *above]
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

    def _ladders(self) -> list[Ladder]:
        return ladders(self.names, self.fetching, self.cheap)

    def _cheapest(self) -> TriedRematerialization:
        """Return the fitting rung of fewest seconds, or the one that comes nearest where none fits.

        Of each ladder only the rungs are looked at that take fewer seconds than the best so far: if
        the last of these does not fit, none does.
        """
        best: TriedRematerialization | None = None
        for low, rungs in self._ladders():
            least = math.inf if best is None else best.seconds
            cheaper = rungs[: bisect.bisect_left(rungs, least, key=self.seconds_of)]
            if cheaper and self._fits(self.tried(cheaper[-1])):
                best = self._first_that_fits(low, cheaper)
        return best or min(self.known.values(), key=lambda tried: tried.memory.peak)

    def _first_that_fits(
        self, low: Rematerialized, rungs: list[Rematerialized]
    ) -> TriedRematerialization:
        """Return the first of these rungs that fits, where the last one does and `low` does not: it
        is guessed as if every rung took as much off the peak as the next, then halved.
        """
        assert self.budget.memory_bytes is not None
        fails, fits, guesses = -1, len(rungs) - 1, _GUESSES
        while fits - fails > 1:
            middle = (fails + fits) // 2
            if guesses:
                start = self.tried(rungs[fails] if fails >= 0 else low).memory.peak
                taken = max(1.0, start - self.tried(rungs[fits]).memory.peak)
                share = (start - self.budget.memory_bytes) / taken
                guessed = fails + math.ceil(share * (fits - fails) - 1e-9)
                middle, guesses = min(max(guessed, fails + 1), fits - 1), guesses - 1
            if self._fits(self.tried(rungs[middle])):
                fits = middle
            else:
                fails = middle
        return self.tried(rungs[fits])

    def _fits(self, tried: TriedRematerialization) -> bool:
        return self.budget.fits(tried.memory)


class RematerializationSteps(RematerializationSearch):
    """The rungs of an emitted program, priced exactly: each is rewritten and its peak simulated."""

    def __init__(self, program: Program, world: World, budget: Budget) -> None:
        assert program.plan is not None
        self.program, self.world = program, world
        self._made: dict[Rematerialized, Program] = {}
        names = blocks(program.module.graph.nodes)
        fetching, cheap = recompute.regathers(program), recompute.reruns(program)
        super().__init__(names, fetching, cheap, program.plan, budget)

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
    """The rungs of a deep program, estimated on straight lines between a few corners: the plan as
    it is, every weight gathered again, all cheap ops run again, both, and every block recomputed.
    The corners are computed on shorter programs.
    """

    def __init__(self, deep: DeepModel, world: World, budget: Budget) -> None:
        chosen = deep.program
        assert chosen.plan is not None
        self.deep, self.world = deep, world
        self._rungs: dict[int, RematerializationSteps] = {}
        self._corners: dict[tuple[str, str], NDArray[np.float64]] = {}
        self.budget = budget
        names = blocks(chosen.module.graph.nodes)
        short = self._of(deep.shorter())
        fetching, cheap = (
            tuple(name for name in names if deep.stand_in(name) in found)
            for found in (short.fetching, short.cheap)
        )
        super().__init__(names, fetching, cheap, chosen.plan, budget)

    def seconds_of(self, rung: Rematerialized) -> float:
        """Return the estimated seconds of what runs twice on this rung."""
        return float(self._figures(rung, "seconds")[0])

    def memory_of(self, rung: Rematerialized) -> Memory:
        """Return the estimated memory at the peak on this rung."""
        return Memory(*(float(size) for size in self._figures(rung, "memory")))

    def _figures(self, rung: Rematerialized, kind: str) -> NDArray[np.float64]:
        """Return the rung's "memory", field by field, or its "seconds" of what runs twice."""
        start = self._corner("planned", kind)
        if rung == self.start:
            return start
        both = {*rung.regather} & {*rung.rerun}
        shares = {
            "recompute": len(rung.recompute) / max(1, len(self.names)),
            "regather": (len(rung.regather) - len(both)) / max(1, len(self.fetching)),
            "rerun": (len(rung.rerun) - len(both)) / max(1, len(self.cheap)),
            "both": len(both) / max(1, len({*self.fetching} & {*self.cheap})),
        }
        parts = [
            share * (self._corner(name, kind) - start) for name, share in shares.items() if share
        ]
        return start + np.sum(parts, axis=0) if parts else start

    def _corner(self, name: str, kind: str) -> NDArray[np.float64]:
        if (name, kind) not in self._corners:
            weighted = [
                weight * np.array(self._at(short, name, kind))
                for weight, short in self.deep.samples()
            ]
            self._corners[name, kind] = np.sum(weighted, axis=0)
        return self._corners[name, kind]

    def _at(self, short: Program, name: str, kind: str) -> tuple[float, ...]:
        rungs = self._of(short)
        rung = {
            "planned": rungs.start,
            "recompute": Rematerialized(rungs.names, ()),
            "regather": Rematerialized((), rungs.fetching),
            "rerun": Rematerialized((), (), rungs.cheap),
            "both": Rematerialized((), rungs.fetching, rungs.cheap),
        }[name]
        if kind == "seconds":
            return (rungs.seconds_of(rung),)
        return dataclasses.astuple(rungs.tried(rung).memory)

    def _of(self, short: Program) -> RematerializationSteps:
        if id(short) not in self._rungs:
            self._rungs[id(short)] = RematerializationSteps(
                emit_program(short, self.world), self.world, self.budget
            )
        return self._rungs[id(short)]


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
        again = "; ".join(f"{what} again: {names}" for names, what in fitted.plan.dropped)
        if len(fitted.plan.recompute) == len(blocks(program.module.graph.nodes)):
            again = "every block recomputed"
        auto, name = budget.recompute == "auto", program.plan.layout
        raise refusal(memory, budget.memory_bytes, world, name, again, auto, larger(memory))
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
